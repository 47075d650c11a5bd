// Room for the activations of a product; matmul.h says how a panel is laid out.
#pragma once

#include "matrix.h"

namespace quire {

// The activations of a call as the kernels read them, and room for each thread, in one array.
struct Panels {
    Array memory;
    int64_t quantized_bytes, float_bytes;  // of one token; 0 for a panel that no part needs
    uint8_t *quantized, *floats;
    float* rooms;
    int64_t room;  // floats of one thread
};

inline Panels take_panels(Cpu& cpu, const Matrix& w, int64_t n, bool exact) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    bool quantized = false, floats = false;
    for (const Part& part : w.parts) (is_dense(part.tile) || exact ? floats : quantized) = true;
    const int64_t qbytes = quantized ? kernels.quantized_bytes(w.cols) : 0;
    const int64_t fbytes = floats ? kernels.float_bytes(w.cols) : 0;
    const int64_t room = w.cols * (exact ? kernels.lanes : 1);
    Array memory = cpu.array(1, n * (qbytes + fbytes) / 4 + cpu.pool.size() * room);
    uint8_t* at = reinterpret_cast<uint8_t*>(memory.data);
    return {std::move(memory), qbytes, fbytes, at, at + n * qbytes,
            reinterpret_cast<float*>(at + n * (qbytes + fbytes)), room};
}

// Tokens that a thread lays out in a panel at a time: those of a group lie in the same cache lines, so
// whole groups where there are enough of them, and else as few threads in one as can be.
inline int64_t tokens_at_once(Cpu& cpu, int64_t n) {
    const int64_t step = matmul_kernels(cpu.isa).token_step, share = n / cpu.pool.size();
    return share < step ? std::max<int64_t>(share, 1) : std::max(step, share / 8 / step * step);
}

}  // namespace quire
