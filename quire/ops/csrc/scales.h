// What the kernels of every instruction set share: words of a panel, and a tile's scales as floats.
#pragma once

#include "simd.h"
#include "tiles.h"

namespace quire::QUIRE_ISA {

static inline float word_f32(const uint8_t* p) {
    float f;
    std::memcpy(&f, p, 4);
    return f;
}
static inline int32_t word_i32(const uint8_t* p) {
    int32_t i;
    std::memcpy(&i, p, 4);
    return i;
}
static inline void put_word(uint8_t* p, float f) { std::memcpy(p, &f, 4); }
static inline void put_word(uint8_t* p, int32_t i) { std::memcpy(p, &i, 4); }

static inline const uint16_t* halfs(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

template <Tile F>
static constexpr bool has_min = layout_of(F).scales == Scales::half_min ||
                                layout_of(F).scales == Scales::super_min ||
                                layout_of(F).scales == Scales::super16_min;
template <Tile F>
static constexpr bool has_halves =
    layout_of(F).scales == Scales::super16 || layout_of(F).scales == Scales::super16_min;

static inline vf negate(vf a) { return mul(a, set1(-1.0f)); }  // of zeros as well

// A weight is scale · (q - zero) + min; d and dmin are those of the 256 columns around it.
template <Tile F>
static inline vf tile_scale(const uint8_t* scales, vf d) {
    if constexpr (layout_of(F).scales == Scales::super) return mul(d, load_i8((const int8_t*)scales));
    else if constexpr (layout_of(F).scales == Scales::super_min) return mul(d, load_u8(scales));
    else return load_f16(halfs(scales));
}
template <Tile F>
static inline vf tile_min(const uint8_t* scales, vf dmin) {
    if constexpr (layout_of(F).scales == Scales::super_min)
        return negate(mul(dmin, load_u8(scales + LANES)));
    else if constexpr (layout_of(F).scales == Scales::half_min) return load_f16(halfs(scales + 2 * LANES));
    else return zero();
}

// The high nibbles of bytes: (16h + l - 7.5) / 16 is nearest to h. Adding 0 makes -0 positive.
static inline vf high_nibbles(vf bytes) {
    return add(round(sub(mul(bytes, set1(1.0f / 16)), set1(7.5f / 16))), zero());
}

// The same for columns 0…15 (half 0) or 16…31 (half 1) of a tile with scales of its own for each.
template <Tile F>
static inline vf half_scale(const uint8_t* scales, int half, vf d) {
    if constexpr (!has_halves<F>) return tile_scale<F>(scales, d);
    else if constexpr (!has_min<F>) return mul(d, load_i8((const int8_t*)scales + half * LANES));
    else {
        const vf bytes = load_u8(scales + half * LANES);
        return mul(d, sub(bytes, mul(high_nibbles(bytes), set1(16.0f))));
    }
}
template <Tile F>
static inline vf half_min(const uint8_t* scales, int half, vf dmin) {
    if constexpr (!has_halves<F>) return tile_min<F>(scales, dmin);
    else if constexpr (has_min<F>) return negate(mul(dmin, high_nibbles(load_u8(scales + half * LANES))));
    else return zero();
}

}  // namespace quire::QUIRE_ISA
