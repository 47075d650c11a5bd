// Recurrent layers for Python: checks arguments, lays out the work of a step, runs the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "bind.h"
#include "cpu.h"
#include "recurrent_layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

const RecurrentKernels& kernels_of(Isa isa) {
#if defined(QUIRE_X86)
    if (isa == Isa::avx512) return avx512::recurrent_kernels;
    if (isa == Isa::avx2) return avx2::recurrent_kernels;
#endif
    (void)isa;
    return portable::recurrent_kernels;
}

// Sequences and layers that are walked together, and what their jobs point to.
class Work {
  public:
    // Before `new_tokens`, the state in `state_in` (null: zeros) and `entries` of the log; pages from the layer's part.
    void add(const RecurrentLayer& layer, const char* state_in, const char* log, int64_t log_stride, int64_t entries,
             int64_t new_tokens, const float* x, char* state_out, char* log_out, float* out) {
        const RecurrentShape& s = layer.shape;
        const bool conv = s.kind == RecurrentKind::conv;
        RecurrentJob job{};
        job.shape = &s;
        job.tokens = entries + new_tokens;
        job.first_new = entries;
        job.x = x;
        job.log = log_out ? log_out + entries * log_stride : nullptr;
        job.log_stride = log_stride;
        job.state = state_in ? reinterpret_cast<const float*>(state_in + s.tail_bytes()) : nullptr;
        job.state_out = state_out ? reinterpret_cast<float*>(state_out + s.tail_bytes()) : nullptr;
        job.tail_out = reinterpret_cast<float*>(state_out);
        job.out = out;
        std::vector<const float*> rows;
        for (int64_t j = 0; j < s.width - 1; j++)
            rows.push_back(state_in ? reinterpret_cast<const float*>(state_in) + j * s.channels : layer.zeros.data());
        for (int64_t t = 0; t < entries; t++) rows.push_back(reinterpret_cast<const float*>(log + t * log_stride));
        for (int64_t t = 0; t < new_tokens; t++) rows.push_back(conv ? out + t * s.out_cols : x + t * s.in_cols);
        tasks_.push_back({job, std::move(rows)});
    }

    void run(Cpu& cpu) {
        if (tasks_.empty()) return;
        // Long ones first, so that nobody is left with one at the end.
        std::stable_sort(tasks_.begin(), tasks_.end(),
                         [](const Task& a, const Task& b) { return a.job.tokens > b.job.tokens; });
        const int64_t longest = tasks_.front().job.tokens;
        int64_t dk = 0, floats = 0, size = 1 << 12;
        for (const Task& task : tasks_) {
            dk = std::max<int64_t>(dk, task.job.shape->dk);
            // An append has no place for a state between tiles, and a convolution begins with its last token.
            if (!task.job.state_out || task.job.shape->kind == RecurrentKind::conv)
                tile_ = std::max(tile_, task.job.tokens);
        }
        for (const Task& task : tasks_) floats += std::min(task.job.tokens, tile_) * task.job.shape->prepared_cols;
        while (size < floats) size *= 2;  // few sizes for steps of many lengths
        Array prepared = cpu.array(1, size);
        Array scratch = cpu.array(cpu.pool.size(), kernels_of(cpu.isa).blocks * dk * STATE_LANES);
        for (int64_t from = 0; from < longest; from += tile_) run_tile(cpu, from, prepared, scratch);
    }

  private:
    struct Task {
        RecurrentJob job;
        std::vector<const float*> rows;  // those of the tail, then all tokens'
    };

    void run_tile(Cpu& cpu, int64_t from, Array& prepared, Array& scratch) {
        const RecurrentKernels& kernels = kernels_of(cpu.isa);
        std::vector<RecurrentJob> jobs;
        float* rows = prepared.data;
        for (const Task& task : tasks_) {
            if (from >= task.job.tokens) break;
            jobs.push_back(tile(task, from, rows));
            rows += jobs.back().tokens * task.job.shape->prepared_cols;
        }
        each(cpu, jobs, 16, [](const RecurrentJob& job) { return job.first_pieces(); },
             [&](const RecurrentJob& job, int64_t begin, int64_t end, int) { kernels.prepare(job, begin, end); });
        auto slices = [&](const RecurrentJob& j) { return (j.shape->blocks() + kernels.blocks - 1) / kernels.blocks; };
        const RecurrentJob& first = jobs.front();
        const int64_t work = first.tokens * first.shape->dk * kernels.blocks * STATE_LANES;
        each(cpu, jobs, 1 + 8192 / work,  // less is not worth handing out
             [&](const RecurrentJob& job) {
                 return job.shape->kind == RecurrentKind::conv ? 0 : job.shape->n_v * slices(job);
             },
             [&](const RecurrentJob& job, int64_t begin, int64_t end, int thread) {
                 for (int64_t i = begin; i < end; i++)
                     kernels.scan(job, int(i / slices(job)), i % slices(job) * kernels.blocks, scratch.row(thread));
             });
    }

