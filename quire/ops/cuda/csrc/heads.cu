// What attention of one token is made of: its arguments and sizes, how rows of heads are normed and turned, and
// how spans are merged. TYPE, DIMS and STAGES come from the host.

struct AttendArgs {
  const float* qkv;
  float* out;
  float *parts, *tops;           // of spans that another block may join: [spans, queries, DIMS], [spans, queries, 2]
  int* arrived;                  // [sequences, KV heads]: 0 between launches
  u8* base;                      // where page 0 lies
  const int *tables, *first, *length, *slots, *positions;
  const float *q_norm, *k_norm;  // null: none
  const float* rope;             // [sequences, n_rot]
  long long page_bytes, k_offset, v_offset, stride;
  int seqs, table_cols, heads, kv_heads, page_tokens, page_bits, n_rot, neox, store, window;
  int shares, most;              // spans of a head are cut in so many parts, of so many spans at most
  int rooms;                     // spans of a block that those of its cluster can read
  float eps, scale;
};

constexpr int WARPS = THREADS / 32;
constexpr int SPAN = 128;
constexpr int BN = DIMS > 128 ? 32 : 64;
constexpr int TILE = 2 * BN;                // slots; keys of a tile are one stage, its values the next
constexpr int ROW = DIMS * 2;               // bytes
constexpr int CHUNKS = DIMS / 8;            // of 16 bytes in a row
constexpr int MINE = TILE / WARPS;          // slots that a warp fetches and scores
constexpr int SCORED = MINE / 8, SUMMED = DIMS / WARPS / 8, STEPS = DIMS / 16;
constexpr int STAGE = TILE * ROW;
constexpr int Q_ROW = ROW + 16, P_ROW = TILE * 2 + 16;  // apart by 16 bytes, so that eight rows share no bank
constexpr int Q_AT = STAGES * STAGE, P_AT = Q_AT + 16 * Q_ROW;
constexpr int NEW_AT = P_AT + 16 * P_ROW, MAX_AT = NEW_AT + 2 * ROW;
constexpr int KEPT_AT = MAX_AT + WARPS * 16 * 4;
#define NONE __int_as_float(0xff800000)

extern __shared__ __align__(128) u8 memory[];

__device__ __forceinline__ int load_int(const int* at) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ float2 load2(const float* at) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ __forceinline__ void load_tiles(u32 r[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void load_turned(u32 r[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ float exponential(float x) {
  float e;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, 1.4426950408889634f)));
  return e;
}

__device__ __forceinline__ float divided(float a, float b) {
  float c;
  asm("div.full.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float finite(float top) { return top == NONE ? 0.0f : top; }

// ---- blocks of a cluster read each other's shared memory -----------------------------------------

__device__ __forceinline__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ float2 load2_of(u32 rank, u32 at) {
  float2 v = {0.0f, 0.0f};
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %2, %3; ld.shared::cluster.v2.f32 {%0, %1}, [there]; }"
               : "=f"(v.x), "=f"(v.y) : "r"(at), "r"(rank) : "memory");
#endif
  return v;
}

// What is known of a query, and how one more span joins it.
struct Known {
  float best = NONE, total = 0.0f, before, now;
  __device__ __forceinline__ void join(float most, float mass) {
    const float top = fmaxf(best, most), safe = finite(top);
    before = exponential(__fsub_rn(best, safe));
    now = exponential(__fsub_rn(most, safe));
    total = __fmaf_rn(total, before, __fmul_rn(mass, now));
    best = top;
  }
  __device__ __forceinline__ float joined(float sum, float part) const { return __fmaf_rn(sum, before, __fmul_rn(part, now)); }
  __device__ __forceinline__ float result(float sum) const { return total == 0.0f ? 0.0f : divided(sum, total); }
};

// The inverse root of a row's mean square, which is added in integers: see kernels/heads.py.
__device__ __forceinline__ float inverse_root(const float y[DIMS / 32], float eps) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < DIMS / 32; ++i) most = max(most, __float_as_uint(y[i]) & 0x7fffffffu);
  const int exponent = min(max((int)(__reduce_max_sync(~0u, most) >> 23), 30), 250);
  const float scale = __int_as_float((274 - exponent) << 23), inverse = __int_as_float((exponent - 20) << 23);
  u64 sum = 0;
#pragma unroll
  for (int i = 0; i < DIMS / 32; ++i) {
    const float x = __fmul_rn(y[i], scale);
    sum += (u64)__float2ll_rz(__fmul_rn(x, x));
  }
  const u32 low = __reduce_add_sync(~0u, (u32)sum & 0x3ffffffu), high = __reduce_add_sync(~0u, (u32)(sum >> 26));
  const float total = __ll2float_rn((long long)(((u64)high << 26) + low));
  const float mean = divided(__fmul_rn(__fmul_rn(total, inverse), inverse), (float)DIMS);
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

// A row of a head, normed and rotated: a lane has dimensions lane, lane + 32, …
__device__ __forceinline__ void turned(float y[DIMS / 32], const AttendArgs& a, const float* x, const float* norm, int lane) {
  constexpr int N = DIMS / 32;
  const int half = a.n_rot / 2, step = a.neox ? half : 1;
  const float* table = a.rope + (u64)blockIdx.x * a.n_rot;
  float w[N], z[N], w_z[N], cosine[N], sine[N];
  auto turns = [&](int i) { return i * 32 + lane < a.n_rot; };
  const int first = a.neox ? half : lane % 2 ? 0 : DIMS;  // dimensions before it are the first of a pair
  auto second = [&](int i) { return i * 32 + lane >= first; };
  // Everything is on its way before anything is used.
#pragma unroll
  for (int i = 0; i < N; ++i) {
    y[i] = load(x + i * 32 + lane);
    w[i] = norm ? load(norm + i * 32 + lane) : 1.0f;
  }
  if (a.n_rot)
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int d = i * 32 + lane, other = !turns(i) ? d : second(i) ? d - step : d + step;
      const int pair = !turns(i) ? 0 : a.neox ? min(d, other) : d / 2;
      z[i] = load(x + other);
      w_z[i] = norm ? load(norm + other) : 1.0f;
      cosine[i] = load(table + pair);
      sine[i] = load(table + half + pair);
    }
  const float inverse = norm ? inverse_root(y, a.eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (norm) y[i] = __fmul_rn(__fmul_rn(y[i], inverse), w[i]);
    if (!a.n_rot) continue;
    if (!turns(i)) z[i] = w_z[i] = sine[i] = 0.0f, cosine[i] = 1.0f;
    sine[i] = second(i) ? sine[i] : -sine[i];
    if (norm) z[i] = __fmul_rn(__fmul_rn(z[i], inverse), w_z[i]);
    y[i] = __fmaf_rn(y[i], cosine[i], __fmul_rn(z[i], sine[i]));
  }
}
