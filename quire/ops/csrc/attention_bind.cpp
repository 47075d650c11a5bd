// Rope, pages and attention for Python: checks arguments, plans the work, runs the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <string>

#include "bind.h"
#include "cpu.h"
#include "move.h"
#include "pages.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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
        need(n > 0 && n % 2 == 0, "Rope: n_rot is ", n, ", it must be even and positive");
        need(freqs.size() * 2 == size_t(n), "Rope: ", freqs.size(), " frequencies for n_rot ", n,
             ", one per pair is needed");
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
    throw Refused("unknown K/V type " + name + " (f32, f16, bf16, q8_0, q4_0)");
}

struct AttentionSpec {
    AttentionShape shape;
    std::vector<float> q_norm, k_norm;

    AttentionSpec(int n_heads, int n_kv_heads, int dk, int dv, const std::string& type_k, const std::string& type_v,
                  float scale, int window, float softcap, const Array* q, const Array* k, float eps) {
        need(n_kv_heads > 0 && n_heads > 0 && n_heads % n_kv_heads == 0, "AttentionSpec: ", n_heads,
             " heads do not divide into ", n_kv_heads, " kv heads");
        need(window >= 0 && softcap >= 0, "AttentionSpec: window and softcap must not be negative");
        check_dims("K", dk, type_k);
        check_dims("V", dv, type_v);
        q_norm = weights("q_norm", q, dk);
        k_norm = weights("k_norm", k, dk);
        shape = {n_heads, n_kv_heads, n_heads / n_kv_heads, dk, dv, (dv + 15) / 16 * 16, kv_type(type_k),
                 kv_type(type_v), scale, softcap, window, q ? q_norm.data() : nullptr, k ? k_norm.data() : nullptr,
                 eps};
    }
    AttentionSpec(const AttentionSpec&) = delete;

    int64_t k_bytes(int page_tokens) const { return bytes(shape.type_k, shape.dk) * page_tokens; }
    int64_t v_bytes(int page_tokens) const { return bytes(shape.type_v, shape.dv) * page_tokens; }

  private:
    int64_t bytes(KvType type, int dims) const {  // of one token
        constexpr int of_32[] = {4 * 32, 2 * 32, 2 * 32, 34, 18};
        return int64_t(shape.n_kv_heads) * dims * of_32[int(type)] / 32;
    }
    static void check_dims(const char* what, int dims, const std::string& type) {
        const int step = kv_type(type) >= KvType::q8_0 ? 32 : 2;
        need(dims > 0 && dims <= MAX_HEAD_DIM && dims % step == 0, "AttentionSpec: head dimension ", dims, " of ", what,
             " as ", type, " must be a multiple of ", step, " up to ", MAX_HEAD_DIM);
    }
    static std::vector<float> weights(const char* what, const Array* a, int dk) {
        if (!a) return {};
        need(a->rows * a->cols == dk, "AttentionSpec: ", what, " has ", a->rows * a->cols,
             " values, the head dimension is ", dk);
        return std::vector<float>(a->data, a->data + dk);
    }
};

// ---- attention ----

void check_parts(const AttentionSpec& spec, int64_t page_bytes, int page_tokens, int64_t k_offset, int64_t v_offset) {
    need(k_offset >= 0 && v_offset >= 0 && k_offset + spec.k_bytes(page_tokens) <= page_bytes &&
             v_offset + spec.v_bytes(page_tokens) <= page_bytes,
         "attention: K at ", k_offset, " or V at ", v_offset, " lies outside a page of ", page_bytes, " bytes");
}

void check_rows(const char* what, const Array& x, const Pages& pages, int64_t cols) {
    need(x.rows == pages.n_tokens && x.cols == cols, what, " is [", x.rows, ", ", x.cols,
         "], the pages and heads need [", pages.n_tokens, ", ", cols, "]");
}

RopeView rope_view(const RopeTable* table, const AttentionShape& shape, int64_t n) {
    if (!table) return {nullptr, 0, false};
    need(table->rows == n, "attention: the rope table has ", table->rows, " rows for ", n, " tokens");
    need(table->cols <= shape.dk, "attention: rope turns ", table->cols, " dimensions, a head has ", shape.dk);
    return {table->data, int(table->cols), table->neox};
}

