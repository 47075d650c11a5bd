// Products of many tokens with weights of 16 bits, on Hopper: the copy engine fills a ring of tiles, two
// groups of four warps multiply 64 tokens each. K is cut into the slices of every other product: each is
// summed in order, then added to those before it.
//
// Given: ROWS of weights in a tile; SHARED: 1 rows, 2 tokens; STAGES of the ring; TYPE bf16 or f16;
// TWO: registers for two slices; ACT: of weights that are gate and up, 0 of others; BFLOAT: the type of
// the output, 0 float. With WEIGHTS they are quantised: more warps unpack them.

// The registers of a sum, as text and as operands, and the numbers of the operands behind them.
#define NAMES_48 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES_64 NAMES_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_80 NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES_96 NAMES_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_112 NAMES_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES_128 NAMES_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_144 NAMES_128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define NAMES_160 NAMES_144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_176 NAMES_160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define NAMES_192 NAMES_176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define SUMS_48 EIGHT(0), EIGHT(8), EIGHT(16)
#define SUMS_64 SUMS_48, EIGHT(24)
#define SUMS_80 SUMS_64, EIGHT(32)
#define SUMS_96 SUMS_80, EIGHT(40)
#define SUMS_112 SUMS_96, EIGHT(48)
#define SUMS_128 SUMS_112, EIGHT(56)
#define SUMS_144 SUMS_128, EIGHT(64)
#define SUMS_160 SUMS_144, EIGHT(72)
#define SUMS_176 SUMS_160, EIGHT(80)
#define SUMS_192 SUMS_176, EIGHT(88)
#define BEHIND_48 "%24", "%25", "%26"
#define BEHIND_64 "%32", "%33", "%34"
#define BEHIND_80 "%40", "%41", "%42"
#define BEHIND_96 "%48", "%49", "%50"
#define BEHIND_128 "%64", "%65", "%66"
#define BEHIND_160 "%80", "%81", "%82"
#define BEHIND_192 "%96", "%97", "%98"
#define MULTIPLY_TEXT(names, a, b, add)                                                            \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\n"                                                 \
  "wgmma.mma_async.sync.aligned.m64n" TEXT(ROWS) "k16.f32." TEXT(TYPE) "." TEXT(TYPE)              \
  " {" names "}, " a ", " b ", p, 1, 1, 0, 0;\n}\n"
#define MULTIPLY_WITH(names, ...) MULTIPLY_TEXT(names, __VA_ARGS__)

// d = x · w over 16 columns, or with `add` d += that; queued only.
__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 x, u64 w, int add) {
  asm volatile(MULTIPLY_WITH(JOIN(NAMES_, ROWS), JOIN(BEHIND_, ROWS)) : JOIN(SUMS_, ROWS) : "l"(x), "l"(w), "r"(add));
}

__device__ __forceinline__ void add_to(float (&total)[SUMS], const float (&some)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) total[i] = __fadd_rn(total[i], some[i]);
}

// One group's side of the ring: it multiplies what is there, and gives back what both have read.
struct Multiplier {
  Ring ring;
  int group;
  u32 before;  // the stage whose products are still under way
  bool any;    // whether there is one
  __device__ __forceinline__ void release() {
    if (any && threadIdx.x % GROUP < 2) barrier_arrive(ring.empty(before), threadIdx.x % GROUP);
    any = false;
  }
  // 64 columns: d += …, or with `fresh` d = …; those before them are done then.
  __device__ __forceinline__ void block(float (&d)[SUMS], bool fresh) {
    barrier_wait(ring.full(ring.stage), ring.phase);
#ifdef WEIGHTS
    barrier_wait(ring.ready(ring.stage), ring.phase);
#endif
    const u64 x = matrix_at(ring.tiles() + group * HALF_X), w = matrix_at(ring.tiles() + 2 * HALF_X);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply(d, x + step * 2, w + step * 2, !fresh || step > 0);
    products_end();
    products_wait<1>();
    release();
    before = ring.stage, any = true;
    ring.next();
  }
  __device__ __forceinline__ void finish() {
    products_wait<0>();
    release();
  }
};

// The sums of one tile: slices one after the other. With registers for two slices, one is added while
// the next is multiplied.
__device__ __forceinline__ void add_up(const ManyArgs& a, Multiplier& m, float (&total)[SUMS]) {
  float some[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) total[i] = 0;
#if TWO
  float other[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) other[i] = 0;
  for (int k = 0;;) {
    auto slice = [&](float (&mine)[SUMS], const float (&last)[SUMS]) {
      const int end = min(k + a.slice, a.blocks);
      m.block(mine, true);
      add_to(total, last);
      for (++k; k < end; ++k) m.block(mine, false);
    };
    slice(some, other);
    if (k >= a.blocks) {
      m.finish();
      add_to(total, some);
      break;
    }
    slice(other, some);
    if (k >= a.blocks) {
      m.finish();
      add_to(total, other);
      break;
    }
  }
#else
  for (int k = 0; k < a.blocks;) {
    const int first = k, end = min(k + a.slice, a.blocks);
    for (; k < end; ++k) m.block(some, k == first);
    m.finish();
    add_to(total, some);
  }
#endif
}

