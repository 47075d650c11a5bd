// Products of a warp's 16 weight rows × 64 columns with a tile of tokens: by `wgmma`, in which four warps
// share the tokens and it reads them from shared memory itself, or by `mma` where there is none. Both add
// columns in order in steps of 16. Nobody touches what `wgmma` reads and sums until it is finished.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FOUR(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define WGMMA(TYPE, N, SUMS, REST) \
  asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE \
               "." TYPE " {" SUMS "}, " REST ", add, 1, 1, 0;}"
#define WEIGHTS_AND_TOKENS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x)
#define SUMS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SUMS_16 SUMS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS_32 SUMS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_OF(T, TYPE)                                                                          \
  __device__ __forceinline__ void wgmma(T, float (&c)[2][4], const u32 (&a)[4], u64 x) {           \
    WGMMA(TYPE, "16", SUMS_8, "{%8,%9,%10,%11}, %12")                                              \
        : FOUR(0), FOUR(1) : WEIGHTS_AND_TOKENS);                                                  \
  }                                                                                                \
  __device__ __forceinline__ void wgmma(T, float (&c)[4][4], const u32 (&a)[4], u64 x) {           \
    WGMMA(TYPE, "32", SUMS_16, "{%16,%17,%18,%19}, %20")                                           \
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3) : WEIGHTS_AND_TOKENS);                                \
  }                                                                                                \
  __device__ __forceinline__ void wgmma(T, float (&c)[8][4], const u32 (&a)[4], u64 x) {           \
    WGMMA(TYPE, "64", SUMS_32, "{%32,%33,%34,%35}, %36")                                           \
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7) : WEIGHTS_AND_TOKENS); \
  }
WGMMA_OF(Half, "f16")
WGMMA_OF(Bfloat, "bf16")
#endif

// Copies of this thread that have arrived become visible to `wgmma`.
__device__ __forceinline__ void show_copies() {
#ifdef WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

template <int EIGHTS> __device__ __forceinline__ void finish_products(float (&c)[EIGHTS][4]) {
#ifdef WGMMA
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < EIGHTS * 4; ++i) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
#endif
}

// Tokens lie in rows of 128 bytes from a multiple of 1,024 on; chunks of 16 bytes are swizzled by their row.
template <class T, int EIGHTS>
__device__ __forceinline__ void multiply_unit(float (&c)[EIGHTS][4], const u32 (&w)[4][4], u32 x, int lane) {
#ifdef WGMMA
  const u64 rows_of_128 = 1ull << 62 | 64ull << 32 | 1ull << 16, at = rows_of_128 | (x & 0x3ffff) >> 4;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int s = 0; s < 4; ++s) wgmma(T(), c, w[s], at + 2 * s);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  const int r = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int j = 0; j < EIGHTS / 2; ++j) {
      u32 b[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                   : "r"(x + (j * 16 + r) * 128 + (((2 * s + chunk) ^ (r & 7)) << 4)) : "memory");
      T::multiply(c[2 * j], w[s], b[0], b[1]);
      T::multiply(c[2 * j + 1], w[s], b[2], b[3]);
    }
#endif
}
