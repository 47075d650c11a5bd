// Recurrent layers: new tokens behind a state and a log, and logs folded into states. The formulas
// are those of kernels/recur.py, which is what runs where shapes are odd.
//
// A state is a row of DK values for each column of its values. Eight threads share a row, each with
// DK / 8 of its values, four at a time. Sums over a row are chains in a thread, then a tree over the
// eight; a row's share of the log is in the same sum. So what a token gets depends on its head's
// values alone, whether it comes by itself (`decode`, which streams a whole head) or with others
// (`recur`, which keeps 32 rows in registers). Compiled for one shape: DK (a multiple of 32), DV,
// HEADS, K_HEADS, TILED, DELTA, and COLUMNS, the rows of a block of `decode`: a multiple of 16.

constexpr int ROWS = 32;     // of a state in a block of `recur`, 16 for each of its threads' rows
constexpr int FOLDED = DV % 64 ? 1 : 4;  // rows of a thread of `fold`
constexpr int ENTRIES = 16;  // of a log, at most
constexpr int PARTS = DK / 32;
constexpr int KEYS = K_HEADS * DK, VALUES = HEADS * DV;

struct RecurArgs {
  const float *x, *mixed;
  float* out;
  const float *a, *dt_bias, *skip;
  float *states, *logs;
  const int *first, *count, *state_in, *log_in, *length, *state_out, *state_end, *room, *seq, *page, *slot, *entry;
  float* related;  // [tokens][HEADS][RELATED], what `relate` tells `recur`
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

// A log, and u of 16 · R columns: eight entries of four of them meet in no bank.
template <int R> struct Log {
  float keys[ENTRIES][DK];
  float u[ENTRIES][16 * R + 4];
  float c[ENTRIES];
};

struct One {  // what the warps of `decode` tell each other
  float u[ENTRIES][COLUMNS + 4];
  float past_k[ENTRIES], past_q[ENTRIES], own_q;
};

extern __shared__ float4 shared_memory[];

// Where a thread is: in a group of eight, of which there are 16; in a head, from a column on.
struct Place {
  int lane8, group, head, shared, start;
};

template <int COLUMNS_EACH> __device__ __forceinline__ Place place() {
  constexpr int SPLITS = (DV + COLUMNS_EACH - 1) / COLUMNS_EACH;
  Place p;
  p.lane8 = threadIdx.x & 7, p.group = threadIdx.x >> 3;
  p.head = blockIdx.x / SPLITS, p.start = blockIdx.x % SPLITS * COLUMNS_EACH;
  p.shared = TILED ? p.head % K_HEADS : p.head / (HEADS / K_HEADS);
  return p;
}

// Waits for all copies of this thread but the last few; a number that unrolling makes a constant.
__device__ __forceinline__ void wait_copies_but(int pending) {
  switch (pending) {
    case 0: return wait_copies<0>();
    case 1: return wait_copies<1>();
    case 2: return wait_copies<2>();
    case 3: return wait_copies<3>();
    case 4: return wait_copies<4>();
    case 5: return wait_copies<5>();
    case 6: return wait_copies<6>();
    case 7: return wait_copies<7>();
    default: return wait_copies<8>();
  }
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

// Rows group, group + 16, … from the start on.
template <int R>
__device__ __forceinline__ void load_state(float4 (*s)[PARTS], const float* page, const Place& p, bool known) {
#pragma unroll
  for (int r = 0; r < R; r++) {
    int column = p.start + 16 * r + p.group;
    bool there = known && column < DV;
    const float* at = page + (long long)(p.head * DV + column) * DK;
#pragma unroll
    for (int j = 0; j < PARTS; j++) s[r][j] = there ? load4(at + 4 * p.lane8 + 32 * j) : zero4();
  }
}

template <int R> __device__ __forceinline__ void store_state(float4 (*s)[PARTS], float* page, const Place& p) {
#pragma unroll
  for (int r = 0; r < R; r++) {
    int column = p.start + 16 * r + p.group;
    float4* at = (float4*)(page + (long long)(p.head * DV + column) * DK);
    if (column < DV)
#pragma unroll
      for (int j = 0; j < PARTS; j++) at[p.lane8 + 8 * j] = s[r][j];
  }
}

// The first n entries of a log, from where derived values start; u is 0 behind them.
template <int R>
__device__ __forceinline__ void load_log(Log<R>& log, const float* derived, long long stride, int n, const Place& p) {
  const float* mine = derived + p.group * stride + p.shared * DK;
  if (p.group < n)
#pragma unroll
    for (int j = 0; j < PARTS; j++)
      *(float4*)&log.keys[p.group][4 * p.lane8 + 32 * j] = load4(mine + 4 * p.lane8 + 32 * j);
#pragma unroll
  for (int i = threadIdx.x; i < ENTRIES * 16 * R; i += 128) {
    int e = i / (16 * R), column = i % (16 * R);
    bool there = e < n && p.start + column < DV;
    log.u[e][column] = there ? load(derived + e * stride + KEYS + p.head * DV + p.start + column) : 0.f;
  }
  if (threadIdx.x < n) log.c[threadIdx.x] = load(derived + threadIdx.x * stride + KEYS + VALUES + p.head);
}

// A state and the n tokens behind it become a state. All threads have written what is in the log;
// it is used up.
template <int R>
__device__ __forceinline__ void fold_log(float4 (*s)[PARTS], Log<R>& log, int n, const Place& p) {
  float last = n ? log.c[n - 1] : 0.f;
  float decay = expf(last);
  for (int i = threadIdx.x; i < n * 16 * R; i += 128) {
    int e = i / (16 * R), column = i % (16 * R);
    log.u[e][column] = __fmul_rn(expf(__fsub_rn(last, log.c[e])), log.u[e][column]);
  }
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int j = 0; j < PARTS; j++) s[r][j] = scaled(s[r][j], decay);
  __syncthreads();
#pragma unroll 2
  for (int e = 0; e < n; e++) {
    float by[R];
#pragma unroll
    for (int r = 0; r < R; r++) by[r] = log.u[e][16 * r + p.group];
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
      float4 k = *(const float4*)&log.keys[e][4 * p.lane8 + 32 * j];
#pragma unroll
      for (int r = 0; r < R; r++) s[r][j] = added(s[r][j], by[r], k);
    }
  }
}

