// Sampling for Python: what each sequence wants, and the draw for all rows at once.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cmath>
#include <optional>
#include <unordered_map>
#include <vector>

#include "bind.h"
#include "check.h"
#include "cpu.h"
#include "numpy.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Words = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro>;

const SamplingKernels& kernels_of(Isa isa) {
#if defined(QUIRE_X86)
    if (isa == Isa::avx512) return avx512::sampling_kernels;
    if (isa == Isa::avx_vnni || isa == Isa::avx2) return avx2::sampling_kernels;
#elif defined(QUIRE_ARM)
    if (isa == Isa::i8mm || isa == Isa::neon) return neon::sampling_kernels;
#endif
    (void)isa;
    return portable::sampling_kernels;
}

template <class T>
nb::ndarray<nb::numpy, T> new_array(std::vector<size_t> shape) {
    size_t size = 1;
    for (size_t n : shape) size *= n;
    T* data = new T[size];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(data, shape.size(), shape.data(), owner);
}

// What one sequence wants of its samples, and the tokens it has seen.
class Sampler {
  public:
    Sampler(float temperature, int64_t top_k, double top_p, double min_p, float repetition, float presence,
            float frequency, std::optional<Ints> bias_ids, std::optional<Floats> bias_values)
        : filter{temperature, top_k, top_p, min_p}, repetition_(repetition), presence_(presence),
          frequency_(frequency) {
        need(temperature >= 0 && std::isfinite(temperature), "Sampler: temperature must be a number from 0");
        need(top_k >= 0, "Sampler: top_k must be 0 (off) or more");
        need(top_p > 0 && top_p <= 1, "Sampler: top_p must lie in (0, 1]");
        need(min_p >= 0 && min_p <= 1, "Sampler: min_p must lie in [0, 1]");
        need(repetition > 0 && std::isfinite(repetition), "Sampler: repetition_penalty must be a positive number");
        need(std::isfinite(presence), "Sampler: presence_penalty must be a number");
        need(std::isfinite(frequency), "Sampler: frequency_penalty must be a number");
        need(bias_ids.has_value() == bias_values.has_value(), "Sampler: bias_ids and bias_values go together");
        if (!bias_ids) return;
        need(bias_ids->shape(0) == bias_values->shape(0), "Sampler: every bias id needs one value");
        for (size_t i = 0; i < bias_ids->shape(0); i++) {
            const Bias bias{bias_ids->data()[i], bias_values->data()[i]};
            need(bias.id >= 0, "Sampler: there is no token ", bias.id, " to bias");
            need(!std::isnan(bias.value), "Sampler: the bias of token ", bias.id, " is not a number");
            bias_.push_back(bias);
        }
    }

    // Without penalties nobody asks which tokens there were, so none are kept.
    void observe(Ints ids) {
        if (!penalises()) return;
        for (size_t i = 0; i < ids.shape(0); i++) seen(ids.data()[i]).count++;
    }

    // A prompt's tokens are repeated when they come again, but were not said by the model: the
    // repetition penalty knows them, presence and frequency do not.
    void observe_prompt(Ints ids) {
        if (!penalises()) return;
        for (size_t i = 0; i < ids.shape(0); i++) seen(ids.data()[i]).prompt = true;
    }

    void unobserve(Ints ids) {
        if (!penalises()) return;
        for (size_t i = 0; i < ids.shape(0); i++) {
            const auto found = place_.find(ids.data()[i]);
            need(found != place_.end() && seen_[found->second].count > 0,
                 "Sampler: token " + std::to_string(ids.data()[i]) + " was not observed");
            const size_t at = found->second;
            if (--seen_[at].count > 0 || seen_[at].prompt) continue;
            place_[seen_.back().id] = at;
            seen_[at] = seen_.back();
            seen_.pop_back();
            place_.erase(ids.data()[i]);
        }
    }

    bool edits() const { return !bias_.empty() || (penalises() && !seen_.empty()); }

    // Bias, then penalties; false when an id lies outside the vocabulary.
    bool edit(float* x, int64_t vocab) const {
        for (const Bias& b : bias_) {
            if (b.id >= vocab) return false;
            x[b.id] += b.value;
        }
        if (!penalises()) return true;
        for (const Seen& s : seen_) {
            if (s.id >= vocab) return false;
            float& v = x[s.id];
            v = v > 0 ? v / repetition_ : v * repetition_;
            if (s.count > 0) v -= frequency_ * float(s.count) + presence_;
        }
        return true;
    }

    const Filter filter;

  private:
    struct Bias {
        int32_t id;
        float value;
    };
    struct Seen {
        int32_t id, count;
        bool prompt;
    };
    Seen& seen(int32_t id) {
        need(id >= 0, "Sampler: token " + std::to_string(id) + " cannot be observed");
        const auto [found, added] = place_.try_emplace(id, seen_.size());
        if (added) seen_.push_back({id, 0, false});
        return seen_[found->second];
    }
    bool penalises() const { return repetition_ != 1 || presence_ != 0 || frequency_ != 0; }