Array attend_pages(Cpu& cpu, const Array& q, const AttentionShape& shape, Pages& pages, int64_t k_offset,
                   int64_t v_offset) {
    const AttentionKernels& kernels = kernels_of(cpu.isa);
    Plan& plan = pages.plan(shape, cpu.pool.size());
    PageView view = pages.view;
    view.begin = plan.begin.data();
    view.end = plan.end.data();
    Array out = cpu.array(q.rows, int64_t(shape.n_heads) * shape.dv);
    Array scratch = cpu.array(cpu.pool.size(), kernels.scratch(shape, plan.most_rows));
    Array partial = cpu.array(plan.partial_rows, shape.dv_padded + STATE_EXTRA);
    const AttendJob job{&shape, &view, q.data, q.cols, out.data, k_offset, v_offset};
    auto work = [&](int64_t from, int64_t to, int thread) {
        for (int64_t i = from; i < to; i++) {
            const Item& item = plan.items[size_t(i)];
            const Tile& tile = plan.tiles[size_t(item.tile)];
            if (item.join < 0) {
                kernels.attend(job, tile, item.head, item.from, item.to, nullptr, scratch.row(thread));
                continue;
            }
            const Plan::Join& join = plan.joins[size_t(item.join)];
            float* parts = partial.row(join.rows_before);
            kernels.attend(job, tile, item.head, item.from, item.to, parts, scratch.row(thread));
            // Whoever finishes the last part joins them all.
            if (plan.left[size_t(item.join)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
                kernels.join(job, tile, item.head, parts);
                plan.left[size_t(item.join)].store(join.parts, std::memory_order_relaxed);
            }
        }
    };
    const int64_t count = int64_t(plan.items.size());
    const bool small = plan.scores * (shape.dk + shape.dv) < 200'000;  // not worth waking anybody
    cpu.pool.parallel(count, small ? count : 1, work);
    return out;
}

Array attention(Cpu& cpu, Array& qkv, const AttentionSpec& spec, Pages& pages, const RopeTable* rope, int64_t k_offset,
                int64_t v_offset) {
    const AttentionShape& s = spec.shape;
    const int64_t q_cols = int64_t(s.n_heads) * s.dk, k_cols = int64_t(s.n_kv_heads) * s.dk;
    check_rows("attention: qkv", qkv, pages, q_cols + k_cols + int64_t(s.n_kv_heads) * s.dv);
    check_parts(spec, pages.view.page_bytes, pages.view.page_tokens, k_offset, v_offset);
    const RopeView view = rope_view(rope, s, qkv.rows);
    const AttentionKernels& kernels = kernels_of(cpu.isa);
    nb::gil_scoped_release released;
    cpu.pool.parallel(qkv.rows, BLOCK, [&](int64_t begin, int64_t end, int) {
        float* q = qkv.data;
        kernels.prepare(s, pages.view, view, q, q + q_cols, q + q_cols + k_cols, qkv.cols, begin, end, k_offset,
                        v_offset);
    });
    return attend_pages(cpu, qkv, s, pages, k_offset, v_offset);
}

Array attend(Cpu& cpu, Array& q, const AttentionSpec& spec, Pages& pages, int64_t k_offset, int64_t v_offset,
             const RopeTable* rope) {
    const AttentionShape& s = spec.shape;
    check_rows("attend: q", q, pages, int64_t(s.n_heads) * s.dk);
    check_parts(spec, pages.view.page_bytes, pages.view.page_tokens, k_offset, v_offset);
    const RopeView view = rope_view(rope, s, q.rows);
    const AttentionKernels& kernels = kernels_of(cpu.isa);
    nb::gil_scoped_release released;
    cpu.pool.parallel(q.rows, BLOCK, [&](int64_t begin, int64_t end, int) {
        kernels.prepare(s, pages.view, view, q.data, nullptr, nullptr, q.cols, begin, end, 0, 0);
    });
    return attend_pages(cpu, q, s, pages, k_offset, v_offset);
}

void rotate_pages(Cpu& cpu, const AttentionSpec& spec, const Rope& rope, int64_t address, int64_t page_bytes,
                  int page_tokens, Ints pages, IntRows deltas, Longs k_offsets) {
    const int64_t n = int64_t(pages.shape(0));
    need(page_tokens > 0 && page_tokens % BLOCK == 0, "rotate_pages: page_tokens must be a multiple of 16");
    need(int64_t(deltas.shape(0)) == n && int64_t(deltas.shape(1)) == page_tokens, "rotate_pages: deltas must be [", n,
         ", ", page_tokens, "]");
    need(rope.n_rot <= spec.shape.dk, "rotate_pages: rope turns ", rope.n_rot, " dimensions, a head has ",
         spec.shape.dk);
    for (int64_t i = 0; i < n; i++) need(pages.data()[i] >= 0, "rotate_pages: there is no page ", pages.data()[i]);
    for (size_t l = 0; l < k_offsets.shape(0); l++) check_parts(spec, page_bytes, page_tokens, k_offsets.data()[l], 0);
    const AttentionKernels& kernels = kernels_of(cpu.isa);
    nb::gil_scoped_release released;
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
                kernels.rotate(spec.shape, {table.data(), rope.n_rot, rope.neox}, page + k_offsets.data()[l],
                               page_tokens, skip.get());
        }
    });
}

