// Rope, pages and attention for Python: checks arguments, plans the work, runs the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "bind.h"
#include "cpu.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntRows = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void need(bool holds, const std::string& message) {
    if (!holds) throw std::invalid_argument(message);
}

const AttentionKernels& kernels_of(Isa isa) {
#if defined(QUIRE_X86)
    if (isa == Isa::avx512) return avx512::attention_kernels;
    if (isa == Isa::avx2) return avx2::attention_kernels;
#endif
    (void)isa;
    return portable::attention_kernels;
}

// ---- rope ----

struct Rope {
    int n_rot;
    std::vector<double> freqs;
    bool neox;
    double mscale;

    Rope(int n, Doubles f, bool x, double m)
        : n_rot(n), freqs(f.data(), f.data() + f.shape(0)), neox(x), mscale(m) {
        need(n > 0 && n % 2 == 0, "Rope: n_rot is " + std::to_string(n) + ", it must be even and positive");
        need(freqs.size() * 2 == size_t(n), "Rope: " + std::to_string(freqs.size()) +
                                                " frequencies for n_rot " + std::to_string(n) + ", one per pair is needed");
    }

    // Cosines, then sines, of one position.
    void row(double position, double scale, float* out) const {
        const int half = n_rot / 2;
        for (int i = 0; i < half; i++) {
            const double angle = position * freqs[size_t(i)];
            out[i] = float(std::cos(angle) * scale);
            out[half + i] = float(std::sin(angle) * scale);
        }
    }
};

struct RopeTable : Array {
    bool neox;
    RopeTable(Array&& a, bool x) : Array(std::move(a)), neox(x) {}
};

RopeTable rope_table(Cpu& cpu, const Rope& rope, Ints positions) {
    RopeTable table(cpu.array(int64_t(positions.shape(0)), rope.n_rot), rope.neox);
    const int32_t* p = positions.data();
    cpu.pool.parallel(table.rows, 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; i++) rope.row(p[i], rope.mscale, table.row(i));
    });
    return table;
}

// ---- the shape of a layer's attention ----

KvType kv_type(const std::string& name) {
    const char* names[] = {"f32", "f16", "bf16", "q8_0", "q4_0"};
    for (int i = 0; i < 5; i++)
        if (name == names[i]) return KvType(i);
    throw std::invalid_argument("unknown K/V type " + name + " (f32, f16, bf16, q8_0, q4_0)");
}

int64_t row_bytes(KvType type, int dims) {
    const int bytes[] = {4 * 32, 2 * 32, 2 * 32, 34, 18};  // of 32 values
    return int64_t(dims) * bytes[int(type)] / 32;
}

struct AttentionSpec {
    AttentionShape shape;
    std::vector<float> q_norm, k_norm;

    AttentionSpec(int n_heads, int n_kv_heads, int dk, int dv, const std::string& type_k, const std::string& type_v,
                  float scale, int window, float softcap, const Array* q, const Array* k, float eps) {
        need(n_kv_heads > 0 && n_heads > 0 && n_heads % n_kv_heads == 0,
             "AttentionSpec: " + std::to_string(n_heads) + " heads do not divide into " + std::to_string(n_kv_heads) + " kv heads");
        need(window >= 0 && softcap >= 0, "AttentionSpec: window and softcap must not be negative");
        check_dims("K", dk, kv_type(type_k), type_k);
        check_dims("V", dv, kv_type(type_v), type_v);
        q_norm = weights("q_norm", q, dk);
        k_norm = weights("k_norm", k, dk);
        shape = {n_heads, n_kv_heads, n_heads / n_kv_heads, dk, dv, (dv + 15) / 16 * 16, kv_type(type_k),
                 kv_type(type_v), scale, softcap, window, q ? q_norm.data() : nullptr, k ? k_norm.data() : nullptr, eps};
    }
    AttentionSpec(const AttentionSpec&) = delete;

    int64_t k_part(int page_tokens) const { return shape.n_kv_heads * page_tokens * row_bytes(shape.type_k, shape.dk); }
    int64_t v_part(int page_tokens) const { return shape.n_kv_heads * page_tokens * row_bytes(shape.type_v, shape.dv); }

