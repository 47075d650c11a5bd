// Keys and values of a page read straight into registers, a vector at a time. The numbers are the
// ones that load_keys and load_values of kv.h write out: equal bits whichever way they are read.
#pragma once

#include "attention.h"
#include "kv.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Where the value rows of a block begin, and their scales; and the keys that are read next, where that is known.
struct ValueBlock {
    const void* rows;
    const uint16_t* scales;
    const char* next = nullptr;
};

inline ValueBlock value_block(KvType type, const char* part, int dv, int page_tokens, int slot) {
    if (type < KvType::q8_0) return {part + slot * row_bytes(type, dv), nullptr};
    const int bytes = type == KvType::q8_0 ? dv : dv / 2;
    return {part + slot * bytes, (const uint16_t*)(part + page_tokens * bytes) + slot * (dv / 32)};
}

// How values are stored: in how many bytes (about), and after how many dims of a key another scale or nibble begins.
struct ReadF32 {
    static constexpr int BYTES = 4;
    static constexpr int GROUP = 1 << 20;
    using T = float;
    static vf at(const T* p) { return load(p); }
};
struct ReadF16 {
    static constexpr int BYTES = 2;
    static constexpr int GROUP = 1 << 20;
    using T = uint16_t;
    static vf at(const T* p) { return load_f16(p); }
};
struct ReadBF16 {
    static constexpr int BYTES = 2;
    static constexpr int GROUP = 1 << 20;
    using T = uint16_t;
    static vf at(const T* p) { return load_bf16(p); }
};
struct ReadQ8 {
    static constexpr int BYTES = 1;
    static constexpr int GROUP = 32;
};
struct ReadQ4 {
    static constexpr int BYTES = 1;
    static constexpr int GROUP = 16;
};

// LANES keys of a block from lane `lane` on, dim by dim; `open` comes before every group of dims.
template <class R>
struct Keys {
    const typename R::T* p;
    void init(const void* block, int lane, int) { p = (const typename R::T*)block + lane; }
    void open(int) {}
    vf at(int d) const { return R::at(p + d * BLOCK); }
};

template <>
struct Keys<ReadQ8> {
    const int8_t* p;
    const uint16_t* scales;
    vf scale;
    void init(const void* block, int lane, int dk) {
        p = (const int8_t*)block + lane;
        scales = (const uint16_t*)((const char*)block + BLOCK * dk) + lane;
    }
    void open(int d) { scale = load_f16(scales + d / 32 * BLOCK); }
    vf at(int d) const { return mul(load_i8(p + d * BLOCK), scale); }
};

template <>
struct Keys<ReadQ4> {
    const uint8_t *bytes, *p;
    const uint16_t* scales;
    int shift;
    vf scale;
    void init(const void* block, int lane, int dk) {
        bytes = (const uint8_t*)block + lane;
        scales = (const uint16_t*)((const char*)block + BLOCK * dk / 2) + lane;
    }
    void open(int d) {  // dims d and d + 16 of a group share their bytes
        scale = load_f16(scales + d / 32 * BLOCK);
        p = bytes + (d / 32 * 16 - d) * BLOCK;
        shift = d % 32 / 16 * 4;
    }
    vf at(int d) const { return mul(sub(load_nibble(p + d * BLOCK, shift), set1(8.0f)), scale); }
};

// N vectors of one value row from dim `offset` on, row after row.
template <class R>
struct Values {
    const typename R::T* p;
    int dims;
    Values(const ValueBlock& block, int row, int dims, int offset)
        : p((const typename R::T*)block.rows + int64_t(row) * dims + offset), dims(dims) {}
    vf at(int n) const { return R::at(p + n * LANES); }
    void next() { p += dims; }
};

template <>
struct Values<ReadQ8> {
    const int8_t* p;
    const uint16_t* scales;
    int dims, offset;
    Values(const ValueBlock& block, int row, int dims, int offset)
        : p((const int8_t*)block.rows + row * dims + offset), scales(block.scales + row * (dims / 32)), dims(dims),
          offset(offset) {}
    vf at(int n) const { return mul(load_i8(p + n * LANES), set1(half_to_float(scales[(offset + n * LANES) / 32]))); }
    void next() {
        p += dims;
        scales += dims / 32;
    }
};

template <>
struct Values<ReadQ4> {
    const uint8_t* p;
    const uint16_t* scales;
    int dims, offset;
    Values(const ValueBlock& block, int row, int dims, int offset)
        : p((const uint8_t*)block.rows + row * dims / 2), scales(block.scales + row * (dims / 32)), dims(dims),
          offset(offset) {}
    vf at(int n) const {
        const int d = offset + n * LANES;
        const vf nibbles = load_nibble(p + d / 32 * 16 + d % 16, d % 32 / 16 * 4);
        return mul(sub(nibbles, set1(8.0f)), set1(half_to_float(scales[d / 32])));
    }
    void next() {
        p += dims / 2;
        scales += dims / 32;
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