__device__ __forceinline__ float softplus(float x) {
  return __fadd_rn(fmaxf(x, 0.f), logf(__fadd_rn(1.f, expf(-fabsf(x)))));
}

// What a token brings.
struct Token {
  float4 k[PARTS], q[PARTS];
  float gate, rate;
};

__device__ __forceinline__ const float* values_of(const RecurArgs& a, int row, const Place& p) {
  return a.mixed + (long long)row * a.channels + (DELTA ? 2 * KEYS : 0) + p.head * DV;
}

__device__ __forceinline__ void load_vectors(Token& t, const RecurArgs& a, int row, const Place& p) {
  const float* values = a.mixed + (long long)row * a.channels + p.shared * DK;
  load_part(t.q, values + (DELTA ? 0 : VALUES + KEYS), p.lane8);
  load_part(t.k, values + (DELTA ? KEYS : VALUES), p.lane8);
}

__device__ __forceinline__ void load_token(Token& t, const RecurArgs& a, int row, const Place& p) {
  const float* raw = a.x + (long long)row * a.cols + a.channels;
  load_vectors(t, a, row, p);
  t.gate = load(raw + (DELTA ? HEADS : 0) + p.head);
  t.rate = DELTA ? load(raw + p.head) : 0.f;
}

// Weights of a head.
struct Head {
  float a, bias, skip;
};

__device__ __forceinline__ Head head_of(const RecurArgs& a, const Place& p) {
  return {a.a[p.head], a.dt_bias[p.head], DELTA ? 0.f : a.skip[p.head]};
}

// Of a head, the same for all of its rows: c is the log-decay behind the state, dt its step.
struct Gates {
  float c, decay, dt, rate, skip;
};

