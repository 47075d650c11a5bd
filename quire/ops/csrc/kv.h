// Storing and loading of keys and values in the layout of a page (see attention.h).
#pragma once

#include "attention.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Bytes of one token's row of `dims` values.
inline int64_t row_bytes(KvType type, int dims) {
    switch (type) {
        case KvType::f32: return int64_t(dims) * 4;
        case KvType::f16:
        case KvType::bf16: return int64_t(dims) * 2;
        case KvType::q8_0: return int64_t(dims) / 32 * 34;
        default: return int64_t(dims) / 32 * 18;
    }
}

// One group of 32 in the way of ggml; returns the scale as fp16.
inline uint16_t quantize_q8(const float* x, int8_t* q) {
    float most = 0.0f;
    for (int i = 0; i < 32; i++) {
        const float a = __builtin_fabsf(x[i]);
        most = a > most ? a : most;
    }
    const float scale = most / 127.0f;
    const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < 32; i++) {
        const float v = x[i] * inverse, a = __builtin_fabsf(v);
        int n = int(a);
        n += (a - float(n)) >= 0.5f;  // halves away from zero
        q[i] = int8_t(v < 0.0f ? -n : n);
    }
    return float_to_half(scale);
}

inline uint16_t quantize_q4(const float* x, uint8_t* q) {
    float most = 0.0f, extreme = 0.0f;
    for (int i = 0; i < 32; i++) {
        const float a = __builtin_fabsf(x[i]);
        if (a > most) {
            most = a;
            extreme = x[i];
        }
    }
    const float scale = extreme / -8.0f;
    const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < 16; i++) {
        const int low = int(x[i] * inverse + 8.5f), high = int(x[i + 16] * inverse + 8.5f);
        q[i] = uint8_t((low < 15 ? low : 15) | (high < 15 ? high : 15) << 4);
    }
    return float_to_half(scale);
}

// ---- keys: `part` is one kv head of one page, `slot` the token's place in the page ----

// Where the block of a slot begins.
inline int64_t key_block(KvType type, int dk, int slot) { return slot / BLOCK * (BLOCK * row_bytes(type, dk)); }

// Dims [0, dims) of a key of dk dims; for the quantised types dims is rounded up to whole groups.
inline void store_key(KvType type, char* part, int dk, int slot, const float* x, int dims) {
    char* block = part + key_block(type, dk, slot);
    const int lane = slot % BLOCK;
    if (type == KvType::f32) {
        float* out = (float*)block + lane;
        for (int d = 0; d < dims; d++) out[d * BLOCK] = x[d];
    } else if (type == KvType::f16) {
        uint16_t* out = (uint16_t*)block + lane;
        for (int d = 0; d < dims; d++) out[d * BLOCK] = float_to_half(x[d]);
    } else if (type == KvType::bf16) {
        uint16_t* out = (uint16_t*)block + lane;
        for (int d = 0; d < dims; d++) out[d * BLOCK] = float_to_bf16(x[d]);
    } else if (type == KvType::q8_0) {
        uint16_t* scales = (uint16_t*)(block + BLOCK * dk) + lane;
        for (int g = 0; g * 32 < dims; g++) {
            int8_t q[32];
            scales[g * BLOCK] = quantize_q8(x + g * 32, q);
            for (int i = 0; i < 32; i++) block[(g * 32 + i) * BLOCK + lane] = char(q[i]);
        }
    } else {
        uint16_t* scales = (uint16_t*)(block + BLOCK * dk / 2) + lane;
        for (int g = 0; g * 32 < dims; g++) {
            uint8_t q[16];
            scales[g * BLOCK] = quantize_q4(x + g * 32, q);
            for (int i = 0; i < 16; i++) block[(g * 16 + i) * BLOCK + lane] = char(q[i]);
        }
    }
}

// A block of 16 keys as float32 [dk][16].
inline void load_keys(KvType type, const char* block, int dk, float* out) {
    const int n = dk * BLOCK;
    if (type == KvType::f32) {
        std::memcpy(out, block, size_t(n) * 4);
    } else if (type == KvType::f16) {
        for (int i = 0; i < n; i += LANES) store(out + i, load_f16((const uint16_t*)block + i));
    } else if (type == KvType::bf16) {
        for (int i = 0; i < n; i += LANES) store(out + i, load_bf16((const uint16_t*)block + i));
    } else if (type == KvType::q8_0) {
        const uint16_t* scales = (const uint16_t*)(block + n);
        for (int g = 0; g < dk / 32; g++)
            for (int v = 0; v < BLOCK; v += LANES) {
                const vf scale = load_f16(scales + g * BLOCK + v);
                for (int i = g * 32 * BLOCK + v; i < (g + 1) * 32 * BLOCK; i += BLOCK)
                    store(out + i, mul(load_i8((const int8_t*)block + i), scale));
            }
    } else {
        const uint16_t* scales = (const uint16_t*)(block + n / 2);
        for (int g = 0; g < dk / 32; g++)
            for (int v = 0; v < BLOCK; v += LANES) {
                const vf scale = load_f16(scales + g * BLOCK + v), eight = set1(8.0f);
                const uint8_t* bytes = (const uint8_t*)block + g * 16 * BLOCK + v;
                float* group = out + g * 32 * BLOCK + v;
                for (int i = 0; i < 16 * BLOCK; i += BLOCK) {
                    vf low, high;
                    load_nibbles(bytes + i, low, high);
                    store(group + i, mul(sub(low, eight), scale));
                    store(group + i + 16 * BLOCK, mul(sub(high, eight), scale));
                }
            }
    }
}

