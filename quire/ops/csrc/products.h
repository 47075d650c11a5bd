// The two products of attention: queries with keys (lanes are keys) and weights with values (lanes
// are dims). Every sum is one chain in one order, so that the shape of a kernel changes no bit.
#pragma once

#include "attention.h"
#include "kv_read.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Keys and values lie in pieces too short for a processor to see where it goes on. So where they are read once,
// values are fetched while their keys are multiplied, and the next keys while values are: into the second cache, since
// the first can only wait for a few lines at a time.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Scores of R queries with blocks [from, to) of a segment, N vectors of keys at a time. Their values, if given, are
// fetched meanwhile.
template <class T, int R, int N>
void score(const float* q, int dk, const void* const* blocks, const ValueBlock* values, int from, int to, float* s) {
    constexpr int STEP = N * LANES / BLOCK, BYTES = T::BYTES * BLOCK;
    for (; from + STEP <= to; from += STEP) {
        Keys<T> keys[N];
        vf sum[R][N];
#pragma GCC unroll 24
        for (int n = 0; n < N; n++) keys[n].init(blocks[from + n * LANES / BLOCK], n * LANES % BLOCK, dk);
#pragma GCC unroll 24
        for (int i = 0; i < R * N; i++) sum[i / N][i % N] = zero();
        auto multiply = [&]<bool FETCH>() {
            for (int d = 0; d < dk;) {
#pragma GCC unroll 24
                for (int n = 0; n < N; n++) keys[n].open(d);
                const int stop = d + T::GROUP < dk ? d + T::GROUP : dk;
                for (; d < stop; d++) {
                    vf key[N];
#pragma GCC unroll 24
                    for (int n = 0; n < N; n++) key[n] = keys[n].at(d);
#pragma GCC unroll 24
                    for (int n = 0; n < N && FETCH; n++)
                        fetch((const char*)values[from + n * LANES / BLOCK].rows + d * BYTES);
#pragma GCC unroll 24
                    for (int r = 0; r < R; r++) {
                        const vf x = set1(q[r * dk + d]);
#pragma GCC unroll 24
                        for (int n = 0; n < N; n++) sum[r][n] = fma(x, key[n], sum[r][n]);
                    }
                }
            }
        };
        if (values) multiply.template operator()<true>();
        else multiply.template operator()<false>();
        float* out = s + from * BLOCK;
#pragma GCC unroll 24
        for (int i = 0; i < R * N; i++) store(out + i / N * SEGMENT + i % N * LANES, sum[i / N][i % N]);
    }
    if constexpr (STEP > 1)
        if (from < to) score<T, R, N / 2>(q, dk, blocks, values, from, to, s);
}

// Adds the values of keys [from, to) weighted by p to R accumulators, N vectors of dims.
template <class T, int R, int N>
void weigh_dims(const float* p, const ValueBlock* blocks, int dims, int offset, int from, int to, float* out,
                int64_t out_stride) {
    vf sum[R][N];
    out += offset;
#pragma GCC unroll 24
    for (int i = 0; i < R * N; i++) sum[i / N][i % N] = load(out + i / N * out_stride + i % N * LANES);
    for (int j = from; j < to;) {
        const int stop = (j / BLOCK + 1) * BLOCK < to ? (j / BLOCK + 1) * BLOCK : to;
        Values<T> values(blocks[j / BLOCK], j % BLOCK, dims, offset);
        if (const char* next = blocks[j / BLOCK].next)
            for (int i = 0; i < N * LANES * BLOCK * T::BYTES; i += 64) fetch(next + offset * BLOCK * T::BYTES + i);
        for (; j < stop; j++, values.next()) {
            vf value[N];
#pragma GCC unroll 24
            for (int n = 0; n < N; n++) value[n] = values.at(n);
#pragma GCC unroll 24
            for (int r = 0; r < R; r++) {
                const vf x = set1(p[r * SEGMENT + j]);
#pragma GCC unroll 24
                for (int n = 0; n < N; n++) sum[r][n] = fma(x, value[n], sum[r][n]);
            }
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < R * N; i++) store(out + i / N * out_stride + i % N * LANES, sum[i / N][i % N]);
}

template <class T, int R, int N>
void weigh(const float* p, const ValueBlock* blocks, int dims, int from, int to, float* out, int64_t out_stride) {
    int d = 0;
    for (; d + N * LANES <= dims; d += N * LANES) weigh_dims<T, R, N>(p, blocks, dims, d, from, to, out, out_stride);
    for (; d < dims; d += LANES) weigh_dims<T, R, 1>(p, blocks, dims, d, from, to, out, out_stride);
}

using Score = void (*)(const float*, int, const void* const*, const ValueBlock*, int, int, float*);
using Weigh = void (*)(const float*, const ValueBlock*, int, int, int, float*, int64_t);

// For 1 to ROWS rows: enough chains in flight to hide the latency of a multiply-add, in the registers there are.
constexpr int WIDE = LANES == 16 ? 4 : 2;
template <class T>
constexpr Score scores_as[ROWS] = {score<T, 1, 8>,    score<T, 2, 4>,    score<T, 3, WIDE>,
                                   score<T, 4, WIDE>, score<T, 5, WIDE>, score<T, 6, WIDE>};
template <class T>
constexpr Weigh weighs_as[ROWS] = {weigh<T, 1, 4>,    weigh<T, 2, 4>,    weigh<T, 3, WIDE>,
                                   weigh<T, 4, WIDE>, weigh<T, 5, WIDE>, weigh<T, 6, WIDE>};

constexpr const Score* scores_of[] = {scores_as<ReadF32>, scores_as<ReadF16>, scores_as<ReadBF16>, scores_as<ReadQ8>,
                                      scores_as<ReadQ4>};
constexpr const Weigh* weighs_of[] = {weighs_as<ReadF32>, weighs_as<ReadF16>, weighs_as<ReadBF16>, weighs_as<ReadQ8>,
                                      weighs_as<ReadQ4>};

}  // namespace
}  // namespace quire::QUIRE_ISA