__device__ __forceinline__ float step_of(const RecurArgs& a, float gate, float bias) {
  float dt = softplus(__fadd_rn(gate, bias));
  return DELTA ? dt : fminf(fmaxf(dt, a.dt_low), a.dt_high);
}

__device__ __forceinline__ float rate_of(float rate) { return __fdiv_rn(1.f, __fadd_rn(1.f, expf(-rate))); }

__device__ __forceinline__ Gates gates_of(const RecurArgs& a, const Head& h, const Token& t, float c_last) {
  Gates g;
  g.dt = step_of(a, t.gate, h.bias);
  g.c = __fmaf_rn(h.a, g.dt, c_last);
  g.decay = expf(g.c);
  g.rate = DELTA ? rate_of(t.rate) : 0.f;
  g.skip = h.skip;
  return g;
}

// What the entries lane8 and lane8 + 8 have in a token's sums, and q times its own key.
struct Past {
  float k[2], q[2], own;
};

struct Result {
  float y, u;
};

// What a thread has of a row's products with k and q, and u of the entries lane8 and lane8 + 8 there.
__device__ __forceinline__ Result one_row(float by_k, float by_q, const Gates& g, const Past& past, float v, float u_low,
                                          float u_high) {
  Result made;
  float y = __fmul_rn(g.decay, by_q);
  y = __fmaf_rn(past.q[0], u_low, y);
  y = over_row(__fmaf_rn(past.q[1], u_high, y));
  if (DELTA) {
    float seen = __fmul_rn(g.decay, by_k);
    seen = __fmaf_rn(past.k[0], u_low, seen);
    seen = over_row(__fmaf_rn(past.k[1], u_high, seen));
    made.u = __fmul_rn(g.rate, __fsub_rn(v, seen));
    made.y = __fmul_rn(__fmaf_rn(past.own, made.u, y), rsqrtf((float)DK));
  } else {
    made.u = __fmul_rn(g.dt, v);
    made.y = __fmaf_rn(g.skip, v, __fmaf_rn(past.own, made.u, y));
  }
  return made;
}

__device__ __forceinline__ float* entry_of(const RecurArgs& a, int page, int slot) {
  return a.logs + (page < 0 ? 0 : page * a.log_words + a.log_at + slot * a.log_stride);
}

__device__ __forceinline__ void keep_gates(const RecurArgs& a, float* entry, float gate, float rate, float c, int head) {
  entry[a.cols + KEYS + VALUES + head] = c;
  entry[a.channels + (DELTA ? HEADS : 0) + head] = gate;
  if (DELTA) entry[a.channels + head] = rate;
}

__device__ __forceinline__ void zeros(const RecurArgs& a, int first, int count, int head, int column, int columns) {
  for (int i = threadIdx.x; i < count * columns; i += 128) {
    int at = column + i % columns;
    if (at < DV) a.out[(long long)(first + i / columns) * VALUES + head * DV + at] = 0.f;
  }
}

