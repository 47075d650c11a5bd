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
