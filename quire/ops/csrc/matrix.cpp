#include "matrix.h"

#include <algorithm>
#include <utility>

#include "panels.h"
#include "pieces.h"

namespace quire {
namespace {

int64_t blocks_of(const Matrix& w, int lanes) {
    int64_t blocks = 0;
    for (const Part& part : w.parts) blocks += blocks_of(part, lanes);
    return blocks;
}

// Calls f(part, begin, end) for the pieces of [begin, end) among the row blocks of all parts.
template <class F>
void for_blocks(const Matrix& w, int lanes, int64_t begin, int64_t end, F&& f) {
    for (const Part& part : w.parts) {
        const int64_t blocks = blocks_of(part, lanes);
        if (begin < blocks && end > 0) f(part, std::max<int64_t>(begin, 0), std::min(end, blocks));
        begin -= blocks;
        end -= blocks;
    }
}

const Part& part_of(const Matrix& w, int64_t row) {
    size_t i = 0;
    while (row >= w.parts[i].first_row + w.parts[i].rows) i++;
    return w.parts[i];
}

// What is in a thread's panel, in a line of its own.
struct alignas(64) LaidOut {
    int64_t strip = -1;
};

// Lays tokens [begin, end) out in a thread's own panel, after what is fused in front of the product.
void lay_out(const MatmulKernels& kernels, const Array& x, int64_t cols, const Linear& options, const Panels& panels,
             int64_t begin, int64_t end, int thread) {
    float* room = panels.rooms + thread * panels.room;
    for (int64_t t = begin; t < end; t++) {
        const float* row = x.row(t);
        if (options.norm) kernels.rms_norm(row, options.norm, options.eps, cols, room);
        if (options.act != Act::none) kernels.act_mul(row, options.act, cols, room);
        if (options.norm || options.act != Act::none) row = room;
        if (panels.quantized_bytes)
            kernels.put_quantized(row, cols, panels.quantized_of(thread), t - begin, end - begin);
        if (panels.float_bytes) kernels.put_float(row, cols, panels.floats_of(thread), t - begin, end - begin);
    }
}

}  // namespace

const MatmulKernels& matmul_kernels(Isa isa) {
#if defined(QUIRE_X86)
    if (isa == Isa::avx512) return avx512::matmul_kernels;
#if defined(QUIRE_HAS_AVX_VNNI)
    if (isa == Isa::avx_vnni) return avx_vnni::matmul_kernels;
#endif
    if (isa == Isa::avx2) return avx2::matmul_kernels;
#elif defined(QUIRE_ARM)
    if (isa == Isa::i8mm) return i8mm::matmul_kernels;
    if (isa == Isa::neon) return neon::matmul_kernels;
#endif
    (void)isa;
    return portable::matmul_kernels;
}

int64_t packed_bytes(Isa isa, const FileFormat& format, int64_t rows, int64_t cols) {
    const int lanes = matmul_kernels(isa).lanes;
    return (rows + lanes - 1) / lanes * block_bytes(format.tile, lanes, cols);
}

Matrix pack(Cpu& cpu, const std::vector<FilePart>& files) {
    const int lanes = matmul_kernels(cpu.isa).lanes;
    int64_t bytes = 0;
    for (const FilePart& file : files) bytes += packed_bytes(cpu.isa, *file.format, file.rows, file.cols);
    Matrix w{cpu.isa, 0, files[0].cols, {}, cpu.tiles.take(bytes)};
    uint8_t* at = w.memory.data();
    for (const FilePart& file : files) {
        const int64_t stride = block_bytes(file.format->tile, lanes, file.cols);
        const int64_t blocks = (file.rows + lanes - 1) / lanes;
        cpu.pool.parallel(blocks, std::max<int64_t>(1, blocks / (8 * cpu.pool.size())),
                          [&](int64_t begin, int64_t end, int) {
                              file.format->pack(file.data, file.rows, file.cols, lanes, at, begin, end);
                          });
        w.parts.push_back({file.format->tile, file.rows, file.cols, w.rows, stride, at});
        w.rows += file.rows;
        at += blocks * stride;
    }
    return w;
}

void unpack(const Matrix& w, float* out) {
    const MatmulKernels& kernels = matmul_kernels(w.isa);
    const int64_t lanes = kernels.lanes, cols = w.cols;
    std::vector<float> scratch(size_t(cols * lanes));
    for (const Part& part : w.parts)
        for (int64_t block = 0; block < blocks_of(part, int(lanes)); block++) {
            kernels.unpack(part.tile, part.blocks + block * part.stride, cols, scratch.data());
            for (int64_t r = 0; r < lanes && block * lanes + r < part.rows; r++)
                for (int64_t k = 0; k < cols; k++)
                    out[(part.first_row + block * lanes + r) * cols + k] = scratch[size_t(k * lanes + r)];
        }
}

void embed(Cpu& cpu, const Matrix& w, const int32_t* ids, int64_t n, float scale, float* out) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    const int64_t lanes = kernels.lanes, cols = w.cols;
    Array scratch = cpu.array(cpu.pool.size(), cols * lanes);
    cpu.pool.parallel(n, 8, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t i = begin; i < end; i++) {
            const Part& part = part_of(w, ids[i]);
            const int64_t row = ids[i] - part.first_row;
            kernels.unpack(part.tile, part.blocks + row / lanes * part.stride, cols, scratch.row(thread));
            const float* values = scratch.row(thread) + row % lanes;
            for (int64_t k = 0; k < cols; k++) out[i * cols + k] = values[k * lanes] * scale;
        }
    });
}

