// Integer dot products of one tile with VNNI: `vpdpbusd` multiplies unsigned weights by signed
// activations, four columns of sixteen rows at once, or of eight where there is no AVX-512.
//
// Weights with a zero point are moved to the top of their byte, which makes every zero point 128:
// the sum starts at -128 · sum(x), kept ready in the panel, and costs nothing.
#pragma once

#include "planes.h"
#include "quantize.h"
#include "sanitized.h"

namespace quire::QUIRE_ISA {

// A panel's record of T tokens × 32 columns: int8 q[T][32], then five words per token.
struct Record {
    static constexpr int bytes = 32 + 5 * 4;
    template <int T> static constexpr int scale = 32 * T;         // float: d
    template <int T> static constexpr int scaled_sum = 36 * T;    // float: d · sum(q)
    template <int T> static constexpr int offset = 40 * T;        // int: -128 · sum(q)
    template <int T> static constexpr int offset_low = 44 * T;    // the same of columns 0…15
    template <int T> static constexpr int offset_high = 48 * T;   // and of 16…31
};

#if defined(QUIRE_AVX512)

constexpr int INT8_TOKENS = 8, FLOAT_TOKENS = 8, TOKEN_STEP = 8;

static inline vi broadcast(int32_t a) { return _mm512_set1_epi32(a); }
// sum += w · the four columns at x. The instruction itself can repeat them for every row; compilers load them into a
// register of their own instead, which leaves too few for the next tile to begin early. A sanitizer sees that load.
static inline void add_product(vi& sum, vi w, const uint8_t* x) {
    if constexpr (SANITIZED) sum = _mm512_dpbusd_epi32(sum, w, broadcast(word_i32(x)));
    else asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const uint8_t(*)[4]>(x)));
}

#else

constexpr int INT8_TOKENS = 6, FLOAT_TOKENS = 6, TOKEN_STEP = 6;  // what sixteen registers hold

static inline vi broadcast(int32_t a) { return _mm256_set1_epi32(a); }
static inline void add_product(vi& sum, vi w, const uint8_t* x) {
    sum = _mm256_dpbusd_avx_epi32(sum, w, broadcast(word_i32(x)));
}

#endif

template <int T>
static inline void add_products(vi w, const uint8_t* x, vi (&dot)[T]) {
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) add_product(dot[t], w, x + 32 * t);
}

template <Tile F, int V, int T>
static inline void add_vectors(const uint8_t* w, const uint8_t* x, vi (&low)[T], vi (&high)[T]) {
    vi lo, hi;
    weights<F, V>(w, lo, hi);
    add_products<T>(lo, x + 4 * V, low);
    add_products<T>(hi, x + 16 + 4 * V, high);
}

template <Tile F>
constexpr bool has_zero = layout_of(F).zero != 0;

// dot[t] = Σ weight · q over the 32 columns, times 2^lift.
template <Tile F, int T>
static inline void dots(const uint8_t* w, const uint8_t* x, vi (&dot)[T]) {
#pragma GCC unroll 16
    for (int t = 0; t < T; t++)
        dot[t] = broadcast(has_zero<F> ? word_i32(x + Record::offset<T> + 4 * t) : 0);
    add_vectors<F, 0, T>(w, x, dot, dot);
    add_vectors<F, 1, T>(w, x, dot, dot);
    add_vectors<F, 2, T>(w, x, dot, dot);
    add_vectors<F, 3, T>(w, x, dot, dot);
}

// acc[t] += one tile whose halves of 16 columns have scales of their own.
template <Tile F, int T>
static inline void add_tile16(const uint8_t* scales, const uint8_t* w, const uint8_t* x, vf d, vf dmin,
                              vf (&acc)[T]) {
    vi low[T], high[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
        low[t] = broadcast(has_zero<F> ? word_i32(x + Record::offset_low<T> + 4 * t) : 0);
        high[t] = broadcast(has_zero<F> ? word_i32(x + Record::offset_high<T> + 4 * t) : 0);
    }
    add_vectors<F, 0, T>(w, x, low, high);
    add_vectors<F, 1, T>(w, x, low, high);
    add_vectors<F, 2, T>(w, x, low, high);
    add_vectors<F, 3, T>(w, x, low, high);
    constexpr float unlift = 1.0f / (1 << lift<F>);
    const vf scale_low = mul(half_scale<F>(scales, 0, d), set1(unlift));
    const vf scale_high = mul(half_scale<F>(scales, 1, d), set1(unlift));
    const vf min_low = mul(half_min<F>(scales, 0, dmin), set1(-1.0f / 128));
    const vf min_high = mul(half_min<F>(scales, 1, dmin), set1(-1.0f / 128));
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
        vf sum = mul(to_float(low[t]), scale_low);
        sum = fma(to_float(high[t]), scale_high, sum);
        if constexpr (has_min<F>) {
            sum = fma(to_float(broadcast(word_i32(x + Record::offset_low<T> + 4 * t))), min_low, sum);
            sum = fma(to_float(broadcast(word_i32(x + Record::offset_high<T> + 4 * t))), min_high, sum);
        }
        acc[t] = fma(sum, set1(word_f32(x + Record::scale<T> + 4 * t)), acc[t]);
    }
}

// Quantises 32 floats into token t's place in a record of T.
static inline void put_group(const float* x, uint8_t* record, int t, int T) {
    const QuantizedGroup group = quantize(x, record + 32 * t);
    uint8_t* words = record + 32 * T + 4 * t;
    put_word(words, group.d);
    put_word(words + 4 * T, group.d * float(group.low + group.high));
    put_word(words + 8 * T, -128 * (group.low + group.high));
    put_word(words + 12 * T, -128 * group.low);
    put_word(words + 16 * T, -128 * group.high);
}

}  // namespace quire::QUIRE_ISA
