// Tiles of f16, bf16 and f32 against float32 activations: panels are [cols][T] floats.
#pragma once

#include "simd.h"
#include "tiles.h"

namespace quire::QUIRE_ISA {

template <Tile F>
static inline vf dense_row(const uint8_t* w, int64_t k) {
    if constexpr (F == Tile::f32) return load((const float*)w + k * LANES);
    else if constexpr (F == Tile::f16) return load_f16((const uint16_t*)w + k * LANES);
    else return load_bf16((const uint16_t*)w + k * LANES);
}

// Fetches BYTES of the next row block while as many of this one take about CYCLES to multiply. Where
// they take fewer, weights already come as fast as memory gives them, and this would only disturb.
template <int BYTES, int CYCLES>
static inline void fetch(const uint8_t* w) {
    if constexpr (BYTES <= 10 * CYCLES)
#pragma GCC unroll 16
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(w + i, 0, 2);
}

// Even and odd columns have sums of their own, so that two multiply-adds are under way per token.
template <Tile F, int T>
static void dense(const uint8_t* w, int64_t cols, const uint8_t* panel, float* out, int64_t stride, int64_t ahead) {
    const float* x = (const float*)panel;
    vf even[T], odd[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) even[t] = odd[t] = zero();
    int64_t k = 0;
    for (; k + 2 <= cols; k += 2, x += 2 * T) {
        const vf a = dense_row<F>(w, k), b = dense_row<F>(w, k + 1);
        constexpr int bytes = 2 * LANES * (layout_of(F).bits / 8);
        fetch<bytes, T * LANES / 8>(w + k * (bytes / 2) + ahead);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) even[t] = fma(a, set1(x[t]), even[t]);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) odd[t] = fma(b, set1(x[T + t]), odd[t]);
    }
    if (k < cols) {
        const vf a = dense_row<F>(w, k);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) even[t] = fma(a, set1(x[t]), even[t]);
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) store(out + t * stride, add(even[t], odd[t]));
}

template <Tile F>
static void unpack_dense(const uint8_t* w, int64_t cols, float* out) {
    for (int64_t k = 0; k < cols; k++) store(out + k * LANES, dense_row<F>(w, k));
}

}  // namespace quire::QUIRE_ISA