void move_tokens(Cpu& cpu, const AttentionSpec& spec, int64_t from_page, int64_t to_page, int64_t page_bytes,
                 int page_tokens, Ints from_slots, Ints to_slots, Longs k_offsets, Longs v_offsets) {
    const int64_t n = int64_t(from_slots.shape(0)), layers = int64_t(k_offsets.shape(0));
    need(page_tokens > 0 && page_tokens % BLOCK == 0, "move_tokens: page_tokens must be a multiple of 16");
    need(int64_t(to_slots.shape(0)) == n && int64_t(v_offsets.shape(0)) == layers,
         "move_tokens: each token needs a slot to go to, and each layer K and V");
    for (int64_t i = 0; i < n; i++)
        for (int32_t slot : {from_slots.data()[i], to_slots.data()[i]})
            need(slot >= 0 && slot < page_tokens, "move_tokens: a page of ", page_tokens, " has no slot ", slot);
    for (int64_t l = 0; l < layers; l++)
        check_parts(spec, page_bytes, page_tokens, k_offsets.data()[l], v_offsets.data()[l]);
    const char* from = reinterpret_cast<const char*>(from_page);
    char* to = reinterpret_cast<char*>(to_page);
    nb::gil_scoped_release released;
    cpu.pool.parallel(layers, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t l = begin; l < end; l++) {
            const int64_t k = k_offsets.data()[l], v = v_offsets.data()[l];
            for (int64_t i = 0; i < n; i++)
                move_token(spec.shape, page_tokens, from + k, to + k, from + v, to + v, from_slots.data()[i],
                           to_slots.data()[i]);
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
        .def(nb::init<int, int, int, int, const std::string&, const std::string&, float, int, float, const Array*,
                      const Array*, float>(),
             "n_heads"_a, "n_kv_heads"_a, "head_dim_k"_a, "head_dim_v"_a, "type_k"_a, "type_v"_a, "scale"_a,
             "window"_a = 0, "softcap"_a = 0.0f, "q_norm"_a.none() = nb::none(), "k_norm"_a.none() = nb::none(),
             "eps"_a = 0.0f)
        .def("k_bytes", &AttentionSpec::k_bytes, "page_tokens"_a, "Bytes of one layer's keys in a page.")
        .def("v_bytes", &AttentionSpec::v_bytes, "page_tokens"_a, "Bytes of one layer's values in a page.");
    nb::class_<Pages>(m, "Pages", "One group's pages in one step: who reads and writes what.")
        .def(nb::init<int64_t, int64_t, int, IntRows, Ints, Ints, Ints, Ints, Ints, std::optional<IntRows>>(),
             "address"_a, "page_bytes"_a, "page_tokens"_a, "tables"_a.noconvert(), "first"_a.noconvert(),
             "length"_a.noconvert(), "slots"_a.noconvert(), "positions"_a.noconvert(), "seq_rows"_a.noconvert(),
             "slot_positions"_a.none().noconvert() = nb::none());
    nb::borrow<nb::class_<Cpu>>(m.attr("Cpu"))
        .def("rope_table", &rope_table, "rope"_a, "positions"_a,
             "Cosines and sines of positions, for all layers of a step.")
        .def("attention", &attention, "qkv"_a, "spec"_a, "pages"_a, "rope_table"_a.none(), "k_offset"_a, "v_offset"_a,
             "Norms and rotates q and k, stores k and v, attends; qkv is used up.")
        .def("attend", &attend, "q"_a, "spec"_a, "pages"_a, "k_offset"_a, "v_offset"_a,
             "rope_table"_a.none() = nb::none(),
             "The same for a layer that reads another layer's keys and values; q is used up.")
        .def("rotate_pages", &rotate_pages, "spec"_a, "rope"_a, "address"_a, "page_bytes"_a, "page_tokens"_a,
             "pages"_a, "deltas"_a, "k_offsets"_a, "Turns stored keys on by a number of positions per slot.")
        .def("move_tokens", &move_tokens, "spec"_a, "from_page"_a, "to_page"_a, "page_bytes"_a, "page_tokens"_a,
             "from_slots"_a, "to_slots"_a, "k_offsets"_a, "v_offsets"_a,
             "Copies tokens from slots of one page, by address, to slots of another.");
}

}  // namespace quire