// One token of each sequence, into its log: block x has COLUMNS of a head, block y a sequence. All of
// their state and log is on its way before the token is waited for: the kernel that makes it writes
// neither. Each thread waits for its own part of the state.
extern "C" __global__ void __launch_bounds__(128) decode(const RecurArgs a) {
  constexpr int STEPS = COLUMNS / 16;
  float4* state = shared_memory;  // [STEPS][PARTS][128 threads]
  One& one = *(One*)(shared_memory + STEPS * PARTS * 128);
  const Place p = place<COLUMNS>();
  const int seq = blockIdx.y;
  const int row = a.first[seq], n = a.length[seq], state_in = a.state_in[seq], log_in = a.log_in[seq];
  const float* derived = a.logs + log_in * a.log_words + a.log_at + a.cols;
  const float* us = derived + KEYS + p.head * DV + p.start;
  for (int i = threadIdx.x; i < ENTRIES * COLUMNS / 4; i += 128) {
    int e = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
    copy16_if(shared_address(&one.u[e][column]), e < n ? us + e * a.log_stride + column : a.logs, e < n);
  }
  commit_copies();
  const float* from = a.states + state_in * a.state_words + a.state_at + (long long)(p.head * DV + p.start + p.group) * DK;
  const u32 to = shared_address(state + threadIdx.x);
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
#pragma unroll
    for (int j = 0; j < PARTS; j++)
      copy16_if(to + (step * PARTS + j) * 128 * 16,
                state_in < 0 ? a.states : from + step * 16 * DK + 4 * p.lane8 + 32 * j, state_in >= 0);
    commit_copies();
  }
  const int page = a.page[row], slot = a.slot[row], count = a.count[seq];
  const float* cs = derived + KEYS + VALUES + p.head;
  float c_last = 0.f, c_mine = 0.f;
  float4 key[PARTS];
  if (n) {
    const int e = p.group < n ? p.group : n - 1;
    load_part(key, derived + e * a.log_stride + p.shared * DK, p.lane8);
    c_last = load(cs + (n - 1) * a.log_stride), c_mine = load(cs + e * a.log_stride);
  }
  const Head head = head_of(a, p);
  wait_for_previous();
  let_next_start();
  if (page < 0 || !count) {  // padding
    wait_copies<0>();
    return zeros(a, row, count, p.head, p.start, COLUMNS);
  }
  Token t;
  load_token(t, a, row, p);
  const float* values = values_of(a, row, p) + p.start + p.group;
  float v[STEPS];
#pragma unroll
  for (int step = 0; step < STEPS; step++) v[step] = load(values + step * 16);
  const Gates g = gates_of(a, head, t, c_last);
#pragma unroll
  for (int j = 0; j < PARTS; j++) key[j] = p.group < n ? key[j] : t.k[j];
  float by_k = DELTA ? over_row(dot(key, t.k)) : 0.f, by_q = over_row(dot(key, t.q));
  if (p.lane8 == 0) {
    float share = p.group < n ? expf(__fsub_rn(g.c, c_mine)) : 0.f;
    one.past_k[p.group] = __fmul_rn(by_k, share);
    one.past_q[p.group] = __fmul_rn(by_q, share);
    if (p.group == n) one.own_q = by_q;
  }
  wait_copies_but(STEPS);
  __syncthreads();
  const Past past = {{one.past_k[p.lane8], one.past_k[p.lane8 + 8]}, {one.past_q[p.lane8], one.past_q[p.lane8 + 8]},
                     one.own_q};
  float* entry = entry_of(a, page, slot);
  float* out = a.out + (long long)row * VALUES + p.head * DV + p.start;
  float* kept = entry + a.cols + KEYS + p.head * DV + p.start;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    wait_copies_but(STEPS - 1 - step);
    float4 s[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; j++) s[j] = state[(step * PARTS + j) * 128 + threadIdx.x];
    const int column = step * 16 + p.group;
    const float by_q = dot(s, t.q), by_k = DELTA ? dot(s, t.k) : 0.f;
    Result made = one_row(by_k, by_q, g, past, v[step], one.u[p.lane8][column], one.u[p.lane8 + 8][column]);
    if (p.lane8 == 0) out[column] = made.y, kept[column] = made.u;
  }
  if (threadIdx.x == 0 && p.start == 0) keep_gates(a, entry, t.gate, t.rate, g.c, p.head);
}

constexpr int SHARERS = HEADS / K_HEADS;  // heads that share a key
constexpr int RELATED = 2 * ENTRIES + 4;  // shares of entries in sums with k and with q; c, decay, rate and dt

struct Steps {
  float by[2][ENTRIES];  // products with k and with q
  float dt[SHARERS][ENTRIES], c[SHARERS][ENTRIES];
};

