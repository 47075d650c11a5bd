// Matrix products, unpacking and what is fused in front of them; see tiles.h and matmul.h.
//
// Compiled once per instruction set: everything here is static or in the namespace of one, so that
// the linker can never take another instruction set's copy.
#include "matmul.h"

#if defined(QUIRE_AVX512) || defined(QUIRE_AVX_VNNI)
#include "dot_vnni.h"
#elif defined(QUIRE_NEON)
#include "dot_neon.h"
#else
#include "dot_int16.h"
#endif

#include "dense.h"

namespace quire::QUIRE_ISA {
namespace {

// The largest token group in a panel of int8 or float32 activations.
constexpr int largest(bool floats) { return floats ? FLOAT_TOKENS : INT8_TOKENS; }

// One row block × one token group; out has T rows of LANES. What lies `ahead` of w is fetched on the way.
using Kernel = void (*)(const uint8_t* w, int64_t cols, const uint8_t* x, float* out, int64_t stride, int64_t ahead);

template <Tile F, int T>
inline void add_tile(const uint8_t* w, const uint8_t* x, vf d, vf dmin, vf (&acc)[T]) {
    const uint8_t* planes = w + scale_bytes(layout_of(F).scales) * LANES;
    if constexpr (has_halves<F>) {
        add_tile16<F, T>(w, planes, x, d, dmin, acc);
    } else {
        vi dot[T];
        dots<F, T>(planes, x, dot);
        const vf scale = mul(tile_scale<F>(w, d), set1(1.0f / (1 << lift<F>)));
        const vf min = tile_min<F>(w, dmin);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
            acc[t] = fma(mul(to_float(dot[t]), set1(word_f32(x + Record::scale<T> + 4 * t))), scale, acc[t]);
            if constexpr (has_min<F>) acc[t] = fma(min, set1(word_f32(x + Record::scaled_sum<T> + 4 * t)), acc[t]);
        }
    }
}

template <Tile F, int T>
void quantized(const uint8_t* w, int64_t cols, const uint8_t* x, float* out, int64_t stride, int64_t ahead) {
    constexpr Scales scales = layout_of(F).scales;
    constexpr int64_t tile = (scale_bytes(scales) + 4 * layout_of(F).bits) * LANES;
    constexpr int64_t super = super_bytes(scales) * LANES;
    vf acc[T], d = zero(), dmin = zero();
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) acc[t] = zero();
    for (int64_t k = 0; k < cols;) {
        if constexpr (super != 0) {
            d = load_f16(halfs(w));
            if constexpr (has_min<F>) dmin = load_f16(halfs(w + 2 * LANES));
            w += super;
        }
        const int64_t end = super != 0 ? k + 256 : cols;
        for (; k < end; k += 32) {
            fetch<tile, T * (LANES == 16 ? 10 : 7)>(w + ahead);
            add_tile<F, T>(w, x, d, dmin, acc);
            w += tile;
            x += Record::bytes * T;
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) store(out + t * stride, acc[t]);
}

template <Tile F, int T>
constexpr Kernel kernel_of() {
    if constexpr (is_dense(F)) return dense<F, T>;
    else return quantized<F, T>;
}

#define TILES(X) X(q2k), X(q3k), X(q4), X(q4m), X(q4t), X(q4k), X(q4tk), X(q5), X(q5m), X(q5k), X(q6k), \
                 X(q8), X(f16), X(bf16), X(f32)
#define KERNELS(F) {kernel_of<Tile::F, 1>(), kernel_of<Tile::F, 2>(), kernel_of<Tile::F, 4>(), \
                    kernel_of<Tile::F, largest(is_dense(Tile::F))>()}
constexpr Kernel kernels[][4] = {TILES(KERNELS)};

inline int group_size(int64_t left, bool floats) {
    return left >= largest(floats) ? largest(floats) : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}
inline Kernel kernel(Tile tile, int size) {
    return kernels[int(tile)][size == 4 ? 2 : size > 4 ? 3 : size - 1];
}

// The group of a token among n: its first token and its size.
inline int64_t group_of(int64_t token, int64_t n, bool floats, int& size) {
    int64_t first = token / largest(floats) * largest(floats);
    size = group_size(n - first, floats);
    while (token >= first + size) {
        first += size;
        size = group_size(n - first, floats);
    }
    return first;
}