    float repetition_, presence_, frequency_;
    std::vector<Bias> bias_;
    std::vector<Seen> seen_;
    std::unordered_map<int32_t, size_t> place_;  // of an id in seen_
};

// ---- rows of logits ----

class Scratch {
  public:
    Scratch(Cpu& cpu, int64_t vocab)
        : step_((vocab + 64 + 15) / 16 * 16), array_(cpu.array(cpu.pool.size(), 6 * step_)) {}
    SamplingScratch of(int thread) {
        float* p = array_.row(thread);
        auto ids = [&](int i) { return reinterpret_cast<int32_t*>(p + i * step_); };
        return {p, p + step_, p + 2 * step_, ids(3), ids(4), p + 5 * step_};
    }

  private:
    int64_t step_;
    Array array_;
};

enum class Outcome : uint8_t { ok, nan, outside, excluded };

void raise(Outcome outcome, int64_t row) {
    need(outcome != Outcome::nan, "row ", row, " of the logits contains NaN");
    need(outcome != Outcome::outside, "row ", row, " of the logits: a biased or observed token lies outside them");
    need(outcome != Outcome::excluded, "row ", row, " of the logits: mask and bias exclude every token");
}

// The arguments of a draw: row i of the logits by samplers[i] and its mask.
struct Draw {
    const Array& logits;
    const int32_t* rows;
    std::vector<const Sampler*> samplers;
    const uint32_t* masks = nullptr;
    int64_t words;

    Draw(const Array& l, Ints r, nb::list list, const std::optional<Words>& m)
        : logits(l), rows(r.data()), words((l.cols + 31) / 32) {
        const size_t count = r.shape(0);
        need(list.size() == count, "sample: ", list.size(), " samplers for ", count, " rows");
        for (nb::handle h : list) samplers.push_back(nb::cast<const Sampler*>(h));
        for (size_t i = 0; i < count; i++)
            need(rows[i] >= 0 && rows[i] < l.rows, "sample: there is no row ", rows[i], " in ", l.rows);
        if (!m) return;
        need(m->itemsize() == 4 && m->shape(0) == count && int64_t(m->shape(1)) == words,
             "sample: masks must be 32-bit words [", count, ", ", words, "]");
        masks = static_cast<const uint32_t*>(m->data());
    }

    // The edited logits of row i in the scratch.
    Outcome edit(const SamplingKernels& kernels, const SamplingScratch& c, int64_t i) const {
        if (!kernels.copy(logits.row(rows[i]), logits.cols, c.x)) return Outcome::nan;
        if (!samplers[size_t(i)]->edit(c.x, logits.cols)) return Outcome::outside;
        if (masks) kernels.mask(c.x, logits.cols, masks + i * words);
        return Outcome::ok;
    }

    // Runs f(i, scratch) for every row in parallel; raises for the first whose outcome is not ok.
    template <class F>
    void run(Cpu& cpu, F&& f) const {
        std::vector<Outcome> outcomes(samplers.size(), Outcome::ok);
        {
            nb::gil_scoped_release released;
            Scratch scratch(cpu, logits.cols);
            cpu.pool.parallel(int64_t(samplers.size()), 1, [&](int64_t begin, int64_t end, int thread) {
                for (int64_t i = begin; i < end; i++) outcomes[size_t(i)] = f(i, scratch.of(thread));
            });
        }
        for (size_t i = 0; i < outcomes.size(); i++) raise(outcomes[i], rows[i]);
    }
};

nb::ndarray<nb::numpy, int32_t> sample(Cpu& cpu, const Array& logits, Ints rows, nb::list samplers, Doubles uniforms,
                                       std::optional<Words> masks) {
    const Draw draw(logits, rows, samplers, masks);
    need(uniforms.shape(0) == rows.shape(0), "sample: every row needs one uniform number");
    for (size_t i = 0; i < rows.shape(0); i++)
        need(uniforms.data()[i] >= 0 && uniforms.data()[i] < 1, "sample: uniform numbers must lie in [0, 1)");
    auto out = new_array<int32_t>({rows.shape(0)});
    int32_t* picked = out.data();
    const SamplingKernels& kernels = kernels_of(cpu.isa);
    draw.run(cpu, [&](int64_t i, const SamplingScratch& c) {
        const Sampler& sampler = *draw.samplers[size_t(i)];
        if (sampler.filter.temperature == 0 && !sampler.edits() && !masks) {  // nothing to copy
            picked[i] = int32_t(kernels.argmax(logits.row(draw.rows[i]), logits.cols));
            return picked[i] < 0 ? Outcome::nan : Outcome::ok;
        }
        const Outcome outcome = draw.edit(kernels, c, i);
        if (outcome != Outcome::ok) return outcome;
        picked[i] = int32_t(kernels.pick(c, logits.cols, sampler.filter, uniforms.data()[i]));
        return picked[i] < 0 ? Outcome::excluded : Outcome::ok;
    });
    return out;
}

