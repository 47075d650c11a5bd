// One vector of floats on aarch64: two registers of four, so that tiles have eight rows as elsewhere.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace quire::QUIRE_ISA {

constexpr int LANES = 8;
struct vf {
    float32x4_t a, b;
};
struct vi {
    int32x4_t a, b;
};

static inline vf load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline void store(float* p, vf x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
}
static inline vf set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline vf zero() { return set1(0.0f); }
static inline vf add(vf x, vf y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
static inline vf sub(vf x, vf y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
static inline vf mul(vf x, vf y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
static inline vf div(vf x, vf y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
static inline vf fma(vf x, vf y, vf z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
static inline vf round(vf x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
// Of a NaN and a number the second operand, as on other processors: chosen, not vmax.
static inline float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
static inline float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
static inline vf max(vf x, vf y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
static inline vf min(vf x, vf y) { return {smaller(x.a, y.a), smaller(x.b, y.b)}; }

static inline vf to_float(vi x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
static inline vi to_int(vf x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)}; }
static inline vf pow2(vf n) {
    const vi i = to_int(n);
    return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(i.a, vdupq_n_s32(127)), 23)),
            vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(i.b, vdupq_n_s32(127)), 23))};
}

static inline vf load_f16(const uint16_t* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
static inline void store_f16(uint16_t* p, vf x) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
}
static inline vf load_bf16(const uint16_t* p) {
    const uint16x8_t h = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(h, 16))};
}
static inline vf widened(uint16x8_t x) {
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(x))), vcvtq_f32_u32(vmovl_high_u16(x))};
}
static inline vf load_u8(const uint8_t* p) { return widened(vmovl_u8(vld1_u8(p))); }
static inline vf load_i8(const int8_t* p) {
    const int16x8_t x = vmovl_s8(vld1_s8(p));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))};
}
static inline void load_nibbles(const uint8_t* p, vf& low, vf& high) {
    const uint8x8_t x = vld1_u8(p);
    low = widened(vmovl_u8(vand_u8(x, vdup_n_u8(15))));
    high = widened(vmovl_u8(vshr_n_u8(x, 4)));
}
static inline vf load_nibble(const uint8_t* p, int shift) {
    const uint8x8_t x = vshl_u8(vld1_u8(p), vdup_n_s8(int8_t(-shift)));
    return widened(vmovl_u8(vand_u8(x, vdup_n_u8(15))));
}

static inline float half_to_float(uint16_t h) {
    __fp16 x;
    std::memcpy(&x, &h, 2);
    return float(x);
}
static inline uint16_t float_to_half(float f) {
    const __fp16 x = __fp16(f);
    uint16_t h;
    std::memcpy(&h, &x, 2);
    return h;
}

static inline vf choose(unsigned bits, vf x, vf y) {
    const uint32x4_t all = vdupq_n_u32(bits), low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
    return {vbslq_f32(vtstq_u32(all, low), x.a, y.a), vbslq_f32(vtstq_u32(all, high), x.b, y.b)};
}
static inline unsigned bits_of(uint32x4_t a, uint32x4_t b) {
    const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
    return vaddvq_u32(vorrq_u32(vandq_u32(a, low), vandq_u32(b, high)));
}
static inline unsigned bits_ge(vf x, vf y) { return bits_of(vcgeq_f32(x.a, y.a), vcgeq_f32(x.b, y.b)); }
static inline unsigned bits_nan(vf x) { return bits_of(vmvnq_u32(vceqq_f32(x.a, x.a)), vmvnq_u32(vceqq_f32(x.b, x.b))); }

static inline float reduce_add(vf x) {
    const float32x4_t four = vaddq_f32(x.a, x.b);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
static inline float reduce_max(vf x) {
    const float32x4_t four = larger(x.a, x.b);
    const float32x4_t two = larger(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(larger(two, vextq_f32(two, two, 1)), 0);
}

// y where x is above the bound, else 0.
static inline vf where_above(vf x, vf bound, vf y) {
    return {vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(x.a, bound.a), vreinterpretq_u32_f32(y.a))),
            vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(x.b, bound.b), vreinterpretq_u32_f32(y.b)))};
}

}  // namespace quire::QUIRE_ISA