// ---- values: `part` is one kv head of one page ----

inline void store_value(KvType type, char* part, int dv, int page_tokens, int slot, const float* x) {
    if (type == KvType::f32) {
        std::memcpy((float*)part + int64_t(slot) * dv, x, size_t(dv) * 4);
    } else if (type == KvType::f16) {
        uint16_t* out = (uint16_t*)part + int64_t(slot) * dv;
        int d = 0;
        for (; d + LANES <= dv; d += LANES) store_f16(out + d, load(x + d));
        for (; d < dv; d++) out[d] = float_to_half(x[d]);
    } else if (type == KvType::bf16) {
        uint16_t* out = (uint16_t*)part + int64_t(slot) * dv;
        for (int d = 0; d < dv; d++) out[d] = float_to_bf16(x[d]);
    } else if (type == KvType::q8_0) {
        uint16_t* scales = (uint16_t*)(part + page_tokens * dv) + slot * (dv / 32);
        for (int g = 0; g < dv / 32; g++)
            scales[g] = quantize_q8(x + g * 32, (int8_t*)part + slot * dv + g * 32);
    } else {
        uint16_t* scales = (uint16_t*)(part + page_tokens * dv / 2) + slot * (dv / 32);
        for (int g = 0; g < dv / 32; g++)
            scales[g] = quantize_q4(x + g * 32, (uint8_t*)part + (slot * dv + g * 32) / 2);
    }
}

// One value row as float32; dims past dv up to `padded` become 0.
template <KvType TYPE>
inline void load_value(const char* part, int dv, int page_tokens, int slot, float* out, int padded) {
    int d = 0;
    if constexpr (TYPE == KvType::f32) {
        std::memcpy(out, (const float*)part + int64_t(slot) * dv, size_t(dv) * 4);
        d = dv;
    } else if constexpr (TYPE == KvType::f16) {
        const uint16_t* in = (const uint16_t*)part + int64_t(slot) * dv;
        for (; d + LANES <= dv; d += LANES) store(out + d, load_f16(in + d));
        for (; d < dv; d++) out[d] = half_to_float(in[d]);
    } else if constexpr (TYPE == KvType::bf16) {
        const uint16_t* in = (const uint16_t*)part + int64_t(slot) * dv;
        for (; d + LANES <= dv; d += LANES) store(out + d, load_bf16(in + d));
        for (; d < dv; d++) {
            const uint32_t bits = uint32_t(in[d]) << 16;
            std::memcpy(out + d, &bits, 4);
        }
    } else if constexpr (TYPE == KvType::q8_0) {
        const uint16_t* scales = (const uint16_t*)(part + page_tokens * dv) + slot * (dv / 32);
        const int8_t* in = (const int8_t*)part + slot * dv;
        for (; d < dv; d += 32) {
            const vf scale = set1(half_to_float(scales[d / 32]));
            for (int i = d; i < d + 32; i += LANES) store(out + i, mul(load_i8(in + i), scale));
        }
    } else {
        const uint16_t* scales = (const uint16_t*)(part + page_tokens * dv / 2) + slot * (dv / 32);
        const uint8_t* bytes = (const uint8_t*)part + slot * dv / 2;
        for (; d < dv; d += 32) {
            const vf scale = set1(half_to_float(scales[d / 32])), eight = set1(8.0f);
            for (int i = 0; i < 16; i += LANES) {
                vf low, high;
                load_nibbles(bytes + d / 2 + i, low, high);
                store(out + d + i, mul(sub(low, eight), scale));
                store(out + d + 16 + i, mul(sub(high, eight), scale));
            }
        }
    }
    for (; d < padded; d++) out[d] = 0.0f;
}

// The value rows of a block from `slot` on whose bit is set; the others become 0.
template <KvType TYPE>
void load_block(const char* part, int dv, int page_tokens, int slot, unsigned needed, float* out, int padded) {
    for (int t = 0; t < BLOCK; t++, out += padded) {
        if (needed >> t & 1) load_value<TYPE>(part, dv, page_tokens, slot + t, out, padded);
        else std::memset(out, 0, size_t(padded) * 4);
    }
}

inline void load_values(KvType type, const char* part, int dv, int page_tokens, int slot, unsigned needed,
                        float* out, int padded) {
    constexpr decltype(&load_block<KvType::f32>) loads[] = {
        load_block<KvType::f32>, load_block<KvType::f16>, load_block<KvType::bf16>, load_block<KvType::q8_0>,
        load_block<KvType::q4_0>};
    loads[int(type)](part, dv, page_tokens, slot, needed, out, padded);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
