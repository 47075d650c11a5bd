// Bytes of a tile on aarch64: what planes.h is written with.
#pragma once

#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr bool LIFTS = false;

static inline uint8x16_t bytes(int32x4_t a) { return vreinterpretq_u8_s32(a); }
static inline int32x4_t words(uint8x16_t a) { return vreinterpretq_s32_u8(a); }

static inline vi load_plane(const uint8_t* p) { return {words(vld1q_u8(p)), words(vld1q_u8(p + 16))}; }
static inline vi bytes_of(uint8_t b) { return {words(vdupq_n_u8(b)), words(vdupq_n_u8(b))}; }
static inline vi both(vi x, vi y) { return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b)}; }
static inline vi either(vi x, vi mask, vi y) {
    return {vorrq_s32(vandq_s32(x.a, mask.a), y.a), vorrq_s32(vandq_s32(x.b, mask.b), y.b)};
}
static inline vi shift_left(vi x, int s) {
    const int8x16_t by = vdupq_n_s8(int8_t(s));
    return {words(vshlq_u8(bytes(x.a), by)), words(vshlq_u8(bytes(x.b), by))};
}
static inline vi shift_right(vi x, int s) { return shift_left(x, -s); }
static inline vi lookup(const uint8_t* values, vi index) {
    const uint8x16_t table = vld1q_u8(values);
    return {words(vqtbl1q_u8(table, bytes(index.a))), words(vqtbl1q_u8(table, bytes(index.b)))};
}
static inline vi byte_of(vi x, int j) {
    const int32x4_t by = vdupq_n_s32(-8 * j), mask = vdupq_n_s32(255);
    const uint32x4_t a = vshlq_u32(vreinterpretq_u32_s32(x.a), by), b = vshlq_u32(vreinterpretq_u32_s32(x.b), by);
    return {vandq_s32(vreinterpretq_s32_u32(a), mask), vandq_s32(vreinterpretq_s32_u32(b), mask)};
}
static inline vi minus(vi x, int y) { return {vsubq_s32(x.a, vdupq_n_s32(y)), vsubq_s32(x.b, vdupq_n_s32(y))}; }

}  // namespace quire::QUIRE_ISA
