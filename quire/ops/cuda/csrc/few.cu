// Products for up to four tokens. A block has eight warps; it takes tiles of 16 weight rows, and each
// warp an eighth of the columns, in order; then the eighths are added one after the other. Weights are
// the rows of `mma`, tokens its eight columns. WEIGHTS, STAGES and BLOCKS come from the host, and SECOND
// and SECOND_STAGES for matrices of two formats: some blocks then take one, some the other.

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

  const FewArgs& a;
  const int block, blocks;  // which one of how many this is
  const int warp, lane, units, slice, first, count, columns, mine;

  __device__ Few(const FewArgs& args, int which, int of)
      : a(args), block(which), blocks(of), warp(threadIdx.x / 32), lane(threadIdx.x % 32), units((args.cols + UNIT - 1) / UNIT),
        slice((units + 7) / 8), first(warp * slice), count(max(min(slice, units - first), 0)),
        columns(args.n * (1 + args.fine)),
        mine((args.tiles - which + of - 1) / of * (PAIR ? 2 : 1)) {}

  __device__ __forceinline__ u8* slot(int i) const { return memory + (warp * DEPTH + i) * W::bytes; }
  __device__ __forceinline__ float* parts(int buffer) const {
    return (float*)(memory + 8 * DEPTH * W::bytes) + buffer * 8 * 16 * columns;
  }
  __device__ __forceinline__ int x_step() const { return units * UNIT + 8; }
  __device__ __forceinline__ u16* staged() const { return (u16*)parts(BUFFERS); }

  __device__ __forceinline__ int tile(int v) const {
    if (PAIR) return block + v / 2 * blocks + v % 2 * a.tiles;
    return block + v * blocks;
  }

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

  __device__ __forceinline__ void take(const NormWeights<KEEP, true>& norm, float* undo, float* room) const {
    if (a.cols % UNIT) {  // zeros behind the last column, which in this order is not at the end
      for (int i = threadIdx.x; i < columns * UNIT; i += THREADS)
        staged()[i / UNIT * x_step() + (units - 1) * UNIT + i % UNIT] = 0;
      __syncthreads();
    }
    for (int token = 0; token < a.n; ++token) {
      WholeRow row{a.x + token * a.x_stride, a.cols};
      float back = stage<T::scaled>(row, norm, a.eps, room, [&](int c, float4 v) { put(token, c, v); });
      if (threadIdx.x == 0) undo[token] = back;
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

  __device__ __forceinline__ void run() const {
    __shared__ float undo[4], room[THREADS / 32];
    __shared__ __align__(16) u16 zeros[16];
    let_next_start();
    if (threadIdx.x < 16) zeros[threadIdx.x] = 0;
    int next_v = 0, next_u = 0;  // what is fetched next, and where it lies
    const u8* from = W::find(a.w, tile(0), a.cols, first, lane);
    auto fetch_next = [&](int into) {
      if (count && next_v < mine) {
        W::copy(shared_address(slot(into)), from, a.rows - tile(next_v) * 16, a.cols, lane);
        from += W::step;
        if (++next_u == count) next_u = 0, from = W::find(a.w, tile(++next_v), a.cols, first, lane);
      }
      commit_copies();
    };
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) fetch_next(i);
    NormWeights<KEEP, true> norm(NORM ? a.norm : nullptr, a.cols);
    wait_for_previous();
    take(norm, undo, room);
    __syncthreads();
    // Columns without a token read the same zeros again and again.
    const bool used = lane / 4 < columns;
    const u16* x = used ? staged() + lane / 4 * x_step() + lane % 4 * 16 + first * UNIT : zeros;
    const int x_unit = used ? UNIT : 0;
    const int row = threadIdx.x % 16;
    int now = 0, buffer = 0;
    for (int v = 0; v < mine; ++v) {
      // Other warps finish each tile, so that none falls behind.
      const int token = ((int)threadIdx.x - (PAIR ? v / 2 : v) * 64 & THREADS - 1) / 16;
      const int out_row = (PAIR ? tile(v & ~1) : tile(v)) * 16 + row;
      const bool writes = token < a.n && out_row < (PAIR ? a.tiles * 16 : a.rows);
      float add = 0, bias = 0;
      if (!PAIR && writes) {
        if (a.into) add = load(a.into + token * a.out_stride + out_row);
        if (a.bias) bias = a.bias[out_row];
      }
      float c[4] = {0, 0, 0, 0};
      for (int u = 0; u < count; ++u) {
        wait_copies<DEPTH - 1>();
        __syncwarp();
        const typename W::Raw raw = W::read(slot(now), lane);
        const uint4 b0 = *(const uint4*)(x + u * x_unit), b1 = *(const uint4*)(x + u * x_unit + 8);
        __syncwarp();
        fetch_next(now);
        now = now + 1 == DEPTH ? 0 : now + 1;
        u32 w[4];
        W::operand(raw, 0, w);
        T::multiply(c, w, b0.x, b0.y);
        W::operand(raw, 1, w);
        T::multiply(c, w, b0.z, b0.w);
        W::operand(raw, 2, w);
        T::multiply(c, w, b1.x, b1.y);
        W::operand(raw, 3, w);
        T::multiply(c, w, b1.z, b1.w);
      }
      float* part = parts(buffer) + warp * columns * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (lane % 4 * 2 + i < columns) {
          part[(lane % 4 * 2 + i) * 16] = c[i];
          part[(lane % 4 * 2 + i) * 16 + 8] = c[2 + i];
        }
      if (!PAIR || v % 2) {
        __syncthreads();
        if (writes) {
          float y = value(buffer, token, row, undo);
          if (PAIR) {
            y = activate(a.act, value(buffer - 1, token, row, undo), y);
          } else {
            if (a.bias) y = __fadd_rn(y, bias);
            if (a.into) y = __fadd_rn(y, add);
          }
          a.out[token * a.out_stride + out_row] = y;
        }
      }
      buffer = buffer + 1 == BUFFERS ? 0 : buffer + 1;
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
