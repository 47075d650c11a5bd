// The tiles of many.cu: where they lie, and how they come into a ring in shared memory. Blocks walk them
// with a stride of the grid. Two neighbours (a cluster) share either weight rows or tokens: each copies
// half of what they share into both.

constexpr bool GATED = ACT > 0;
constexpr int HALF_X = 64 * UNIT * 2;             // bytes of the tokens of one group
constexpr int HALF_W = ROWS / 2 * UNIT * 2;       // bytes of half the weight rows
#ifdef WEIGHTS
constexpr int PACKED = ROWS / 16 * WEIGHTS::bytes;
#else
constexpr int PACKED = 0;
#endif
constexpr int STAGE = (2 * (HALF_X + HALF_W) + PACKED + 1023) / 1024 * 1024;
constexpr int SUMS = ROWS / 2;                    // of a thread

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

// Of the block of this rank in the cluster.
__device__ __forceinline__ void barrier_arrive(u32 bar, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(rank) : "memory");
}

__device__ __forceinline__ void cluster_arrive_and_wait() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

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
