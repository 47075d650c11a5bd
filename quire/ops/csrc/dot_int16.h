// Integer dot products of one tile without VNNI: `pmaddubsw` sums pairs of products in int16, and as
// many of these are added in int16 as cannot overflow (weights below 16: all eight, below 32: four,
// below 64: two); `pmaddwd` folds them to int32, multiplying by the tile's integer scales on the way.
// Weights of eight bits: |w| · (x with w's sign), folded one by one.
#pragma once

#include "planes.h"
#include "quantize.h"

namespace quire::QUIRE_ISA {

constexpr int INT8_TOKENS = 4, FLOAT_TOKENS = 6, TOKEN_STEP = 12;  // what sixteen registers hold

// A panel's record of T tokens × 32 columns: int8 q[T][32], then three words per token.
struct Record {
    static constexpr int bytes = 32 + 3 * 4;
    template <int T> static constexpr int scale = 32 * T;       // float: d
    template <int T> static constexpr int scaled_sum = 36 * T;  // float: d · sum(q)
    template <int T> static constexpr int sums = 40 * T;        // int16: -sum of columns 0…15 and 16…31
};

#if defined(QUIRE_AVX2)

static inline vi broadcast(int32_t a) { return _mm256_set1_epi32(a); }
static inline vi add16(vi a, vi b) { return _mm256_add_epi16(a, b); }
static inline vi add32(vi a, vi b) { return _mm256_add_epi32(a, b); }
// int16 sums of two neighbouring products: uint8 × int8
static inline vi products(vi w, vi x) { return _mm256_maddubs_epi16(w, x); }
// The same for int8 w, given |w| and w.
static inline vi signed_products(vi size, vi w, vi x) { return _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w)); }
static inline vi sizes(vi w) { return _mm256_abs_epi8(w); }
static inline vi less_128(vi w) { return _mm256_xor_si256(w, bytes_of(128)); }  // uint8 to int8
// int32 sums of two neighbouring products: int16 × int16
static inline vi fold(vi a, vi b) { return _mm256_madd_epi16(a, b); }
static inline vi load_i8_int(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
static inline vi low_half(vi a) { return _mm256_and_si256(a, _mm256_set1_epi32(0xffff)); }
static inline vi to_high_half(vi a) { return _mm256_slli_epi32(a, 16); }
static inline vi join(vi a, vi b) { return _mm256_or_si256(a, b); }
// Keeps a sum in its register where it stands: reordered additions would spill half of them.
static inline void pin(vi& a) { asm("" : "+x"(a)); }

#else

typedef uint16_t vh __attribute__((vector_size(32)));
typedef int16_t vs __attribute__((vector_size(32)));

static inline vi broadcast(int32_t a) { return vi{} + a; }
static inline vi add16(vi a, vi b) { return (vi)((vh)a + (vh)b); }
static inline vi add32(vi a, vi b) { return (vi)((vu)a + (vu)b); }
static inline vs even_bytes(vi a) { return (vs)((vh)a << 8) >> 8; }
static inline vs odd_bytes(vi a) { return (vs)a >> 8; }
static inline vi products(vi w, vi x) {
    return (vi)(((vh)w & 255) * (vh)even_bytes(x) + ((vh)w >> 8) * (vh)odd_bytes(x));
}
static inline vi signed_products(vi, vi w, vi x) {
    return (vi)((vh)even_bytes(w) * (vh)even_bytes(x) + (vh)odd_bytes(w) * (vh)odd_bytes(x));
}
static inline vi sizes(vi w) { return w; }
static inline vi less_128(vi w) { return w ^ bytes_of(128); }
static inline vi fold(vi a, vi b) {
    const vi a0 = (vi)((vu)a << 16) >> 16, b0 = (vi)((vu)b << 16) >> 16;
    return a0 * b0 + (a >> 16) * (b >> 16);
}
static inline vi load_i8_int(const int8_t* p) {
    vi a;
    for (int i = 0; i < LANES; i++) a[i] = p[i];
    return a;
}
static inline vi low_half(vi a) { return a & 0xffff; }
static inline vi to_high_half(vi a) { return (vi)((vu)a << 16); }
static inline vi join(vi a, vi b) { return a | b; }
static inline void pin(vi&) {}

#endif

// sum[t] += (or =, if FIRST) the pair sums of w · the dword of each token at x.
template <bool FIRST, int T>
static inline void add_products(vi w, const uint8_t* x, vi (&sum)[T]) {
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        const vi a = products(w, broadcast(word_i32(x + 32 * t)));
        sum[t] = FIRST ? a : add16(sum[t], a);
        pin(sum[t]);
    }
}

// dot[t] += (or =, if FIRST) sum[t], its halves times those of scale.
template <bool FIRST, int T>
static inline void add_folded(const vi (&sum)[T], vi scale, vi (&dot)[T]) {
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        dot[t] = FIRST ? fold(sum[t], scale) : add32(dot[t], fold(sum[t], scale));
        pin(dot[t]);
    }
}

// dot[t] += (or =, if FIRST) w · the dword of each token at x, for w of the whole int8.
template <bool FIRST, int T>
static inline void add_wide(vi w, const uint8_t* x, vi (&dot)[T]) {
    const vi size = sizes(w);
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        const vi a = fold(signed_products(size, w, broadcast(word_i32(x + 32 * t))), broadcast(0x00010001));
        dot[t] = FIRST ? a : add32(dot[t], a);
        pin(dot[t]);
    }
}

