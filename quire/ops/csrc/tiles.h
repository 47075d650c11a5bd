// How a matrix lies in memory: tiles of LANES rows × 32 columns, along a row block, then by block.
//
// A row block is LANES rows (16 on AVX-512, 8 elsewhere; the last one padded with zero rows). In
// a quantised one every 32 columns are a tile, its scales before its weights:
//
//     [ 256 columns: d, dmin ]  [ tile: scales, weights ] [ tile: scales, weights ] …
//
// The weights are planes of dwords, one dword per row, so that lane r of a vector is row r and
// one broadcast dword of activations (k, k+1, k+2, k+3) meets all rows at once:
//
//     nibble plane v (0…3)  byte j: column 4v+j in the low nibble, 16+4v+j in the high one
//     pair plane h (0, 1)   byte j: two bits each of columns 16h+4v+j, v = 0…3 from the low end
//     bit plane             byte j: one bit each of columns 4v+j (bit v) and 16+4v+j (bit 4+v)
//     byte plane v (0…7)    byte j: column 4v+j
//
// A weight of 2 bits is the pair planes, 3 adds the bit plane on top; 4 is the nibble planes,
// 5 and 6 add the bit plane or the pair planes on top. Weights are unsigned with a zero point.
// A dense row block is [cols][LANES] of its element.
#pragma once

#include <cstdint>

namespace quire {

enum class Tile : uint8_t { q2k, q3k, q4, q4m, q4t, q4k, q4tk, q5, q5m, q5k, q6k, q8, f16, bf16, f32 };

// What stands beside the weights of one row.
enum class Scales : uint8_t {
    none,         // dense
    half,         // f16 scale per 32
    half_min,     // f16 scale, f16 minimum per 32
    super,        // f16 d per 256; i8 scale per 32
    super_min,    // f16 d, dmin per 256; u8 scale, u8 minimum per 32
    super16,      // f16 d per 256; two i8 scales per 32, one for each 16 columns
    super16_min,  // f16 d, dmin per 256; two bytes per 32, each a 4-bit scale and a 4-bit minimum
};

struct TileLayout {
    const char* name;
    Scales scales;
    int bits;    // of one weight
    int zero;    // the weight that stands for 0
    bool table;  // weights are indices of iq4_values
};

static constexpr TileLayout tile_layouts[] = {
    {"q2k", Scales::super16_min, 2, 0, false}, {"q3k", Scales::super16, 3, 4, false},
    {"q4", Scales::half, 4, 8, false},         {"q4m", Scales::half_min, 4, 0, false},
    {"q4t", Scales::half, 4, 128, true},       {"q4k", Scales::super_min, 4, 0, false},
    {"q4tk", Scales::super, 4, 128, true},     {"q5", Scales::half, 5, 16, false},
    {"q5m", Scales::half_min, 5, 0, false},    {"q5k", Scales::super_min, 5, 0, false},
    {"q6k", Scales::super16, 6, 32, false},    {"q8", Scales::half, 8, 128, false},
    {"f16", Scales::none, 16, 0, false},       {"bf16", Scales::none, 16, 0, false},
    {"f32", Scales::none, 32, 0, false},
};
static constexpr TileLayout layout_of(Tile tile) { return tile_layouts[int(tile)]; }
static constexpr bool is_dense(Tile tile) { return layout_of(tile).scales == Scales::none; }

// The values of IQ4, + 128.
static constexpr uint8_t iq4_values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                           129, 141, 153, 166, 181, 197, 217, 241};

// Bytes of one row in one tile, before its weights, and before each 256 columns.
static constexpr int scale_bytes(Scales scales) {
    return scales == Scales::none ? 0 : scales == Scales::half_min ? 4 : scales == Scales::super ? 1 : 2;
}
static constexpr int super_bytes(Scales scales) {
    return scales == Scales::super_min || scales == Scales::super16_min ? 4
           : scales == Scales::super || scales == Scales::super16       ? 2
                                                                        : 0;
}

// Bytes of one row block.
static constexpr int64_t block_bytes(Tile tile, int lanes, int64_t cols) {
    const TileLayout layout = layout_of(tile);
    if (is_dense(tile)) return cols * lanes * (layout.bits / 8);
    return lanes * (cols / 32 * (scale_bytes(layout.scales) + 4 * layout.bits) +
                    cols / 256 * super_bytes(layout.scales));
}

// One matrix of a file as it lies in memory; a Matrix stacks several along its rows.
struct Part {
    Tile tile;
    int64_t rows, cols;
    int64_t first_row;      // of the stack
    int64_t stride;         // bytes from one row block to the next
    const uint8_t* blocks;
};

}  // namespace quire
