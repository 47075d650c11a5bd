// Recurrent layers: new tokens behind a state and a log, and logs folded into states. The formulas
// are those of kernels/recur.py, which is what runs where shapes are odd.
//
// A block has one head of one sequence and 32 columns of its values, which are rows of its state:
// eight threads to a row, each with DK / 8 of its values in registers, four at a time. Sums over a
// row are chains in a thread, then a tree over the eight; a row's share of the log is in the same
// sum. So what a token gets depends on its head's values alone. Compiled for one shape: DK (a
// multiple of 32), DV, HEADS, K_HEADS, TILED, DELTA.

constexpr int ROWS = 32;     // of a state in a block
constexpr int ENTRIES = 16;  // of a log, at most
constexpr int PARTS = DK / 32;
constexpr int PITCH = ROWS + 4;  // of u in shared memory, so that eight entries of four rows meet in no bank
constexpr int KEYS = K_HEADS * DK, VALUES = HEADS * DV, SPLITS = (DV + ROWS - 1) / ROWS;

struct RecurArgs {
  const float *x, *mixed;
  float* out;
  const float *a, *dt_bias, *skip;
  float *states, *logs;
  const int *first, *count, *state_in, *log_in, *length, *state_out, *state_end, *room, *page, *slot;
  long long state_at, log_at, state_words, log_words, log_stride;
  int cols, channels, log_tokens;
  float dt_low, dt_high;
};

struct FoldArgs {
  float *states, *logs;
  const long long* offsets;
  const int *state_in, *log, *n_entries, *state_out;
  long long state_words, log_words, log_stride;
  int n_layers, tail_words, cols;
};

struct Log {
  float keys[ENTRIES][DK];
  float u[ENTRIES][PITCH];
  float c[ENTRIES];
  float past_k[2][ENTRIES], past_q[2][ENTRIES], own_q[2];
};

extern __shared__ float4 shared_memory[];  // one Log

struct Place {
  int lane8, group, row[2], entry, head, shared, split;
};

__device__ __forceinline__ Place place() {
  Place p;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  p.lane8 = lane & 7, p.group = lane >> 3;
  p.row[0] = warp * 8 + p.group, p.row[1] = p.row[0] + 4;
  p.entry = warp * 4 + p.group;
  p.head = blockIdx.x / SPLITS, p.split = blockIdx.x % SPLITS;
  p.shared = TILED ? p.head % K_HEADS : p.head / (HEADS / K_HEADS);
  return p;
}

__device__ __forceinline__ float4 zero4() { return {0.f, 0.f, 0.f, 0.f}; }

__device__ __forceinline__ float4 scaled(float4 v, float by) {
  return {__fmul_rn(v.x, by), __fmul_rn(v.y, by), __fmul_rn(v.z, by), __fmul_rn(v.w, by)};
}

__device__ __forceinline__ float4 added(float4 v, float by, float4 k) {
  return {__fmaf_rn(by, k.x, v.x), __fmaf_rn(by, k.y, v.y), __fmaf_rn(by, k.z, v.z), __fmaf_rn(by, k.w, v.w)};
}

__device__ __forceinline__ float chain(float sum, float4 a, float4 b) {
  sum = __fmaf_rn(a.x, b.x, sum);
  sum = __fmaf_rn(a.y, b.y, sum);
  sum = __fmaf_rn(a.z, b.z, sum);
  return __fmaf_rn(a.w, b.w, sum);
}

// Two chains of half a row each: a quarter of the latency is saved, and the order is fixed.
__device__ __forceinline__ float dot(const float4* a, const float4* b) {
  float even = 0.f, odd = 0.f;
#pragma unroll
  for (int j = 0; j < PARTS; j += 2) {
    even = chain(even, a[j], b[j]);
    if (j + 1 < PARTS) odd = chain(odd, a[j + 1], b[j + 1]);
  }
  return __fadd_rn(even, odd);
}

__device__ __forceinline__ float over_row(float v) {
#pragma unroll
  for (int step = 4; step; step /= 2) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, step));
  return v;
}

// Of vectors of DK values, those that a thread has: 4 · lane8 + 32 · j onwards.
__device__ __forceinline__ void load_part(float4* v, const float* from, int lane8) {
#pragma unroll
  for (int j = 0; j < PARTS; j++) v[j] = load4(from + 4 * lane8 + 32 * j);
}

__device__ __forceinline__ void load_state(float4 (*s)[PARTS], const float* page, const Place& p, bool known) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int column = p.split * ROWS + p.row[r];
    bool there = known && column < DV;
    const float* at = page + (long long)(p.head * DV + column) * DK;
#pragma unroll
    for (int j = 0; j < PARTS; j++) s[r][j] = there ? load4(at + 4 * p.lane8 + 32 * j) : zero4();
  }
}

