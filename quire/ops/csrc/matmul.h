// The kernels of the matrix products, one table per instruction set.
//
// Activations are laid out for the kernels in a *panel*: the n tokens of a call in groups of
// T tokens (as many of the largest T as fit, then 4, 2, 1), each group one contiguous piece with
// what its T tokens need next to each other. A token takes `token_bytes` in a panel of any
// grouping, so a group starts at its first token's number × token_bytes.
//
// An output element is the same whatever n: its integer dot products are exact, and its tiles are
// added one after the other from column 0, by the same operations in every kernel.
#pragma once

#include <cstdint>

#include "tiles.h"

namespace quire {

// One part of a matrix times all tokens of a call.
struct Product {
    Part part;
    const uint8_t* panel;  // of int8 activations, or float32 for dense tiles and exact products
    int64_t token_bytes;
    const float* bias;     // of this part's rows, or null
    float* out;            // column of the part's first row, row 0
    int64_t out_stride;    // floats from one token to the next
    bool add;              // add to what is there
    bool pairs = false;    // tokens come in pairs whose results are added: out has one row for both
};

enum class Act : uint8_t { none, silu_mul, gelu_mul };

struct MatmulKernels {
    int lanes;       // rows of a tile
    int token_step;  // token ranges of `multiply` and `multiply_exact` begin at multiples of this

    // Bytes of one token in a panel of int8 or of float32 activations.
    int64_t (*quantized_bytes)(int64_t cols);
    int64_t (*float_bytes)(int64_t cols);
    // Writes one token's row into its place in a panel of n tokens.
    void (*put_quantized)(const float* row, int64_t cols, uint8_t* panel, int64_t token, int64_t n);
    void (*put_float)(const float* row, int64_t cols, uint8_t* panel, int64_t token, int64_t n);

    // Row blocks [block, block_end) × tokens [token, token_end) of a product.
    void (*multiply)(const Product& p, int64_t block, int64_t block_end, int64_t token, int64_t token_end);
    // The same with quantised tiles and float32 activations; scratch holds cols × lanes floats.
    void (*multiply_exact)(const Product& p, int64_t block, int64_t block_end, int64_t token,
                           int64_t token_end, float* scratch);

    // One row block as float32 [cols][lanes], each value as the file's format defines it.
    void (*unpack)(Tile tile, const uint8_t* block, int64_t cols, float* out);

    // out = x · rsqrt(mean(x²) + eps) · weight
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t cols, float* out);
    // into += x · rsqrt(mean(x²) + eps) · weight
    void (*add_norm)(const float* x, const float* weight, float eps, int64_t cols, float* into);
    // x = cap · tanh(x / cap)
    void (*softcap)(float* x, float cap, int64_t cols);
    // out = act(x[0, cols)) · x[cols, 2·cols)
    void (*act_mul)(const float* x, Act act, int64_t cols, float* out);
};

namespace portable { extern const MatmulKernels matmul_kernels; }
namespace avx2 { extern const MatmulKernels matmul_kernels; }
namespace avx_vnni { extern const MatmulKernels matmul_kernels; }
namespace avx512 { extern const MatmulKernels matmul_kernels; }
namespace neon { extern const MatmulKernels matmul_kernels; }
namespace i8mm { extern const MatmulKernels matmul_kernels; }

}  // namespace quire
