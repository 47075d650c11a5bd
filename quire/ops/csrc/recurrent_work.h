// The work of one call on recurrent layers, laid out for the threads.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu.h"
#include "recurrent_layer.h"

namespace quire {

inline const RecurrentKernels& recurrent_kernels_of(Isa isa) {
#if defined(QUIRE_X86)
    if (isa == Isa::avx512) return avx512::recurrent_kernels;
    if (isa == Isa::avx_vnni || isa == Isa::avx2) return avx2::recurrent_kernels;
#elif defined(QUIRE_ARM)
    if (isa == Isa::i8mm || isa == Isa::neon) return neon::recurrent_kernels;
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
        floats_ += job.tokens * s.prepared_cols;
        tasks_.push_back({job, std::move(rows)});
    }

    // Whether more should wait until this has run: what is prepared has to lie somewhere.
    bool full() const { return floats_ >= MOST_FLOATS; }

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
        Array scratch = cpu.array(cpu.pool.size(), recurrent_kernels_of(cpu.isa).blocks * dk * STATE_LANES);
        for (int64_t from = 0; from < longest; from += tile_) run_tile(cpu, from, prepared, scratch);
    }

  private:
    struct Task {
        RecurrentJob job;
        std::vector<const float*> rows;  // those of the tail, then all tokens'
    };

    void run_tile(Cpu& cpu, int64_t from, Array& prepared, Array& scratch) {
        const RecurrentKernels& kernels = recurrent_kernels_of(cpu.isa);
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

    static constexpr int64_t MOST_FLOATS = 4 << 20;

    std::vector<Task> tasks_;
    int64_t floats_ = 0;  // that preparing all tokens takes
    int64_t tile_ = 64;  // tokens that are prepared, then walked: their rows stay in a cache
};

}  // namespace quire
