// NumPy arrays as arguments.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>

namespace quire {

template <class T, int dims>
using Values = nanobind::ndarray<const T, nanobind::ndim<dims>, nanobind::c_contig, nanobind::device::cpu>;

using Ints = Values<int32_t, 1>;
using IntRows = Values<int32_t, 2>;
using Longs = Values<int64_t, 1>;
using Doubles = Values<double, 1>;
using Floats = Values<float, 1>;
using FloatRows = Values<float, 2>;

}  // namespace quire
