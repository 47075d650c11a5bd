// The product that ends a model: see linear_int16.cpp.
#pragma once

#include "matrix.h"

namespace quire {

// out = w · rms_norm(x) with activations of 16 bits. Arguments are checked by the caller.
void linear_int16(Cpu& cpu, const Array& x, const Matrix& w, const float* norm, float eps, Array& out);

}  // namespace quire
