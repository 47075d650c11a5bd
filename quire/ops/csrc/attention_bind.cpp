// Attention for Python: checks arguments, plans the work, runs the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "attention_spec.h"
#include "bind.h"
#include "pages.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

RopeTable rope_table(Cpu& cpu, const Rope& rope, Ints positions) {
    RopeTable table(cpu.array(int64_t(positions.shape(0)), rope.n_rot), rope.neox);
    const int32_t* p = positions.data();
    cpu.pool.parallel(table.rows, 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; i++) rope.row(p[i], rope.mscale, table.row(i));
    });
    return table;
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
    const AttentionKernels& kernels = attention_kernels_of(cpu.isa);
    Plan& plan = pages.plan(shape, cpu.pool.size());
    PageView view = pages.view;
    view.begin = plan.begin.data();
    view.end = plan.end.data();
    Array out = cpu.array(q.rows, int64_t(shape.n_heads) * shape.dv);
    Array scratch = cpu.array(cpu.pool.size(), kernels.scratch(shape, plan.most_rows));
    Array partial = cpu.array(plan.partial_rows, shape.dv_padded + STATE_EXTRA);
    Array sums = cpu.array(plan.sums * shape.n_heads, shape.dv_padded + STATE_EXTRA);
    const AttendJob job{&shape, &view, q.data, q.cols, out.data, sums.data, plan.sums, k_offset, v_offset};
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
    if (plan.shared_items) cpu.pool.parallel(plan.shared_items, 1, work);
    const int64_t count = int64_t(plan.items.size()) - plan.shared_items;
    const bool small = plan.scores * (shape.dk + shape.dv) < 200'000;  // not worth waking anybody
    // The heads of a token lie side by side in its pages: where there is enough for all threads, one has them all.
    const bool many = plan.single && count >= int64_t(8) * shape.n_kv_heads * cpu.pool.size();
    cpu.pool.parallel(count, small ? count : many ? shape.n_kv_heads : 1,
                      [&](int64_t from, int64_t to, int thread) {
                          work(plan.shared_items + from, plan.shared_items + to, thread);
                      });
    return out;
}

// Without `store`, qkv is q alone: the pages hold the keys and values of these tokens already.
Array attention(Cpu& cpu, Array& qkv, const AttentionSpec& spec, Pages& pages, const RopeTable* rope, int64_t k_offset,
                int64_t v_offset, bool store) {
    const AttentionShape& s = spec.shape;
    const int64_t q_cols = int64_t(s.n_heads) * s.dk, k_cols = int64_t(s.n_kv_heads) * s.dk;
    check_rows(store ? "attention: qkv" : "attention: q", qkv, pages,
               store ? q_cols + k_cols + int64_t(s.n_kv_heads) * s.dv : q_cols);
    check_parts(spec, pages.view.page_bytes, pages.view.page_tokens, k_offset, v_offset);
    const RopeView view = rope_view(rope, s, qkv.rows);
    const AttentionKernels& kernels = attention_kernels_of(cpu.isa);
    nb::gil_scoped_release released;
    float* q = qkv.data;
    float* k = store ? q + q_cols : nullptr;
    float* v = store ? k + k_cols : nullptr;
    const int64_t rows = std::clamp<int64_t>(qkv.rows / cpu.pool.size(), 4, BLOCK);
    cpu.pool.parallel(qkv.rows, rows, [&](int64_t begin, int64_t end, int) {
        kernels.prepare(s, pages.view, view, q, k, v, qkv.cols, begin, end, k_offset, v_offset);
    });
    return attend_pages(cpu, qkv, s, pages, k_offset, v_offset);
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
             "base"_a, "page_bytes"_a, "page_tokens"_a, "tables"_a.noconvert(), "first"_a.noconvert(),
             "length"_a.noconvert(), "slots"_a.noconvert(), "positions"_a.noconvert(), "seq_rows"_a.noconvert(),
             "slot_positions"_a.none().noconvert() = nb::none());
    nb::borrow<nb::class_<Cpu>>(m.attr("Cpu"))
        .def("rope_table", &rope_table, "rope"_a, "positions"_a,
             "Cosines and sines of positions, for all layers of a step.")
        .def("attention", &attention, "qkv"_a, "heads"_a, "pages"_a, "rope"_a.none(), "k_offset"_a, "v_offset"_a,
             "store"_a = true, "Norms and rotates q and k, stores k and v, attends; qkv is used up.");
}

}  // namespace quire
