// Products for up to 64 tokens. A block has four warps, each with two tiles of 16 weight rows, and a
// tile of tokens that all share. Columns are summed in order within a slice, then slices one after
// the other: here, or, where a matrix has few rows, by `join` after blocks of their own.
// WEIGHTS, TOKENS, STAGES and BLOCKS come from the host.

struct SomeArgs {
  const u16* x;       // [n, cols], then with `fine` as many rows of what rounding has lost
  const u8* w;
  float* out;         // of slices on their own: [slices, columns, rows]
  const float* bias;  // null: none
  const float* into;  // null: none; else where `out` points too
  const float* undo;  // of float16: what undoes the scale of each row
  long long out_stride;
  int n, cols, rows;
  int tiles;          // of 16 rows; with `act`, of the gate alone: as many of up follow
  int act, fine;
};

extern __shared__ __align__(128) u8 memory[];

enum Kind { SLICE, WHOLE, GATED };

template <int KIND> struct Some {
  typedef WEIGHTS W;
  typedef typename W::Type T;
  static constexpr int WARPS = 4, TILES = 2, GROUPS = TOKENS / 8;
  static constexpr int X_BYTES = TOKENS * 128, STAGE = X_BYTES + WARPS * TILES * W::bytes;

  const SomeArgs& a;
  const int warp, lane, units, slice, first, count;

  __device__ Some(const SomeArgs& args)
      : a(args), warp(threadIdx.x / 32), lane(threadIdx.x % 32), units((args.cols + UNIT - 1) / UNIT),
        slice((units + 7) / 8), first(KIND == SLICE ? blockIdx.z * slice : 0),
        count(KIND == SLICE ? min(slice, units - first) : units) {}

  __device__ __forceinline__ u8* stage_x(int i) const { return memory + i * STAGE; }
  __device__ __forceinline__ u8* stage_w(int i, int m) const {
    return memory + i * STAGE + X_BYTES + (warp * TILES + m) * W::bytes;
  }

  __device__ __forceinline__ int tile(int m) const {
    if (KIND == GATED) return blockIdx.y * WARPS + warp + m * a.tiles;
    return (blockIdx.y * WARPS + warp) * TILES + m;
  }

  __device__ __forceinline__ void fetch_weights(int into, int u) const {
    const int last = (KIND == GATED ? 2 : 1) * a.tiles - 1;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const int t = min(tile(m), last);
      const u8* from = W::find(a.w, t, a.cols, first + u, lane);
      W::copy(shared_address(stage_w(into, m)), from, a.rows - t * 16, a.cols, lane);
    }
  }

  // A row of x for each column of the tile; with `fine` the second half has what rounding lost.
  __device__ __forceinline__ int token(int column) const {
    const int half = TOKENS / 2;
    if (!a.fine) return blockIdx.x * TOKENS + column;
    return blockIdx.x * half + column % half;
  }
  __device__ __forceinline__ void fetch_x(int into, int u) const {
    const u32 to = shared_address(stage_x(into));
#pragma unroll
    for (int i = 0; i < TOKENS * 8 / 128; ++i) {
      const int r = (i * 128 + threadIdx.x) / 8, c = threadIdx.x % 8, column = (first + u) * UNIT + c * 8;
      const int row = token(r) + (a.fine && r >= TOKENS / 2 ? a.n : 0);
      const bool inside = token(r) < a.n && column < a.cols;
      copy16_if(to + r * 128 + ((c ^ (r & 7)) << 4), inside ? a.x + (u64)row * a.cols + column : a.x, inside);
    }
  }

  __device__ __forceinline__ void multiply(int at, float c[TILES][GROUPS][4]) const {
    typename W::Raw raw[TILES];
#pragma unroll
    for (int m = 0; m < TILES; ++m) raw[m] = W::read(stage_w(at, m), lane);
    const u32 x = shared_address(stage_x(at));
    const int r = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      u32 w[TILES][4];
#pragma unroll
      for (int m = 0; m < TILES; ++m) W::operand(raw[m], s, w[m]);
#pragma unroll
      for (int j = 0; j < GROUPS / 2; ++j) {
        u32 b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(x + (j * 16 + r) * 128 + (((2 * s + chunk) ^ (r & 7)) << 4)) : "memory");
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
          T::multiply(c[m][2 * j], w[m], b[0], b[1]);
          T::multiply(c[m][2 * j + 1], w[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void store_slice(const float c[TILES][GROUPS][4]) const {
    const int columns = a.n * (1 + a.fine);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = j * 8 + lane % 4 * 2 + i % 2, row = tile(m) * 16 + lane / 4 + i / 2 * 8;
          const int at = token(column) + (a.fine && column >= TOKENS / 2 ? a.n : 0);
          if (token(column) < a.n && row < a.rows)
            a.out[((u64)blockIdx.z * columns + at) * a.rows + row] = c[m][j][i];
        }
  }

  __device__ __forceinline__ void store(float total[TILES][GROUPS][4]) const {
    if (a.fine)
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int j = 0; j < GROUPS / 2; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) total[m][j][i] = __fadd_rn(total[m][j][i], total[m][j + GROUPS / 2][i]);
    const int rows = KIND == GATED ? a.tiles * 16 : a.rows;
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      if (a.fine && j >= GROUPS / 2) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = token(j * 8 + lane % 4 * 2 + i % 2);
        if (t >= a.n) continue;
        const float undo = T::scaled ? load(a.undo + t) : 1.0f;
#pragma unroll
        for (int m = 0; m < (KIND == GATED ? 1 : TILES); ++m) {
          const int row = tile(m) * 16 + lane / 4 + i / 2 * 8;
          if (row >= rows) continue;
          float* to = a.out + t * a.out_stride + row;
          float y = __fmul_rn(total[m][j][i], undo);
          if (KIND == GATED) {
            y = activate(a.act, y, __fmul_rn(total[1][j][i], undo));
          } else {
            if (a.bias) y = __fadd_rn(y, a.bias[row]);
            if (a.into) y = __fadd_rn(y, load(to));
          }
          *to = y;
        }
      }
    }
  }

  __device__ __forceinline__ void run() const {
    let_next_start();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
      if (i < count) fetch_weights(i, i);
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (i < count) fetch_x(i, i);
      commit_copies();
    }
    float c[TILES][GROUPS][4] = {}, total[TILES][GROUPS][4] = {};
    int now = 0, next = STAGES - 1, left = slice;
    for (int u = 0; u < count; ++u) {
      wait_copies<STAGES - 2>();
      __syncthreads();
      if (u + STAGES - 1 < count) {
        fetch_weights(next, u + STAGES - 1);
        fetch_x(next, u + STAGES - 1);
      }
      commit_copies();
      multiply(now, c);
      now = now + 1 == STAGES ? 0 : now + 1;
      next = next + 1 == STAGES ? 0 : next + 1;
      if (KIND != SLICE && (--left == 0 || u + 1 == count)) {
        left = slice;
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
          for (int j = 0; j < GROUPS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[m][j][i] = __fadd_rn(total[m][j][i], c[m][j][i]), c[m][j][i] = 0;
      }
    }
    if (KIND == SLICE)
      store_slice(c);
    else
      store(total);
  }
};

extern "C" __global__ void __launch_bounds__(128, BLOCKS) some_slice(const __grid_constant__ SomeArgs a) {
  Some<SLICE>(a).run();
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS) some_whole(const __grid_constant__ SomeArgs a) {
  Some<WHOLE>(a).run();
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS) some_gated(const __grid_constant__ SomeArgs a) {
  Some<GATED>(a).run();
}
