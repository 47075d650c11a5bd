#include "pack.h"

#include <cstring>

namespace quire {
namespace {

uint32_t word(const uint8_t* p) {
    uint32_t w;
    std::memcpy(&w, p, 4);
    return w;
}
uint64_t eight(const uint8_t* p) {
    uint64_t w;
    std::memcpy(&w, p, 8);
    return w;
}

constexpr uint32_t each(uint32_t byte) { return byte * 0x01010101u; }

// The bits of each of eight bytes from `at` up, as many as mask has.
constexpr uint64_t field(uint64_t w, int at, uint64_t mask) { return (w >> at) & mask * 0x0101010101010101u; }

// Where one row of one tile goes.
struct Place {
    uint8_t* tile;
    int lanes, row;
    int planes;  // bytes before the weights

    void byte(int at, uint8_t value) const { tile[at * lanes + row] = value; }
    void half(int at, const uint8_t* value) const { std::memcpy(tile + at * lanes + 2 * row, value, 2); }
    void plane(int n, uint32_t value) const { std::memcpy(tile + planes + (n * lanes + row) * 4, &value, 4); }
};

// 32 weights, eight to a word in the order of the columns, into the planes of tiles.h.
template <int BITS>
inline void put_weights(const uint64_t (&q)[4], const Place& to) {
    constexpr int low = BITS >= 4 ? 4 : 0;
    int next = 0;
    if constexpr (BITS >= 4)
        for (int i = 0; i < 2; i++) {
            const uint64_t nibbles = field(q[i], 0, 15) | field(q[2 + i], 0, 15) << 4;
            to.plane(next++, uint32_t(nibbles));
            to.plane(next++, uint32_t(nibbles >> 32));
        }
    if constexpr (BITS == 2 || BITS == 3 || BITS == 6)
        for (int h = 0; h < 4; h += 2) {
            const uint64_t pairs = field(q[h], low, 3) | field(q[h + 1], low, 3) << 4;  // of v = 0, 2 and 1, 3
            to.plane(next++, uint32_t(pairs) | uint32_t(pairs >> 32) << 2);
        }
    if constexpr (BITS == 3 || BITS == 5) {
        uint64_t bits = 0;  // of even v and odd v
        for (int i = 0; i < 4; i++) bits |= field(q[i], BITS - 1, 1) << 2 * i;
        to.plane(next++, uint32_t(bits) | uint32_t(bits >> 32) << 1);
    }
}

// Sixteen bytes whose low nibbles are columns 0…15 and whose high ones are 16…31.
inline void put_nibbles(const uint8_t* qs, const Place& to) {
    for (int v = 0; v < 4; v++) to.plane(v, word(qs + 4 * v));
}

// 32 bits in the order of the columns.
inline uint32_t bit_plane(uint32_t bits) {
    uint32_t plane = 0;
    for (int v = 0; v < 8; v++) plane |= (((bits >> 4 * v) & 15) * 0x00204081u & each(1)) << v;
    return plane;
}

// The 6-bit scale and minimum of group g in the 12 bytes of Q4_K and Q5_K.
uint8_t k_scale(const uint8_t* s, int g) { return g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4; }
uint8_t k_min(const uint8_t* s, int g) { return g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4; }

// One struct per format: `super` writes what stands before 256 columns, `group` writes the g-th
// 32 columns of the block b.
struct Q4_0 {
    static constexpr int block = 32, bytes = 18;
    static constexpr Tile tile = Tile::q4;
    static void group(const uint8_t* b, int, const Place& to) {
        to.half(0, b);
        put_nibbles(b + 2, to);
    }
};

struct IQ4_NL : Q4_0 {
    static constexpr Tile tile = Tile::q4t;
};

struct Q4_1 {
    static constexpr int block = 32, bytes = 20;
    static constexpr Tile tile = Tile::q4m;
    static void group(const uint8_t* b, int, const Place& to) {
        to.half(0, b);
        to.half(2, b + 2);
        put_nibbles(b + 4, to);
    }
};

struct Q5_0 {
    static constexpr int block = 32, bytes = 22;
    static constexpr Tile tile = Tile::q5;
    static void group(const uint8_t* b, int, const Place& to) {
        to.half(0, b);
        put_nibbles(b + 6, to);
        to.plane(4, bit_plane(word(b + 2)));
    }
};

struct Q5_1 {
    static constexpr int block = 32, bytes = 24;
    static constexpr Tile tile = Tile::q5m;
    static void group(const uint8_t* b, int, const Place& to) {
        to.half(0, b);
        to.half(2, b + 2);
        put_nibbles(b + 8, to);
        to.plane(4, bit_plane(word(b + 4)));
    }
};

struct Q8_0 {
    static constexpr int block = 32, bytes = 34;
    static constexpr Tile tile = Tile::q8;
    static void group(const uint8_t* b, int, const Place& to) {
        to.half(0, b);
        for (int v = 0; v < 8; v++) to.plane(v, word(b + 2 + 4 * v) ^ each(128));
    }
};

struct Q2_K {
    static constexpr int block = 256, bytes = 84;
    static constexpr Tile tile = Tile::q2k;
    static void super(const uint8_t* b, const Place& to) {
        to.half(0, b + 80);
        to.half(2, b + 82);
    }
    static void group(const uint8_t* b, int g, const Place& to) {
        to.byte(0, b[2 * g]);
        to.byte(1, b[2 * g + 1]);
        uint64_t q[4];
        for (int i = 0; i < 4; i++) q[i] = field(eight(b + 16 + g / 4 * 32 + 8 * i), g % 4 * 2, 3);
        put_weights<2>(q, to);
    }
};

struct Q3_K {
    static constexpr int block = 256, bytes = 110;
    static constexpr Tile tile = Tile::q3k;
    static void super(const uint8_t* b, const Place& to) { to.half(0, b + 108); }
    static uint8_t scale(const uint8_t* s, int i) {
        const int low = (s[i % 8] >> i / 8 * 4) & 15, high = (s[8 + i % 4] >> i / 4 * 2) & 3;
        return uint8_t((low | high << 4) - 32);
    }
    static void group(const uint8_t* b, int g, const Place& to) {
        to.byte(0, scale(b + 96, 2 * g));
        to.byte(1, scale(b + 96, 2 * g + 1));
        uint64_t q[4];
        for (int i = 0; i < 4; i++)
            q[i] = field(eight(b + 32 + g / 4 * 32 + 8 * i), g % 4 * 2, 3) | field(eight(b + 8 * i), g, 1) << 2;
        put_weights<3>(q, to);
    }
};

struct Q4_K {
    static constexpr int block = 256, bytes = 144;
    static constexpr Tile tile = Tile::q4k;
    static void super(const uint8_t* b, const Place& to) {
        to.half(0, b);
        to.half(2, b + 2);
    }
    static void group(const uint8_t* b, int g, const Place& to) {
        to.byte(0, k_scale(b + 4, g));
        to.byte(1, k_min(b + 4, g));
        uint64_t q[4];
        for (int i = 0; i < 4; i++) q[i] = field(eight(b + 16 + g / 2 * 32 + 8 * i), g % 2 * 4, 15);
        put_weights<4>(q, to);
    }
};

struct Q5_K : Q4_K {
    static constexpr int bytes = 176;
    static constexpr Tile tile = Tile::q5k;
    static void group(const uint8_t* b, int g, const Place& to) {
        to.byte(0, k_scale(b + 4, g));
        to.byte(1, k_min(b + 4, g));
        uint64_t q[4];
        for (int i = 0; i < 4; i++)
            q[i] = field(eight(b + 48 + g / 2 * 32 + 8 * i), g % 2 * 4, 15) | field(eight(b + 16 + 8 * i), g, 1) << 4;
        put_weights<5>(q, to);
    }
};

struct Q6_K {
    static constexpr int block = 256, bytes = 210;
    static constexpr Tile tile = Tile::q6k;
    static void super(const uint8_t* b, const Place& to) { to.half(0, b + 208); }
    static void group(const uint8_t* b, int g, const Place& to) {
        to.byte(0, b[192 + 2 * g]);
        to.byte(1, b[192 + 2 * g + 1]);
        const uint8_t *ql = b + g / 4 * 64 + g % 2 * 32, *qh = b + 128 + g / 4 * 32;
        uint64_t q[4];
        for (int i = 0; i < 4; i++)
            q[i] = field(eight(ql + 8 * i), g % 4 / 2 * 4, 15) | field(eight(qh + 8 * i), g % 4 * 2, 3) << 4;
        put_weights<6>(q, to);
    }
};

struct IQ4_XS {
    static constexpr int block = 256, bytes = 136;
    static constexpr Tile tile = Tile::q4tk;
    static void super(const uint8_t* b, const Place& to) { to.half(0, b); }
    static void group(const uint8_t* b, int g, const Place& to) {
        const int low = (b[4 + g / 2] >> g % 2 * 4) & 15, high = ((b[2] | b[3] << 8) >> 2 * g) & 3;
        to.byte(0, uint8_t((low | high << 4) - 32));
        put_nibbles(b + 8 + 16 * g, to);
    }
};

template <class F>
void pack_quantized(const uint8_t* file, int64_t rows, int64_t cols, int lanes, uint8_t* out, int64_t begin,
                    int64_t end) {
    constexpr Scales scales = layout_of(F::tile).scales;
    const int planes = scale_bytes(scales) * lanes;
    const int64_t tile = planes + 4 * layout_of(F::tile).bits * lanes, file_row = cols / F::block * F::bytes;
    for (int64_t block = begin; block < end; block++) {
        uint8_t* to = out + block * block_bytes(F::tile, lanes, cols);
        for (int r = 0; r < lanes && block * lanes + r < rows; r++) {
            const uint8_t* from = file + (block * lanes + r) * file_row;
            uint8_t* at = to;
            for (int64_t k = 0; k < cols; k += F::block, from += F::bytes) {
                if constexpr (F::block == 256) {
                    F::super(from, Place{at, lanes, r, 0});
                    at += super_bytes(scales) * lanes;
                }
                for (int g = 0; g < F::block / 32; g++, at += tile) F::group(from, g, Place{at, lanes, r, planes});
            }
        }
    }
}

template <class Element, Tile F>
void pack_dense(const uint8_t* file, int64_t rows, int64_t cols, int lanes, uint8_t* out, int64_t begin, int64_t end) {
    constexpr int64_t size = sizeof(Element), strip = 32;  // columns whose tile stays in the first cache
    for (int64_t block = begin; block < end; block++) {
        uint8_t* to = out + block * block_bytes(F, lanes, cols);
        for (int64_t from = 0; from < cols; from += strip)
            for (int r = 0; r < lanes && block * lanes + r < rows; r++) {
                const uint8_t* row = file + (block * lanes + r) * cols * size;
                for (int64_t k = from; k < cols && k < from + strip; k++)
                    std::memcpy(to + (k * lanes + r) * size, row + k * size, size);
            }
    }
}

template <class F>
constexpr FileFormat quantized(int id, const char* name) {
    return {id, name, F::block, F::bytes, F::tile, pack_quantized<F>};
}

constexpr FileFormat formats[] = {
    {0, "F32", 1, 4, Tile::f32, pack_dense<uint32_t, Tile::f32>},
    {1, "F16", 1, 2, Tile::f16, pack_dense<uint16_t, Tile::f16>},
    {30, "BF16", 1, 2, Tile::bf16, pack_dense<uint16_t, Tile::bf16>},
    quantized<Q4_0>(2, "Q4_0"),    quantized<Q4_1>(3, "Q4_1"),      quantized<Q5_0>(6, "Q5_0"),
    quantized<Q5_1>(7, "Q5_1"),    quantized<Q8_0>(8, "Q8_0"),      quantized<Q2_K>(10, "Q2_K"),
    quantized<Q3_K>(11, "Q3_K"),   quantized<Q4_K>(12, "Q4_K"),     quantized<Q5_K>(13, "Q5_K"),
    quantized<Q6_K>(14, "Q6_K"),   quantized<IQ4_NL>(20, "IQ4_NL"), quantized<IQ4_XS>(23, "IQ4_XS"),
};

}  // namespace

const FileFormat* file_format(int id) {
    for (const FileFormat& format : formats)
        if (format.id == id) return &format;
    return nullptr;
}

}  // namespace quire
