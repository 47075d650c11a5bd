// Rows of activations in the type that a weight is multiplied in, for more tokens than `few` takes,
// and the sums of a product's slices. Both at once where a product's result is read first by a norm.
//
// Given: KEPT steps of 1,024 columns that are read once, as many as rows have where they are not very
// wide; SOURCE: 0 any rows, 1 rows of whole fours without an activation, 2 slices that are added first.

#ifndef SOURCE
#define SOURCE 0
#define KEPT 3
#endif

struct JoinArgs {
  const float* parts;  // [slices, columns, rows]; null: none
  float* out;
  const float* bias;   // null: none
  const float* into;   // null: none
  const float* undo;   // null: none
  long long out_stride, into_stride;
  int n, rows, slices, fine;
};

// Four rows of a product for one token: its slices one after the other, with `fine` also those of what
// rounding had lost; then what is added to it.
__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

template <bool WHOLE> __device__ __forceinline__ float4 four(const float* row, int at, int cols) {
  return WHOLE ? load4(row + at) : row4(row, at, cols);
}

template <bool WHOLE>
__device__ __forceinline__ float4 sum_slices(const float* parts, u64 step, int slices, int row, int rows) {
  float4 of[8], total = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < slices) of[i] = four<WHOLE>(parts + i * step, row, rows);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < slices) total = plus(total, of[i]);
  return total;
}

template <bool WHOLE> __device__ __forceinline__ float4 joined(const JoinArgs& a, int token, int row) {
  const u64 step = (u64)a.n * (1 + a.fine) * a.rows;
  float4 v = sum_slices<WHOLE>(a.parts + (u64)token * a.rows, step, a.slices, row, a.rows);
  if (!WHOLE && a.fine)
    v = plus(v, sum_slices<WHOLE>(a.parts + (u64)(a.n + token) * a.rows, step, a.slices, row, a.rows));
  if (a.undo) v = times(v, load(a.undo + token));
  if (a.bias) v = plus(v, four<WHOLE>(a.bias, row, a.rows));
  if (a.into) v = plus(v, four<WHOLE>(a.into + token * a.into_stride, row, a.rows));
  return v;
}

__device__ __forceinline__ void store4(float* row, int at, int cols, float4 v) {
  if (at + 3 < cols && ((u64)(row + at) & 15) == 0) {
    *(float4*)(row + at) = v;
  } else {
    const float of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (at + i < cols) row[at + i] = of[i];
  }
}

extern "C" __global__ void __launch_bounds__(128) join(const __grid_constant__ JoinArgs a) {
  let_next_start();
  wait_for_previous();
  const int row = (blockIdx.x * 128 + threadIdx.x) * 4, token = blockIdx.y;
  if (row < a.rows) store4(a.out + token * a.out_stride, row, a.rows, joined<false>(a, token, row));
}

struct PrepareArgs {
  const float* x;
  const float* norm;   // null: none
  u8* out;             // [rows, cols], then with `fine` as many rows of what rounding has lost
  float* undo;         // of float16: what undoes the scale of each row
  long long x_stride;
  int n, cols, act, fine;
  float eps;
  JoinArgs from;       // instead of x: a product that is still in slices; its sum is stored, too
};

// The sum of a product's slices, of rows of whole fours, without what rounding had lost.
struct JoinedRow {
  const JoinArgs& from;
  int token, cols;
  __device__ __forceinline__ float4 at(int c) const {
    float4 v = joined<true>(from, token, c);
    *(float4*)(from.out + token * from.out_stride + c) = v;
    return v;
  }
  __device__ __noinline__ float4 again(int c) const { return at(c); }
};

template <class T, bool FINE, class Source>
__device__ __forceinline__ void prepare_row(const PrepareArgs& a, const Source& row) {
  u16* out = (u16*)a.out + (u64)blockIdx.x * a.cols;
  u16* rest = out + (u64)a.n * a.cols;
  const int cols = a.cols;
  NormWeights<KEPT, SOURCE == 1> norm(a.norm, cols);
  wait_for_previous();
  auto put = [&](int c, float4 v) {
    u32 two[2] = {T::pack(v.x, v.y), T::pack(v.z, v.w)};
    u32 lost[2] = {0, 0};
    if (FINE) {
      lost[0] = T::pack(__fsub_rn(v.x, T::low(two[0])), __fsub_rn(v.y, T::high(two[0])));
      lost[1] = T::pack(__fsub_rn(v.z, T::low(two[1])), __fsub_rn(v.w, T::high(two[1])));
    }
    if (SOURCE || cols % 4 == 0) {
      *(uint2*)(out + c) = {two[0], two[1]};
      if (FINE) *(uint2*)(rest + c) = {lost[0], lost[1]};
    } else {
      for (int i = 0; i < 4 && c + i < cols; ++i) {
        out[c + i] = (u16)(two[i / 2] >> (i % 2 * 16));
        if (FINE) rest[c + i] = (u16)(lost[i / 2] >> (i % 2 * 16));
      }
    }
  };
  float undo = stage<T::scaled>(row, norm, a.eps, put);
  if (T::scaled && threadIdx.x == 0) a.undo[blockIdx.x] = undo;
}

template <class T> __device__ __forceinline__ void prepare(const PrepareArgs& a) {
  let_next_start();
#if SOURCE == 2
  prepare_row<T, false>(a, JoinedRow{a.from, (int)blockIdx.x, a.cols});
#elif SOURCE == 1
  prepare_row<T, false>(a, WholeRow{a.x + blockIdx.x * a.x_stride, a.cols});
#else
  const Row row{a.x + blockIdx.x * a.x_stride, a.cols, a.act};
  if (a.fine) prepare_row<T, true>(a, row);
  else prepare_row<T, false>(a, row);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare_half(const __grid_constant__ PrepareArgs a) {
  prepare<Half>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare_bfloat(const __grid_constant__ PrepareArgs a) {
  prepare<Bfloat>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare_float(const __grid_constant__ PrepareArgs a) {
  let_next_start();
  float* out = (float*)a.out + (u64)blockIdx.x * a.cols;
  const int cols = a.cols;
  NormWeights<KEPT> norm(a.norm, cols);
  wait_for_previous();
  const Row row{a.x + blockIdx.x * a.x_stride, cols, a.act};
  stage<false>(row, norm, a.eps, [&](int c, float4 v) { store4(out, c, cols, v); });
}