template <Tile F>
static constexpr bool is_wide = layout_of(F).bits == 8 || layout_of(F).table;

template <Tile F, int V, int T>
static inline void add_vectors(const uint8_t* w, const uint8_t* x, vi (&sum)[T], vi (&dot)[T]) {
    constexpr bool five = layout_of(F).bits == 5;
    vi lo, hi;
    weights<F, V>(w, lo, hi);
    if constexpr (is_wide<F>) {
        add_wide<V == 0>(less_128(lo), x + 4 * V, dot);
        add_wide<false>(less_128(hi), x + 16 + 4 * V, dot);
        return;
    }
    add_products<V == 0 || (five && V == 2)>(lo, x + 4 * V, sum);
    add_products<false>(hi, x + 16 + 4 * V, sum);
    if constexpr (five && V == 1) add_folded<true>(sum, broadcast(0x00010001), dot);
    if constexpr (V == 3) add_folded<!five>(sum, broadcast(0x00010001), dot);
}

// dot[t] = Σ weight · q over the 32 columns.
template <Tile F, int T>
static inline void dots(const uint8_t* w, const uint8_t* x, vi (&dot)[T]) {
    constexpr TileLayout layout = layout_of(F);
    vi sum[T];
    add_vectors<F, 0>(w, x, sum, dot);
    add_vectors<F, 1>(w, x, sum, dot);
    add_vectors<F, 2>(w, x, sum, dot);
    add_vectors<F, 3>(w, x, sum, dot);
    if constexpr (layout.zero != 0 && !is_wide<F>) {
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            const vi sums = broadcast(word_i32(x + Record::sums<T> + 4 * t));
            dot[t] = add32(dot[t], fold(sums, broadcast(layout.zero * 0x00010001)));
        }
    }
}

// The integer scales of 16 columns in both halves of each row's dword.
template <Tile F>
static inline vi scales16(const uint8_t* scales, int half) {
    vi s = load_i8_int((const int8_t*)scales + half * LANES);
    if constexpr (layout_of(F).scales == Scales::super16_min) s = both(s, broadcast(15));
    return join(low_half(s), to_high_half(s));
}

template <Tile F, int V, int HALF, int T>
static inline void add_half_vector(const uint8_t* w, const uint8_t* x, vi scale, vi (&sum)[T], vi (&dot)[T]) {
    constexpr bool six = layout_of(F).bits == 6;
    vi lo, hi;
    weights<F, V>(w, lo, hi);
    add_products<V == 0 || (six && V == 2)>(HALF ? hi : lo, x + 16 * HALF + 4 * V, sum);
    if constexpr (V == 3 || (six && V == 1)) add_folded<false>(sum, scale, dot);
}

// dot[t] += columns 0…15 (HALF 0) or 16…31 of a tile, times their scales.
template <Tile F, int HALF, int T>
static inline void add_half(const uint8_t* w, const uint8_t* x, vi scale, vi (&dot)[T]) {
    vi sum[T];
    add_half_vector<F, 0, HALF>(w, x, scale, sum, dot);
    add_half_vector<F, 1, HALF>(w, x, scale, sum, dot);
    add_half_vector<F, 2, HALF>(w, x, scale, sum, dot);
    add_half_vector<F, 3, HALF>(w, x, scale, sum, dot);
}

// acc[t] += one tile whose halves of 16 columns have scales of their own.
template <Tile F, int T>
static inline void add_tile16(const uint8_t* scales, const uint8_t* w, const uint8_t* x, vf d, vf dmin,
                              vf (&acc)[T]) {
    const vi low = scales16<F>(scales, 0), high = scales16<F>(scales, 1);
    const vi pair = join(low_half(low), to_high_half(high));
    vi zero_point = broadcast(0);
    if constexpr (layout_of(F).zero != 0) {
        static_assert(layout_of(F).zero == 4 || layout_of(F).zero == 32);
        zero_point = pair;  // · zero, by doubling in int16
        for (int z = layout_of(F).zero; z > 1; z /= 2) zero_point = add16(zero_point, zero_point);
    }
    vi dot[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) dot[t] = fold(broadcast(word_i32(x + Record::sums<T> + 4 * t)), zero_point);
    add_half<F, 0>(w, x, low, dot);
    add_half<F, 1>(w, x, high, dot);
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        const vf scale = set1(word_f32(x + Record::scale<T> + 4 * t));
        acc[t] = fma(mul(to_float(dot[t]), scale), d, acc[t]);
        if constexpr (has_min<F>) {
            const vi m0 = both(shift_right(load_i8_int((const int8_t*)scales), 4), broadcast(15));
            const vi m1 = both(shift_right(load_i8_int((const int8_t*)scales + LANES), 4), broadcast(15));
            const vi below = fold(broadcast(word_i32(x + Record::sums<T> + 4 * t)), join(m0, to_high_half(m1)));
            acc[t] = fma(mul(to_float(below), scale), dmin, acc[t]);
        }
    }
}

// Quantises 32 floats into token t's place in a record of T.
static inline void put_group(const float* x, uint8_t* record, int t, int T) {
    const QuantizedGroup group = quantize(x, record + 32 * t);
    uint8_t* words = record + 32 * T + 4 * t;
    put_word(words, group.d);
    put_word(words + 4 * T, group.d * float(group.low + group.high));
    put_word(words + 8 * T, int32_t(uint32_t(-group.low & 0xffff) | uint32_t(-group.high) << 16));
}

}  // namespace quire::QUIRE_ISA
