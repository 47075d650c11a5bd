// Products for up to four tokens. A block has eight warps; it takes tiles of 16 weight rows, and each
// warp an eighth of the columns, in order; then the eighths are added one after the other. Weights are
// the rows of `mma`, tokens its eight columns. WEIGHTS, STAGES and BLOCKS come from the host, and SECOND
// and SECOND_STAGES for matrices of two formats: some blocks then take one, some the other.
//
// With few bits the number of instructions is what counts, more than bytes: a warp waits, fetches and
// counts once for a step of two units, and unpacking is the better part of what is left.

struct FewArgs {
  const float* x;
  const float* norm;  // null: none
  const u8* w;
  float* out;
  const float* bias;  // null: none
  const float* into;  // null: none; else where `out` points too
  long long x_stride, out_stride;
  int n, cols, rows;
  int tiles;          // of 16 rows; with `act`, of the gate alone: as many of up follow
  int act, fine;
  float eps;
};

extern __shared__ __align__(128) u8 memory[];

template <class W, int DEPTH, bool NORM, bool PAIR> struct Few {
  typedef typename W::Type T;
  static constexpr int KEEP = NORM ? 3 : 10;
  static constexpr int BUFFERS = PAIR ? 4 : 2;
  static constexpr int EACH = PAIR || !W::dense ? 2 : 1;  // units of a step: of gate and up, or neighbours
  static constexpr int ALONG = PAIR ? 1 : EACH;           // of which so many are of one row
  static constexpr int STEPS = (DEPTH + EACH - 1) / EACH, BYTES = EACH * W::bytes;

  const FewArgs& a;
  const int block, blocks;  // which one of how many this is
  const int warp, lane, units, slice, first, count, columns;

  __device__ Few(const FewArgs& args, int which, int of)
      : a(args), block(which), blocks(of), warp(threadIdx.x / 32), lane(threadIdx.x % 32), units((args.cols + UNIT - 1) / UNIT),
        slice((units + 7) / 8), first(warp * slice), count(max(min(slice, units - first), 0)),
        columns(args.n * (1 + args.fine)) {}

  __device__ __forceinline__ float* parts(int buffer) const {
    return (float*)(memory + 8 * STEPS * BYTES) + buffer * 8 * 16 * columns;
  }
  __device__ __forceinline__ int x_step() const { return units * UNIT + 8; }
  __device__ __forceinline__ u16* staged() const { return (u16*)parts(BUFFERS); }

  // Tokens as 16 bits in shared memory, in the order in which lanes read them.
  __device__ __forceinline__ void put(int token, int c, float4 v) const {
    int s = c / 16 % 4, p = c % 16;
    u16* at = staged() + token * x_step() + c / UNIT * UNIT + p % 8 / 2 * 16 + s * 4 + p / 8 * 2;
    u32 two[2] = {T::pack(v.x, v.y), T::pack(v.z, v.w)};
    *(u32*)at = two[0];
    *(u32*)(at + 16) = two[1];
    if (NORM && a.fine) {
      at += a.n * x_step();
      *(u32*)at = T::pack(__fsub_rn(v.x, T::low(two[0])), __fsub_rn(v.y, T::high(two[0])));
      *(u32*)(at + 16) = T::pack(__fsub_rn(v.z, T::low(two[1])), __fsub_rn(v.w, T::high(two[1])));
    }
  }

  __device__ __forceinline__ void take(const NormWeights<KEEP, true>& norm, float* undo) const {
    if (a.cols % UNIT) {  // zeros behind the last column, which in this order is not at the end
      for (int i = threadIdx.x; i < columns * UNIT; i += THREADS)
        staged()[i / UNIT * x_step() + (units - 1) * UNIT + i % UNIT] = 0;
      __syncthreads();
    }
    for (int token = 0; token < a.n; ++token) {
      WholeRow row{a.x + token * a.x_stride, a.cols};
      float back = stage<T::scaled>(row, norm, a.eps, [&](int c, float4 v) { put(token, c, v); });
      if (threadIdx.x == 0) undo[token] = back;
      __syncthreads();
    }
  }

  __device__ __forceinline__ float sum(const float* part, int column, int row) const {
    float of[8], total = 0;
    const int slices = (units + slice - 1) / slice;
#pragma unroll
    for (int i = 0; i < 8; ++i) of[i] = i < slices ? part[(i * columns + column) * 16 + row] : 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < slices) total = __fadd_rn(total, of[i]);
    return total;
  }

  __device__ __forceinline__ float value(int buffer, int token, int row, const float* undo) const {
    float total = sum(parts(buffer), token, row);
    if (NORM && a.fine) total = __fadd_rn(total, sum(parts(buffer), a.n + token, row));
    return T::scaled ? __fmul_rn(total, undo[token]) : total;
  }

  // 64 columns of a token, as a lane takes them.
  struct Token {
    uint4 low, high;
  };
  static __device__ __forceinline__ Token token_at(const u16* x) { return {*(const uint4*)x, *(const uint4*)(x + 8)}; }

  static __device__ __forceinline__ void multiply(float c[4], const typename W::Raw& raw, const Token& x) {
    u32 w[4];
    W::operand(raw, 0, w);
    T::multiply(c, w, x.low.x, x.low.y);
    W::operand(raw, 1, w);
    T::multiply(c, w, x.low.z, x.low.w);
    W::operand(raw, 2, w);
    T::multiply(c, w, x.high.x, x.high.y);
    W::operand(raw, 3, w);
    T::multiply(c, w, x.high.z, x.high.w);
  }

  // A warp's sums of a tile, and with PAIR of both.
  __device__ __forceinline__ void leave(const float (&c)[2][4], int buffer) const {
    float* part = parts(buffer) + warp * columns * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (lane % 4 * 2 + i < columns)
#pragma unroll
        for (int j = 0; j < 1 + PAIR; ++j) {
          float* to = part + (j * 8 * columns + lane % 4 * 2 + i) * 16;
          to[0] = c[j][i];
          to[8] = c[j][2 + i];
        }
  }

  __device__ __forceinline__ void run() const {
    __shared__ float undo[4];
    __shared__ __align__(16) u16 zeros[16];
    let_next_start();
    if (threadIdx.x < 16) zeros[threadIdx.x] = 0;
    const int tiles = (a.tiles - block + blocks - 1) / blocks, steps = (count + ALONG - 1) / ALONG;
    const bool odd = count % ALONG;  // the last step of a tile has one unit
    // What is fetched next, and how much there is still.
    const u64 tile_bytes = W::tile_bytes(a.cols), up = a.tiles * tile_bytes;
    const u64 jump = blocks * tile_bytes - (u64)(steps * ALONG) * W::step;
    const u8* from = W::find(a.w, block, a.cols, first, lane);
    int tiles_left = count ? tiles : 0, steps_left = steps, rows_left = a.rows - block * 16;
    auto fetch_next = [&](int into) {
      if (tiles_left) {
        const u32 to = shared_address(memory + into);
        if constexpr (PAIR) {
          W::copy(to, from, 16, a.cols, lane);
          W::copy(to + W::bytes, from + up, 16, a.cols, lane);
        } else if constexpr (EACH == 2) {
          W::copy_two(to, from, !odd || steps_left > 1, lane);
        } else {
          W::copy(to, from, rows_left, a.cols, lane);
        }
        from += ALONG * W::step;
        if (--steps_left == 0) --tiles_left, steps_left = steps, rows_left -= blocks * 16, from += jump;
      }
      commit_copies();
    };
    const int ring = warp * STEPS * BYTES;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) fetch_next(ring + i * BYTES);
    NormWeights<KEEP, true> norm(NORM ? a.norm : nullptr, a.cols);
    wait_for_previous();
    take(norm, undo);
    // Columns without a token read the same zeros again and again.
    const bool used = lane / 4 < columns;
    const u16* const start = used ? staged() + lane / 4 * x_step() + lane % 4 * 16 + first * UNIT : zeros;
    const int x_unit = used ? UNIT : 0, row = threadIdx.x % 16;
    int place = ring, buffer = 0;
    for (int v = 0; v < tiles; ++v, buffer = buffer ? 0 : BUFFERS / 2) {
      // Other warps finish each tile, so that none falls behind.
      const int token = ((int)threadIdx.x - v * 64 & THREADS - 1) / 16;
      const int out_row = (block + v * blocks) * 16 + row;
      const bool writes = token < a.n && out_row < (PAIR ? a.tiles * 16 : a.rows);
      float add = 0, bias = 0;
      if (!PAIR && writes) {
        if (a.into) add = load(a.into + token * a.out_stride + out_row);
        if (a.bias) bias = a.bias[out_row];
      }
      float c[2][4] = {};
      const u16* x = start;
      auto step = [&](bool both) {
        wait_copies<STEPS - 1>();
        __syncwarp();
        typename W::Raw raw[2];
        Token of[2];
        raw[0] = W::read(memory + place, lane), of[0] = token_at(x);
        if (both) raw[1] = W::read(memory + place + W::bytes, lane);
        if (both && !PAIR) of[1] = token_at(x + x_unit);
        x += (both ? ALONG : 1) * x_unit;
        __syncwarp();
        fetch_next(place);
        place = place + BYTES == ring + STEPS * BYTES ? ring : place + BYTES;
        multiply(c[0], raw[0], of[0]);
        if (both) multiply(c[PAIR], raw[1], of[!PAIR]);
      };
      for (int s = odd; s < steps; ++s) step(EACH == 2);
      if (odd) step(false);
      leave(c, buffer);
      __syncthreads();
      if (writes) {
        float y = value(buffer, token, row, undo);
        if (PAIR) y = activate(a.act, y, value(buffer + 1, token, row, undo));
        if (!PAIR && a.bias) y = __fadd_rn(y, bias);
        if (!PAIR && a.into) y = __fadd_rn(y, add);
        a.out[token * a.out_stride + out_row] = y;
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) few(const __grid_constant__ FewArgs a) {
  Few<WEIGHTS, STAGES, false, false>(a, blockIdx.x, gridDim.x).run();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) few_normed(const __grid_constant__ FewArgs a) {
  Few<WEIGHTS, STAGES, true, false>(a, blockIdx.x, gridDim.x).run();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) few_gated(const __grid_constant__ FewArgs a) {
  Few<WEIGHTS, STAGES, true, true>(a, blockIdx.x, gridDim.x).run();
}

#ifdef SECOND
struct TwoArgs {
  FewArgs first, second;
  int blocks;  // of the first
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) few_two(const __grid_constant__ TwoArgs a) {
  if (blockIdx.x < a.blocks)
    Few<WEIGHTS, STAGES, true, false>(a.first, blockIdx.x, a.blocks).run();
  else
    Few<SECOND, SECOND_STAGES, true, false>(a.second, blockIdx.x - a.blocks, gridDim.x - a.blocks).run();
}
#endif
