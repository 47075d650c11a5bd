// Copies single tokens between the parts of pages (attention.h draws a part), whatever their type.
#pragma once

#include <cstring>

#include "attention.h"

namespace quire {

// Bytes of a value, or of 32 values for the quantised types, and of the scale that goes with those.
struct KvCell {
    int values, bytes, scale;
};

inline KvCell kv_cell(KvType type) {
    constexpr KvCell cells[] = {{1, 4, 0}, {1, 2, 0}, {1, 2, 0}, {32, 32, 2}, {32, 16, 2}};
    return cells[int(type)];
}

// Keys: 16 tokens side by side, `width` bytes each, `count` times over.
inline void move_lanes(const char* from, char* to, int from_lane, int to_lane, int width, int count) {
    for (int i = 0; i < count; i++)
        std::memcpy(to + (i * BLOCK + to_lane) * width, from + (i * BLOCK + from_lane) * width, size_t(width));
}

// One head's key.
inline void move_key(KvType type, int dims, const char* from, char* to, int from_slot, int to_slot) {
    const KvCell cell = kv_cell(type);
    const int groups = dims / cell.values;
    const int64_t block = int64_t(BLOCK) * groups * (cell.bytes + cell.scale);
    from += from_slot / BLOCK * block;
    to += to_slot / BLOCK * block;
    const int width = cell.scale ? 1 : cell.bytes, count = groups * cell.bytes / width;
    move_lanes(from, to, from_slot % BLOCK, to_slot % BLOCK, width, count);
    const int64_t scales = int64_t(BLOCK) * groups * cell.bytes;
    if (cell.scale)
        move_lanes(from + scales, to + scales, from_slot % BLOCK, to_slot % BLOCK, cell.scale, groups);
}

// One head's value.
inline void move_value(KvType type, int dims, int page_tokens, const char* from, char* to, int from_slot, int to_slot) {
    const KvCell cell = kv_cell(type);
    const int64_t row = int64_t(dims / cell.values) * cell.bytes, scales = int64_t(dims / cell.values) * cell.scale;
    std::memcpy(to + to_slot * row, from + from_slot * row, size_t(row));
    std::memcpy(to + page_tokens * row + to_slot * scales, from + page_tokens * row + from_slot * scales,
                size_t(scales));
}

// One token of one layer, all heads.
inline void move_token(const AttentionShape& s, int page_tokens, const char* from_k, char* to_k, const char* from_v,
                       char* to_v, int from_slot, int to_slot) {
    const KvCell k = kv_cell(s.type_k), v = kv_cell(s.type_v);
    const int64_t k_head = int64_t(page_tokens) * (s.dk / k.values) * (k.bytes + k.scale);
    const int64_t v_head = int64_t(page_tokens) * (s.dv / v.values) * (v.bytes + v.scale);
    for (int h = 0; h < s.n_kv_heads; h++) {
        move_key(s.type_k, s.dk, from_k + h * k_head, to_k + h * k_head, from_slot, to_slot);
        move_value(s.type_v, s.dv, page_tokens, from_v + h * v_head, to_v + h * v_head, from_slot, to_slot);
    }
}

}  // namespace quire