  private:
    static void check_dims(const char* what, int dims, KvType type, const std::string& name) {
        const int step = type >= KvType::q8_0 ? 32 : 2;
        need(dims > 0 && dims <= 1024 && dims % step == 0,
             std::string("AttentionSpec: head dimension ") + std::to_string(dims) + " of " + what + " as " + name +
                 " must be a multiple of " + std::to_string(step) + " up to 1024");
    }
    static std::vector<float> weights(const char* what, const Array* a, int dk) {
        if (!a) return {};
        need(a->rows * a->cols == dk, std::string("AttentionSpec: ") + what + " has " + std::to_string(a->rows * a->cols) +
                                          " values, the head dimension is " + std::to_string(dk));
        return std::vector<float>(a->data, a->data + dk);
    }
};

// ---- one group's pages in this step ----

struct Item {
    int32_t tile, head, from, to;
    int32_t join;  // index of its counter when the tile is split, else -1
};

// Who computes what: the same for every layer with this grouping, so it is made once per step.
struct Plan {
    int group, n_kv_heads, window, threads;
    std::vector<int32_t> begin, end;
    std::vector<Tile> tiles;
    std::vector<Item> items;
    struct Join {
        int64_t rows_before;  // rows of partial results before this one's
        int32_t parts;
    };
    std::vector<Join> joins;
    std::unique_ptr<std::atomic<int32_t>[]> left;  // parts of each join still to come
    int64_t partial_rows = 0, keys = 0;            // keys: scores to compute, over all heads
};

class Pages {
  public:
    Pages(int64_t address, int64_t page_bytes, int page_tokens, IntRows tables, Ints first, Ints length, Ints slots,
          Ints positions, Ints seq_rows, std::optional<IntRows> slot_positions)
        : tables_(tables), first_(first), length_(length), slots_(slots), positions_(positions), seq_rows_(seq_rows),
          slot_positions_(slot_positions) {
        view = {};
        view.address = reinterpret_cast<char*>(address);
        view.page_bytes = page_bytes;
        view.page_tokens = page_tokens;
        view.tables = tables.data();
        view.max_pages = int64_t(tables.shape(1));
        view.slots = slots.data();
        view.positions = positions.data();
        if (slot_positions) {
            view.slot_positions = slot_positions->data();
            view.max_slots = int64_t(slot_positions->shape(1));
        }
        n_seqs = int64_t(tables.shape(0));
        n_tokens = int64_t(slots.shape(0));
        check();
        for (int64_t s = 0; s < n_seqs; s++) {
            phase_.push_back(first.data()[s] % SEGMENT / BLOCK * BLOCK);
            ordered_.push_back(ordered(s));
        }
        view.phase = phase_.data();
    }
    Pages(const Pages&) = delete;

    Plan& plan(const AttentionShape& shape, int threads) {
        for (auto& p : plans_)
            if (p->group == shape.group && p->n_kv_heads == shape.n_kv_heads && p->window == shape.window && p->threads == threads)
                return *p;
        plans_.push_back(make_plan(shape, threads));
        return *plans_.back();
    }

    PageView view;
    int64_t n_seqs, n_tokens;

  private:
    void check() const {
        need(view.page_tokens > 0 && view.page_tokens % BLOCK == 0, "Pages: page_tokens is " + std::to_string(view.page_tokens) +
                                                                        ", it must be a multiple of 16");
        need(int64_t(first_.shape(0)) == n_seqs && int64_t(length_.shape(0)) == n_seqs, "Pages: first and length need one entry per sequence");
        need(int64_t(positions_.shape(0)) == n_tokens && int64_t(seq_rows_.shape(0)) == n_tokens,
             "Pages: positions and seq_rows need one entry per slot");
        if (slot_positions_) need(int64_t(slot_positions_->shape(0)) == n_seqs, "Pages: slot_positions needs one row per sequence");
        for (int64_t s = 0; s < n_seqs; s++) check_sequence(s);
        for (int64_t i = 0; i < n_tokens; i++) check_token(i);
    }

