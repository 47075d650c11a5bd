// Rows of activations on their way into a product: normed, and scaled so that no float16 overflows.

// Over all threads of a block; `room` is free again behind the next barrier.
__device__ __forceinline__ float block_sum(float v, float* room) {
  for (int o = 16; o; o >>= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, o));
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  v = room[0];
  for (int i = 1; i < THREADS / 32; ++i) v = __fadd_rn(v, room[i]);
  return v;
}

__device__ __forceinline__ float block_max(float v, float* room) {  // of numbers that are not negative
  v = __int_as_float(__reduce_max_sync(~0u, __float_as_int(v)));
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  v = room[0];
  for (int i = 1; i < THREADS / 32; ++i) v = fmaxf(v, room[i]);
  return v;
}

__device__ __forceinline__ float add_squares(float sum, float4 v) {
  sum = __fmaf_rn(v.x, v.x, sum);
  sum = __fmaf_rn(v.y, v.y, sum);
  sum = __fmaf_rn(v.z, v.z, sum);
  return __fmaf_rn(v.w, v.w, sum);
}

__device__ __forceinline__ float largest(float most, float4 v) {
  return fmaxf(fmaxf(fmaxf(most, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
}

__device__ __forceinline__ float4 normed(float4 v, float inverse, float4 w) {
  v.x = __fmul_rn(__fmul_rn(v.x, inverse), w.x);
  v.y = __fmul_rn(__fmul_rn(v.y, inverse), w.y);
  v.z = __fmul_rn(__fmul_rn(v.z, inverse), w.z);
  v.w = __fmul_rn(__fmul_rn(v.w, inverse), w.w);
  return v;
}

__device__ __forceinline__ float4 times(float4 v, float scale) {
  return {__fmul_rn(v.x, scale), __fmul_rn(v.y, scale), __fmul_rn(v.z, scale), __fmul_rn(v.w, scale)};
}

// A row of activations: x, or act(gate) · up of a row that has both.
struct Row {
  const float* x;
  int cols, act;
  __device__ __forceinline__ float4 at(int c) const {
    float4 v = row4(x, c, cols);
    return act ? activate4(act, v, row4(x + cols, c, cols)) : v;
  }
  __device__ __noinline__ float4 again(int c) const { return at(c); }
};

// The same for rows of whole fours, which lie on 16 bytes.
struct WholeRow {
  const float* x;
  int cols;
  __device__ __forceinline__ float4 at(int c) const { return load4(x + c); }
  __device__ __forceinline__ float4 again(int c) const { return at(c); }
};

// Weights of a norm, or as much of them as KEEP steps of the block hold: they can be read early.
template <int KEEP, bool WHOLE = false> struct NormWeights {
  float4 kept[KEEP];
  const float* weight;
  int cols;
  __device__ __forceinline__ NormWeights(const float* w, int n) : weight(w), cols(n) {
    if (weight)
#pragma unroll
      for (int j = 0; j < KEEP; ++j)
        if ((j * THREADS + threadIdx.x) * 4 < cols) kept[j] = at((j * THREADS + threadIdx.x) * 4);
  }
  __device__ __forceinline__ float4 at(int c) const { return WHOLE ? load4(weight + c) : row4(weight, c, cols); }
};

// Hands each four columns of a row to `put(column, values)`: normed where there are weights, and with
// SCALED times the power of two that brings the largest into [1024, 2048), so that no float16
// overflows. Returns what undoes the scale. KEEP steps of 1,024 columns are read only once, others `again`.
// Between two rows of a block there must be a barrier.
template <bool SCALED, int KEEP, bool WHOLE, class Source, class Put>
__device__ __forceinline__ float stage(const Source& row, const NormWeights<KEEP, WHOLE>& norm, float eps, Put put) {
  __shared__ float room[2][THREADS / 32];
  float4 v[KEEP];
  const int first = threadIdx.x * 4, step = THREADS * 4, kept = KEEP * step;
#pragma unroll
  for (int j = 0; j < KEEP; ++j) v[j] = j * step + first < row.cols ? row.at(j * step + first) : float4{0, 0, 0, 0};
  float inverse = 1.0f;
  if (norm.weight) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < KEEP; ++j) sum = add_squares(sum, v[j]);
    for (int c = kept + first; c < row.cols; c += step) sum = add_squares(sum, row.again(c));
    float mean = __fdiv_rn(block_sum(sum, room[0]), (float)row.cols);
    inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
    for (int j = 0; j < KEEP; ++j) v[j] = normed(v[j], inverse, norm.kept[j]);
  }
  auto later = [&](int c) {
    float4 y = row.again(c);
    return norm.weight ? normed(y, inverse, norm.at(c)) : y;
  };
  float scale = 1.0f, undo = 1.0f;
  if (SCALED) {
    float most = 0;
#pragma unroll
    for (int j = 0; j < KEEP; ++j) most = largest(most, v[j]);
    for (int c = kept + first; c < row.cols; c += step) most = largest(most, later(c));
    int exponent = __float_as_int(block_max(most, room[1])) >> 23;
    exponent = min(max(exponent, 11), 254);
    scale = __int_as_float((264 - exponent) << 23);
    undo = __int_as_float((exponent - 10) << 23);
  }
#pragma unroll
  for (int j = 0; j < KEEP; ++j)
    if (j * step + first < row.cols) put(j * step + first, times(v[j], scale));
  for (int c = kept + first; c < row.cols; c += step) put(c, times(later(c), scale));
  return undo;
}
