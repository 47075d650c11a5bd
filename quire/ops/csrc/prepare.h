// Before attention: norm and rotation of queries and keys, and their way into the pages.
#pragma once

#include "attention.h"
#include "kv.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

inline void rms_norm(float* x, const float* weight, int n, float eps) {
    vf squares = zero();
    float sum = 0.0f;
    int d = 0;
    for (; d + LANES <= n; d += LANES) squares = fma(load(x + d), load(x + d), squares);
    for (; d < n; d++) sum += x[d] * x[d];
    sum += reduce_add(squares);
    const float scale = 1.0f / __builtin_sqrtf(sum / float(n) + eps);
    for (d = 0; d < n; d++) x[d] = x[d] * scale * weight[d];
}

inline void rotate(float* x, const float* cosines, int n_rot, bool neox) {
    const int half = n_rot / 2;
    const float* sines = cosines + half;
    if (!neox) {
        for (int i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosines[i] - b * sines[i];
            x[2 * i + 1] = a * sines[i] + b * cosines[i];
        }
        return;
    }
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = a * sines[i] + b * cosines[i];
    }
}

inline void prepare_heads(float* x, int heads, int dims, const float* norm, float eps,
                          const RopeView& rope, int64_t token) {
    for (int h = 0; h < heads; h++, x += dims) {
        if (norm) rms_norm(x, norm, dims, eps);
        if (rope.table) rotate(x, rope.table + token * rope.n_rot, rope.n_rot, rope.neox);
    }
}

// Stores tokens [begin, end), head by head: the lines of a block of keys stay in the cache.
void store_tokens(const AttentionShape& s, const PageView& pages, const float* k, const float* v, int64_t stride,
                  int64_t begin, int64_t end, int64_t k_offset, int64_t v_offset) {
    const int64_t k_head = pages.page_tokens * row_bytes(s.type_k, s.dk);
    const int64_t v_head = pages.page_tokens * row_bytes(s.type_v, s.dv);
    for (int h = 0; h < s.n_kv_heads; h++)
        for (int64_t i = begin; i < end; i++) {
            const int slot = pages.slots[i] % pages.page_tokens;
            char* page = pages.base + pages.slots[i] / pages.page_tokens * pages.page_bytes;
            const float *key = k + i * stride + h * s.dk, *value = v + i * stride + h * s.dv;
            store_key(s.type_k, page + k_offset + h * k_head, s.dk, slot, key, s.dk);
            store_value(s.type_v, page + v_offset + h * v_head, s.dv, pages.page_tokens, slot, value);
        }
}

void prepare(const AttentionShape& s, const PageView& pages, const RopeView& rope, float* q, float* k, float* v,
             int64_t stride, int64_t begin, int64_t end, int64_t k_offset, int64_t v_offset) {
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t stop = i + BLOCK < end ? i + BLOCK : end;
        for (int64_t t = i; t < stop; t++) {
            prepare_heads(q + t * stride, s.n_heads, s.dk, s.q_norm, s.eps, rope, t);
            if (k) prepare_heads(k + t * stride, s.n_kv_heads, s.dk, s.k_norm, s.eps, rope, t);
        }
        if (k) store_tokens(s, pages, k, v, stride, i, stop, k_offset, v_offset);
    }
}

void rotate_part(const AttentionShape& s, const RopeView& rope, char* part, int page_tokens,
                 const bool* skip) {
    float keys[MAX_HEAD_DIM * BLOCK], x[MAX_HEAD_DIM];
    for (int h = 0; h < s.n_kv_heads; h++, part += page_tokens * row_bytes(s.type_k, s.dk)) {
        for (int t = 0; t < page_tokens; t++) {
            if (t % BLOCK == 0) load_keys(s.type_k, part + key_block(s.type_k, s.dk, t), s.dk, keys);
            if (skip[t]) continue;
            for (int d = 0; d < s.dk; d++) x[d] = keys[d * BLOCK + t % BLOCK];
            rotate(x, rope.table + int64_t(t) * rope.n_rot, rope.n_rot, rope.neox);
            store_key(s.type_k, part, s.dk, t, x, rope.n_rot);
        }
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
