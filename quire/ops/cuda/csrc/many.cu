// Products of many tokens with dense weights of 16 bits, on Hopper: the copy engine fills a ring of
// tiles, two groups of four warps multiply 64 tokens each with `wgmma`. K is cut into the slices of
// every other product: each is summed in order, then added to those before it. Blocks walk tiles with
// a stride of the grid. Two neighbours (a cluster) share either weight rows or tokens: each copies
// half of what they share into both.
//
// Given: ROWS of weights in a tile; SHARED: 1 rows, 2 tokens; STAGES of the ring; TYPE bf16 or f16;
// TWO: registers for two slices; ACT: of weights that are gate and up, 0 of others; BFLOAT: the type of
// the output, 0 float. With WEIGHTS they are quantised: more warps unpack them.

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)

// The registers of a sum, as text and as operands, and the numbers of the operands behind them.
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
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

constexpr bool GATED = ACT > 0;
constexpr int GROUP = 128;                        // threads that multiply together
constexpr int HALF_X = 64 * UNIT * 2;             // bytes of the tokens of one group
constexpr int HALF_W = ROWS / 2 * UNIT * 2;       // bytes of half the weight rows
#ifdef WEIGHTS
constexpr int PACKED = ROWS / 16 * WEIGHTS::bytes;
#else
constexpr int PACKED = 0;
#endif
constexpr int STAGE = (2 * (HALF_X + HALF_W) + PACKED + 1023) / 1024 * 1024;
constexpr int SUMS = ROWS / 2;                    // of a thread

struct __align__(64) TensorMap { u64 words[16]; };

struct ManyArgs {
  TensorMap x, w;      // boxes of what a block copies at a time, by 64 columns
  const u8* packed;    // quantised weights
  void* out;           // [tokens, stride]
  const float* bias;   // null: none
  const float* into;   // null: none; as `out`
  const float* undo;   // null: none
  long long stride;
  int n, rows;         // tokens; rows of the output
  int blocks, slice;   // columns of all weights and of a slice, in 64s
  int row_tiles, token_tiles;
  int units;           // of 16 rows, of quantised weights
};

// ---- barriers of the ring -----------------------------------------------------------------------

__device__ __forceinline__ void barrier_start(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar), "r"(phase) : "memory");
}

// Of the block of this rank in the cluster.
__device__ __forceinline__ void barrier_arrive(u32 bar, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(rank) : "memory");
}

__device__ __forceinline__ void cluster_arrive_and_wait() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

__device__ __forceinline__ void copy_bytes(u32 to, const u8* from, int bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// A box of a matrix; with `both` into the same place of both blocks.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int column, int row, u32 bar, bool both) {
  if (both)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(bar), "h"((u16)3) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(bar) : "memory");
}

// ---- tensor cores ---------------------------------------------------------------------------------

