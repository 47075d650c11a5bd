// Any tokens of each sequence, after `relate`, in chunks between folds.

constexpr int ROWS = 32;               // of a state in a block
constexpr int R = 4;                   // of them in a thread; 16 threads share those
constexpr int BLOCK = ROWS / R * 16;   // threads
constexpr int MINE = (PARTS + 1) / 2;  // parts of a row that a thread has: even ones or odd ones
constexpr int FOUR = 4;                // tokens that meet the state at a time

// Tokens between two folds, at the places that they have in a log, and what `relate` tells of them.
struct Chunk {
  float vectors[2][ENTRIES][DK];  // keys and queries
  float v[ENTRIES][ROWS], related[ENTRIES][RELATED];
  int page[ENTRIES], slot[ENTRIES];
};

struct Scan {
  Chunk chunks[2];
  float sums[2][ENTRIES][ROWS];  // of rows of the state with keys and with queries
  float u[ENTRIES][ROWS];        // of entries that were there, then of all, as they are folded
  float left[ENTRIES];           // of each entry, where it is folded
};

// Where a thread is among the sixteen that share R rows. Its row r is row r ^ turn of them: so sums over
// rows, of which each lane ends up with one, need no choice of what to give away.
struct Spot {
  int lane8, odd, rows, turn;
  __device__ __forceinline__ Spot() : lane8(threadIdx.x & 7), odd(threadIdx.x >> 3 & 1), rows((threadIdx.x >> 4) * R) {
    turn = lane8 * R / 8;
  }
  // Part i of a vector.
  __device__ __forceinline__ float4 part(const float* vector, int i) const {
    const int j = 2 * i + odd;
    return j < PARTS ? *(const float4*)(vector + 4 * lane8 + 32 * j) : zero4();
  }
};

typedef float4 Rows[R][MINE];

// Lanes read next to each other, and change the order of rows then.
__device__ __forceinline__ void load_state(Rows& s, const float* page, const Place& p, const Spot& at, bool known) {
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int column = p.start + at.rows + r;
    const float* row = page + (long long)(p.head * DV + column) * DK + 4 * at.lane8;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int j = 2 * i + at.odd;
      s[r][i] = known && column < DV && j < PARTS ? load4(row + 32 * j) : zero4();
    }
  }
#pragma unroll
  for (int bit = R / 2; bit; bit /= 2)
#pragma unroll
    for (int r = 0; r < R; r++)
      if (!(r & bit))
#pragma unroll
        for (int i = 0; i < MINE; i++) {
          const float4 low = s[r][i], high = s[r | bit][i];
          s[r][i] = at.turn & bit ? high : low, s[r | bit][i] = at.turn & bit ? low : high;
        }
}

// Once for a prompt, so lanes may well write far from each other.
__device__ __forceinline__ void store_state(const Rows& s, float* page, const Place& p, const Spot& at) {
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int column = p.start + at.rows + (r ^ at.turn);
    float* row = page + (long long)(p.head * DV + column) * DK + 4 * at.lane8;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int j = 2 * i + at.odd;
      if (column < DV && j < PARTS) *(float4*)(row + 32 * j) = s[r][i];
    }
  }
}

// The first n entries of a log, from where derived values start.
__device__ __forceinline__ void load_log(Scan& scan, const float* derived, long long stride, int n, const Place& p) {
  Chunk& chunk = scan.chunks[0];
  for (int i = threadIdx.x; i < n * DK / 4; i += BLOCK) {
    const int e = i / (DK / 4), at = i % (DK / 4) * 4;
    *(float4*)&chunk.vectors[0][e][at] = load4(derived + e * stride + p.shared * DK + at);
  }
  for (int i = threadIdx.x; i < n * ROWS; i += BLOCK) {
    const int e = i / ROWS, column = p.start + i % ROWS;
    scan.u[e][i % ROWS] = column < DV ? load(derived + e * stride + KEYS + p.head * DV + column) : 0.f;
  }
  if (threadIdx.x < n) {
    const float c = load(derived + threadIdx.x * stride + KEYS + VALUES + p.head);
    chunk.related[threadIdx.x][2 * ENTRIES] = c;
  }
}