    void check_sequence(int64_t s) const {
        const int64_t length = length_.data()[s], tokens = view.page_tokens;
        const std::string who = "Pages: sequence " + std::to_string(s);
        need(length >= 0 && length <= view.max_pages * tokens, who + " has " + std::to_string(length) + " slots, its table holds " +
                                                                   std::to_string(view.max_pages * tokens));
        need(!view.slot_positions || length <= view.max_slots, who + " has more slots than slot_positions");
        need(first_.data()[s] >= 0, who + " starts before position 0");
        if (view.slot_positions) return;  // pages of holes are never read
        for (int64_t p = 0; p * tokens < length; p++)
            need(view.tables[s * view.max_pages + p] >= 0, who + " has no page " + std::to_string(p));
    }

    void check_token(int64_t i) const {
        const int64_t s = seq_rows_.data()[i], slot = slots_.data()[i];
        const std::string who = "Pages: token " + std::to_string(i);
        need(s >= 0 && s < n_seqs && slot >= 0, who + " has no sequence or slot");
        need(i == 0 || seq_rows_.data()[i - 1] != s || positions_.data()[i - 1] < positions_.data()[i],
             who + " does not come after the one before it");
        if (view.slot_positions) return;
        const int64_t at = int64_t(positions_.data()[i]) - first_.data()[s];
        need(at >= 0 && at < length_.data()[s], who + " lies outside its sequence");
        need(slot == view.tables[s * view.max_pages + at / view.page_tokens] * int64_t(view.page_tokens) + at % view.page_tokens,
             who + " has slot " + std::to_string(slot) + ", not the one of its position");
    }

    // Whether the slots that are no holes have rising positions: then what a token sees is one range.
    bool ordered(int64_t s) const {
        if (!view.slot_positions) return true;
        const int32_t* p = view.slot_positions + s * view.max_slots;
        int32_t last = -1;
        for (int64_t i = 0; i < length_.data()[s]; i++) {
            if (p[i] < 0) continue;
            if (p[i] < last) return false;
            last = p[i];
        }
        return true;
    }

    // The range of slots that token i sees; [0, 0) for none.
    void see(Plan& plan, int64_t i) const {
        const int64_t s = seq_rows_.data()[i];
        const int32_t position = positions_.data()[i], first = first_.data()[s];
        const int32_t after = plan.window > 0 && position >= plan.window ? position - plan.window : -1;
        int32_t begin = 0, end = length_.data()[s];
        if (view.slot_positions) {
            const int32_t* p = view.slot_positions + s * view.max_slots;
            while (end > 0 && !(p[end - 1] > after && p[end - 1] <= position)) end--;
            while (begin < end && !(p[begin] > after && p[begin] <= position)) begin++;
        } else {
            begin = std::max(after + 1 - first, 0);
            end = std::min(position + 1 - first, end);
        }
        plan.begin[size_t(i)] = begin < end ? begin : 0;
        plan.end[size_t(i)] = begin < end ? end : 0;
    }

    void add_tile(Plan& plan, int64_t row, int64_t rows) const {
        const int64_t s = seq_rows_.data()[row];
        Tile tile{int32_t(s), int32_t(row), int32_t(rows), INT32_MAX, 0, 0, 0};
        for (int64_t i = row; i < row + rows; i++) {
            see(plan, i);
            if (plan.end[size_t(i)] == 0) continue;
            tile.begin = std::min(tile.begin, plan.begin[size_t(i)]);
            tile.end = std::max(tile.end, plan.end[size_t(i)]);
        }
        if (tile.end > 0) {
            tile.first_segment = (tile.begin + phase_[size_t(s)]) / SEGMENT;
            tile.segments = (tile.end + phase_[size_t(s)] - 1) / SEGMENT + 1 - tile.first_segment;
        }
        plan.keys += int64_t(tile.end > 0 ? tile.end - tile.begin : 0) * rows * plan.group * plan.n_kv_heads;
        plan.tiles.push_back(tile);
    }

    std::unique_ptr<Plan> make_plan(const AttentionShape& shape, int threads) const {
        auto plan = std::make_unique<Plan>();
        plan->group = shape.group;
        plan->n_kv_heads = shape.n_kv_heads;
        plan->window = shape.window;
        plan->threads = threads;
        plan->begin.resize(size_t(n_tokens));
        plan->end.resize(size_t(n_tokens));
        for (int64_t row = 0; row < n_tokens;) {
            const int32_t s = seq_rows_.data()[row];
            const int64_t most = ordered_[size_t(s)] ? std::clamp(TILE_ROWS / shape.group, 1, TILE_ROWS) : 1;
            int64_t rows = 1;
            while (rows < most && row + rows < n_tokens && seq_rows_.data()[row + rows] == s) rows++;
            add_tile(*plan, row, rows);
            row += rows;
        }
        make_items(*plan);
        return plan;
    }