// What a token has to do with those between it and its state, for all heads of a key: block x has a
// token, block y a key. Nothing here waits for a sum over the tokens before, so they run together.
extern "C" __global__ void __launch_bounds__(128) relate(const RecurArgs a) {
  Steps& steps = *(Steps*)shared_memory;
  Place p = place<DV>();
  p.shared = blockIdx.y;
  const int row = blockIdx.x, seq = a.seq[row], n = a.entry[row], page = a.page[row], slot = a.slot[row];
  wait_for_previous();
  let_next_start();
  const int i = row - a.first[seq], back = n - p.group;
  const float* log = a.logs + a.log_in[seq] * a.log_words + a.log_at + a.cols;
  Token t;
  load_vectors(t, a, row, p);
  float4 key[PARTS];
  if (back < 0) {
#pragma unroll
    for (int j = 0; j < PARTS; j++) key[j] = zero4();
  } else if (back <= i) {
    load_part(key, a.mixed + (long long)(row - back) * a.channels + p.shared * DK + (DELTA ? KEYS : VALUES), p.lane8);
  } else {
    load_part(key, log + p.group * a.log_stride + p.shared * DK, p.lane8);
  }
  float by_k = DELTA ? over_row(dot(key, t.k)) : 0.f, by_q = over_row(dot(key, t.q));
  if (p.lane8 == 0) steps.by[0][p.group] = by_k, steps.by[1][p.group] = by_q;
  for (int at = threadIdx.x; at < SHARERS * ENTRIES; at += 128) {
    const int h = at / ENTRIES, e = at % ENTRIES, head = TILED ? p.shared + h * K_HEADS : p.shared * SHARERS + h;
    const float* raw = a.x + (long long)(row - n + e) * a.cols + a.channels + (DELTA ? HEADS : 0) + head;
    if (e <= n && n - e <= i) steps.dt[h][e] = step_of(a, load(raw), a.dt_bias[head]);
    else if (e <= n) steps.c[h][e] = load(log + e * a.log_stride + KEYS + VALUES + head);
  }
  __syncthreads();
  for (int h = threadIdx.x; h < SHARERS; h += 128) {
    const int start = n > i ? n - i : 0;
    const float by = a.a[TILED ? p.shared + h * K_HEADS : p.shared * SHARERS + h];
    float c = start ? steps.c[h][start - 1] : 0.f;
    for (int e = start; e <= n; e++) steps.c[h][e] = c = __fmaf_rn(by, steps.dt[h][e], c);
  }
  __syncthreads();
  for (int at = threadIdx.x; at < SHARERS * ENTRIES; at += 128) {
    const int h = at / ENTRIES, e = at % ENTRIES, head = TILED ? p.shared + h * K_HEADS : p.shared * SHARERS + h;
    float* out = a.related + ((long long)row * HEADS + head) * RELATED;
    const float c = steps.c[h][n], share = e < n ? expf(__fsub_rn(c, steps.c[h][e])) : 0.f;
    out[e] = __fmul_rn(steps.by[0][e], share);
    out[ENTRIES + e] = e == n ? steps.by[1][e] : __fmul_rn(steps.by[1][e], share);
    if (e) continue;
    const float* raw = a.x + (long long)row * a.cols + a.channels + head;
    const float gate = load(raw + (DELTA ? HEADS : 0)), rate = DELTA ? load(raw) : 0.f;
    *(float4*)(out + 2 * ENTRIES) = {c, expf(c), DELTA ? rate_of(rate) : 0.f, steps.dt[h][n]};
    if (page >= 0) keep_gates(a, entry_of(a, page, slot), gate, rate, c, head);
  }
}

// Tokens between two folds, at the places that they have in a log, and what `relate` tells of them.
struct Chunk {
  Log<ROWS / 16> log;
  float queries[ENTRIES][DK], v[ENTRIES][ROWS], related[ENTRIES][RELATED];
  int page[ENTRIES], slot[ENTRIES];
};

