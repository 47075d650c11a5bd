// Recurrent layers for Python: checks arguments and runs the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_set>
#include <utility>

#include "bind.h"
#include "recurrent_work.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

void check_place(const RecurrentLayer& layer, int64_t state_offset, int64_t state_page, int64_t log_offset,
                 int64_t log_page, int64_t log_stride, int64_t log_tokens) {
    need(state_offset >= 0 && state_offset % 64 == 0 && state_offset + layer.state_bytes() <= state_page,
         "recurrent layer: its state of ", layer.state_bytes(), " bytes at ", state_offset,
         " lies outside a page of ", state_page, " or not at a multiple of 64");
    need(log_stride >= layer.log_bytes(), "recurrent layer: entries are ", log_stride, " bytes apart and take ",
         layer.log_bytes());
    need(log_offset >= 0 && log_offset % 4 == 0 && log_offset + log_tokens * log_stride <= log_page,
         "recurrent layer: its log at ", log_offset, " lies outside a page of ", log_page, " bytes");
}

Array recur(Cpu& cpu, const Array& x, const RecurrentLayer& layer, const States& states, int64_t state_offset,
            int64_t log_offset) {
    const RecurrentShape& s = layer.shape;
    need(x.rows == states.n_tokens && x.cols == s.in_cols, "recur: x is [", x.rows, ", ", x.cols,
         "], the states and the layer need [", states.n_tokens, ", ", s.in_cols, "]");
    check_place(layer, state_offset, states.state_page_bytes, log_offset, states.log_page_bytes, states.log_stride,
                states.log_tokens);
    nb::gil_scoped_release released;
    Array out = cpu.array(x.rows, s.out_cols);
    auto part = [](char* page, int64_t offset) { return page ? page + offset : nullptr; };
    // A scan that leaves its last tokens in a log is a scan of the others, then an append.
    Work work, tails;
    for (const States::Sequence& q : states.sequences) {
        char *state_out = part(states.state(q.state_out), state_offset), *log_out = part(states.log(q.log_out), log_offset);
        const int64_t head = q.count - q.tail, at = q.row + head;
        work.add(layer, part(states.state(q.state_in), state_offset), part(states.log(q.log_in), log_offset),
                 states.log_stride, q.log_length, head, x.row(q.row), state_out, q.tail ? nullptr : log_out,
                 out.row(q.row));
        if (q.tail)
            tails.add(layer, state_out, nullptr, states.log_stride, 0, q.tail, x.row(at), nullptr, log_out,
                      out.row(at));
    }
    work.run(cpu);
    tails.run(cpu);
    return out;
}

// Several folds are walked at once; none may read or write what another writes.
void check_folds(const Ints& state_in, const Ints& log, const Ints& entries, const Ints& state_out) {
    const size_t n = state_in.shape(0);
    need(log.shape(0) == n && entries.shape(0) == n && state_out.shape(0) == n,
         "fold: state_in, log, n_entries and state_out need one entry per fold");
    const std::unordered_set<int32_t> read(state_in.data(), state_in.data() + n);
    std::unordered_set<int32_t> written;
    for (size_t i = 0; i < n; i++) {
        const int32_t out = state_out.data()[i];
        need(state_in.data()[i] >= -1 && log.data()[i] >= 0 && out >= 0, "fold: there is no state page ",
             state_in.data()[i], ", log page ", log.data()[i], " or state page ", out);
        need(written.insert(out).second && !read.count(out), "fold: needs a state page of its own, not ", out);
        need(entries.data()[i] > 0, "fold: there are no entries to fold");
    }
}

void fold(Cpu& cpu, const std::vector<const RecurrentLayer*>& layers,
          const std::vector<std::pair<int64_t, int64_t>>& offsets, int64_t state_base, int64_t state_page_bytes,
          int64_t log_base, int64_t log_page_bytes, int64_t log_stride, Ints state_in, Ints log, Ints entries,
          Ints state_out) {
    need(layers.size() == offsets.size(), "fold: ", layers.size(), " layers, but offsets of ", offsets.size());
    check_folds(state_in, log, entries, state_out);
    const int64_t n = int64_t(state_in.shape(0));
    const int64_t most = n ? *std::max_element(entries.data(), entries.data() + n) : 0;
    for (size_t l = 0; l < layers.size(); l++)
        check_place(*layers[l], offsets[l].first, state_page_bytes, offsets[l].second, log_page_bytes, log_stride,
                    most);
    nb::gil_scoped_release released;
    char *const states = reinterpret_cast<char*>(state_base), *const logs = reinterpret_cast<char*>(log_base);
    Work work;
    for (int64_t i = 0; i < n; i++)
        for (size_t l = 0; l < layers.size(); l++) {
            const auto [state_at, log_at] = offsets[l];
            const int64_t before = state_in.data()[i];
            work.add(*layers[l], before < 0 ? nullptr : states + before * state_page_bytes + state_at,
                     logs + log.data()[i] * log_page_bytes + log_at, log_stride, entries.data()[i], 0, nullptr,
                     states + state_out.data()[i] * state_page_bytes + state_at, nullptr, nullptr);
            if (!work.full()) continue;
            work.run(cpu);
            work = Work();
        }
    work.run(cpu);
}

// ---- around a layer ----