// Rows of 128 bytes as the copy engine swizzles them, eight to 1,024 bytes.
__device__ __forceinline__ u64 matrix_at(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// d = x · w over 16 columns, or with `add` d += that; queued only.
__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 x, u64 w, int add) {
  asm volatile(MULTIPLY_WITH(JOIN(NAMES_, ROWS), JOIN(BEHIND_, ROWS)) : JOIN(SUMS_, ROWS) : "l"(x), "l"(w), "r"(add));
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// ---- tiles ----------------------------------------------------------------------------------------

struct Ring {
  u32 base, stage, phase;
  __device__ __forceinline__ u32 tiles() const { return base + stage * STAGE; }
  __device__ __forceinline__ u32 full(u32 s) const { return base + STAGES * STAGE + s * 8; }
  __device__ __forceinline__ u32 empty(u32 s) const { return full(STAGES + s); }
  __device__ __forceinline__ u32 ready(u32 s) const { return full(2 * STAGES + s); }  // unpacked
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

struct Tile { int token, row; };

__device__ __forceinline__ Tile tile_of(const ManyArgs& a, int work, int rank) {
  if (SHARED == 1) {
    const int pairs = (a.token_tiles + 1) / 2;
    return {work % pairs * 2 + rank, work / pairs};
  }
  return {work % a.token_tiles, work / a.token_tiles * 2 + rank};
}

__device__ __forceinline__ int all_work(const ManyArgs& a) {
  return SHARED == 1 ? (a.token_tiles + 1) / 2 * a.row_tiles : (a.row_tiles + 1) / 2 * a.token_tiles;
}

// The row of the weights at which half a tile's rows start.
__device__ __forceinline__ int row_of(const ManyArgs& a, Tile tile, int half) {
  return GATED ? tile.row * (ROWS / 2) + half * a.rows : tile.row * ROWS + half * (ROWS / 2);
}

#ifdef WEIGHTS

constexpr int UNITS = ROWS / 16, PER_WARP = (UNITS + 3) / 4;

// Where a unit of a tile's rows lies, at the first columns; null behind the last row.
__device__ __forceinline__ const u8* unit_at(const ManyArgs& a, Tile tile, int i) {
  const int half = GATED && i >= UNITS / 2, unit = row_of(a, tile, half) / 16 + (half ? i - UNITS / 2 : i);
  return i < UNITS && unit < a.units ? a.packed + (u64)unit * a.blocks * WEIGHTS::bytes : nullptr;
}

__device__ __forceinline__ int units_of(const ManyArgs& a, Tile tile) {
  const int first = max(min(UNITS / (1 + GATED), a.units - row_of(a, tile, 0) / 16), 0);
  return GATED ? first + max(min(UNITS / 2, a.units - row_of(a, tile, 1) / 16), 0) : first;
}

// Weights of what has arrived, as the copy engine would have laid them: by two groups in turn.
__device__ __forceinline__ void unpack(const ManyArgs& a, Ring ring, const u8* shared, int turn) {
  const int warp = threadIdx.x % GROUP / 32, lane = threadIdx.x % 32, row = lane % 16;
  const int works = (all_work(a) - (int)blockIdx.x / 2 + (int)gridDim.x / 2 - 1) / ((int)gridDim.x / 2);
  if (turn) ring.next();
  for (int k = turn; k < works * a.blocks; k += 2, ring.next(), ring.next()) {
    barrier_wait(ring.full(ring.stage), ring.phase);
    const u8* from = shared + (ring.tiles() - ring.base) + 2 * (HALF_X + HALF_W);
    typename WEIGHTS::Raw raw[PER_WARP];
#pragma unroll
    for (int i = 0; i < PER_WARP; ++i)
      if (i * 4 + warp < UNITS) raw[i] = WEIGHTS::read(from + (i * 4 + warp) * WEIGHTS::bytes, lane);
#pragma unroll
    for (int i = 0; i < PER_WARP; ++i) {
      if (i * 4 + warp >= UNITS) break;
      const u32 to = ring.tiles() + 2 * HALF_X + ((i * 4 + warp) * 16 + row) * 128;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        u32 w[4];
        WEIGHTS::operand(raw[i], step, w);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(to + ((step * 2 + lane / 16 ^ row & 7) << 4)), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]));
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ring.ready(ring.stage)) : "memory");
  }
}

#endif

// What both blocks share each copies half of.
__device__ __forceinline__ void copy_tokens(const ManyArgs& a, Tile tile, int k, u32 to, u32 bar, int rank) {
  if (SHARED == 2) copy_box(to + rank * HALF_X, a.x, k * UNIT, tile.token * 128 + rank * 64, bar, true);
  else copy_box(to, a.x, k * UNIT, tile.token * 128, bar, false);
}

__device__ __forceinline__ void copy_weights(const ManyArgs& a, Tile tile, int k, u32 to, u32 bar, int rank) {
  if (SHARED == 1) copy_box(to + rank * HALF_W, a.w, k * UNIT, row_of(a, tile, rank), bar, true);
  else copy_box(to, a.w, k * UNIT, row_of(a, tile, 0), bar, false);
  if (SHARED == 2 && GATED) copy_box(to + HALF_W, a.w, k * UNIT, row_of(a, tile, 1), bar, false);
}

// Fills the ring: tokens by warp 3, weights by warp 2, packed ones by warps 0 to 2.
__device__ __forceinline__ void fill(const ManyArgs& a, Ring ring, int rank, int warp) {
  for (int work = blockIdx.x / 2; work < all_work(a); work += gridDim.x / 2) {
    const Tile tile = tile_of(a, work, rank);
#ifdef WEIGHTS
    const int bytes = 2 * HALF_X + units_of(a, tile) * WEIGHTS::bytes;
    constexpr int MOST = (UNITS + 2) / 3;
    const u8* from[MOST];
#pragma unroll
    for (int i = 0; i < MOST; ++i) from[i] = unit_at(a, tile, i * 3 + warp);
#else
    const int bytes = 2 * (HALF_X + HALF_W);
#endif
    for (int k = 0; k < a.blocks; ++k, ring.next()) {
      const u32 bar = ring.full(ring.stage), to = ring.tiles();
      barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
      if (warp == 3) {
        barrier_expect(bar, bytes);
        copy_tokens(a, tile, k, to, bar, rank);
        continue;
      }
#ifdef WEIGHTS
#pragma unroll
      for (int i = 0; i < MOST; ++i)
        if (from[i]) {
          copy_bytes(to + 2 * (HALF_X + HALF_W) + (i * 3 + warp) * WEIGHTS::bytes, from[i], WEIGHTS::bytes, bar);
          from[i] += WEIGHTS::bytes;
        }
#else
      copy_weights(a, tile, k, to + 2 * HALF_X, bar, rank);
#endif
    }
  }
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
