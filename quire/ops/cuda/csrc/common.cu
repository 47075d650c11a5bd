// What the kernels share. Nothing is included, so that NVRTC needs no headers; rounding is written
// out (…_rn), because equal bits in every kernel must not hang on what a compiler contracts.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = 256;  // of every kernel that norms: one tree for one width of rows
constexpr int UNIT = 64;      // columns of a unit of weights; its rows are 16

// ---- order of kernels: each may start early, but reads what others write only after this ----

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- memory -------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Through L1: for what was there before any kernel of this step.
__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// 16 bytes, or zeros where nothing is to be read.
__device__ __forceinline__ void copy16_if(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Activations are read past L1, which an earlier kernel's blocks may have filled.
__device__ __forceinline__ float load(const float* at) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ float4 load4(const float* at) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
  return v;
}

// Columns at … at+3 of a row, zeros behind its end; out of line what is rarely needed.
__device__ __noinline__ float4 row4_end(const float* row, int at, int cols) {
  float4 v = {0, 0, 0, 0};
  if (at < cols) v.x = load(row + at);
  if (at + 1 < cols) v.y = load(row + at + 1);
  if (at + 2 < cols) v.z = load(row + at + 2);
  if (at + 3 < cols) v.w = load(row + at + 3);
  return v;
}

__device__ __forceinline__ float4 row4(const float* row, int at, int cols) {
  return at + 3 < cols && ((u64)(row + at) & 15) == 0 ? load4(row + at) : row4_end(row, at, cols);
}

// ---- numbers ------------------------------------------------------------------------------------

__device__ __forceinline__ u32 to_half2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ u32 to_bfloat2(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float from_half(u32 bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"((u16)bits));
  return v;
}

struct Bfloat {
  static constexpr bool scaled = false;
  static __device__ __forceinline__ u32 pack(float low, float high) { return to_bfloat2(low, high); }
  static __device__ __forceinline__ float low(u32 two) { return __uint_as_float(two << 16); }
  static __device__ __forceinline__ float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }
  static __device__ __forceinline__ void multiply(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct Half {
  static constexpr bool scaled = true;
  static __device__ __forceinline__ u32 pack(float low, float high) { return to_half2(low, high); }
  static __device__ __forceinline__ float low(u32 two) { return from_half(two & 0xffffu); }
  static __device__ __forceinline__ float high(u32 two) { return from_half(two >> 16); }
  static __device__ __forceinline__ void multiply(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// x · sigmoid(x) and gelu's tanh form, which is a sigmoid too, times up: what 1 is added to, and all.
__device__ __forceinline__ float sigmoid_power(int act, float gate) {
  float inner = gate;
  if (act == 2) {
    float cube = __fmul_rn(__fmul_rn(gate, gate), gate);
    inner = __fmul_rn(1.5957691216057308f, __fmaf_rn(0.044715f, cube, gate));
  }
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(inner, -1.4426950408889634f)));
  return e;
}

__device__ __forceinline__ float activate(int act, float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, sigmoid_power(act, gate))), up);
}

__device__ __noinline__ float4 activate4(int act, float4 gate, float4 up) {
  return {activate(act, gate.x, up.x), activate(act, gate.y, up.y), activate(act, gate.z, up.z), activate(act, gate.w, up.w)};
}

// ---- rows: norm, scale ----------------------------------------------------------------------

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
