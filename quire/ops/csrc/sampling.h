// Sampling: what the driver hands to the kernels of one instruction set.
//
// Nothing is ever sorted. "The first tokens in order" (by count or by probability mass) are found
// by radix selection on the bits of the logits, and bounds from maxima per chunk of the vocabulary
// keep almost every token out of it. Order: descending logit, ties by lower id.
//
// A token is drawn by an exponential race keyed by token id: what a token draws depends on the row's
// random number and its id alone, so that similar distributions mostly draw the same token.
#pragma once

#include <cstdint>

namespace quire {

constexpr int VOCAB_CHUNK = 64;  // tokens per maximum

struct Filter {
    float temperature;  // 0: the most likely token
    int64_t top_k;      // 0: off
    double top_p, min_p;
};

// Memory for one row of n logits.
struct SamplingScratch {
    float* x;             // [n + 64]: the logits, edited
    float *value, *weight;  // [n + 64]: candidates, in order of id
    int32_t *id, *set;    // [n + 64]
    float* chunk;         // [n / VOCAB_CHUNK + 64]
};

struct SamplingKernels {
    bool (*copy)(const float* in, int64_t n, float* out);  // false when something is NaN
    // Excludes tokens whose bit is not set.
    void (*mask)(float* x, int64_t n, const uint32_t* words);
    // A token for the random number u; -1 when every token is excluded.
    int64_t (*pick)(const SamplingScratch&, int64_t n, const Filter&, double u);
    // The probabilities that pick draws from; false when every token is excluded.
    bool (*distribution)(const SamplingScratch&, int64_t n, const Filter&, float* out);
    int64_t (*argmax)(const float* x, int64_t n);  // -1 when something is NaN
    double (*log_sum)(const float* x, int64_t n);  // log of the sum of e^x
    // The first k tokens in order, into scratch.id and scratch.value.
    void (*top)(const SamplingScratch&, const float* x, int64_t n, int64_t k);
};

namespace portable {
extern const SamplingKernels sampling_kernels;
}
namespace avx2 {
extern const SamplingKernels sampling_kernels;
}
namespace avx512 {
extern const SamplingKernels sampling_kernels;
}
namespace neon {
extern const SamplingKernels sampling_kernels;
}

}  // namespace quire
