// Attention over pages: what the driver hands to the kernels of one instruction set.
//
// A page holds `page_tokens` tokens for every layer of its group. One layer's part of a page:
//
//   K  [kv head][block of 16 tokens][dim][16 tokens]   one load gives 16 keys' value of one dim
//      q8_0: int8 [dim][16], then fp16 scales [dim/32][16]
//      q4_0: bytes [dim/2][16] (dims d and d+16 of a group of 32 share one), then the scales
//   V  [kv head][token][dim]                           one row per token
//      q8_0: int8 [token][dim], then fp16 scales [token][dim/32]; q4_0: the same with nibbles
//
// Why a result does not depend on the batch: a query walks its keys in segments of 128, aligned
// to positions. Inside a segment each score is one chain of multiply-adds over the dims and each
// output one chain over the keys; the segments are folded together in order. Tiles of queries,
// threads and splits only choose who computes which segment.
#pragma once

#include <cstdint>

namespace quire {

enum class KvType : int { f32, f16, bf16, q8_0, q4_0 };

constexpr int BLOCK = 16;
constexpr int SEGMENT = 128;
constexpr int SEGMENT_BLOCKS = SEGMENT / BLOCK;
constexpr int ROWS = 6;          // query rows (tokens x heads of a group) that are computed together, at most
constexpr int TILE_ROWS = 96;     // rows of a tile, unless one token has more
constexpr int STATE_EXTRA = 16;   // floats after a row's sums: its maximum, its total, padding
constexpr int MAX_HEAD_DIM = 1024;

struct AttentionShape {
    int n_heads, n_kv_heads, group;  // group: query heads that share a kv head
    int dk, dv, dv_padded;           // padded: to a multiple of 16, as accumulators are kept
    KvType type_k, type_v;
    float scale, softcap;
    int window;
    const float *q_norm, *k_norm;  // per-head RMS norm weights, or null
    float eps;
};

struct RopeView {
    const float* table;  // [n][n_rot]: cosines, then sines; null for no rotation
    int n_rot;
    bool neox;
};

struct PageView {
    char* base;  // of page 0
    int64_t page_bytes;
    int page_tokens;
    const int32_t* tables;  // [n_seqs][max_pages]
    int64_t max_pages;
    const int32_t *slots, *positions;  // [n_tokens]
    const int32_t* slot_positions;     // [n_seqs][max_slots], -1 for a hole; or null
    int64_t max_slots;
    const int32_t* phase;        // [n_seqs]: slot i belongs to segment (i + phase) / SEGMENT
    const int32_t *begin, *end;  // [n_tokens]: every slot a token sees lies in [begin, end)
};

// Consecutive tokens of one sequence that are attended together; or one each of several (`shared`) whose tables begin
// alike, over whole segments of that beginning. Their sums are left for the tiles that go on behind it.
struct Tile {
    int32_t seq, row, rows;
    int32_t begin, end;     // slots that any of them sees and that are this tile's
    int32_t first_segment;  // of `begin`
    int32_t segments;
    bool shared;
    int32_t sums;  // where those sums are: a row, or -1
};

struct AttendJob {
    const AttentionShape* shape;
    const PageView* pages;
    const float* q;  // [n][q_stride]
    int64_t q_stride;
    float* out;   // [n][n_heads * dv]
    float* sums;  // [n_kv_heads][n_sums][group][dv_padded + STATE_EXTRA] of shared tiles
    int64_t n_sums;
    int64_t k_offset, v_offset;
};

struct AttentionKernels {
    // Norm, rotation and storing of tokens [begin, end); `k` and `v` may be null: only q then.
    void (*prepare)(const AttentionShape&, const PageView&, const RopeView&, float* q, float* k,
                    float* v, int64_t stride, int64_t begin, int64_t end, int64_t k_offset,
                    int64_t v_offset);
    // Floats of scratch that one thread needs for tiles of at most `rows` tokens.
    int64_t (*scratch)(const AttentionShape&, int rows);
    // Segments [from, to) of a tile and one kv head. With `partial` ([segments][rows of the
    // tile][dv_padded + STATE_EXTRA]) they are left there for `join`, otherwise the result is written.
    void (*attend)(const AttendJob&, const Tile&, int head, int from, int to, float* partial,
                   float* scratch);
    void (*join)(const AttendJob&, const Tile&, int head, float* partial);
    // Rotates the keys of one layer's K part; token t by row t of the table unless skip[t].
    void (*rotate)(const AttentionShape&, const RopeView&, char* part, int page_tokens,
                   const bool* skip);
};

namespace portable {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}
namespace neon {
extern const AttentionKernels attention_kernels;
}

}  // namespace quire
