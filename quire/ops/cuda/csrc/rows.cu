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