// A thread has, of every eight rows of weights, two next to each other, for a token and the eighth after it.
__device__ __forceinline__ void store_sums(const ManyArgs& a, const float (&total)[SUMS], int token, int row) {
  constexpr int ALL = SUMS / 4, AT_ONCE = ALL <= 12 ? ALL : 8;  // what is read waits in registers
  const int left = a.rows - row;
#pragma unroll
  for (int first = 0; first < ALL; first += AT_ONCE) {
    float2 before[2][AT_ONCE] = {};
    if (a.into)
#pragma unroll
      for (int i = 0; i < 2 * AT_ONCE; ++i) {
        const int of = first + i % AT_ONCE, at = token + i / AT_ONCE * 8;
        if (of < ALL && of * 8 < left && at < a.n) before[i / AT_ONCE][i % AT_ONCE] = *(const float2*)(a.into + at * a.stride + row + of * 8);
      }
#pragma unroll
    for (int two = 0; two < 2; ++two) {
      const int at = token + two * 8;
      if (at >= a.n) break;
      const float undo = a.undo ? load(a.undo + at) : 1.0f;
      float* out = (float*)a.out + at * a.stride + row;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int of = first + j;
        if (of >= ALL || of * 8 >= left) break;
        float2 v = {__fmul_rn(total[of * 4 + two * 2], undo), __fmul_rn(total[of * 4 + two * 2 + 1], undo)};
        if (a.bias) v.x = __fadd_rn(v.x, a.bias[row + of * 8]), v.y = __fadd_rn(v.y, a.bias[row + of * 8 + 1]);
        if (a.into) v.x = __fadd_rn(v.x, before[two][j].x), v.y = __fadd_rn(v.y, before[two][j].y);
        *(float2*)(out + of * 8) = v;
      }
    }
  }
}

// Quotients as __fdiv_rn rounds them, without its branches where no exponent is extreme.
template <int N> __device__ __forceinline__ void divide(float (&a)[N], const float (&b)[N]) {
  bool plain = true;
#pragma unroll
  for (int i = 0; i < N; ++i) plain &= fabsf(a[i]) >= 0x1p-60f && fabsf(a[i]) <= 0x1p60f && b[i] >= 1.0f && b[i] <= 0x1p60f;
  if (plain) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float r;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b[i]));
      r = __fmaf_rn(r, __fmaf_rn(-b[i], r, 1.0f), r);
      const float q = __fmul_rn(a[i], r);
      a[i] = __fmaf_rn(r, __fmaf_rn(-b[i], q, a[i]), q);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = __fdiv_rn(a[i], b[i]);
  }
}

// act(gate) · up with the bits of `activate`. Gate's sums come first, then up's.
__device__ __forceinline__ void store_gated(const ManyArgs& a, const float (&total)[SUMS], int token, int row) {
#pragma unroll
  for (int two = 0; two < 2; ++two, token += 8) {
    if (token >= a.n) return;
    const float undo = a.undo ? load(a.undo + token) : 1.0f;
    const long long start = token * a.stride + row;
    constexpr int AT_ONCE = SUMS / 8 % 4 ? SUMS / 8 % 2 ? 1 : 2 : 4;
#pragma unroll
    for (int first = 0; first < SUMS / 8; first += AT_ONCE) {
      float v[2 * AT_ONCE], one_more[2 * AT_ONCE];
#pragma unroll
      for (int i = 0; i < 2 * AT_ONCE; ++i) {
        v[i] = __fmul_rn(total[(first + i / 2) * 4 + two * 2 + i % 2], undo);
        one_more[i] = __fadd_rn(1.0f, sigmoid_power(ACT, v[i]));
      }
      divide(v, one_more);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int of = first + j, up = SUMS / 2 + of * 4 + two * 2;
        if (row + of * 8 >= a.rows) break;
        const float x = __fmul_rn(v[2 * j], __fmul_rn(total[up], undo));
        const float y = __fmul_rn(v[2 * j + 1], __fmul_rn(total[up + 1], undo));
        if (BFLOAT) *(u32*)((u16*)a.out + start + of * 8) = to_bfloat2(x, y);
        else *(float2*)((float*)a.out + start + of * 8) = {x, y};
      }
    }
  }
}

// Registers of a thread; together no more than all threads have at first.
#ifdef WEIGHTS
constexpr int GROUPS = 5;
#define MULTIPLIERS "160"
#define UNPACKERS "56"
#define FILLER "40"
#else
constexpr int GROUPS = 3;
#define MULTIPLIERS "240"
#define FILLER "24"
#endif

// Groups 0 and 1 multiply, the last one fills the ring, two between them unpack.
__device__ __forceinline__ void many_tiles(const ManyArgs& a) {
  extern __shared__ __align__(1024) u8 shared[];
  Ring ring{shared_address(shared), 0, 0};
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_start(ring.full(s), 1), barrier_start(ring.empty(s), 4), barrier_start(ring.ready(s), 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  let_next_start();
  cluster_arrive_and_wait();
  wait_for_previous();
  const int group = threadIdx.x / GROUP;
  if (group == GROUPS - 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " FILLER ";");
    const int warp = threadIdx.x % GROUP / 32;
    if (threadIdx.x % 32 == 0 && (PACKED || warp >= 2)) fill(a, ring, rank, warp);
#ifdef WEIGHTS
  } else if (group >= 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " UNPACKERS ";");
    unpack(a, ring, shared, group - 2);
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " MULTIPLIERS ";");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Multiplier m{ring, group, 0, false};
    for (int work = blockIdx.x / 2; work < all_work(a); work += gridDim.x / 2) {
      float total[SUMS];
      add_up(a, m, total);
      const Tile tile = tile_of(a, work, rank);
      const int token = tile.token * 128 + warp * 16 + lane / 4, row = lane % 4 * 2;
      if (GATED) store_gated(a, total, token, tile.row * (ROWS / 2) + row);
      else store_sums(a, total, token, tile.row * ROWS + row);
    }
  }
  __syncwarp();
  cluster_arrive_and_wait();  // a neighbour may still copy to this block
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(GROUPS * GROUP, 1)
many(const __grid_constant__ ManyArgs a) {
  many_tiles(a);
}
