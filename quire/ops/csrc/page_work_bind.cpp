// Work on whole pages for Python: copying them, turning stored keys on, moving single tokens.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_set>

#include "attention_spec.h"
#include "bind.h"
#include "move.h"
#include "numpy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

void check_ids(const char* what, const Ints& pages, int64_t n) {
    need(int64_t(pages.shape(0)) == n, what, ": ", pages.shape(0), " pages where ", n, " are needed");
    for (int64_t i = 0; i < n; i++) need(pages.data()[i] >= 0, what, ": there is no page ", pages.data()[i]);
}

void copy_pages(Cpu& cpu, int64_t base, int64_t page_bytes, Ints sources, Ints targets) {
    const int64_t n = int64_t(sources.shape(0));
    need(page_bytes > 0, "copy_pages: pages of ", page_bytes, " bytes");
    check_ids("copy_pages", sources, n);
    check_ids("copy_pages", targets, n);
    const std::unordered_set<int32_t> read(sources.data(), sources.data() + n);
    std::unordered_set<int32_t> written;
    for (int64_t i = 0; i < n; i++) {
        const int32_t target = targets.data()[i];
        need(written.insert(target).second && !read.count(target), "copy_pages: page ", target,
             " is copied to twice, or copied from as well");
    }
    char* const start = reinterpret_cast<char*>(base);
    // A large page is the work of several threads.
    const int64_t piece = 1 << 18, pieces = (page_bytes + piece - 1) / piece;
    nb::gil_scoped_release released;
    cpu.pool.parallel(n * pieces, std::max<int64_t>(1, piece / page_bytes), [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t at = i % pieces * piece, bytes = std::min(piece, page_bytes - at);
            std::memcpy(start + targets.data()[i / pieces] * page_bytes + at,
                        start + sources.data()[i / pieces] * page_bytes + at, size_t(bytes));
        }
    });
}

void rotate_pages(Cpu& cpu, const AttentionSpec& spec, const Rope& rope, int64_t base, int64_t page_bytes,
                  int page_tokens, Ints pages, IntRows deltas, Longs k_offsets) {
    const int64_t n = int64_t(pages.shape(0));
    need(page_tokens > 0 && page_tokens % BLOCK == 0, "rotate_pages: page_tokens must be a multiple of 16");
    need(int64_t(deltas.shape(0)) == n && int64_t(deltas.shape(1)) == page_tokens, "rotate_pages: deltas must be [", n,
         ", ", page_tokens, "]");
    need(rope.n_rot <= spec.shape.dk, "rotate_pages: rope turns ", rope.n_rot, " dimensions, a head has ",
         spec.shape.dk);
    check_ids("rotate_pages", pages, n);
    for (size_t l = 0; l < k_offsets.shape(0); l++) check_parts(spec, page_bytes, page_tokens, k_offsets.data()[l], 0);
    const AttentionKernels& kernels = attention_kernels_of(cpu.isa);
    nb::gil_scoped_release released;
    cpu.pool.parallel(n, 1, [&](int64_t begin, int64_t end, int) {
        std::vector<float> table(size_t(page_tokens) * size_t(rope.n_rot));
        const auto skip = std::make_unique<bool[]>(size_t(page_tokens));
        for (int64_t i = begin; i < end; i++) {
            const int32_t* delta = deltas.data() + i * page_tokens;
            for (int t = 0; t < page_tokens; t++) {
                float* row = table.data() + int64_t(t) * rope.n_rot;
                skip[size_t(t)] = delta[t] == 0;
                if (t > 0 && delta[t] == delta[t - 1]) std::copy(row - rope.n_rot, row, row);
                else rope.row(delta[t], 1.0, row);  // the keys have been scaled already
            }
            char* page = reinterpret_cast<char*>(base) + pages.data()[i] * page_bytes;
            for (size_t l = 0; l < k_offsets.shape(0); l++)
                kernels.rotate(spec.shape, {table.data(), rope.n_rot, rope.neox}, page + k_offsets.data()[l],
                               page_tokens, skip.get());
        }
    });
}

void check_slots(Ints slots, int64_t n, int page_tokens) {
    need(int64_t(slots.shape(0)) == n, "move_tokens: ", slots.shape(0), " slots for ", n, " tokens");
    for (int64_t i = 0; i < n; i++)
        need(slots.data()[i] >= 0 && slots.data()[i] < page_tokens, "move_tokens: a page of ", page_tokens,
             " has no slot ", slots.data()[i]);
}

void move_tokens(Cpu& cpu, const AttentionSpec& spec, int64_t base, int64_t page_bytes, int page_tokens,
                 Ints from_pages, Ints from_slots, Ints to_pages, Ints to_slots, Longs k_offsets, Longs v_offsets) {
    const int64_t n = int64_t(from_pages.shape(0)), layers = int64_t(k_offsets.shape(0));
    need(page_tokens > 0 && page_tokens % BLOCK == 0, "move_tokens: page_tokens must be a multiple of 16");
    need(int64_t(v_offsets.shape(0)) == layers, "move_tokens: each layer needs offsets of K and of V");
    check_ids("move_tokens", from_pages, n);
    check_ids("move_tokens", to_pages, n);
    check_slots(from_slots, n, page_tokens);
    check_slots(to_slots, n, page_tokens);
    for (int64_t l = 0; l < layers; l++)
        check_parts(spec, page_bytes, page_tokens, k_offsets.data()[l], v_offsets.data()[l]);
    char* const start = reinterpret_cast<char*>(base);
    nb::gil_scoped_release released;
    // By layers, not by tokens: a token may go to where the one before it came from.
    cpu.pool.parallel(layers, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t l = begin; l < end; l++) {
            const int64_t k = k_offsets.data()[l], v = v_offsets.data()[l];
            for (int64_t i = 0; i < n; i++) {
                const char* from = start + from_pages.data()[i] * page_bytes;
                char* to = start + to_pages.data()[i] * page_bytes;
                move_token(spec.shape, page_tokens, from + k, to + k, from + v, to + v, from_slots.data()[i],
                           to_slots.data()[i]);
            }
        }
    });
}

}  // namespace

void bind_page_work(nb::module_& m) {
    nb::borrow<nb::class_<Cpu>>(m.attr("Cpu"))
        .def("copy_pages", &copy_pages, "base"_a, "page_bytes"_a, "sources"_a.noconvert(), "targets"_a.noconvert(),
             "Copies whole pages.")
        .def("rotate_pages", &rotate_pages, "heads"_a, "rope"_a, "base"_a, "page_bytes"_a, "page_tokens"_a, "pages"_a,
             "deltas"_a, "k_offsets"_a, "Turns stored keys on by a number of positions per slot.")
        .def("move_tokens", &move_tokens, "heads"_a, "base"_a, "page_bytes"_a, "page_tokens"_a, "from_pages"_a,
             "from_slots"_a, "to_pages"_a, "to_slots"_a, "k_offsets"_a, "v_offsets"_a,
             "Copies tokens from slots of pages to slots of pages, one after the other.");
}

}  // namespace quire