// Has m tokens from a row on copied, to places from n on.
__device__ __forceinline__ void fetch(Chunk& to, const RecurArgs& a, int row, int n, int m, const Place& p) {
  constexpr int VECTORS = DK / 2, NEAR = RELATED / 4;  // copies of a token's key and query; of what is related
  const float* mixed = a.mixed + (long long)row * a.channels + p.shared * DK;
  for (int i = threadIdx.x; i < m * VECTORS; i += 128) {
    const int e = i / VECTORS, at = i % VECTORS * 4;
    const float* from = mixed + (long long)e * a.channels;
    if (at < DK) copy16(shared_address(&to.log.keys[n + e][at]), from + (DELTA ? KEYS : VALUES) + at);
    else copy16(shared_address(&to.queries[n + e][at - DK]), from + (DELTA ? 0 : VALUES + KEYS) + at - DK);
  }
  const float* related = a.related + ((long long)row * HEADS + p.head) * RELATED;
  for (int i = threadIdx.x; i < m * NEAR; i += 128) {
    const int e = i / NEAR, at = i % NEAR * 4;
    copy16(shared_address(&to.related[n + e][at]), related + (long long)e * HEADS * RELATED + at);
  }
  for (int i = threadIdx.x; i < m * ROWS / 4; i += 128) {
    const int e = i / (ROWS / 4), column = i % (ROWS / 4) * 4;
    const bool inside = p.start + column < DV;
    copy16_if(shared_address(&to.v[n + e][column]), inside ? values_of(a, row + e, p) + p.start + column : a.mixed, inside);
  }
  if (threadIdx.x < m) {
    copy4(shared_address(&to.page[n + threadIdx.x]), a.page + row + threadIdx.x);
    copy4(shared_address(&to.slot[n + threadIdx.x]), a.slot + row + threadIdx.x);
  }
  commit_copies();
}

// u of the entries lane8 and lane8 + 8, in each of a thread's rows.
struct Kept {
  float low[ROWS / 16], high[ROWS / 16];
};

// Those of a chunk's tokens from place n to place `stop` that are in one half of the log; place 0 has a
// row. What the state has in them waits for nothing; then each adds what those before it left.
template <int HALF>
__device__ __forceinline__ void advance(const RecurArgs& a, const float4 (*s)[PARTS], Kept& u, const Chunk& chunk, int row,
                                        int n, int stop, float skip, const Place& p) {
  constexpr int R = ROWS / 16, FIRST = 8 * HALF;
  float by_k[R][8], by_q[R][8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int e = FIRST + i;
    if (e < n || e >= stop) continue;
    float4 k[PARTS], q[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
      k[j] = *(const float4*)&chunk.log.keys[e][4 * p.lane8 + 32 * j];
      q[j] = *(const float4*)&chunk.queries[e][4 * p.lane8 + 32 * j];
    }
#pragma unroll
    for (int r = 0; r < R; r++) by_k[r][i] = DELTA ? dot(s[r], k) : 0.f, by_q[r][i] = dot(s[r], q);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int e = FIRST + i;
    if (e < n || e >= stop) continue;
    const float* near = chunk.related[e];
    const float4 told = *(const float4*)(near + 2 * ENTRIES);
    const Gates g = {told.x, told.y, told.w, told.z, skip};
    Past past = {{near[p.lane8], near[p.lane8 + 8]}, {near[ENTRIES + p.lane8], near[ENTRIES + p.lane8 + 8]},
                 near[ENTRIES + e]};
    const bool mine = p.lane8 == i;
    if (mine) past.q[HALF] = 0.f;
    float* entry = entry_of(a, chunk.page[e], chunk.slot[e]) + a.cols + KEYS + p.head * DV;
    float* out = a.out + (long long)(row + e) * VALUES + p.head * DV;
#pragma unroll
    for (int r = 0; r < R; r++) {
      const int at = 16 * r + p.group;
      Result made = one_row(by_k[r][i], by_q[r][i], g, past, chunk.v[e][at], u.low[r], u.high[r]);
      if (mine) (HALF ? u.high[r] : u.low[r]) = made.u;
      if (p.lane8 == 0 && p.start + at < DV) {
        out[p.start + at] = made.y;
        if (chunk.page[e] >= 0) entry[p.start + at] = made.u;
      }
    }
  }
}

