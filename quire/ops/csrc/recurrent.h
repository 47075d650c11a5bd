// Recurrent layers: what the driver hands to the kernels of one instruction set.
//
// Three kinds, of which the first two share their code. A token's raw input is a row; its first
// `channels` columns go through a causal convolution over the last `width` tokens.
//
//   delta  row [q | k | v | b | a]    S ← α S + k ⊗ u,  u = β (v - α Sᵀk)      y = Sᵀq
//   ssd    row [x | B | C | dt]       S ← α S + B ⊗ u,  u = Δ x                y = SᵀC + D x
//   conv   row [B | C | x]            entry B·x                                y = C · conv(B·x)
//
// In terms of the code: k is B, q is C, v is x, β is Δ. The state of a layer in a state page:
//
//   tail  [width - 1][channels]             raw inputs of the last tokens, oldest first
//   S     [value head][block of 16 lanes][dk][16 lanes]      from the next multiple of 64 bytes
//
// Lanes run along dv, and lanes behind dv are zeros. A block is contiguous, so a thread reads one
// stream and keeps it in its L1 cache for all tokens.
//
// Why a result does not depend on chunks, folds, drafts, batch or threads: every token is prepared
// from its raw inputs by one function, and then changes each lane by the same operations in the same
// order, one token after the other. Who computes a lane, and whether a state went through memory
// between two tokens, changes no bit.
#pragma once

#include <cstdint>

namespace quire {

constexpr int STATE_LANES = 16;
constexpr int CONV_BLOCK = 256;  // channels of a kind conv that one thread takes at a time

enum class RecurrentKind { delta, ssd, conv };

struct RecurrentShape {
    RecurrentKind kind;
    int n_k, n_v, dk, dv;  // key heads (groups), value heads, rows and lanes of a head's state
    int width;             // taps of the convolution
    bool tiled;            // value head h reads key head h % n_k, not h / (n_v / n_k)
    int64_t channels;      // the first columns of an entry, which are convolved
    int64_t entry;         // floats of a log entry
    int64_t in_cols, out_cols;
    int64_t q_at, k_at, v_at, beta_at, alpha_at;  // columns of a row; prepared rows keep the first three
    int64_t prepared_cols;                        // convolved channels, then alpha, beta and k·q by head
    float low, high;                              // limits of Δ
    const float *weight, *bias;                   // [width][channels]; [channels] or null
    const float *a, *dt_bias, *d;                 // [n_v]; d may be null

    int64_t blocks() const { return (dv + STATE_LANES - 1) / STATE_LANES; }
    int64_t head_floats() const { return blocks() * dk * STATE_LANES; }
    int64_t tail_bytes() const { return ((width - 1) * channels * 4 + 63) / 64 * 64; }
    int key_head(int h) const { return tiled ? h % n_k : h / (n_v / n_k); }
};

// One sequence in one layer. Tokens 0 … tokens-1 are those of the log, then the new ones.
struct RecurrentJob {
    const RecurrentShape* shape;
    const float* const* rows;  // entries by token; rows[-1] … rows[1 - width] are the tail's
    int64_t tokens, first_new;
    const float* x;       // input row of token `first_new`; kind conv makes the new entries from it
    char* log;            // where its entry goes, or null
    int64_t log_stride;   // bytes
    const float* state;   // S before token 0, or null for zeros
    float *state_out, *tail_out;  // S and tail after the last token, or null
    float* prepared;      // [tokens][prepared_cols]
    float* out;           // [new tokens][out_cols]

    // Pieces of the two phases that may run at the same time; the second begins when the first is done.
    int64_t units() const {
        if (shape->kind == RecurrentKind::conv) return (shape->channels + CONV_BLOCK - 1) / CONV_BLOCK;
        return shape->n_k + shape->n_v + 1;
    }
    int64_t first_pieces() const { return shape->kind == RecurrentKind::conv ? units() : units() * tokens; }
};

struct RecurrentKernels {
    int blocks;  // blocks of lanes that one call of `scan` takes
    // The preparation of tokens, a key head or a value head at a time; for kind conv all there is.
    void (*prepare)(const RecurrentJob&, int64_t begin, int64_t end);
    // Walks the tokens for `blocks` blocks of a head, from `block`; scratch: blocks * dk * 16 floats.
    void (*scan)(const RecurrentJob&, int head, int64_t block, float* scratch);
    // One row: norms over `group` columns each, with a gate after or before; weights repeat after `weights`.
    void (*gated_norm)(const float* x, const float* gate, const float* weight, float* out, int64_t cols,
                       int64_t group, int64_t weights, float eps, bool gate_first);
    void (*gate_sigmoid)(float* x, const float* gate, int64_t n);
};

namespace portable {
extern const RecurrentKernels recurrent_kernels;
}
namespace avx2 {
extern const RecurrentKernels recurrent_kernels;
}
namespace avx512 {
extern const RecurrentKernels recurrent_kernels;
}
namespace neon {
extern const RecurrentKernels recurrent_kernels;
}

}  // namespace quire