Array gated_norm(Cpu& cpu, const Array& x, const Array& gate, const Array& weight, float eps, int64_t group,
                 bool gate_first) {
    const int64_t weights = weight.rows * weight.cols;
    need(gate.rows == x.rows && gate.cols == x.cols, "gated_norm: x is [", x.rows, ", ", x.cols, "], the gate [",
         gate.rows, ", ", gate.cols, "]");
    need(group > 0 && x.cols % group == 0, "gated_norm: ", x.cols, " columns do not divide into groups of ", group);
    need(weights == group || weights == x.cols, "gated_norm: ", weights, " weights for groups of ", group, " in ",
         x.cols, " columns; one per column of a group or of x is needed");
    const RecurrentKernels& kernels = recurrent_kernels_of(cpu.isa);
    nb::gil_scoped_release released;
    Array out = cpu.array(x.rows, x.cols);
    cpu.pool.parallel(x.rows, std::max<int64_t>(1, 4096 / x.cols), [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; r++)
            kernels.gated_norm(x.row(r), gate.row(r), weight.data, out.row(r), x.cols, group, weights, eps,
                               gate_first);
    });
    return out;
}

void gate_sigmoid(Cpu& cpu, Array& x, const Array& gate) {
    need(gate.rows == x.rows && gate.cols == x.cols, "gate_sigmoid: x is [", x.rows, ", ", x.cols, "], the gate [",
         gate.rows, ", ", gate.cols, "]");
    const RecurrentKernels& kernels = recurrent_kernels_of(cpu.isa);
    nb::gil_scoped_release released;
    cpu.pool.parallel(x.rows, std::max<int64_t>(1, 4096 / x.cols), [&](int64_t begin, int64_t end, int) {
        kernels.gate_sigmoid(x.row(begin), gate.row(begin), (end - begin) * x.cols);
    });
}

Array columns(Cpu& cpu, const Array& x, int64_t start, int64_t count) {
    need(start >= 0 && count > 0 && start <= x.cols - count, "columns: ", start, " to ", start + count, " of ",
         x.cols);
    nb::gil_scoped_release released;
    Array out = cpu.array(x.rows, count);
    cpu.pool.parallel(x.rows, std::max<int64_t>(1, 16384 / count), [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; r++) std::memcpy(out.row(r), x.row(r) + start, size_t(count) * 4);
    });
    return out;
}

}  // namespace

void bind_recurrent(nb::module_& m) {
    nb::class_<RecurrentLayer>(m, "RecurrentLayer", "The weights and shape of one recurrent layer.")
        .def_static("delta_net", &RecurrentLayer::delta_net, "n_k"_a, "n_v"_a, "dk"_a, "dv"_a, "conv"_a,
                    "conv_bias"_a.none(), "ssm_a"_a, "dt_bias"_a, "tiled"_a = false)
        .def_static("ssd", &RecurrentLayer::ssd, "n_heads"_a, "n_groups"_a, "head_dim"_a, "state_dim"_a, "conv"_a,
                    "conv_bias"_a.none(), "ssm_a"_a, "dt_bias"_a, "d"_a, "dt_low"_a = 0.0f,
                    "dt_high"_a = std::numeric_limits<float>::infinity())
        .def_static("short_conv", &RecurrentLayer::short_conv, "conv"_a, "conv_bias"_a.none() = nb::none())
        .def_prop_ro("state_bytes", &RecurrentLayer::state_bytes)
        .def_prop_ro("log_bytes", &RecurrentLayer::log_bytes)
        .def_prop_ro("in_cols", [](const RecurrentLayer& l) { return l.shape.in_cols; })
        .def_prop_ro("out_cols", [](const RecurrentLayer& l) { return l.shape.out_cols; });
    nb::class_<States>(m, "States", "One group's states and logs in one step: who reads and writes what.")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, Ints, Ints, Ints, Ints, Ints, Ints, Ints>(),
             "state_base"_a, "state_page_bytes"_a, "log_base"_a, "log_page_bytes"_a, "log_stride"_a,
             "log_tokens"_a, "state_in"_a.noconvert(), "state_out"_a.noconvert(), "log_in"_a.noconvert(),
             "log_length"_a.noconvert(), "log_out"_a.noconvert(), "tail"_a.noconvert(),
             "seq_rows"_a.noconvert());
    nb::borrow<nb::class_<Cpu>>(m.attr("Cpu"))
        .def("recur", &recur, "x"_a, "layer"_a, "states"_a, "state_offset"_a, "log_offset"_a,
             "Takes tokens into their logs or states, and returns the layer's outputs.")
        .def("fold", &fold, "layers"_a, "offsets"_a, "state_base"_a, "state_page_bytes"_a, "log_base"_a,
             "log_page_bytes"_a, "log_stride"_a, "state_in"_a.noconvert(), "log"_a.noconvert(),
             "n_entries"_a.noconvert(), "state_out"_a.noconvert(), "Replays logs on states, in all layers.")
        .def("gated_norm", &gated_norm, "x"_a, "gate"_a, "weight"_a, "eps"_a, "group"_a, "gate_first"_a,
             "Norms over groups of columns, times silu(gate) after or before.")
        .def("gate_sigmoid",
             [](Cpu& cpu, nb::object x, const Array& gate) {
                 gate_sigmoid(cpu, nb::cast<Array&>(x), gate);
                 return x;
             },
             "x"_a, "gate"_a, "x times sigmoid(gate), in place; returns x.")
        .def("columns", &columns, "x"_a, "start"_a, "count"_a, "A copy of some columns.");
}

}  // namespace quire
