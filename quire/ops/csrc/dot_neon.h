// Integer dot products of one tile on aarch64: `sdot` multiplies four columns of four rows by those of
// one token, all signed bytes. `smmla` (QUIRE_I8MM) multiplies eight columns of two rows by those of two
// tokens, where there are as many.
#pragma once

#include "planes.h"
#include "quantize.h"

namespace quire::QUIRE_ISA {

constexpr int INT8_TOKENS = 4, FLOAT_TOKENS = 6, TOKEN_STEP = 12;  // what 32 registers hold

// A panel's record of T tokens × 32 columns: int8 q[T][32], then four words per token. For `smmla` the
// bytes of two tokens are in turns of eight columns: q[T / 2][4][2][8].
struct Record {
    static constexpr int bytes = 32 + 4 * 4;
    template <int T> static constexpr int scale = 32 * T;       // float: d
    template <int T> static constexpr int scaled_sum = 36 * T;  // float: d · sum(q)
    template <int T> static constexpr int sum_low = 40 * T;     // int: sum(q) of columns 0…15
    template <int T> static constexpr int sum_high = 44 * T;    // and of 16…31
};

static inline vi broadcast(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
static inline int8x16_t as_s8(int32x4_t a) { return vreinterpretq_s8_s32(a); }

// Weights as signed bytes: those of eight bits less their zero point, the others fit as they are.
template <Tile F>
static constexpr bool is_wide = layout_of(F).bits == 8 || layout_of(F).table;

template <Tile F, int V>
static inline void signed_weights(const uint8_t* w, vi& lo, vi& hi) {
    weights<F, V>(w, lo, hi);
    if constexpr (is_wide<F>) {
        const int32x4_t top = words(vdupq_n_u8(128));
        lo = {veorq_s32(lo.a, top), veorq_s32(lo.b, top)};
        hi = {veorq_s32(hi.a, top), veorq_s32(hi.b, top)};
    }
}

// dot[t] += w · the dword V of token t's sixteen columns at x.
template <int V, int T>
static inline void add_products(vi w, const int8x16_t (&x)[T], vi (&dot)[T]) {
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        dot[t].a = vdotq_laneq_s32(dot[t].a, as_s8(w.a), x[t], V);
        dot[t].b = vdotq_laneq_s32(dot[t].b, as_s8(w.b), x[t], V);
    }
}

template <Tile F, int V, int T>
static inline void add_vectors(const uint8_t* w, const int8x16_t (&x0)[T], const int8x16_t (&x1)[T], vi (&low)[T],
                               vi (&high)[T]) {
    vi lo, hi;
    signed_weights<F, V>(w, lo, hi);
    add_products<V, T>(lo, x0, low);
    add_products<V, T>(hi, x1, high);
}

// low[t] and high[t] += columns 0…15 and 16…31; both may be the same sums.
template <Tile F, int T>
static inline void add_columns(const uint8_t* w, const uint8_t* x, vi (&low)[T], vi (&high)[T]) {
    int8x16_t x0[T], x1[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        x0[t] = vld1q_s8((const int8_t*)x + 32 * t);
        x1[t] = vld1q_s8((const int8_t*)x + 32 * t + 16);
    }
    add_vectors<F, 0, T>(w, x0, x1, low, high);
    add_vectors<F, 1, T>(w, x0, x1, low, high);
    add_vectors<F, 2, T>(w, x0, x1, low, high);
    add_vectors<F, 3, T>(w, x0, x1, low, high);
}

#if defined(QUIRE_I8MM)

static inline int32x4_t low_halves(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
static inline int32x4_t high_halves(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}

// Sums of a pair of tokens: of two rows each, the first token's before the second's.
struct PairSums {
    int32x4_t rows[4];
};

// sums += the four columns of w0 and the next four of w1 · the eight columns of each pair at x.
template <int T>
static inline void add_eight(vi w0, vi w1, const uint8_t* x, PairSums (&sums)[T / 2]) {
    const int8x16_t rows[4] = {as_s8(vzip1q_s32(w0.a, w1.a)), as_s8(vzip2q_s32(w0.a, w1.a)),
                               as_s8(vzip1q_s32(w0.b, w1.b)), as_s8(vzip2q_s32(w0.b, w1.b))};
#pragma GCC unroll 2
    for (int p = 0; p < T / 2; p++) {
        const int8x16_t tokens = vld1q_s8((const int8_t*)x + 64 * p);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) sums[p].rows[r] = vmmlaq_s32(sums[p].rows[r], tokens, rows[r]);
    }
}

template <Tile F, int V, int T>
static inline void add_vector_pairs(const uint8_t* w, const uint8_t* x, PairSums (&low)[T / 2],
                                    PairSums (&high)[T / 2]) {
    vi lo0, hi0, lo1, hi1;
    signed_weights<F, V>(w, lo0, hi0);
    signed_weights<F, V + 1>(w, lo1, hi1);
    add_eight<T>(lo0, lo1, x + 8 * V, low);
    add_eight<T>(hi0, hi1, x + 32 + 8 * V, high);
}

// Adds a pair's sums to those of its tokens. Called, it would pass all of its arguments through memory.
[[gnu::always_inline]] static inline void add_sums(const PairSums& sums, vi& first, vi& second) {
    const int32x4_t(&s)[4] = sums.rows;
    first = {vaddq_s32(first.a, low_halves(s[0], s[1])), vaddq_s32(first.b, low_halves(s[2], s[3]))};
    second = {vaddq_s32(second.a, high_halves(s[0], s[1])), vaddq_s32(second.b, high_halves(s[2], s[3]))};
}

// The same in pairs of tokens.
template <Tile F, int T>
    requires(T > 1)
static inline void add_columns(const uint8_t* w, const uint8_t* x, vi (&low)[T], vi (&high)[T]) {
    PairSums sums[2][T / 2] = {};
    PairSums(&low_sums)[T / 2] = sums[0], (&high_sums)[T / 2] = sums[has_halves<F>];
    add_vector_pairs<F, 0, T>(w, x, low_sums, high_sums);
    add_vector_pairs<F, 2, T>(w, x, low_sums, high_sums);
#pragma GCC unroll 2
    for (int p = 0; p < T / 2; p++) {
        add_sums(low_sums[p], low[2 * p], low[2 * p + 1]);
        if constexpr (has_halves<F>) add_sums(high_sums[p], high[2 * p], high[2 * p + 1]);
    }
}

// Quantises 32 floats into token t's bytes of a record of T.
static inline QuantizedGroup put_bytes(const float* x, uint8_t* record, int t, int T) {
    if (T == 1) return quantize(x, record);
    uint8_t q[32];
    const QuantizedGroup group = quantize(x, q);
    for (int i = 0; i < 4; i++) std::memcpy(record + 64 * (t / 2) + 16 * i + 8 * (t % 2), q + 8 * i, 8);
    return group;
}

#else

static inline QuantizedGroup put_bytes(const float* x, uint8_t* record, int t, int) {
    return quantize(x, record + 32 * t);
}

#endif

template <Tile F>
static constexpr int zero_point = is_wide<F> ? 0 : layout_of(F).zero;

// dot[t] = Σ weight · q over the 32 columns.
template <Tile F, int T>
static inline void dots(const uint8_t* w, const uint8_t* x, vi (&dot)[T]) {
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        const int32_t sum = zero_point<F> == 0 ? 0 : word_i32(x + Record::sum_low<T> + 4 * t) +
                                                         word_i32(x + Record::sum_high<T> + 4 * t);
        dot[t] = broadcast(-zero_point<F> * sum);
    }
    add_columns<F, T>(w, x, dot, dot);
}