nb::ndarray<nb::numpy, float> probabilities(Cpu& cpu, const Array& logits, Ints rows, nb::list samplers,
                                            std::optional<Words> masks) {
    const Draw draw(logits, rows, samplers, masks);
    auto out = new_array<float>({rows.shape(0), size_t(logits.cols)});
    float* p = out.data();
    const SamplingKernels& kernels = kernels_of(cpu.isa);
    draw.run(cpu, [&](int64_t i, const SamplingScratch& c) {
        const Outcome outcome = draw.edit(kernels, c, i);
        if (outcome != Outcome::ok) return outcome;
        const bool any = kernels.distribution(c, logits.cols, draw.samplers[size_t(i)]->filter, p + i * logits.cols);
        return any ? Outcome::ok : Outcome::excluded;
    });
    return out;
}

nb::ndarray<nb::numpy, int32_t> argmax(Cpu& cpu, const Array& logits) {
    need(logits.cols > 0, "argmax: the rows are empty");
    auto out = new_array<int32_t>({size_t(logits.rows)});
    int32_t* best = out.data();
    const SamplingKernels& kernels = kernels_of(cpu.isa);
    {
        nb::gil_scoped_release released;
        cpu.pool.parallel(logits.rows, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; i++) best[i] = int32_t(kernels.argmax(logits.row(i), logits.cols));
        });
    }
    for (int64_t i = 0; i < logits.rows; i++)
        if (best[i] < 0) raise(Outcome::nan, i);
    return out;
}

nb::tuple logprobs(Cpu& cpu, const Array& logits, Ints ids, int64_t top) {
    const int64_t n = logits.rows, vocab = logits.cols;
    need(int64_t(ids.shape(0)) == n, "logprobs: ", ids.shape(0), " ids for ", n, " rows");
    need(top >= 0 && top <= vocab, "logprobs: top is ", top, ", it must lie between 0 and ", vocab);
    const int32_t* id = ids.data();
    for (int64_t i = 0; i < n; i++)
        need(id[i] >= 0 && id[i] < vocab, "logprobs: token ", id[i], " lies outside the vocabulary of ", vocab);
    auto chosen = new_array<float>({size_t(n)});
    auto top_ids = new_array<int32_t>({size_t(n), size_t(top)});
    auto top_values = new_array<float>({size_t(n), size_t(top)});
    float *value = chosen.data(), *top_value = top_values.data();
    int32_t* top_id = top_ids.data();
    const SamplingKernels& kernels = kernels_of(cpu.isa);
    std::vector<Outcome> outcomes(size_t(n), Outcome::ok);
    {
        nb::gil_scoped_release released;
        Scratch scratch(cpu, vocab);
        cpu.pool.parallel(n, 1, [&](int64_t begin, int64_t end, int thread) {
            const SamplingScratch c = scratch.of(thread);
            for (int64_t i = begin; i < end; i++) {
                const float* x = logits.row(i);
                if (kernels.argmax(x, vocab) < 0) {
                    outcomes[size_t(i)] = Outcome::nan;
                    continue;
                }
                const double total = kernels.log_sum(x, vocab);
                value[i] = float(double(x[id[i]]) - total);
                if (top > 0) kernels.top(c, x, vocab, top);
                for (int64_t t = 0; t < top; t++) {
                    top_id[i * top + t] = c.id[t];
                    top_value[i * top + t] = float(double(c.value[t]) - total);
                }
            }
        });
    }
    for (int64_t i = 0; i < n; i++) raise(outcomes[size_t(i)], i);
    return nb::make_tuple(chosen, top_ids, top_values);
}

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::class_<Sampler>(m, "Sampler", "What one sequence wants of its samples, and the tokens it has seen.")
        .def(nb::init<float, int64_t, double, double, float, float, float, std::optional<Ints>,
                      std::optional<Floats>>(),
             "temperature"_a = 1.0f, "top_k"_a = 0, "top_p"_a = 1.0, "min_p"_a = 0.0, "repetition_penalty"_a = 1.0f,
             "presence_penalty"_a = 0.0f, "frequency_penalty"_a = 0.0f, "bias_ids"_a.none() = nb::none(),
             "bias_values"_a.none() = nb::none())
        .def("observe", &Sampler::observe, "ids"_a, "Counts tokens for the penalties.")
        .def("observe_prompt", &Sampler::observe_prompt, "ids"_a, "Notes tokens for the repetition penalty alone.")
        .def("unobserve", &Sampler::unobserve, "ids"_a, "Takes back what was observed.");
    nb::borrow<nb::class_<Cpu>>(m.attr("Cpu"))
        .def("sample", &sample, "logits"_a, "rows"_a, "samplers"_a, "uniforms"_a, "masks"_a.none() = nb::none(),
             "One token for each of the rows, drawn with its sampler and its random number in [0, 1).")
        .def("probabilities", &probabilities, "logits"_a, "rows"_a, "samplers"_a, "masks"_a.none() = nb::none(),
             "The distributions that sample draws from.")
        .def("argmax", &argmax, "logits"_a, "The most likely token of each row.")
        .def("logprobs", &logprobs, "logits"_a, "ids"_a, "top"_a,
             "Log-probabilities of ids, and the `top` most likely tokens with theirs, of the logits as they are.");
}

}  // namespace quire