// Has the last THREADS threads copy m tokens from a row on, to places from n on.
template <int THREADS>
__device__ __forceinline__ void fetch(Chunk& to, const RecurArgs& a, int row, int n, int m, const Place& p) {
  const int me = threadIdx.x - (BLOCK - THREADS);
  constexpr int FOURS = DK / 4, NEAR = RELATED / 4;  // copies of a vector, and of what is related
  const float* mixed = token(a, row) + p.shared * DK;
  for (int i = me; i < m * 2 * FOURS; i += THREADS) {
    const int e = i / (2 * FOURS), query = i / FOURS % 2, at = i % FOURS * 4;
    const float* from = mixed + (long long)e * a.channels + (query ? Q_AT : K_AT);
    copy16(shared_address(&to.vectors[query][n + e][at]), from + at);
  }
  const float* related = a.related + ((long long)row * HEADS + p.head) * RELATED;
  for (int i = me; i < m * NEAR; i += THREADS) {
    const int e = i / NEAR, at = i % NEAR * 4;
    copy16(shared_address(&to.related[n + e][at]), related + (long long)e * HEADS * RELATED + at);
  }
  for (int i = me; i < m * ROWS / 4; i += THREADS) {
    const int e = i / (ROWS / 4), column = i % (ROWS / 4) * 4;
    const bool inside = p.start + column < DV;
    const float* from = token(a, row + e) + V_AT + p.head * DV + p.start + column;
    copy16_if(shared_address(&to.v[n + e][column]), inside ? from : a.mixed, inside);
  }
  if (me < m) {
    copy4(shared_address(&to.page[n + me]), a.page + row + me);
    copy4(shared_address(&to.slot[n + me]), a.slot + row + me);
  }
  commit_copies();
}

// What rows of the state have in the sums of tokens up to place `stop`: this waits for none of them.
// Four at a time, whether they are there or not, since sums over lanes take long. Threads with even
// parts of rows sum over keys, those with odd ones over queries.
__device__ __forceinline__ void multiply(const Rows& s, Scan& scan, const Chunk& chunk, int n, int stop, const Spot& at) {
  const float(*own)[DK] = chunk.vectors[at.odd], (*other)[DK] = chunk.vectors[!at.odd];
#pragma unroll 1
  for (int first = n & ~(FOUR - 1); first < stop; first += FOUR) {
    float sum[FOUR][R], given[FOUR][R];
#pragma unroll
    for (int e = 0; e < FOUR; e++) {
#pragma unroll
      for (int r = 0; r < R; r++) sum[e][r] = given[e][r] = 0.f;
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        const float4 mine = at.part(own[first + e], i), theirs = at.part(other[first + e], i);
#pragma unroll
        for (int r = 0; r < R; r++) sum[e][r] = chain(sum[e][r], s[r][i], mine);
#pragma unroll
        for (int r = 0; r < R; r++) given[e][r] = chain(given[e][r], s[r][i], theirs);
      }
    }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int e = 0; e < FOUR; e++) sum[e][r] = __fadd_rn(sum[e][r], __shfl_xor_sync(~0u, given[e][r], 8));
#pragma unroll
    for (int step = 4; step; step /= 2) {
      const int kept = R * step / 8;  // rows; the last one is kept by both
#pragma unroll
      for (int e = 0; e < FOUR; e++) {
        if (!kept) sum[e][0] = __fadd_rn(sum[e][0], __shfl_xor_sync(~0u, sum[e][0], step));
#pragma unroll
        for (int r = 0; r < kept; r++) sum[e][r] = __fadd_rn(sum[e][r], __shfl_xor_sync(~0u, sum[e][r + kept], step));
      }
    }
#pragma unroll
    for (int e = 0; e < FOUR; e++) scan.sums[at.odd][first + e][at.rows + at.turn] = sum[e][0];
  }
}

