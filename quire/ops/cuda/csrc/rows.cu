// Rows of activations in the type that a weight is multiplied in: for more tokens than `few` takes.

struct PrepareArgs {
  const float* x;
  const float* norm;   // null: none
  u8* out;             // [rows, cols], then with `fine` as many rows of what rounding has lost
  float* undo;         // of float16: what undoes the scale of each row
  long long x_stride;
  int n, cols, act, fine;
  float eps;
};

template <class T, bool FINE> __device__ __forceinline__ void prepare_row(const PrepareArgs& a) {
  __shared__ float room[THREADS / 32];
  const long long row = blockIdx.x;
  u16* out = (u16*)a.out + row * a.cols;
  u16* rest = out + (long long)a.n * a.cols;
  const int cols = a.cols;
  NormWeights<6> norm(a.norm, cols);
  wait_for_previous();
  auto put = [&](int c, float4 v) {
    u32 two[2] = {T::pack(v.x, v.y), T::pack(v.z, v.w)};
    u32 lost[2] = {0, 0};
    if (FINE) {
      lost[0] = T::pack(__fsub_rn(v.x, T::low(two[0])), __fsub_rn(v.y, T::high(two[0])));
      lost[1] = T::pack(__fsub_rn(v.z, T::low(two[1])), __fsub_rn(v.w, T::high(two[1])));
    }
    if (cols % 4 == 0) {
      *(uint2*)(out + c) = {two[0], two[1]};
      if (FINE) *(uint2*)(rest + c) = {lost[0], lost[1]};
    } else {
      for (int i = 0; i < 4 && c + i < cols; ++i) {
        out[c + i] = (u16)(two[i / 2] >> (i % 2 * 16));
        if (FINE) rest[c + i] = (u16)(lost[i / 2] >> (i % 2 * 16));
      }
    }
  };
  float undo = stage<T::scaled, 6>(Row{a.x + row * a.x_stride, cols, a.act}, norm, a.eps, room, put);
  if (T::scaled && threadIdx.x == 0) a.undo[row] = undo;
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare_half(const __grid_constant__ PrepareArgs a) {
  let_next_start();
  a.fine ? prepare_row<Half, true>(a) : prepare_row<Half, false>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare_bfloat(const __grid_constant__ PrepareArgs a) {
  let_next_start();
  a.fine ? prepare_row<Bfloat, true>(a) : prepare_row<Bfloat, false>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare_float(const __grid_constant__ PrepareArgs a) {
  __shared__ float room[THREADS / 32];
  let_next_start();
  const long long row = blockIdx.x;
  float* out = (float*)a.out + row * a.cols;
  const int cols = a.cols;
  NormWeights<6> norm(a.norm, cols);
  wait_for_previous();
  auto put = [&](int c, float4 v) {
    float of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (c + i < cols) out[c + i] = of[i];
  };
  stage<false, 6>(Row{a.x + row * a.x_stride, cols, a.act}, norm, a.eps, room, put);
}

// Adds the slices of a product, one after the other; with `fine` also of what rounding had lost.
struct JoinArgs {
  const float* parts;  // [slices, columns, rows]
  float* out;
  const float* bias;   // null: none
  const float* into;   // null: none; else where `out` points too
  const float* undo;   // null: none
  long long out_stride;
  int n, rows, slices, fine;
};

__device__ __forceinline__ float4 sum_slices(const float* parts, u64 step, int slices, int row, int rows) {
  float4 total = {0, 0, 0, 0};
#pragma unroll 8
  for (int i = 0; i < slices; ++i) {
    float4 v = row4(parts + i * step, row, rows);
    total = {__fadd_rn(total.x, v.x), __fadd_rn(total.y, v.y), __fadd_rn(total.z, v.z), __fadd_rn(total.w, v.w)};
  }
  return total;
}

extern "C" __global__ void __launch_bounds__(128) join(const __grid_constant__ JoinArgs a) {
  let_next_start();
  wait_for_previous();
  const int row = (blockIdx.x * 128 + threadIdx.x) * 4, token = blockIdx.y;
  if (row >= a.rows) return;
  const u64 columns = a.n * (1 + a.fine), step = columns * a.rows;
  float4 v = sum_slices(a.parts + (u64)token * a.rows, step, a.slices, row, a.rows);
  if (a.fine) {
    float4 rest = sum_slices(a.parts + (u64)(a.n + token) * a.rows, step, a.slices, row, a.rows);
    v = {__fadd_rn(v.x, rest.x), __fadd_rn(v.y, rest.y), __fadd_rn(v.z, rest.z), __fadd_rn(v.w, rest.w)};
  }
  const float undo = a.undo ? load(a.undo + token) : 1.0f;
  float of[4] = {v.x, v.y, v.z, v.w};
  float* out = a.out + token * a.out_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (row + i < a.rows) {
      float y = __fmul_rn(of[i], undo);
      if (a.bias) y = __fadd_rn(y, a.bias[row + i]);
      if (a.into) y = __fadd_rn(y, load(out + row + i));
      out[row + i] = y;
    }
}