// Any tokens of each sequence, after `relate`: block x has some rows of a head, block y a sequence.
// Tokens come in chunks between folds; the next one is on its way while one is worked on.
extern "C" __global__ void __launch_bounds__(128, 3) recur(const RecurArgs a) {
  constexpr int R = ROWS / 16;
  Chunk* chunks = (Chunk*)shared_memory;
  const Place p = place<ROWS>();
  const int seq = blockIdx.y;
  wait_for_previous();
  let_next_start();
  const int first = a.first[seq], count = a.count[seq], state_out = a.state_out[seq], end = a.state_end[seq];
  if (!count) return;
  if (a.page[first] < 0 && state_out < 0) return zeros(a, first, count, p.head, p.start, ROWS);
  int n = a.length[seq], room = a.room[seq], turn = 0;
  int m = end == 0 ? 0 : min(room - n, end > 0 ? end : count);
  fetch(chunks[0], a, first, n, m, p);
  float4 s[R][PARTS];
  const int state_in = a.state_in[seq];
  load_state<R>(s, a.states + state_in * a.state_words + a.state_at, p, state_in >= 0);
  load_log(chunks[0].log, a.logs + a.log_in[seq] * a.log_words + a.log_at + a.cols, a.log_stride, n, p);
  const float skip = DELTA ? 0.f : a.skip[p.head];
  __syncthreads();
  Kept u;
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int at = 16 * r + p.group;
    u.low[r] = chunks[0].log.u[p.lane8][at], u.high[r] = chunks[0].log.u[p.lane8 + 8][at];
  }
  for (int i = 0; i < count;) {
    Chunk& chunk = chunks[turn];
    wait_copies<0>();
    __syncthreads();
    const int after = i + m;
    const bool folds = after == end || (n + m == room && after < count);
    int next = 0;
    if (after < count) next = min(a.log_tokens, (end > after ? end : count) - after);
    turn ^= 1;
    fetch(chunks[turn], a, first + after, 0, next, p);
    advance<0>(a, s, u, chunk, first + i - n, n, n + m, skip, p);
    advance<1>(a, s, u, chunk, first + i - n, n, n + m, skip, p);
    n += m;
    if (folds) {
#pragma unroll
      for (int r = 0; r < R; r++) {
        const int at = 16 * r + p.group;
        chunk.log.u[p.lane8][at] = u.low[r], chunk.log.u[p.lane8 + 8][at] = u.high[r];
        u.low[r] = u.high[r] = 0.f;
      }
      if (threadIdx.x < n && threadIdx.x >= n - m) chunk.log.c[threadIdx.x] = chunk.related[threadIdx.x][2 * ENTRIES];
      __syncthreads();
      fold_log(s, chunk.log, n, p);
      if (after == end) store_state<R>(s, a.states + state_out * a.state_words + a.state_at, p);
      n = 0, room = a.log_tokens;
    }
    i = after, m = next;
  }
}

// Logs into states: block x has a part of a head, block y a fold, block z a layer.
extern "C" __global__ void __launch_bounds__(128, 4) fold(const FoldArgs a) {
  constexpr int R = FOLDED;
  Log<R>& log = *(Log<R>*)shared_memory;
  const Place p = place<16 * R>();
  wait_for_previous();
  let_next_start();
  const int which = blockIdx.y, layer = blockIdx.z;
  const int state_in = a.state_in[which], n = a.n_entries[which], page = a.log[which], out = a.state_out[which];
  const long long state_at = a.offsets[layer] + a.tail_words, log_at = a.offsets[a.n_layers + layer];
  float4 s[R][PARTS];
  load_state<R>(s, a.states + state_in * a.state_words + state_at, p, state_in >= 0);
  load_log(log, a.logs + page * a.log_words + log_at + a.cols, a.log_stride, n, p);
  __syncthreads();
  fold_log(s, log, n, p);
  store_state<R>(s, a.states + out * a.state_words + state_at, p);
}
