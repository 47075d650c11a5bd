// Sampling kernels for one instruction set (see sampling.h).
#include "sampling.h"

#include "simd.h"

// From the C library; <cmath> would bring inline functions that the linker merges across
// instruction sets.
extern "C" {
double exp(double) noexcept;
double log(double) noexcept;
}

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
// and returns the index at which the sum reaches the target.
int64_t reach(const float* value, const float* weight, int64_t count, double target, int32_t* set) {
    double mass[2048], before = 0.0;
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
            if (before + mass[digit] >= target) break;
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
        if (before >= target) return set[i];
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
    if (k <= chunks) bound = c.chunk[reach(c.chunk, nullptr, chunks, double(k), c.set)];
    const int64_t count = collect(c, x, n, bound);
    return count > k ? cut(c, count, reach(c.value, nullptr, count, double(k), c.set)) : count;
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

// What the filters leave, weighed, and its mass. Expects the maxima per chunk, and the best of them.
int64_t filter(const SamplingScratch& c, int64_t n, const Filter& f, float best, double& total) {
    int64_t count;
    if (f.top_k > 0 && f.top_k < n) {
        count = collect_top(c, c.x, n, f.top_k);
        total = weigh_candidates(c, count, best, f.temperature);
    } else if (f.top_p < 1.0) {
        count = collect_mass(c, n, best, f.temperature, f.top_p, total);
    } else {
        const float depth = float(-log(f.min_p)) * 1.001f + 0.001f;  // infinite without min_p
        count = collect(c, c.x, n, best - depth * f.temperature);
        total = weigh_candidates(c, count, best, f.temperature);
    }
    if (f.top_p < 1.0) count = cut(c, count, reach(c.value, c.weight, count, f.top_p * total, c.set));
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

// ---- the draw ----

// Finalizer of splitmix64.
inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// An exponential race: token i arrives after -log(u_i) / weight_i, with u_i hashed from the row's
// random number and the id, and the first wins. Scores are 1 / arrival, in float64 throughout: no
// instruction set or library rounds so differently that another token wins.
class Race {
  public:
    Race(double u, float best, float temperature) : best_(best), temperature_(temperature) {
        std::memcpy(&key_, &u, 8);
        key_ = mix(key_);
    }

    // u_i in units of 2^-53: odd, so neither 0 nor 1.
    uint64_t number(int64_t id) const { return mix(key_ + uint64_t(id + 1) * 0x9E3779B97F4A7C15u) >> 11 | 1; }

    // With a smaller number a token of at most this weight loses: as -log(u) >= 1 - u, its score is
    // at most weight / (1 - u). This spares almost every token the logarithm.
    uint64_t least(float weight) const {
        const double room = double(weight) * units_per_weight_;
        return room < UNITS ? uint64_t(UNITS) - uint64_t(room) - 1 : 0;
    }

    void enter(int64_t id, float x, uint64_t number) {
        const double weight = x == best_ ? 1.0 : ::exp((double(x) - double(best_)) / double(temperature_));
        const double score = weight / -log(double(number) / UNITS);
        if (score < score_ || (score == score_ && id > winner)) return;
        score_ = score;
        winner = id;
        units_per_weight_ = UNITS * SLACK / score;
    }

    int64_t winner = -1;

  private:
    static constexpr double UNITS = 0x1p53;
    static constexpr double SLACK = 1.001;  // for the float32 weights that bounds are made of

    uint64_t key_;
    float best_, temperature_;
    double score_ = 0.0, units_per_weight_ = __builtin_inf();
};

// A draw from all tokens. The maximum of a chunk bounds the weights in it, so that only chunks with
// a token that may still win are weighed. The best comes first: behind it few may. Those of weight 0
// cannot: the best scores at least 1 / 37.
int64_t draw_from_all(const SamplingScratch& c, int64_t n, float best, float temperature, Race race) {
    const int64_t chunks = (n + VOCAB_CHUNK - 1) / VOCAB_CHUNK, first = first_equal(c.chunk, chunks, best);
    for (int64_t i = 0; i < chunks; i += LANES)
        store(c.weight + i, weigh(load_part(c.chunk, i, chunks), set1(best), set1(temperature)));
    for (int64_t k = first; k < first + chunks; k++) {
        const int64_t at = k < chunks ? k : k - chunks, begin = at * VOCAB_CHUNK;
        if (c.weight[at] == 0.0f) continue;
        const uint64_t least = race.least(c.weight[at]);
        const int64_t size = n - begin < VOCAB_CHUNK ? n - begin : VOCAB_CHUNK;
        uint64_t number[VOCAB_CHUNK];
        bool any = false;
        for (int64_t i = 0; i < size; i++) {
            number[i] = race.number(begin + i);
            any |= number[i] >= least;
        }
        if (!any) continue;
        float weight[VOCAB_CHUNK];
        for (int64_t i = 0; i < size; i += LANES)
            store(weight + i, weigh(load_part(c.x, begin + i, n), set1(best), set1(temperature)));
        for (int64_t i = 0; i < size; i++) {
            if (weight[i] == 0.0f || number[i] < race.least(weight[i])) continue;
            race.enter(begin + i, c.x[begin + i], number[i]);
        }
    }
    return race.winner;
}

int64_t draw_from_candidates(const SamplingScratch& c, int64_t count, Race race) {
    for (int64_t i = 0; i < count; i++) {
        const uint64_t number = race.number(c.id[i]);
        if (number >= race.least(c.weight[i])) race.enter(c.id[i], c.value[i], number);
    }
    return race.winner;
}

int64_t pick(const SamplingScratch& c, int64_t n, const Filter& f, double u) {
    const float best = maxima(c.x, n, c.chunk);
    if (best == MINUS_INFINITY) return -1;
    if (f.temperature == 0.0f) return first_equal(c.x, n, best);
    const Race race(u, best, f.temperature);
    const bool filtered = (f.top_k > 0 && f.top_k < n) || f.top_p < 1.0 || f.min_p > 0.0;
    if (!filtered) return draw_from_all(c, n, best, f.temperature, race);
    double total;
    return draw_from_candidates(c, filter(c, n, f, best, total), race);
}

bool distribution(const SamplingScratch& c, int64_t n, const Filter& f, float* out) {
    std::memset(out, 0, size_t(n) * 4);
    if (f.temperature == 0.0f) {
        const int64_t best = pick(c, n, f, 0.0);
        if (best >= 0) out[best] = 1.0f;
        return best >= 0;
    }
    const float best = maxima(c.x, n, c.chunk);
    if (best == MINUS_INFINITY) return false;
    double total;
    const int64_t count = filter(c, n, f, best, total);
    for (int64_t i = 0; i < count; i++) out[c.id[i]] = float(double(c.weight[i]) / total);
    return true;
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