void finish(const Product& p, int64_t block, int64_t token, int tokens, const float* sums) {
    const int64_t row = block * LANES, rows = p.part.rows - row;
    const int step = p.pairs ? 2 : 1;  // groups have even sizes then
    float* out = p.out + (p.pairs ? token / 2 : token) * p.out_stride + row;
    for (int t = 0; t < tokens; t += step, sums += step * LANES, out += p.out_stride) {
        if (rows >= LANES) {
            vf value = load(sums);
            if (p.pairs) value = add(value, load(sums + LANES));
            if (p.bias) value = add(value, load(p.bias + row));
            if (p.add) value = add(load(out), value);
            store(out, value);
            continue;
        }
        for (int64_t r = 0; r < rows; r++) {
            const float sum = p.pairs ? sums[r] + sums[LANES + r] : sums[r];
            const float value = p.bias ? sum + p.bias[row + r] : sum;
            out[r] = p.add ? out[r] + value : value;
        }
    }
}

void block_times_tokens(const Product& p, Tile tile, const uint8_t* w, int64_t ahead, int64_t block, int64_t token,
                        int64_t token_end) {
    alignas(64) float sums[TOKEN_STEP * LANES];
    const int64_t row = block * LANES;
    const bool finished = !p.bias && !p.add && !p.pairs && row + LANES <= p.part.rows;  // as they are
    while (token < token_end) {
        const int size = group_size(token_end - token, is_dense(tile));
        float* out = finished ? p.out + token * p.out_stride + row : sums;
        kernel(tile, size)(w, p.part.cols, p.panel + token * p.token_bytes, out, finished ? p.out_stride : LANES, ahead);
        if (!finished) finish(p, block, token, size, sums);
        token += size;
        ahead = 0;
    }
}

void multiply(const Product& p, int64_t block, int64_t block_end, int64_t token, int64_t token_end) {
    const uint8_t* w = p.part.blocks + block * p.part.stride;
    if (token_end - token >= 4)  // the first block; the others are fetched while one is multiplied
        for (int64_t i = 0; i < p.part.stride; i += 64) __builtin_prefetch(w + i, 0, 2);
    for (; block < block_end; block++, w += p.part.stride)
        block_times_tokens(p, p.part.tile, w, block + 1 < block_end ? p.part.stride : 0, block, token, token_end);
}

template <Tile F, int V>
inline void unpack_vectors(const uint8_t* planes, vf scale_low, vf scale_high, vf min_low, vf min_high, float* out) {
    vi lo, hi;
    weights<F, V>(planes, lo, hi);
    unpack_columns<F>(lo, scale_low, min_low, out + 4 * V * LANES);
    unpack_columns<F>(hi, scale_high, min_high, out + (16 + 4 * V) * LANES);
}

template <Tile F>
void unpack_quantized(const uint8_t* w, int64_t cols, float* out) {
    constexpr Scales scales = layout_of(F).scales;
    constexpr int64_t super = super_bytes(scales) * LANES;
    vf d = zero(), dmin = zero();
    for (int64_t k = 0; k < cols; k += 32, out += 32 * LANES) {
        if (super != 0 && k % 256 == 0) {
            d = load_f16(halfs(w));
            if constexpr (has_min<F>) dmin = load_f16(halfs(w + 2 * LANES));
            w += super;
        }
        const vf s0 = half_scale<F>(w, 0, d), s1 = half_scale<F>(w, 1, d);
        const vf m0 = half_min<F>(w, 0, dmin), m1 = half_min<F>(w, 1, dmin);
        w += scale_bytes(scales) * LANES;
        unpack_vectors<F, 0>(w, s0, s1, m0, m1, out);
        unpack_vectors<F, 1>(w, s0, s1, m0, m1, out);
        unpack_vectors<F, 2>(w, s0, s1, m0, m1, out);
        unpack_vectors<F, 3>(w, s0, s1, m0, m1, out);
        w += 4 * layout_of(F).bits * LANES;
    }
}

using Unpack = void (*)(const uint8_t* w, int64_t cols, float* out);
template <Tile F>
constexpr Unpack unpack_of() {
    if constexpr (is_dense(F)) return unpack_dense<F>;
    else return unpack_quantized<F>;
}
#define UNPACK(F) unpack_of<Tile::F>()
constexpr Unpack unpacks[] = {TILES(UNPACK)};

void unpack(Tile tile, const uint8_t* block, int64_t cols, float* out) { unpacks[int(tile)](block, cols, out); }

void multiply_exact(const Product& p, int64_t block, int64_t block_end, int64_t token, int64_t token_end,
                    float* scratch) {
    for (; block < block_end; block++) {
        unpack(p.part.tile, p.part.blocks + block * p.part.stride, p.part.cols, scratch);
        block_times_tokens(p, Tile::f32, (const uint8_t*)scratch, 0, block, token, token_end);
    }
}

