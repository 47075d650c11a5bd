// One token of each sequence, into its log. COLUMNS: rows of a state that a block has at a time, a
// multiple of 16; EACH: how often it has others.

// What the threads of a block tell each other: shares of the log's entries in sums with k and with q,
// the token's own last, and those sums over rows of the state.
struct One {
  float shares[2][ENTRIES];
  float sums[2][COLUMNS];
};

constexpr int STEPS = COLUMNS / 16;

// Has a step's part of the state copied, each thread what it will need itself; zeros of no state.
__device__ __forceinline__ void fetch(float4* to, const float* state, bool known, int step, const Place& p) {
  const float* from = state + (long long)(p.head * DV + p.start + step * 16 + p.group) * DK + 4 * p.lane8;
#pragma unroll
  for (int j = 0; j < PARTS; j++)
    copy16_if(shared_address(to + (step * PARTS + j) * 128 + threadIdx.x), known ? from + 32 * j : state, known);
}

// What a thread has of a log for some rows: u of its row, log-decays of the last entry and of its own.
struct Logged {
  float u[ENTRIES], c_last, c_mine;
  __device__ __forceinline__ Logged(const float* log, long long stride, int n, int entry, const Place& p) {
    const float *us = log + KEYS + p.head * DV + p.start + threadIdx.x, *cs = log + KEYS + VALUES + p.head;
#pragma unroll
    for (int e = 0; e < ENTRIES; e++) u[e] = threadIdx.x < COLUMNS && e < n ? load(us + e * stride) : 0.f;
    c_last = n ? load(cs + (n - 1) * stride) : 0.f, c_mine = n ? load(cs + entry * stride) : 0.f;
  }
};

// Block x has COLUMNS of a head, then the next ones, block y a sequence. The first state is on its way
// before the token is waited for: the kernel that makes it writes neither state nor entries; and what
// follows in the state replaces what was used. Eight threads share a row of the state, and each waits for
// its own part of it; four of them have k first and sum over k, four q. Then each row has a thread.
extern "C" __global__ void __launch_bounds__(128) decode(const RecurArgs a) {
  float4* state = shared_memory;  // [STEPS][PARTS][128 threads]
  One& one = *(One*)(shared_memory + STEPS * PARTS * 128);
  const int seq = blockIdx.y;
  const int row = a.first[seq], n = a.length[seq], state_in = a.state_in[seq];
  const float* log = a.logs + a.log_in[seq] * a.log_words + a.log_at + a.cols;
  const float* from = a.states + (state_in < 0 ? 0 : state_in * a.state_words + a.state_at);
  Place p = place<COLUMNS>(blockIdx.x * EACH);
#pragma unroll
  for (int step = 0; step < STEPS; step++) fetch(state, from, state_in >= 0, step, p), commit_copies();
  const int page = a.page[row], slot = a.slot[row], count = a.count[seq];
  const int which = p.lane8 >> 2, entry = min(p.group, max(n - 1, 0));  // k or q
  const bool has_row = threadIdx.x < COLUMNS;
  float4 own[PARTS], other[PARTS];
  float product = 0.f;  // of the token with the entry's key
#pragma unroll 1
  for (int part = 0; part < EACH; part++) {
    const int shared = p.shared;
    p = place<COLUMNS>(blockIdx.x * EACH + part);
    const bool another = part == 0 || p.shared != shared;  // key
    const Logged logged(log, a.log_stride, n, entry, p);
    float4 key[PARTS];
    if (n && another) load_part(key, log + entry * a.log_stride + p.shared * DK, p.lane8);
    const float by = a.a[p.head], bias = a.dt_bias[p.head], skip = DELTA ? 0.f : a.skip[p.head];
    if (part == 0) {
      wait_for_previous();
      let_next_start();
      if (page < 0 || !count) break;
    }
    const float *values = token(a, row), *raw = gates_at(a, row) + p.head;
    const float v = has_row ? load(values + V_AT + p.head * DV + p.start + threadIdx.x) : 0.f;
    Gates g;
    const float gate = load(raw + GATE_AT), rate = DELTA ? load(raw + RATE_AT) : 0.f;
    if (another) {
      load_part(own, values + (which ? Q_AT : K_AT) + p.shared * DK, p.lane8);
      load_part(other, values + (which ? K_AT : Q_AT) + p.shared * DK, p.lane8);
#pragma unroll
      for (int j = 0; j < PARTS; j++) key[j] = p.group < n ? key[j] : which ? other[j] : own[j];
      product = over_row(dot(key, own), dot(key, other));
    }
    g.dt = step_of(a, gate, bias);
    g.c = __fmaf_rn(by, g.dt, logged.c_last), g.decay = expf(g.c), g.rate = DELTA ? rate_of(rate) : 0.f;
    if (p.lane8 % 4 == 0) {
      const float share = p.group < n ? expf(__fsub_rn(g.c, logged.c_mine)) : 0.f;
      one.shares[which][p.group] = p.group == n && which ? product : __fmul_rn(product, share);
    }
    __syncthreads();
    const float logged_k = DELTA ? of_entries(one.shares[0], logged.u, ENTRIES) : 0.f, own_share = one.shares[1][n];
    const float logged_q = of_entries(one.shares[1], logged.u, ENTRIES);
    const Place next = place<COLUMNS>(blockIdx.x * EACH + part + 1);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      wait_copies_but(STEPS - 1);
      float4 s[PARTS];
#pragma unroll
      for (int j = 0; j < PARTS; j++) s[j] = state[(step * PARTS + j) * 128 + threadIdx.x];
      const float sum = over_row(dot(s, own), dot(s, other));
      if (p.lane8 % 4 == 0) one.sums[which][step * 16 + p.group] = sum;
      if (part + 1 < EACH) fetch(state, from, state_in >= 0, step, next);
      commit_copies();
    }
    __syncthreads();
    float* kept = entry_of(a, page, slot);
    if (threadIdx.x == 0 && p.start == 0) keep_gates(a, kept, gate, rate, g.c, p.head);
    if (!has_row) continue;
    const float made = added_by(g, v, __fmaf_rn(g.decay, one.sums[0][threadIdx.x], logged_k));
    const float y = __fmaf_rn(g.decay, one.sums[1][threadIdx.x], __fmaf_rn(own_share, made, logged_q));
    const int column = p.head * DV + p.start + threadIdx.x;
    a.out[(long long)row * VALUES + column] = output_of(y, v, skip);
    kept[a.cols + KEYS + column] = made;
  }
  wait_copies<0>();
  if (page >= 0 && count) return;
  for (int part = 0; part < EACH; part++) {  // padding
    p = place<COLUMNS>(blockIdx.x * EACH + part);
    zeros(a, row, count, p.head, p.start, COLUMNS);
  }
}
