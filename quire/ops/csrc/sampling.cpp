// Sampling kernels for one instruction set (see sampling.h).
#include "sampling.h"

#include "simd.h"

// From the C library; <cmath> would bring inline functions that the linker merges across
// instruction sets.
extern "C" double log(double) noexcept;

namespace quire::QUIRE_ISA {
namespace {

constexpr float MINUS_INFINITY = -__builtin_inff();
constexpr float WINDOW = 12.0f;  // tokens below e^-12 of the best are looked at only when needed

// The vector at x + i with lanes past n filled with minus infinity.
inline vf load_part(const float* x, int64_t i, int64_t n) {
    if (i + LANES <= n) return load(x + i);
    float t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = i + l < n ? x[i + l] : MINUS_INFINITY;
    return load(t);
}

bool copy(const float* in, int64_t n, float* out) {
    unsigned bad = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        const vf x = load_part(in, i, n);
        bad |= bits_nan(x);
        store(out + i, x);
    }
    return bad == 0;
}

void mask(float* x, int64_t n, const uint32_t* words) {
    const vf none = set1(MINUS_INFINITY);
    for (int64_t i = 0; i < n; i += LANES) store(x + i, choose(words[i / 32] >> (i % 32), load(x + i), none));
}

float maxima(const float* x, int64_t n, float* chunk) {
    vf best = set1(MINUS_INFINITY);
    for (int64_t c = 0; c * VOCAB_CHUNK < n; c++) {
        vf high = load_part(x, c * VOCAB_CHUNK, n);
        for (int64_t i = c * VOCAB_CHUNK + LANES; i < (c + 1) * VOCAB_CHUNK && i < n; i += LANES)
            high = max(high, load_part(x, i, n));
        chunk[c] = reduce_max(high);
        best = max(best, high);
    }
    return reduce_max(best);
}

int64_t first_equal(const float* x, int64_t n, float value) {
    for (int64_t i = 0; i < n; i += LANES) {
        const unsigned bits = bits_ge(load_part(x, i, n), set1(value));
        if (bits) return i + __builtin_ctz(bits);
    }
    return 0;
}

int64_t argmax(const float* x, int64_t n) {
    vf high = set1(MINUS_INFINITY);
    unsigned bad = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        const vf v = load_part(x, i, n);
        bad |= bits_nan(v);
        high = max(high, v);
    }
    return bad ? -1 : first_equal(x, n, reduce_max(high));
}

// ---- candidates: parallel arrays of id and logit, in order of id ----

// Tokens with a logit of at least `bound` that are not excluded.
int64_t collect(const SamplingScratch& c, const float* x, int64_t n, float bound) {
    const vf limit = set1(bound > -3.4028235e38f ? bound : -3.4028235e38f);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        const vf v = load_part(x, i, n);
        unsigned bits = bits_ge(v, limit);
#if defined(QUIRE_AVX512)
        if (!bits) continue;
        const vi lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const vi ids = _mm512_add_epi32(_mm512_set1_epi32(int(i)), lanes);
        _mm512_storeu_ps(c.value + count, _mm512_maskz_compress_ps(__mmask16(bits), v));
        _mm512_storeu_si512(c.id + count, _mm512_maskz_compress_epi32(__mmask16(bits), ids));
        count += __builtin_popcount(bits);
#else
        for (; bits; bits &= bits - 1, count++) {
            c.id[count] = int32_t(i + __builtin_ctz(bits));
            c.value[count] = x[c.id[count]];
        }
#endif
    }
    return count;
}

// e^((x - best) / temperature); the best weigh 1 even where they are infinite.
inline vf weigh(vf x, vf best, vf temperature) {
    return choose(bits_ge(x, best), set1(1.0f), exp(div(sub(x, best), temperature)));
}