    // A job's tokens from `from` on. Between tiles the state lies where it goes in the end.
    RecurrentJob tile(const Task& task, int64_t from, float* prepared) const {
        RecurrentJob job = task.job;
        const RecurrentShape& s = *job.shape;
        const int64_t tokens = std::min(job.tokens - from, tile_), done = std::max<int64_t>(from - job.first_new, 0);
        job.rows = task.rows.data() + s.width - 1 + from;
        job.prepared = prepared;
        job.x += done * s.in_cols;
        job.out += done * s.out_cols;
        if (job.log) job.log += done * job.log_stride;
        if (from > 0) job.state = job.state_out;
        if (from + tokens < job.tokens) job.tail_out = nullptr;
        job.first_new = std::clamp<int64_t>(job.first_new - from, 0, tokens);
        job.tokens = tokens;
        return job;
    }

    // Runs the pieces of all jobs in parallel, some at a time.
    template <class Count, class Run>
    static void each(Cpu& cpu, const std::vector<RecurrentJob>& jobs, int64_t chunk, Count count, Run run) {
        std::vector<int64_t> ends;
        int64_t total = 0;
        for (const RecurrentJob& job : jobs) ends.push_back(total += count(job));
        cpu.pool.parallel(total, chunk, [&](int64_t begin, int64_t end, int thread) {
            size_t at = size_t(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
            for (; begin < end; at++) {
                const int64_t before = at ? ends[at - 1] : 0, stop = std::min(end, ends[at]);
                run(jobs[at], begin - before, stop - before, thread);
                begin = stop;
            }
        });
    }

    std::vector<Task> tasks_;
    int64_t tile_ = 64;  // tokens that are prepared, then walked: their rows stay in a cache
};

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

void fold(Cpu& cpu, const std::vector<const RecurrentLayer*>& layers,
          const std::vector<std::pair<int64_t, int64_t>>& offsets, int64_t state_page_bytes, int64_t log_page_bytes,
          int64_t log_stride, int64_t state_in, int64_t log, int64_t entries, int64_t state_out) {
    need(layers.size() == offsets.size(), "fold: ", layers.size(), " layers, but offsets of ", offsets.size());
    need(log != 0 && state_out != 0 && state_out != state_in, "fold: needs a log and a state page of its own");
    need(entries > 0, "fold: there are no entries to fold");
    for (size_t i = 0; i < layers.size(); i++)
        check_place(*layers[i], offsets[i].first, state_page_bytes, offsets[i].second, log_page_bytes, log_stride,
                    entries);
    nb::gil_scoped_release released;
    Work work;
    for (size_t i = 0; i < layers.size(); i++) {
        const auto [state_at, log_at] = offsets[i];
        const char* before = state_in ? reinterpret_cast<const char*>(state_in) + state_at : nullptr;
        work.add(*layers[i], before, reinterpret_cast<const char*>(log) + log_at, log_stride, entries, 0, nullptr,
                 reinterpret_cast<char*>(state_out) + state_at, nullptr, nullptr);
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
    const RecurrentKernels& kernels = kernels_of(cpu.isa);
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
    const RecurrentKernels& kernels = kernels_of(cpu.isa);
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
             "state_address"_a, "state_page_bytes"_a, "log_address"_a, "log_page_bytes"_a, "log_stride"_a,
             "log_tokens"_a, "state_in"_a.noconvert(), "state_out"_a.noconvert(), "log_in"_a.noconvert(),
             "log_length"_a.noconvert(), "log_out"_a.noconvert(), "tail"_a.noconvert(),
             "seq_rows"_a.noconvert());
    nb::borrow<nb::class_<Cpu>>(m.attr("Cpu"))
        .def("recur", &recur, "x"_a, "layer"_a, "states"_a, "state_offset"_a, "log_offset"_a,
             "Takes tokens into their logs or states, and returns the layer's outputs.")
        .def("fold", &fold, "layers"_a, "offsets"_a, "state_page_bytes"_a, "log_page_bytes"_a, "log_stride"_a,
             "state_in"_a, "log"_a, "n_entries"_a, "state_out"_a, "Replays a log on a state, in all layers.")
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
