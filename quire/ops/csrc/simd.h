// One vector of floats, as wide as the instruction set this file is compiled for.
//
// Kernel sources are compiled once per instruction set with QUIRE_ISA set to the namespace
// (avx512, avx2, neon, i8mm, portable). They use only what is here, so one source serves all of them.
// Contraction is off (-ffp-contract=off): a multiply-add happens where fma() is written and
// nowhere else, so every kernel variant adds in the same order with the same rounding.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
#include <immintrin.h>
#elif defined(QUIRE_NEON)
#include "simd_neon.h"
#endif

namespace quire::QUIRE_ISA {

#if defined(QUIRE_AVX512)

constexpr int LANES = 16;
using vf = __m512;
using vi = __m512i;

static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf set1(float a) { return _mm512_set1_ps(a); }
static inline vf zero() { return _mm512_setzero_ps(); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf round(vf a) { return _mm512_roundscale_ps(a, 0); }
static inline vf load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
static inline void store_f16(uint16_t* p, vf a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline vf load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline vf load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// Nibbles of LANES bytes: both, or the one at a shift of 0 or 4.
static inline void load_nibbles(const uint8_t* p, vf& low, vf& high) {
    const __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    low = _mm512_cvtepi32_ps(_mm512_and_si512(a, _mm512_set1_epi32(15)));
    high = _mm512_cvtepi32_ps(_mm512_srli_epi32(a, 4));
}
static inline vf load_nibble(const uint8_t* p, int shift) {
    const __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(a, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(15)));
}
static inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
// 2^n for integral n in a normal float's range.
static inline vf pow2(vf n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(to_int(n), _mm512_set1_epi32(127)), 23));
}

#elif defined(QUIRE_AVX2)

constexpr int LANES = 8;
using vf = __m256;
using vi = __m256i;

static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf set1(float a) { return _mm256_set1_ps(a); }
static inline vf zero() { return _mm256_setzero_ps(); }
static inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void store_f16(uint16_t* p, vf a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vf load_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline vf load_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline void load_nibbles(const uint8_t* p, vf& low, vf& high) {
    const __m256i a = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    low = _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(15)));
    high = _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 4));
}
static inline vf load_nibble(const uint8_t* p, int shift) {
    const __m256i a = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(a, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(15)));
}
static inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
static inline vf pow2(vf n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(to_int(n), _mm256_set1_epi32(127)), 23));
}

#elif !defined(QUIRE_NEON)

constexpr int LANES = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));

static inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {
        float f = float(mantissa) * 0x1p-24f;
        std::memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
static inline uint16_t float_to_half(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
    if (magnitude < 0x38800000) {                                 // subnormal half: let the adder round
        float a;
        std::memcpy(&a, &magnitude, 4);
        a += 0.5f;
        uint32_t r;
        std::memcpy(&r, &a, 4);
        return uint16_t(sign | (r - 0x3f000000));
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000;
    return uint16_t(sign | (rounded >> 13));
}

static inline vf load(const float* p) { vf a; std::memcpy(&a, p, 32); return a; }
static inline void store(float* p, vf a) { std::memcpy(p, &a, 32); }
static inline vf set1(float a) { return vf{a, a, a, a, a, a, a, a}; }
static inline vf zero() { return set1(0.0f); }
static inline vf add(vf a, vf b) { return a + b; }
static inline vf sub(vf a, vf b) { return a - b; }
static inline vf mul(vf a, vf b) { return a * b; }
static inline vf div(vf a, vf b) { return a / b; }
static inline vf max(vf a, vf b) { return a > b ? a : b; }
static inline vf min(vf a, vf b) { return a < b ? a : b; }
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
static inline vi to_int(vf a) {  // of magnitudes below 2^22: adding 1.5 · 2^23 rounds to the last bit
    return (vi)(a + 0x1.8p23f) - 0x4b400000;
}
static inline vf to_float(vi a) { return __builtin_convertvector(a, vf); }
static inline vf round(vf a) { return to_float(to_int(a)); }
static inline vf load_f16(const uint16_t* p) {  // half_to_float without branches
    vi h;
    for (int i = 0; i < 8; i++) h[i] = p[i];
    const vi magnitude = (vi)((vf)((h & 0x7fff) << 13) * 0x1p112f);
    return (vf)(magnitude | ((h & 0x8000) << 16) | (((h & 0x7c00) == 0x7c00) & 0x7f800000));
}
static inline void store_f16(uint16_t* p, vf a) {
    for (int i = 0; i < 8; i++) p[i] = float_to_half(a[i]);
}
static inline vf load_bf16(const uint16_t* p) {
    vi a;
    for (int i = 0; i < 8; i++) a[i] = int32_t(uint32_t(p[i]) << 16);
    return (vf)a;
}
static inline vf load_i8(const int8_t* p) {
    vi a;
    for (int i = 0; i < 8; i++) a[i] = p[i];
    return to_float(a);
}
static inline vf load_u8(const uint8_t* p) {
    vi a;
    for (int i = 0; i < 8; i++) a[i] = p[i];
    return to_float(a);
}
static inline void load_nibbles(const uint8_t* p, vf& low, vf& high) {
    vi a;
    for (int i = 0; i < 8; i++) a[i] = p[i];
    low = to_float(a & 15);
    high = to_float(a >> 4);
}
static inline vf load_nibble(const uint8_t* p, int shift) {
    vi a;
    for (int i = 0; i < 8; i++) a[i] = p[i] >> shift & 15;
    return to_float(a);
}
static inline vf pow2(vf n) { return (vf)((to_int(n) + 127) << 23); }

#endif

#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
static inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
static inline uint16_t float_to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
#endif

static inline uint16_t float_to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 64);  // keep NaN a NaN
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// One bit per lane: for choosing between vectors and for comparing them.
#if defined(QUIRE_AVX512)
static inline vf choose(unsigned bits, vf a, vf b) { return _mm512_mask_mov_ps(b, __mmask16(bits), a); }
static inline unsigned bits_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline unsigned bits_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
#elif defined(QUIRE_AVX2)
static inline vf choose(unsigned bits, vf a, vf b) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lane), lane);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(set));
}
static inline unsigned bits_ge(vf a, vf b) { return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); }
static inline unsigned bits_nan(vf a) { return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q))); }
#elif !defined(QUIRE_NEON)
static inline vf choose(unsigned bits, vf a, vf b) {
    const vi lane = {1, 2, 4, 8, 16, 32, 64, 128};
    return (lane & int32_t(bits)) != 0 ? a : b;
}
static inline unsigned bits_of(vi set) {
    const vi picked = set & vi{1, 2, 4, 8, 16, 32, 64, 128};
    unsigned bits = 0;
    for (int i = 0; i < 8; i++) bits |= unsigned(picked[i]);
    return bits;
}
static inline unsigned bits_ge(vf a, vf b) { return bits_of(a >= b); }
static inline unsigned bits_nan(vf a) { return bits_of(a != a); }
#endif

// Sums and maxima over the lanes in one fixed order: halves are folded until one lane is left.
#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
static inline float reduce_add(vf v) {
#if defined(QUIRE_AVX512)
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
    const __m256 a = v;
#endif
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float reduce_max(vf v) {
#if defined(QUIRE_AVX512)
    const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
    const __m256 a = v;
#endif
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
#elif !defined(QUIRE_NEON)
static inline float reduce_add(vf a) {
    float t[LANES];
    store(t, a);
    for (int w = LANES / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) t[i] += t[i + w];
    return t[0];
}
static inline float reduce_max(vf a) {
    float t[LANES];
    store(t, a);
    for (int w = LANES / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
    return t[0];
}
#endif

// e^x to about 2 ulp; exact 0 below -87.3 (so that masked scores vanish), clamped above 88.
static inline vf exp(vf x) {
    const vf low = set1(-87.3f);
    const vf y = min(max(x, low), set1(88.0f));
    const vf n = round(mul(y, set1(1.44269504088896341f)));
    vf r = fma(n, set1(-0.693359375f), y);
    r = fma(n, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
#if defined(QUIRE_AVX512)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_GT_OQ), p, n);
#elif defined(QUIRE_AVX2)
    return _mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_GT_OQ), mul(p, pow2(n)));
#elif defined(QUIRE_NEON)
    return where_above(x, low, mul(p, pow2(n)));
#else
    return x > low ? mul(p, pow2(n)) : zero();
#endif
}

}  // namespace quire::QUIRE_ISA