// Weights of the candidates; returns their sum. Those of weight 0 are dropped.
double weigh_candidates(const SamplingScratch& c, int64_t& count, float best, float temperature) {
    for (int64_t i = 0; i < count; i += LANES)
        store(c.weight + i, weigh(load(c.value + i), set1(best), set1(temperature)));
    double total = 0.0;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (c.weight[i] == 0.0f) continue;
        c.id[kept] = c.id[i];
        c.value[kept] = c.value[i];
        c.weight[kept++] = c.weight[i];
        total += double(c.weight[i]);
    }
    count = kept;
    return total;
}

// Sum of the weights of all tokens: float32 inside a chunk, float64 across.
double total_weight(const float* x, int64_t n, float best, float temperature) {
    double total = 0.0;
    for (int64_t begin = 0; begin < n; begin += VOCAB_CHUNK) {
        vf sum = zero();
        for (int64_t i = begin; i < begin + VOCAB_CHUNK && i < n; i += LANES)
            sum = add(sum, weigh(load_part(x, i, n), set1(best), set1(temperature)));
        total += double(reduce_add(sum));
    }
    return total;
}

// ---- radix selection ----

// The bits of x as an unsigned number in the same order; -0 counts as 0.
inline uint32_t order_of(float x) {
    uint32_t bits;
    x += 0.0f;
    std::memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Walks values in order (descending, ties by index), adding their weights (1 each without any),
// and returns the index at which the sum reaches the target, or passes it when `past` is set.
int64_t reach(const float* value, const float* weight, int64_t count, double target, bool past, int32_t* set) {
    double mass[2048], before = 0.0;
    auto reached = [&](double sum) { return past ? sum > target : sum >= target; };
    for (int64_t i = 0; i < count; i++) set[i] = int32_t(i);
    const int width = count > 4096 ? 11 : 8;
    for (int high = 32; high > 0;) {
        const int low = high > width ? high - width : 0, bins = 1 << (high - low);
        for (int d = 0; d < bins; d++) mass[d] = 0.0;
        for (int64_t i = 0; i < count; i++)
            mass[order_of(value[set[i]]) >> low & uint32_t(bins - 1)] += weight ? double(weight[set[i]]) : 1.0;
        int digit = bins - 1, last = -1;
        for (; digit >= 0; digit--) {
            if (mass[digit] == 0.0) continue;
            last = digit;
            if (reached(before + mass[digit])) break;
            before += mass[digit];
        }
        if (digit < 0) {  // rounding kept the sum just below: it is reached at the very end
            digit = last;
            before -= mass[digit];
        }
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            set[kept] = set[i];
            kept += (order_of(value[set[i]]) >> low & uint32_t(bins - 1)) == uint32_t(digit);
        }
        count = kept;
        high = low;
    }
    for (int64_t i = 0; i < count; i++) {
        before += weight ? double(weight[set[i]]) : 1.0;
        if (reached(before)) return set[i];
    }
    return set[count - 1];
}

// Keeps the candidates up to and including the one at `edge` in order.
int64_t cut(const SamplingScratch& c, int64_t count, int64_t edge) {
    const float bound = c.value[edge];
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!(c.value[i] > bound || (c.value[i] == bound && i <= edge))) continue;
        c.id[kept] = c.id[i];
        c.value[kept] = c.value[i];
        c.weight[kept++] = c.weight[i];
    }
    return kept;
}

// Exactly the first k tokens in order (fewer when fewer are not excluded). The k-th largest
// maximum of a chunk is a bound: k tokens at least reach it.
int64_t collect_top(const SamplingScratch& c, const float* x, int64_t n, int64_t k) {
    const int64_t chunks = (n + VOCAB_CHUNK - 1) / VOCAB_CHUNK;
    float bound = MINUS_INFINITY;
    if (k <= chunks) bound = c.chunk[reach(c.chunk, nullptr, chunks, double(k), false, c.set)];
    const int64_t count = collect(c, x, n, bound);
    return count > k ? cut(c, count, reach(c.value, nullptr, count, double(k), false, c.set)) : count;
}

