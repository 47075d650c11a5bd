// Activations as int8: groups of 32 columns with one scale.
#pragma once

#include "simd.h"

namespace quire::QUIRE_ISA {

struct QuantizedGroup {
    float d;            // x ≈ d · q
    int32_t low, high;  // sums of q over columns 0…15 and 16…31
};

// The scale of 32 activations whose largest magnitude is amax, and its inverse. Groups too small to
// have one count as zero; infinities and NaN stay in d and reach every output they touch.
static inline float quant_scale(float amax, float& inverse) {
    const bool zero = amax < 1e-30f;
    const float d = zero ? 0.0f : amax / 127.0f;
    inverse = zero ? 0.0f : 1.0f / d;
    return d;
}

#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)

static inline float from_bits(int32_t bits) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits))); }

static inline int32_t sum_of(__m128i q) {  // of 16 int8
    const __m128i biased = _mm_xor_si128(q, _mm_set1_epi8(char(128)));
    const __m128i sums = _mm_sad_epu8(biased, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

#endif

// Compared as integers, magnitudes have the same order and a NaN is above all numbers.
#if defined(QUIRE_AVX512)

static inline QuantizedGroup quantize(const float* x, uint8_t* q) {
    const vf a = load(x), b = load(x + 16);
    const vi sign = _mm512_set1_epi32(0x7fffffff);
    const vi top = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), sign),
                                    _mm512_and_si512(_mm512_castps_si512(b), sign));
    float inverse;
    const float d = quant_scale(from_bits(_mm512_reduce_max_epi32(top)), inverse);
    const __m128i low = _mm512_cvtsepi32_epi8(to_int(mul(a, set1(inverse))));
    const __m128i high = _mm512_cvtsepi32_epi8(to_int(mul(b, set1(inverse))));
    _mm_storeu_si128((__m128i*)q, low);
    _mm_storeu_si128((__m128i*)(q + 16), high);
    return {d, sum_of(low), sum_of(high)};
}

#elif defined(QUIRE_AVX2)

static inline vi magnitude(vf a) { return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)); }

static inline QuantizedGroup quantize(const float* x, uint8_t* q) {
    const vf a = load(x), b = load(x + 8), c = load(x + 16), e = load(x + 24);
    const vi top = _mm256_max_epi32(_mm256_max_epi32(magnitude(a), magnitude(b)),
                                    _mm256_max_epi32(magnitude(c), magnitude(e)));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1));
    float inverse;
    const float d = quant_scale(from_bits(_mm_cvtsi128_si32(half)), inverse);
    const vf f = set1(inverse);
    const vi words = _mm256_packs_epi32(to_int(mul(a, f)), to_int(mul(b, f)));
    const vi more = _mm256_packs_epi32(to_int(mul(c, f)), to_int(mul(e, f)));
    // Packing works within halves of a register; this puts the dwords back in order.
    const vi bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words, more),
                                                 _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i*)q, bytes);
    return {d, sum_of(_mm256_castsi256_si128(bytes)), sum_of(_mm256_extracti128_si256(bytes, 1))};
}

#elif defined(QUIRE_NEON)

static inline int32x4_t magnitude(float32x4_t a) {
    return vandq_s32(vreinterpretq_s32_f32(a), vdupq_n_s32(0x7fffffff));
}

// Sixteen activations as bytes.
static inline int8x16_t rounded(const float* x, float inverse) {
    const vi a = to_int(mul(load(x), set1(inverse))), b = to_int(mul(load(x + 8), set1(inverse)));
    const int16x8_t low = vqmovn_high_s32(vqmovn_s32(a.a), a.b), high = vqmovn_high_s32(vqmovn_s32(b.a), b.b);
    return vqmovn_high_s16(vqmovn_s16(low), high);
}

static inline QuantizedGroup quantize(const float* x, uint8_t* q) {
    int32x4_t top = vdupq_n_s32(0);
    for (int i = 0; i < 32; i += 4) top = vmaxq_s32(top, magnitude(vld1q_f32(x + i)));
    float inverse;
    const float d = quant_scale(vgetq_lane_f32(vreinterpretq_f32_s32(vdupq_n_s32(vmaxvq_s32(top))), 0), inverse);
    const int8x16_t low = rounded(x, inverse), high = rounded(x + 16, inverse);
    vst1q_s8((int8_t*)q, low);
    vst1q_s8((int8_t*)q + 16, high);
    return {d, vaddlvq_s8(low), vaddlvq_s8(high)};
}

#else

static inline QuantizedGroup quantize(const float* x, uint8_t* q) {
    int32_t top = 0;
    for (int i = 0; i < 32; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float amax, inverse;
    std::memcpy(&amax, &top, 4);
    const float d = quant_scale(amax, inverse);
    int32_t sums[2] = {0, 0};
    for (int i = 0; i < 32; i += LANES) {
        const vi rounded = to_int(max(min(mul(load(x + i), set1(inverse)), set1(127.0f)), set1(-127.0f)));
        for (int j = 0; j < LANES; j++) {
            q[i + j] = uint8_t(rounded[j]);
            sums[i / 16] += rounded[j];
        }
    }
    return {d, sums[0], sums[1]};
}

#endif

}  // namespace quire::QUIRE_ISA