// acc[t] += one tile whose halves of 16 columns have scales of their own.
template <Tile F, int T>
static inline void add_tile16(const uint8_t* scales, const uint8_t* w, const uint8_t* x, vf d, vf dmin,
                              vf (&acc)[T]) {
    vi low[T], high[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        low[t] = broadcast(zero_point<F> == 0 ? 0 : -zero_point<F> * word_i32(x + Record::sum_low<T> + 4 * t));
        high[t] = broadcast(zero_point<F> == 0 ? 0 : -zero_point<F> * word_i32(x + Record::sum_high<T> + 4 * t));
    }
    add_columns<F, T>(w, x, low, high);
    const vf scale_low = half_scale<F>(scales, 0, d), scale_high = half_scale<F>(scales, 1, d);
    const vf min_low = half_min<F>(scales, 0, dmin), min_high = half_min<F>(scales, 1, dmin);
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        vf sum = mul(to_float(low[t]), scale_low);
        sum = fma(to_float(high[t]), scale_high, sum);
        if constexpr (has_min<F>) {
            sum = fma(set1(float(word_i32(x + Record::sum_low<T> + 4 * t))), min_low, sum);
            sum = fma(set1(float(word_i32(x + Record::sum_high<T> + 4 * t))), min_high, sum);
        }
        acc[t] = fma(sum, set1(word_f32(x + Record::scale<T> + 4 * t)), acc[t]);
    }
}

// Quantises 32 floats into token t's place in a record of T.
static inline void put_group(const float* x, uint8_t* record, int t, int T) {
    const QuantizedGroup group = put_bytes(x, record, t, T);
    uint8_t* words = record + 32 * T + 4 * t;
    put_word(words, group.d);
    put_word(words + 4 * T, group.d * float(group.low + group.high));
    put_word(words + 8 * T, group.low);
    put_word(words + 12 * T, group.high);
}

}  // namespace quire::QUIRE_ISA