// Tokens from place n to place `stop` in one row, each with what those before it left; place 0 has a
// row of `out`. All u are left in the scan as they are folded. Eight at a time, whether they are there
// or not, so that nothing but u has to be waited for.
__device__ __forceinline__ void advance(const RecurArgs& a, Scan& scan, const Chunk& chunk, int row, int n, int stop,
                                        float skip, const Place& p) {
  const int at = threadIdx.x, column = p.head * DV + p.start + at;
  const bool inside = p.start + at < DV;
  float u[ENTRIES];
#pragma unroll
  for (int e = 0; e < ENTRIES; e++) u[e] = e < n ? scan.u[e][at] : 0.f;
  float* out = a.out + (long long)row * VALUES + column;
#pragma unroll
  for (int first = 0; first < ENTRIES; first += 8) {
    if (first + 8 <= n || first >= stop) continue;
#pragma unroll
    for (int e = first; e < first + 8; e++) {
      const bool there = e >= n && e < stop;
      const float *near = chunk.related[e], v = chunk.v[e][at];
      const float4 told = *(const float4*)(near + 2 * ENTRIES);
      const Gates g = {told.x, told.y, told.z, told.w};
      const float own = added_by(g, v, __fmaf_rn(g.decay, scan.sums[0][e][at], of_entries(near, u, e)));
      u[e] = there ? own : u[e];
      const float y = __fmaf_rn(g.decay, scan.sums[1][e][at], of_entries(near + ENTRIES, u, e + 1));
      if (there && inside) out[(long long)e * VALUES] = output_of(y, v, skip);
    }
  }
  if (inside && stop > n && chunk.page[stop - 1] >= 0)  // of a chunk, all are kept in a log or none
#pragma unroll
    for (int e = 0; e < ENTRIES; e++)
      if (e >= n && e < stop) entry_of(a, chunk.page[e], chunk.slot[e])[a.cols + KEYS + column] = u[e];
#pragma unroll
  for (int e = 0; e < ENTRIES; e++) scan.u[e][at] = __fmul_rn(scan.left[e], u[e]);
}

// A state and the n tokens behind it become a state.
__device__ __forceinline__ void fold(Rows& s, const Scan& scan, const Chunk& chunk, int n, float decay, const Spot& at) {
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int i = 0; i < MINE; i++) s[r][i] = scaled(s[r][i], decay);
#pragma unroll 4
  for (int e = 0; e < n; e++) {
    float by[R];
#pragma unroll
    for (int r = 0; r < R; r++) by[r] = scan.u[e][at.rows + (r ^ at.turn)];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const float4 k = at.part(chunk.vectors[0][e], i);
#pragma unroll
      for (int r = 0; r < R; r++) s[r][i] = added(s[r][i], by[r], k);
    }
  }
}

// Block x has some rows of a head, block y a sequence. While some threads have a row each, the others
// fetch the next chunk.
extern "C" __global__ void __launch_bounds__(BLOCK, DK > 128 ? 2 : 4) recur(const RecurArgs a) {
  Scan& scan = *(Scan*)shared_memory;
  const Place p = place<ROWS>();
  const Spot at;
  const int seq = blockIdx.y;
  wait_for_previous();
  let_next_start();
  const int first = a.first[seq], count = a.count[seq], state_out = a.state_out[seq], end = a.state_end[seq];
  if (!count) return;
  if (a.page[first] < 0 && state_out < 0) return zeros(a, first, count, p.head, p.start, ROWS);
  int n = a.length[seq], room = a.room[seq], turn = 0;
  int m = end == 0 ? 0 : min(room - n, end > 0 ? end : count);
  fetch<BLOCK>(scan.chunks[0], a, first, n, m, p);
  Rows s;
  const int state_in = a.state_in[seq];
  load_state(s, a.states + state_in * a.state_words + a.state_at, p, at, state_in >= 0);
  load_log(scan, a.logs + a.log_in[seq] * a.log_words + a.log_at + a.cols, a.log_stride, n, p);
  const float skip = DELTA ? 0.f : a.skip[p.head];
  for (int i = 0; i < count;) {
    Chunk& chunk = scan.chunks[turn];
    wait_copies<0>();
    __syncthreads();
    const int after = i + m, stop = n + m;
    const bool folds = after == end || (stop == room && after < count);
    const int next = after < count ? min(a.log_tokens, (end > after ? end : count) - after) : 0;
    turn ^= 1;
    const float last = stop ? chunk.related[stop - 1][2 * ENTRIES] : 0.f;
    if (threadIdx.x < stop) scan.left[threadIdx.x] = expf(__fsub_rn(last, chunk.related[threadIdx.x][2 * ENTRIES]));
    multiply(s, scan, chunk, n, stop, at);
    __syncthreads();
    if (threadIdx.x < ROWS) advance(a, scan, chunk, first + i - n, n, stop, skip, p);
    else fetch<BLOCK - ROWS>(scan.chunks[turn], a, first + after, 0, next, p);
    if (folds) {
      __syncthreads();
      fold(s, scan, chunk, stop, expf(last), at);
      if (after == end) store_state(s, a.states + state_out * a.state_words + a.state_at, p, at);
      room = a.log_tokens;
    }
    i = after, n = 0, m = next;
  }
}