__device__ __forceinline__ void store_state(float4 (*s)[PARTS], float* page, const Place& p) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int column = p.split * ROWS + p.row[r];
    float4* at = (float4*)(page + (long long)(p.head * DV + column) * DK);
    if (column < DV)
#pragma unroll
      for (int j = 0; j < PARTS; j++) at[p.lane8 + 8 * j] = s[r][j];
  }
}

// The first n entries of a log, from where derived values start; zeros behind them.
__device__ __forceinline__ void load_log(Log& log, const float* derived, long long stride, int n, const Place& p) {
  const float* mine = derived + p.entry * stride + p.shared * DK;
#pragma unroll
  for (int j = 0; j < PARTS; j++) {
    float4 k = p.entry < n ? load4(mine + 4 * p.lane8 + 32 * j) : zero4();
    *(float4*)&log.keys[p.entry][4 * p.lane8 + 32 * j] = k;
  }
  int column = p.split * ROWS + (threadIdx.x & 31);
#pragma unroll
  for (int e = threadIdx.x >> 5; e < ENTRIES; e += 4) {
    bool there = e < n && column < DV;
    log.u[e][threadIdx.x & 31] = there ? load(derived + e * stride + KEYS + p.head * DV + column) : 0.f;
  }
  if (threadIdx.x < ENTRIES)
    log.c[threadIdx.x] = threadIdx.x < n ? load(derived + threadIdx.x * stride + KEYS + VALUES + p.head) : 0.f;
}

// A state and the n tokens behind it become a state. All threads have written what is in the log.
__device__ __forceinline__ void fold_log(float4 (*s)[PARTS], const Log& log, int n, const Place& p) {
  float last = n ? log.c[n - 1] : 0.f;
  float decay = expf(last);
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int j = 0; j < PARTS; j++) s[r][j] = scaled(s[r][j], decay);
  for (int e = 0; e < n; e++) {
    float share = expf(__fsub_rn(last, log.c[e]));
    float by[2] = {__fmul_rn(share, log.u[e][p.row[0]]), __fmul_rn(share, log.u[e][p.row[1]])};
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
      float4 k = *(const float4*)&log.keys[e][4 * p.lane8 + 32 * j];
      s[0][j] = added(s[0][j], by[0], k);
      s[1][j] = added(s[1][j], by[1], k);
    }
  }
}

__device__ __forceinline__ float softplus(float x) {
  return __fadd_rn(fmaxf(x, 0.f), logf(__fadd_rn(1.f, expf(-fabsf(x)))));
}

// What a token brings: loaded one token ahead, since it comes from far away.
struct Token {
  float4 k[PARTS], q[PARTS];
  float v[2], gate, rate;
};

__device__ __forceinline__ void load_token(Token& t, const RecurArgs& a, int row, const Place& p) {
  const float* values = a.mixed + (long long)row * a.channels;
  const float* raw = a.x + (long long)row * a.cols + a.channels;
  load_part(t.q, values + (DELTA ? p.shared * DK : VALUES + KEYS + p.shared * DK), p.lane8);
  load_part(t.k, values + (DELTA ? KEYS + p.shared * DK : VALUES + p.shared * DK), p.lane8);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int column = p.split * ROWS + p.row[r];
    t.v[r] = column < DV ? load(values + (DELTA ? 2 * KEYS : 0) + p.head * DV + column) : 0.f;
  }
  t.gate = load(raw + (DELTA ? HEADS : 0) + p.head);
  t.rate = DELTA ? load(raw + p.head) : 0.f;
}