// Candidates with at least the mass `share` of all tokens, those of largest probability, weighed;
// `total` becomes the mass of all.
int64_t collect_mass(const SamplingScratch& c, int64_t n, float best, float temperature, double share, double& total) {
    total = total_weight(c.x, n, best, temperature);
    int64_t count = collect(c, c.x, n, best - WINDOW * temperature);
    if (weigh_candidates(c, count, best, temperature) > share * total) return count;
    count = collect(c, c.x, n, MINUS_INFINITY);
    total = weigh_candidates(c, count, best, temperature);
    return count;
}

// What the filters leave, weighed, and its mass. Where there is no filter, only candidates enough
// to reach the share u of the mass.
int64_t filter(const SamplingScratch& c, int64_t n, const Filter& f, double u, double& total) {
    const float best = maxima(c.x, n, c.chunk);
    if (best == MINUS_INFINITY) return 0;
    int64_t count;
    if (f.top_k > 0 && f.top_k < n) {
        count = collect_top(c, c.x, n, f.top_k);
        total = weigh_candidates(c, count, best, f.temperature);
    } else if (f.top_p < 1.0) {
        count = collect_mass(c, n, best, f.temperature, f.top_p, total);
    } else if (f.min_p > 0.0) {
        const float depth = float(-log(f.min_p)) * 1.001f + 0.001f;
        count = collect(c, c.x, n, best - depth * f.temperature);
        total = weigh_candidates(c, count, best, f.temperature);
    } else {
        return collect_mass(c, n, best, f.temperature, u, total);
    }
    if (f.top_p < 1.0) count = cut(c, count, reach(c.value, c.weight, count, f.top_p * total, false, c.set));
    total = 0.0;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (double(c.weight[i]) < f.min_p) continue;
        c.id[kept] = c.id[i];
        c.value[kept] = c.value[i];
        c.weight[kept++] = c.weight[i];
        total += double(c.weight[i]);
    }
    return kept;
}

int64_t pick(const SamplingScratch& c, int64_t n, const Filter& f, double u) {
    if (f.temperature == 0.0f) {
        const int64_t best = argmax(c.x, n);
        return c.x[best] == MINUS_INFINITY ? -1 : best;
    }
    double total;
    const int64_t count = filter(c, n, f, u, total);
    return count == 0 ? -1 : c.id[reach(c.value, c.weight, count, u * total, true, c.set)];
}

bool distribution(const SamplingScratch& c, int64_t n, const Filter& f, float* out) {
    std::memset(out, 0, size_t(n) * 4);
    if (f.temperature == 0.0f) {
        const int64_t best = pick(c, n, f, 0.0);
        if (best >= 0) out[best] = 1.0f;
        return best >= 0;
    }
    double total;
    const int64_t count = filter(c, n, f, __builtin_inf(), total);
    for (int64_t i = 0; i < count; i++) out[c.id[i]] = float(double(c.weight[i]) / total);
    return count > 0;
}

// ---- log-probabilities ----

double log_sum(const float* x, int64_t n) {
    vf high = set1(MINUS_INFINITY);
    for (int64_t i = 0; i < n; i += LANES) high = max(high, load_part(x, i, n));
    const float best = reduce_max(high);
    return double(best) + log(total_weight(x, n, best, 1.0f));
}

void top(const SamplingScratch& c, const float* x, int64_t n, int64_t k) {
    maxima(x, n, c.chunk);
    int64_t count = collect_top(c, x, n, k);
    for (int64_t i = 0; count < k; i++) {  // excluded tokens come last
        if (x[i] != MINUS_INFINITY) continue;
        c.id[count] = int32_t(i);
        c.value[count++] = MINUS_INFINITY;
    }
    for (int64_t i = 1; i < count; i++) {  // few: insertion keeps ties in order of id
        const float value = c.value[i];
        const int32_t id = c.id[i];
        int64_t j = i;
        for (; j > 0 && c.value[j - 1] < value; j--) {
            c.value[j] = c.value[j - 1];
            c.id[j] = c.id[j - 1];
        }
        c.value[j] = value;
        c.id[j] = id;
    }
}

}  // namespace

extern const SamplingKernels sampling_kernels = {copy, mask, pick, distribution, argmax, log_sum, top};

}  // namespace quire::QUIRE_ISA
