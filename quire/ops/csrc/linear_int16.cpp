// A product whose activations keep 16 bits: each row is followed by what its int8 groups lose, the
// pair is multiplied as two rows whose results are added. One reading of the weights serves
// both, so where that reading is the work (a few rows), the second row is nearly free.
#include "linear_int16.h"

#include <algorithm>
#include <cmath>

namespace quire {
namespace {

constexpr int64_t GROUP = 32;

// x less its int8 groups: the same arithmetic as the kernels' quantisation, so nothing is left over.
void residual(const float* x, int64_t cols, float* out) {
    for (int64_t at = 0; at < cols; at += GROUP) {
        const int64_t end = std::min(at + GROUP, cols);
        float amax = 0;
        for (int64_t k = at; k < end; k++) amax = std::max(amax, std::fabs(x[k]));
        const float d = amax < 1e-30f ? 0.0f : amax / 127.0f, inverse = d == 0 ? 0.0f : 1.0f / d;
        for (int64_t k = at; k < end; k++) out[k] = x[k] - d * std::nearbyint(x[k] * inverse);
    }
}

}  // namespace

void linear_int16(Cpu& cpu, const Array& x, const Matrix& w, const float* norm, float eps, Array& out) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    const int64_t n = x.rows;
    Array rows = cpu.array(2 * n, w.cols);
    cpu.pool.parallel(n, 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; t++) {
            kernels.rms_norm(x.row(t), norm, eps, w.cols, rows.row(2 * t));
            residual(rows.row(2 * t), w.cols, rows.row(2 * t + 1));
        }
    });
    Linear options;
    options.pairs = true;
    linear(cpu, rows, w, options, out);
}

}  // namespace quire