extern "C" __global__ void __launch_bounds__(128, 4) recur(const RecurArgs a) {
  Log& log = *(Log*)shared_memory;
  const Place p = place();
  const int seq = blockIdx.y;
  wait_for_previous();
  let_next_start();
  const int first = a.first[seq], count = a.count[seq], state_out = a.state_out[seq];
  if (!count) return;
  if (a.page[first] < 0 && state_out < 0) {  // padding
    for (int i = threadIdx.x; i < count * ROWS; i += 128) {
      int column = p.split * ROWS + i % ROWS;
      if (column < DV) a.out[(long long)(first + i / ROWS) * VALUES + p.head * DV + column] = 0.f;
    }
    return;
  }
  float4 s[2][PARTS];
  const int state_in = a.state_in[seq], end = a.state_end[seq];
  load_state(s, a.states + state_in * a.state_words + a.state_at, p, state_in >= 0);
  Token token;
  load_token(token, a, first, p);
  int n = a.length[seq], room = a.room[seq];
  load_log(log, a.logs + a.log_in[seq] * a.log_words + a.log_at + a.cols, a.log_stride, n, p);
  const float a_log = a.a[p.head], bias = a.dt_bias[p.head], skip = a.skip[p.head];
  __syncthreads();
  float c_last = n ? log.c[n - 1] : 0.f, c_mine = log.c[p.entry];
  for (int i = 0; i < count; i++) {
    if (n == room || i == end) {
      __syncthreads();
      fold_log(s, log, n, p);
      __syncthreads();
      n = 0, room = a.log_tokens, c_last = 0.f;
      if (i == end) store_state(s, a.states + state_out * a.state_words + a.state_at, p);
    }
    const int row = first + i, turn = i & 1;
    Token now = token;
    if (i + 1 < count) load_token(token, a, row + 1, p);
    float dt = softplus(__fadd_rn(now.gate, bias));
    if (!DELTA) dt = fminf(fmaxf(dt, a.dt_low), a.dt_high);
    const float c = __fmaf_rn(a_log, dt, c_last), decay = expf(c);
    if (p.entry == n) {
      c_mine = c;
      log.c[n] = c;
#pragma unroll
      for (int j = 0; j < PARTS; j++) *(float4*)&log.keys[n][4 * p.lane8 + 32 * j] = now.k[j];
    }
    float4 key[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; j++) key[j] = *(const float4*)&log.keys[p.entry][4 * p.lane8 + 32 * j];
    float by_k = DELTA ? over_row(dot(key, now.k)) : 0.f, by_q = over_row(dot(key, now.q));
    if (p.lane8 == 0) {
      float share = p.entry < n ? expf(__fsub_rn(c, c_mine)) : 0.f;
      log.past_k[turn][p.entry] = __fmul_rn(by_k, share);
      log.past_q[turn][p.entry] = __fmul_rn(by_q, share);
      if (p.entry == n) log.own_q[turn] = by_q;
    }
    __syncthreads();
    const int page = a.page[row];
    float* entry = a.logs + (page < 0 ? 0 : page * a.log_words + a.log_at + a.slot[row] * a.log_stride);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int column = p.split * ROWS + p.row[r];
      float u_low = log.u[p.lane8][p.row[r]], u_high = log.u[p.lane8 + 8][p.row[r]];
      float y = __fmul_rn(decay, dot(s[r], now.q)), mine;
      y = __fmaf_rn(log.past_q[turn][p.lane8], u_low, y);
      y = over_row(__fmaf_rn(log.past_q[turn][p.lane8 + 8], u_high, y));
      if (DELTA) {
        float seen = __fmul_rn(decay, dot(s[r], now.k));
        seen = __fmaf_rn(log.past_k[turn][p.lane8], u_low, seen);
        seen = over_row(__fmaf_rn(log.past_k[turn][p.lane8 + 8], u_high, seen));
        float rate = __fdiv_rn(1.f, __fadd_rn(1.f, expf(-now.rate)));
        mine = __fmul_rn(rate, __fsub_rn(now.v[r], seen));
        y = __fmul_rn(__fmaf_rn(log.own_q[turn], mine, y), rsqrtf((float)DK));
      } else {
        mine = __fmul_rn(dt, now.v[r]);
        y = __fmaf_rn(skip, now.v[r], __fmaf_rn(log.own_q[turn], mine, y));
      }
      if (p.lane8 == 0 && column < DV) {
        a.out[(long long)row * VALUES + p.head * DV + column] = y;
        if (page >= 0) entry[a.cols + KEYS + p.head * DV + column] = mine;
      }
      __syncwarp();
      if (p.lane8 == 0) log.u[n][p.row[r]] = mine;
    }
    if (page >= 0 && p.split == 0 && threadIdx.x == 0) {
      entry[a.cols + KEYS + VALUES + p.head] = c;
      entry[a.channels + (DELTA ? HEADS : 0) + p.head] = now.gate;
      if (DELTA) entry[a.channels + p.head] = now.rate;
    }
    c_last = c, n++;
  }
  if (end == count) {
    __syncthreads();
    fold_log(s, log, n, p);
    store_state(s, a.states + state_out * a.state_words + a.state_at, p);
  }
}

extern "C" __global__ void __launch_bounds__(128, 4) fold(const FoldArgs a) {
  Log& log = *(Log*)shared_memory;
  const Place p = place();
  wait_for_previous();
  let_next_start();
  const int which = blockIdx.y, layer = blockIdx.z;
  const int state_in = a.state_in[which], n = a.n_entries[which];
  const long long state_at = a.offsets[layer] + a.tail_words, log_at = a.offsets[a.n_layers + layer];
  float4 s[2][PARTS];
  load_state(s, a.states + state_in * a.state_words + state_at, p, state_in >= 0);
  load_log(log, a.logs + a.log[which] * a.log_words + log_at + a.cols, a.log_stride, n, p);
  __syncthreads();
  fold_log(s, log, n, p);
  store_state(s, a.states + a.state_out[which] * a.state_words + state_at, p);
}