    // Tiles that are long beside each thread's share are split by segments.
    void make_items(Plan& plan) const {
        int64_t total = 0;
        for (const Tile& t : plan.tiles) total += int64_t(t.rows) * t.segments * plan.n_kv_heads;
        const int64_t share = std::max<int64_t>(1, total / (plan.threads * 4));
        for (size_t i = 0; i < plan.tiles.size(); i++) {
            const Tile& t = plan.tiles[i];
            const int64_t parts = plan.threads == 1 ? 1 : std::clamp<int64_t>(t.rows * t.segments / share, 1, std::max(1, t.segments));
            for (int32_t h = 0; h < plan.n_kv_heads; h++) {
                const int32_t join = parts > 1 ? int32_t(plan.joins.size()) : -1;
                if (parts > 1) {
                    plan.joins.push_back({plan.partial_rows, int32_t(parts)});
                    plan.partial_rows += int64_t(t.segments) * t.rows * plan.group;
                }
                for (int64_t p = 0; p < parts; p++)
                    plan.items.push_back({int32_t(i), h, int32_t(t.segments * p / parts), int32_t(t.segments * (p + 1) / parts), join});
            }
        }
        auto cost = [&](const Item& item) { return int64_t(item.to - item.from) * plan.tiles[size_t(item.tile)].rows; };
        std::stable_sort(plan.items.begin(), plan.items.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
        plan.left = std::make_unique<std::atomic<int32_t>[]>(plan.joins.size());
        for (size_t j = 0; j < plan.joins.size(); j++) plan.left[j] = plan.joins[j].parts;
    }

    static constexpr int TILE_ROWS = 96;  // query rows (tokens x heads of a group) of a tile

    IntRows tables_;
    Ints first_, length_, slots_, positions_, seq_rows_;
    std::optional<IntRows> slot_positions_;
    std::vector<int32_t> phase_;
    std::vector<bool> ordered_;
    std::vector<std::unique_ptr<Plan>> plans_;
};

// ---- attention ----

RopeView rope_view(const RopeTable* table, const AttentionShape& shape, int64_t n) {
    if (!table) return {nullptr, 0, false};
    need(table->rows == n, "attention: the rope table has " + std::to_string(table->rows) + " rows for " + std::to_string(n) + " tokens");
    need(table->cols <= shape.dk, "attention: rope turns " + std::to_string(table->cols) + " dimensions, a head has " + std::to_string(shape.dk));
    return {table->data, int(table->cols), table->neox};
}

Array attend_pages(Cpu& cpu, const Array& q, const AttentionSpec& spec, Pages& pages, int64_t k_offset, int64_t v_offset) {
    const AttentionKernels& kernels = kernels_of(cpu.isa);
    const AttentionShape& shape = spec.shape;
    Plan& plan = pages.plan(shape, cpu.pool.size());
    PageView view = pages.view;
    view.begin = plan.begin.data();
    view.end = plan.end.data();
    Array out = cpu.array(q.rows, int64_t(shape.n_heads) * shape.dv);
    int most = 1;
    for (const Tile& t : plan.tiles) most = std::max(most, t.rows);
    Array scratch = cpu.array(cpu.pool.size(), (kernels.scratch(shape, most) + 15) / 16 * 16);
    Array partial = cpu.array(plan.partial_rows, shape.dv_padded + 16);
    const AttendJob job{&shape, &view, q.data, q.cols, out.data, k_offset, v_offset};
    auto work = [&](int64_t from, int64_t to, int thread) {
        for (int64_t i = from; i < to; i++) {
            const Item& item = plan.items[size_t(i)];
            const Tile& tile = plan.tiles[size_t(item.tile)];
            float* parts = item.join < 0 ? nullptr : partial.row(plan.joins[size_t(item.join)].rows_before);
            kernels.attend(job, tile, item.head, item.from, item.to, parts, scratch.row(thread));
            // Whoever finishes the last part of a split tile joins it.
            if (parts && plan.left[item.join].fetch_sub(1, std::memory_order_acq_rel) == 1) {
                kernels.join(job, tile, item.head, parts);
                plan.left[item.join].store(plan.joins[size_t(item.join)].parts, std::memory_order_relaxed);
            }
        }
    };
    const int64_t count = int64_t(plan.items.size());
    const bool small = plan.keys * (shape.dk + shape.dv) < 200'000;  // not worth waking anybody
    cpu.pool.parallel(count, small ? count : 1, work);
    return out;
}

void check_parts(const AttentionSpec& spec, const Pages& pages, int64_t k_offset, int64_t v_offset) {
    const int64_t bytes = pages.view.page_bytes;
    need(k_offset >= 0 && v_offset >= 0 && k_offset + spec.k_part(pages.view.page_tokens) <= bytes &&
             v_offset + spec.v_part(pages.view.page_tokens) <= bytes,
         "attention: K or V lies outside a page of " + std::to_string(bytes) + " bytes");
}

Array attention(Cpu& cpu, Array& qkv, const AttentionSpec& spec, Pages& pages, const RopeTable* rope, int64_t k_offset, int64_t v_offset) {
    const AttentionShape& s = spec.shape;
    const int64_t q_cols = int64_t(s.n_heads) * s.dk, k_cols = int64_t(s.n_kv_heads) * s.dk, cols = q_cols + k_cols + s.n_kv_heads * s.dv;
    need(qkv.rows == pages.n_tokens && qkv.cols == cols,
         "attention: qkv is [" + std::to_string(qkv.rows) + ", " + std::to_string(qkv.cols) + "], the pages and heads need [" +
             std::to_string(pages.n_tokens) + ", " + std::to_string(cols) + "]");
    check_parts(spec, pages, k_offset, v_offset);
    const RopeView view = rope_view(rope, s, qkv.rows);
    const AttentionKernels& kernels = kernels_of(cpu.isa);
    cpu.pool.parallel(qkv.rows, 16, [&](int64_t begin, int64_t end, int) {
        kernels.prepare(s, pages.view, view, qkv.data, qkv.data + q_cols, qkv.data + q_cols + k_cols, cols, begin, end, k_offset, v_offset);
    });
    return attend_pages(cpu, qkv, spec, pages, k_offset, v_offset);
}

Array attend(Cpu& cpu, Array& q, const AttentionSpec& spec, Pages& pages, int64_t k_offset, int64_t v_offset, const RopeTable* rope) {
    const AttentionShape& s = spec.shape;
    const int64_t cols = int64_t(s.n_heads) * s.dk;
    need(q.rows == pages.n_tokens && q.cols == cols, "attend: q is [" + std::to_string(q.rows) + ", " + std::to_string(q.cols) +
                                                         "], the pages and heads need [" + std::to_string(pages.n_tokens) + ", " + std::to_string(cols) + "]");
    check_parts(spec, pages, k_offset, v_offset);
    const RopeView view = rope_view(rope, s, q.rows);
    const AttentionKernels& kernels = kernels_of(cpu.isa);
    cpu.pool.parallel(q.rows, 16, [&](int64_t begin, int64_t end, int) {
        kernels.prepare(s, pages.view, view, q.data, nullptr, nullptr, cols, begin, end, 0, 0);
    });
    return attend_pages(cpu, q, spec, pages, k_offset, v_offset);
}

void rotate_pages(Cpu& cpu, const AttentionSpec& spec, const Rope& rope, int64_t address, int64_t page_bytes, int page_tokens,
                  Ints pages, IntRows deltas, Longs k_offsets) {
    const int64_t n = int64_t(pages.shape(0));
    need(page_tokens > 0 && page_tokens % BLOCK == 0, "rotate_pages: page_tokens must be a multiple of 16");
    need(int64_t(deltas.shape(0)) == n && int64_t(deltas.shape(1)) == page_tokens, "rotate_pages: deltas must be [pages, page_tokens]");
    need(rope.n_rot <= spec.shape.dk, "rotate_pages: rope turns more dimensions than a head has");
    for (size_t l = 0; l < k_offsets.shape(0); l++)
        need(k_offsets.data()[l] >= 0 && k_offsets.data()[l] + spec.k_part(page_tokens) <= page_bytes, "rotate_pages: K lies outside a page");
    const AttentionKernels& kernels = kernels_of(cpu.isa);
    cpu.pool.parallel(n, 1, [&](int64_t begin, int64_t end, int) {
        std::vector<float> table(size_t(page_tokens * rope.n_rot));
        const auto skip = std::make_unique<bool[]>(size_t(page_tokens));
        for (int64_t i = begin; i < end; i++) {
            const int32_t* delta = deltas.data() + i * page_tokens;
            for (int t = 0; t < page_tokens; t++) {
                float* row = table.data() + t * rope.n_rot;
                skip[size_t(t)] = delta[t] == 0;
                if (t > 0 && delta[t] == delta[t - 1]) std::copy(row - rope.n_rot, row, row);
                else rope.row(delta[t], 1.0, row);  // the keys have been scaled already
            }
            char* page = reinterpret_cast<char*>(address) + pages.data()[i] * page_bytes;
            for (size_t l = 0; l < k_offsets.shape(0); l++)
                kernels.rotate(spec.shape, {table.data(), rope.n_rot, rope.neox}, page + k_offsets.data()[l], page_tokens, skip.get());
        }
    });
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<Rope>(m, "Rope", "Rotary embedding: frequencies, style and scale.")
        .def(nb::init<int, Doubles, bool, double>(), "n_rot"_a, "freqs"_a, "neox"_a, "mscale"_a = 1.0)
        .def_ro("n_rot", &Rope::n_rot)
        .def_ro("neox", &Rope::neox);
    nb::class_<RopeTable, Array>(m, "RopeTable", "Cosines and sines of a step's positions.");
    nb::class_<AttentionSpec>(m, "AttentionSpec", "The shape of one layer's attention.")
        .def(nb::init<int, int, int, int, const std::string&, const std::string&, float, int, float, const Array*, const Array*, float>(),
             "n_heads"_a, "n_kv_heads"_a, "head_dim_k"_a, "head_dim_v"_a, "type_k"_a, "type_v"_a, "scale"_a, "window"_a = 0,
             "softcap"_a = 0.0f, "q_norm"_a.none() = nb::none(), "k_norm"_a.none() = nb::none(), "eps"_a = 0.0f)
        .def("k_bytes", &AttentionSpec::k_part, "page_tokens"_a, "Bytes of one layer's keys in a page.")
        .def("v_bytes", &AttentionSpec::v_part, "page_tokens"_a, "Bytes of one layer's values in a page.");
    nb::class_<Pages>(m, "Pages", "One group's pages in one step: who reads and writes what.")
        .def(nb::init<int64_t, int64_t, int, IntRows, Ints, Ints, Ints, Ints, Ints, std::optional<IntRows>>(), "address"_a,
             "page_bytes"_a, "page_tokens"_a, "tables"_a.noconvert(), "first"_a.noconvert(), "length"_a.noconvert(),
             "slots"_a.noconvert(), "positions"_a.noconvert(), "seq_rows"_a.noconvert(), "slot_positions"_a.none().noconvert() = nb::none());
    nb::borrow<nb::class_<Cpu>>(m.attr("Cpu"))
        .def("rope_table", &rope_table, "rope"_a, "positions"_a)
        .def("attention", &attention, "qkv"_a, "spec"_a, "pages"_a, "rope_table"_a.none(), "k_offset"_a, "v_offset"_a,
             "Norms and rotates q and k, stores k and v, attends; qkv is used up.")
        .def("attend", &attend, "q"_a, "spec"_a, "pages"_a, "k_offset"_a, "v_offset"_a, "rope_table"_a.none() = nb::none(),
             "The same for a layer that reads another layer's keys and values.")
        .def("rotate_pages", &rotate_pages, "spec"_a, "rope"_a, "address"_a, "page_bytes"_a, "page_tokens"_a, "pages"_a, "deltas"_a,
             "k_offsets"_a, "Turns stored keys on by a number of positions per slot.");
}

}  // namespace quire