void linear(Cpu& cpu, const Array& x, const Matrix& w, const Linear& options, Array& out) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    const int64_t n = x.rows, blocks = blocks_of(w, kernels.lanes);
    if (n == 0) return;
    const bool exact = cpu.exact || options.exact;
    const Strips cut = strips_of(cpu, w, n, exact);
    const int64_t strip = cut.tokens, strips = (n + strip - 1) / strip;
    const Panels panels = take_panels(cpu, w, cut.panel, cpu.pool.size(), exact);
    auto multiply = [&](const Part& part, int64_t block, int64_t last, int64_t token, int64_t tokens, int thread) {
        const bool floats = is_dense(part.tile) || exact;
        const Product product{part,
                              floats ? panels.floats_of(thread) : panels.quantized_of(thread),
                              floats ? panels.float_bytes : panels.quantized_bytes,
                              options.bias ? options.bias + part.first_row : nullptr,
                              out.row(options.pairs ? token / 2 : token) + part.first_row,
                              out.cols,
                              options.add,
                              options.pairs};
        if (floats && !is_dense(part.tile))
            kernels.multiply_exact(product, block, last, 0, tokens, panels.rooms + thread * panels.room);
        else kernels.multiply(product, block, last, 0, tokens);
    };

    // Neighbouring blocks are fetched while others are computed, so a piece is some of them.
    const int64_t least = n < kernels.token_step ? CHUNK_BYTES / w.parts[0].stride : 3;
    std::vector<LaidOut> laid_out(size_t(cpu.pool.size()));
    in_pieces(cpu.pool, strips * blocks, least, [&](int64_t begin, int64_t end, int thread) {
        while (begin < end) {  // all row blocks of one strip of tokens, then the next strip
            const int64_t i = begin / blocks, token = i * strip, last = std::min(end, (i + 1) * blocks);
            const int64_t tokens = std::min(n - token, strip);
            if (std::exchange(laid_out[size_t(thread)].strip, i) != i)
                lay_out(kernels, x, w.cols, options, panels, token, token + tokens, thread);
            for_blocks(w, kernels.lanes, begin - i * blocks, last - i * blocks,
                       [&](const Part& part, int64_t from, int64_t to) {
                           multiply(part, from, to, token, tokens, thread);
                       });
            begin = last;
        }
    });
}

void rms_norm(Cpu& cpu, const Array& x, const float* weight, float eps, Array& out) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    cpu.pool.parallel(x.rows, 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; t++) kernels.rms_norm(x.row(t), weight, eps, x.cols, out.row(t));
    });
}

void add_norm(Cpu& cpu, const Array& x, const float* weight, float eps, Array& into) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    cpu.pool.parallel(x.rows, 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; t++) kernels.add_norm(x.row(t), weight, eps, x.cols, into.row(t));
    });
}

void softcap(Cpu& cpu, float cap, Array& x) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    cpu.pool.parallel(x.rows, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; t++) kernels.softcap(x.row(t), cap, x.cols);
    });
}

void act_mul(Cpu& cpu, const Array& x, Act act, Array& out) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    cpu.pool.parallel(x.rows, 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; t++) kernels.act_mul(x.row(t), act, out.cols, out.row(t));
    });
}

}  // namespace quire
