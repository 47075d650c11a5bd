// A tile's weights as vectors of bytes, one dword of four columns per row; see tiles.h.
#pragma once

#include "scales.h"
#if defined(QUIRE_NEON)
#include "planes_neon.h"
#endif

namespace quire::QUIRE_ISA {

#if defined(QUIRE_AVX512)

constexpr bool LIFTS = true;  // one zero point of 128 suits VNNI

static inline vi load_plane(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline vi bytes_of(uint8_t b) { return _mm512_set1_epi8(char(b)); }
static inline vi both(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi either(vi a, vi mask, vi b) { return _mm512_ternarylogic_epi32(a, mask, b, 0xEA); }
static inline vi shift_left(vi a, int s) { return _mm512_slli_epi16(a, unsigned(s)); }
static inline vi shift_right(vi a, int s) { return _mm512_srli_epi16(a, unsigned(s)); }
static inline vi lookup(const uint8_t* values, vi index) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)values)), index);
}
// Column j of the four as one integer per row.
static inline vi byte_of(vi a, int j) {
    return _mm512_and_si512(_mm512_srli_epi32(a, unsigned(8 * j)), _mm512_set1_epi32(255));
}
static inline vi minus(vi a, int b) { return _mm512_sub_epi32(a, _mm512_set1_epi32(b)); }

#elif defined(QUIRE_AVX2)

#if defined(QUIRE_AVX_VNNI)
constexpr bool LIFTS = true;
#else
constexpr bool LIFTS = false;
#endif

static inline vi load_plane(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline vi bytes_of(uint8_t b) { return _mm256_set1_epi8(char(b)); }
static inline vi both(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi either(vi a, vi mask, vi b) { return _mm256_or_si256(_mm256_and_si256(a, mask), b); }
static inline vi shift_left(vi a, int s) { return _mm256_slli_epi16(a, s); }
static inline vi shift_right(vi a, int s) { return _mm256_srli_epi16(a, s); }
static inline vi lookup(const uint8_t* values, vi index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values)), index);
}
static inline vi byte_of(vi a, int j) {
    return _mm256_and_si256(_mm256_srli_epi32(a, 8 * j), _mm256_set1_epi32(255));
}
static inline vi minus(vi a, int b) { return _mm256_sub_epi32(a, _mm256_set1_epi32(b)); }

#elif !defined(QUIRE_NEON)

constexpr bool LIFTS = false;

typedef uint32_t vu __attribute__((vector_size(32)));

static inline vi load_plane(const uint8_t* p) { vi a; std::memcpy(&a, p, 32); return a; }
static inline vi bytes_of(uint8_t b) { return vi{} + int32_t(b * 0x01010101u); }
static inline vi both(vi a, vi b) { return a & b; }
static inline vi either(vi a, vi mask, vi b) { return (a & mask) | b; }
static inline vi shift_left(vi a, int s) { return (vi)((vu)a << s); }
static inline vi shift_right(vi a, int s) { return (vi)((vu)a >> s); }
static inline vi lookup(const uint8_t* values, vi index) {
    uint8_t bytes[32];
    std::memcpy(bytes, &index, 32);
    for (uint8_t& b : bytes) b = values[b];
    vi out;
    std::memcpy(&out, bytes, 32);
    return out;
}
static inline vi byte_of(vi a, int j) { return (vi)((vu)a >> (8 * j)) & 255; }
static inline vi minus(vi a, int b) { return a - b; }

#endif

// By S bits to the left, or to the right below 0; what crosses a byte's border is masked away later.
template <int S>
static inline vi shift(vi a) {
    if constexpr (S > 0) return shift_left(a, S);
    else if constexpr (S < 0) return shift_right(a, -S);
    else return a;
}

// How far weights are moved up in their byte, by which their scales are divided in turn.
template <Tile F>
static constexpr int lift = LIFTS && layout_of(F).zero && !layout_of(F).table ? 8 - layout_of(F).bits : 0;

// Columns 4V… (lo) and 16+4V… (hi) of a tile.
template <Tile F, int V>
static inline void weights(const uint8_t* w, vi& lo, vi& hi) {
    constexpr int plane = 4 * LANES, bits = layout_of(F).bits, up = lift<F>;
    constexpr bool nibbles = bits >= 4;
    if constexpr (bits == 8) {
        lo = load_plane(w + plane * V);
        hi = load_plane(w + plane * (4 + V));
        return;
    }
    const uint8_t* above = w + (nibbles ? 4 * plane : 0);
    if constexpr (bits == 2 || bits == 3 || bits == 6) {
        constexpr int at = up + (nibbles ? 4 : 0);
        lo = both(shift<at - 2 * V>(load_plane(above)), bytes_of(uint8_t(3 << at)));
        hi = both(shift<at - 2 * V>(load_plane(above + plane)), bytes_of(uint8_t(3 << at)));
        above += 2 * plane;
    }
    if constexpr (bits == 3 || bits == 5) {
        constexpr int at = up + bits - 1;
        const vi low = shift<at - V>(load_plane(above)), high = shift<at - 4 - V>(load_plane(above));
        const vi mask = bytes_of(uint8_t(1 << at));
        lo = bits == 3 ? either(low, mask, lo) : both(low, mask);
        hi = bits == 3 ? either(high, mask, hi) : both(high, mask);
    }
    if constexpr (nibbles) {
        const vi low = shift<up>(load_plane(w + plane * V)), high = shift<up - 4>(load_plane(w + plane * V));
        const vi mask = bytes_of(uint8_t(15 << up));
        lo = bits == 4 ? both(low, mask) : either(low, mask, lo);
        hi = bits == 4 ? both(high, mask) : either(high, mask, hi);
    }
    if constexpr (layout_of(F).table) {
        lo = lookup(iq4_values, lo);
        hi = lookup(iq4_values, hi);
    }
}

// The four columns of `weights` as floats, [4][LANES].
template <Tile F>
static inline void unpack_columns(vi bytes, vf scale, vf min, float* out) {
    constexpr int zero_point = layout_of(F).zero << lift<F>;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const vf q = mul(to_float(minus(byte_of(bytes, j), zero_point)), set1(1.0f / (1 << lift<F>)));
        const vf value = mul(scale, q);
        store(out + j * LANES, has_min<F> ? add(value, min) : value);
    }
}

}  // namespace quire::QUIRE_ISA
