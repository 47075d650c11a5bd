// Room for the activations of a product; matmul.h says how a panel is laid out.
#pragma once

#include <algorithm>

#include "matrix.h"
#include "pieces.h"

namespace quire {

// Some panels of so many tokens, and room for each thread, in one array.
struct Panels {
    Array memory;
    int64_t tokens;                        // of one panel
    int64_t quantized_bytes, float_bytes;  // of one token; 0 for what no part needs
    uint8_t *quantized, *floats;           // the first panel's
    float* rooms;
    int64_t room;  // floats of one thread

    uint8_t* quantized_of(int panel) const { return quantized + panel * tokens * quantized_bytes; }
    uint8_t* floats_of(int panel) const { return floats + panel * tokens * float_bytes; }
};

// Bytes of one token in the panels of a product; 0 for what no part needs.
struct TokenBytes {
    int64_t quantized, floats;
};

inline TokenBytes token_bytes(const MatmulKernels& kernels, const Matrix& w, bool exact) {
    TokenBytes bytes{0, 0};
    for (const Part& part : w.parts)
        if (is_dense(part.tile) || exact) bytes.floats = kernels.float_bytes(w.cols);
        else bytes.quantized = kernels.quantized_bytes(w.cols);
    return bytes;
}

inline Panels take_panels(Cpu& cpu, const Matrix& w, int64_t tokens, int64_t panels, bool exact) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    const TokenBytes bytes = token_bytes(kernels, w, exact);
    const int64_t room = w.cols * (exact ? kernels.lanes : 1), all = panels * tokens;
    Array memory = cpu.array(1, all * (bytes.quantized + bytes.floats) / 4 + cpu.pool.size() * room);
    uint8_t* at = reinterpret_cast<uint8_t*>(memory.data);
    return {std::move(memory), tokens, bytes.quantized, bytes.floats, at, at + all * bytes.quantized,
            reinterpret_cast<float*>(at + all * (bytes.quantized + bytes.floats)), room};
}

// How n tokens are multiplied. Where each thread has enough of its own, it reads all weights and shares no line with
// others. Where there are too few, or rows enough to make up for it, threads share the rows, and each lays the same
// tokens out for itself.
struct Strips {
    int64_t tokens;  // at a time
    int64_t panel;   // tokens of a thread's panel: no fewer for more tokens, as whoever plans memory expects
};

inline Strips strips_of(Cpu& cpu, const Matrix& w, int64_t n, bool exact) {
    const TokenBytes bytes = token_bytes(matmul_kernels(cpu.isa), w, exact);
    const int64_t most = std::max<int64_t>(PANEL_BYTES / (bytes.quantized + bytes.floats) / 4, 1) * 4;
    const int64_t threads = w.rows < MANY_ROWS * cpu.pool.size() ? cpu.pool.size() : 1;  // that may have their own
    const int64_t shares = std::clamp<int64_t>(n / ENOUGH_TOKENS, 1, threads);
    const int64_t strips = (n + most * shares - 1) / (most * shares) * shares;
    auto fours = [&](int64_t parts) { return (n + 4 * parts - 1) / (4 * parts) * 4; };  // of n in parts, rounded up
    return {fours(strips), std::min(most, std::max(fours(threads), std::min(fours(1), 2 * ENOUGH_TOKENS)))};
}

// Tokens that a thread lays out in a panel at a time: those of a group lie in the same cache lines, so
// whole groups where there are enough of them, and else as few threads in one as can be.
inline int64_t tokens_at_once(Cpu& cpu, int64_t n) {
    const int64_t step = matmul_kernels(cpu.isa).token_step, share = n / cpu.pool.size();
    return share < step ? std::max<int64_t>(share, 1) : std::max(step, share / 8 / step * step);
}

}  // namespace quire