int64_t quantized_bytes(int64_t cols) { return cols / 32 * Record::bytes; }
int64_t float_bytes(int64_t cols) { return cols * 4; }

void put_quantized(const float* row, int64_t cols, uint8_t* panel, int64_t token, int64_t n) {
    int size;
    const int64_t first = group_of(token, n, false, size);
    uint8_t* record = panel + first * quantized_bytes(cols);
    for (int64_t k = 0; k < cols; k += 32, record += size * Record::bytes)
        put_group(row + k, record, int(token - first), size);
}

void put_float(const float* row, int64_t cols, uint8_t* panel, int64_t token, int64_t n) {
    int size;
    const int64_t first = group_of(token, n, true, size);
    float* out = (float*)(panel + first * float_bytes(cols)) + (token - first);
    for (int64_t k = 0; k < cols; k++) out[k * size] = row[k];
}

float mean_square(const float* x, int64_t cols) {
    vf sums[4] = {zero(), zero(), zero(), zero()};
    int64_t k = 0;
    for (; k + 4 * LANES <= cols; k += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            const vf a = load(x + k + i * LANES);
            sums[i] = fma(a, a, sums[i]);
        }
    float total = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    for (; k < cols; k++) total += x[k] * x[k];
    return total / float(cols);
}

void rms_norm(const float* x, const float* weight, float eps, int64_t cols, float* out) {
    const float factor = 1.0f / __builtin_sqrtf(mean_square(x, cols) + eps);
    const vf f = set1(factor);
    int64_t k = 0;
    for (; k + LANES <= cols; k += LANES) store(out + k, mul(mul(load(x + k), f), load(weight + k)));
    for (; k < cols; k++) out[k] = x[k] * factor * weight[k];
}

void add_norm(const float* x, const float* weight, float eps, int64_t cols, float* into) {
    const float factor = 1.0f / __builtin_sqrtf(mean_square(x, cols) + eps);
    const vf f = set1(factor);
    int64_t k = 0;
    for (; k + LANES <= cols; k += LANES)
        store(into + k, add(load(into + k), mul(mul(load(x + k), f), load(weight + k))));
    for (; k < cols; k++) into[k] += x[k] * factor * weight[k];
}

inline vf softcapped(vf x, float cap) {
    // cap · tanh(y) = cap - 2 cap / (1 + exp(2y))
    const vf y = exp(mul(x, set1(2.0f / cap)));
    return sub(set1(cap), div(set1(2.0f * cap), add(set1(1.0f), y)));
}

void softcap(float* x, float cap, int64_t cols) {
    int64_t k = 0;
    for (; k + LANES <= cols; k += LANES) store(x + k, softcapped(load(x + k), cap));
    if (k == cols) return;
    float rest[LANES] = {};  // the same operations for the rest
    std::memcpy(rest, x + k, size_t(cols - k) * 4);
    store(rest, softcapped(load(rest), cap));
    std::memcpy(x + k, rest, size_t(cols - k) * 4);
}

inline vf act_of(vf x, Act act) {
    if (act == Act::silu_mul) return div(x, add(set1(1.0f), exp(sub(zero(), x))));
    // 0.5 x (1 + tanh(y)) = x / (1 + exp(-2y))
    const vf y = mul(x, fma(mul(x, x), set1(-2 * 0.7978845608f * 0.044715f), set1(-2 * 0.7978845608f)));
    return div(x, add(set1(1.0f), exp(y)));
}

void act_mul(const float* x, Act act, int64_t cols, float* out) {
    int64_t k = 0;
    for (; k + LANES <= cols; k += LANES) store(out + k, mul(act_of(load(x + k), act), load(x + cols + k)));
    if (k == cols) return;
    float gate[LANES] = {}, up[LANES] = {};  // the same operations for the rest
    std::memcpy(gate, x + k, size_t(cols - k) * 4);
    std::memcpy(up, x + cols + k, size_t(cols - k) * 4);
    store(gate, mul(act_of(load(gate), act), load(up)));
    std::memcpy(out + k, gate, size_t(cols - k) * 4);
}

}  // namespace

const MatmulKernels matmul_kernels = {LANES,         TOKEN_STEP, quantized_bytes, float_bytes, put_quantized,
                                      put_float,     multiply, multiply_exact,  unpack,      rms_norm,
                                      add_norm,      softcap,  act_mul};

}  // namespace quire::QUIRE_ISA
