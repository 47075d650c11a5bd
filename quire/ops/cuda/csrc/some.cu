// Products for up to 64 tokens. A block has groups of four warps and a tile of tokens that all share; a
// warp unpacks a tile of 16 weight rows, each weight once. Columns are summed in order within a slice,
// then slices one after the other: here, or, where a matrix has few rows, by `join` after blocks of
// their own.
// WEIGHTS, TOKENS, GROUPS, STAGES and BLOCKS come from the host.

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
  const int *owner, *pairs;  // of experts: which a tile of tokens meets, and its tokens; -1: none
  int divide;                // pair i has row i / divide of x
  int narrow;                // act(gate) · up in bfloat16
};

extern __shared__ __align__(1024) u8 memory[];

__device__ __forceinline__ int load_int(const int* at) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

enum Kind { SLICE, WHOLE, GATED, ROUTED };

template <int KIND> struct Some {
  typedef WEIGHTS W;
  typedef typename W::Type T;
  static constexpr int WARPS = 4 * GROUPS, SIZE = 32 * WARPS, EIGHTS = TOKENS / 8;
  static constexpr int X_BYTES = TOKENS * 128, W_BYTES = WARPS * W::bytes;

  const SomeArgs& a;
  const int warp, lane, units, slice, first, count;

  __device__ Some(const SomeArgs& args)
      : a(args), warp(threadIdx.x / 32), lane(threadIdx.x % 32), units((args.cols + UNIT - 1) / UNIT),
        slice((units + 7) / 8), first(KIND == SLICE ? blockIdx.z * slice : 0),
        count(KIND == SLICE ? min(slice, units - first) : units) {}

  __device__ __forceinline__ u8* stage_x(int i) const { return memory + i * X_BYTES; }
  __device__ __forceinline__ u8* stage_w(int i) const {
    return memory + STAGES * X_BYTES + i * W_BYTES + warp * W::bytes;
  }

  // Of four warps two have rows of the gate, and two those of up.
  __device__ __forceinline__ int tile() const {
    if (KIND == GATED) return blockIdx.y * WARPS / 2 + warp / 4 * 2 + warp % 2 + warp / 2 % 2 * a.tiles;
    return blockIdx.y * WARPS + warp;
  }

  // A row of x for each column of the tile; with `fine` the second half has what rounding lost.
  __device__ __forceinline__ int token(int column) const {
    const int half = TOKENS / 2;
    if (KIND == ROUTED) {
      const int pair = load_int(a.pairs + blockIdx.x * TOKENS + column);
      return pair < 0 ? a.n : pair;
    }
    if (!a.fine) return blockIdx.x * TOKENS + column;
    return blockIdx.x * half + column % half;
  }

  __device__ __forceinline__ int row_of(int token) const { return KIND == ROUTED ? token / a.divide : token; }

  // Each thread fetches some pieces of 16 bytes.
  struct Tokens {
    static constexpr int PIECES = (TOKENS * 8 + SIZE - 1) / SIZE;
    static constexpr u32 NONE = ~0u;
    const Some& f;
    u32 from[PIECES];
    __device__ __forceinline__ Tokens(const Some& some) : f(some) {}
    __device__ __forceinline__ void find() {
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const int r = i * (SIZE / 8) + threadIdx.x / 8, t = r < TOKENS ? f.token(r) : f.a.n;
        const int row = f.row_of(t) + (f.a.fine && r >= TOKENS / 2 ? f.a.n : 0);
        from[i] = t < f.a.n ? row * f.a.cols + f.first * UNIT + threadIdx.x % 8 * 8 : NONE;
      }
    }
    __device__ __forceinline__ void fetch(int into, int u) {
      const u32 r = threadIdx.x / 8, c = threadIdx.x % 8;
      const u32 to = shared_address(f.stage_x(into)) + r * 128 + ((c ^ (r & 7)) << 4);
      const bool whole = (f.first + u) * UNIT + c * 8 < f.a.cols;
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const bool inside = whole && from[i] != NONE;
        if (i * (SIZE / 8) + r < TOKENS)
          copy16_if(to + i * SIZE * 16, f.a.x + (inside ? from[i] + u * UNIT : 0), inside);
      }
    }
  };

  __device__ __forceinline__ void multiply(int at, float (&c)[EIGHTS][4]) const {
    const typename W::Raw raw = W::read(stage_w(at), lane);
    u32 w[4][4];
#pragma unroll
    for (int s = 0; s < 4; ++s) W::operand(raw, s, w[s]);
    multiply_unit<T>(c, w, shared_address(stage_x(at)), lane);
  }

  __device__ __forceinline__ void store_slice(const float (&c)[EIGHTS][4]) const {
    const int columns = a.n * (1 + a.fine);
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = j * 8 + lane % 4 * 2 + i % 2, row = tile() * 16 + lane / 4 + i / 2 * 8;
        const int at = token(column) + (a.fine && column >= TOKENS / 2 ? a.n : 0);
        if (token(column) < a.n && row < a.rows) a.out[((u64)blockIdx.z * columns + at) * a.rows + row] = c[j][i];
      }
  }

  __device__ __forceinline__ void store(float (&total)[EIGHTS][4]) const {
    if (a.fine)
#pragma unroll
      for (int j = 0; j < EIGHTS / 2; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[j][i] = __fadd_rn(total[j][i], total[j + EIGHTS / 2][i]);
    const bool up = KIND == GATED && warp / 2 % 2;
    float* other = (float*)memory + ((warp / 4 * 2 + warp % 2) * EIGHTS * 4) * 32 + lane;
    if (KIND == GATED) {
      __syncthreads();
      if (up)
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; ++i) other[i * 32] = total[i / 4][i % 4];
      __syncthreads();
      if (up) return;
    }
    const int rows = KIND == GATED ? a.tiles * 16 : a.rows;
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
      if (a.fine && j >= EIGHTS / 2) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = token(j * 8 + lane % 4 * 2 + i % 2), row = tile() * 16 + lane / 4 + i / 2 * 8;
        if (t >= a.n || row >= rows) continue;
        const float undo = T::scaled ? load(a.undo + row_of(t)) : 1.0f;
        float* to = a.out + t * a.out_stride + row;
        float y = __fmul_rn(total[j][i], undo);
        if (KIND == GATED) {
          y = activate(a.act, y, __fmul_rn(other[(j * 4 + i) * 32], undo));
          if (a.narrow) {
            ((u16*)a.out)[t * a.out_stride + row] = (u16)to_bfloat2(y, 0);
            continue;
          }
        } else {
          if (a.bias) y = __fadd_rn(y, a.bias[row]);
          if (a.into) y = __fadd_rn(y, load(to));
        }
        *to = y;
      }
    }
  }

  __device__ __forceinline__ void run() const {
    let_next_start();
    Tokens tokens(*this);
    if (KIND == ROUTED) wait_for_previous();  // which expert it is, others write
    const int expert = KIND == ROUTED ? load_int(a.owner + blockIdx.x) : 0;
    if (expert < 0) return;
    const int last = (KIND == GATED ? 2 : 1) * a.tiles - 1, t = min(tile(), last) + expert * a.tiles;
    const u8* from = W::find(a.w, t, a.cols, first, lane);
    auto fetch_weights = [&](int into) {
      W::copy(shared_address(stage_w(into)), from, KIND == ROUTED ? 16 : a.rows - t * 16, a.cols, lane);
      from += W::step;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
      if (i < count) fetch_weights(i);
    if (KIND != ROUTED) wait_for_previous();
    tokens.find();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (i < count) tokens.fetch(i, i);
      commit_copies();
    }
    float c[EIGHTS][4] = {}, total[EIGHTS][4] = {};
    int now = 0, next = STAGES - 1;
    for (int start = 0; start < count; start += slice) {
      const int end = min(start + slice, count);
      for (int u = start; u < end; ++u) {
        wait_copies<STAGES - 2>();
        finish_products(c);
        show_copies();
        __syncthreads();
        if (u + STAGES - 1 < count) {
          fetch_weights(next);
          tokens.fetch(next, u + STAGES - 1);
        }
        commit_copies();
        multiply(now, c);
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
      }
      finish_products(c);
      if (KIND >= WHOLE)
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; ++i)
          total[i / 4][i % 4] = __fadd_rn(total[i / 4][i % 4], c[i / 4][i % 4]), c[i / 4][i % 4] = 0;
    }
    if (KIND == SLICE)
      store_slice(c);
    else
      store(total);
  }
};

extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS) some_slice(const __grid_constant__ SomeArgs a) {
  Some<SLICE>(a).run();
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS) some_whole(const __grid_constant__ SomeArgs a) {
  Some<WHOLE>(a).run();
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS) some_gated(const __grid_constant__ SomeArgs a) {
  Some<GATED>(a).run();
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS) some_routed(const __grid_constant__ SomeArgs a) {
  Some<ROUTED>(a).run();
}
