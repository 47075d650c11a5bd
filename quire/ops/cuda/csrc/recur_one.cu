// One token of each sequence, into its log. COLUMNS: the rows of a block, a multiple of 16.

// What the threads of a block tell each other: u of the log, shares of its entries in sums with k and
// with q, the token's own last, and those sums over rows of the state.
struct One {
  float u[ENTRIES][COLUMNS];
  float shares[2][ENTRIES];
  float sums[2][COLUMNS];
};

// Block x has COLUMNS of a head, block y a sequence. All of their state and log is on its way before
// the token is waited for: the kernel that makes it writes neither. Eight threads share a row of the
// state, and each waits for its own part of it; four of them have k first and sum over k, four q. Then
// each row has a thread.
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
  const float by = a.a[p.head], bias = a.dt_bias[p.head], skip = DELTA ? 0.f : a.skip[p.head];
  wait_for_previous();
  let_next_start();
  if (page < 0 || !count) {  // padding
    wait_copies<0>();
    return zeros(a, row, count, p.head, p.start, COLUMNS);
  }
  const float *values = token(a, row), *raw = gates_at(a, row) + p.head;
  const int which = p.lane8 >> 2;  // k or q
  float4 own[PARTS], other[PARTS];
  load_part(own, values + (which ? Q_AT : K_AT) + p.shared * DK, p.lane8);
  load_part(other, values + (which ? K_AT : Q_AT) + p.shared * DK, p.lane8);
  const bool has_row = threadIdx.x < COLUMNS;
  const float v = has_row ? load(values + V_AT + p.head * DV + p.start + threadIdx.x) : 0.f;
  const float gate = load(raw + GATE_AT), rate = DELTA ? load(raw + RATE_AT) : 0.f;
  Gates g;
  g.dt = step_of(a, gate, bias);
  g.c = __fmaf_rn(by, g.dt, c_last), g.decay = expf(g.c), g.rate = DELTA ? rate_of(rate) : 0.f;
#pragma unroll
  for (int j = 0; j < PARTS; j++) key[j] = p.group < n ? key[j] : which ? other[j] : own[j];
  const float product = over_row(dot(key, own), dot(key, other));
  if (p.lane8 % 4 == 0) {
    const float share = p.group < n ? expf(__fsub_rn(g.c, c_mine)) : 0.f;
    one.shares[which][p.group] = p.group == n && which ? product : __fmul_rn(product, share);
  }
  wait_copies_but(STEPS);
  __syncthreads();
  float logged[2] = {0.f, 0.f}, own_share = 0.f;  // what the log has in sums with k and with q
  if (has_row) {
    float u[ENTRIES];
#pragma unroll
    for (int e = 0; e < ENTRIES; e++) u[e] = one.u[e][threadIdx.x];
    logged[0] = DELTA ? of_entries(one.shares[0], u, ENTRIES) : 0.f;
    logged[1] = of_entries(one.shares[1], u, ENTRIES), own_share = one.shares[1][n];
  }
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    wait_copies_but(STEPS - 1 - step);
    float4 s[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; j++) s[j] = state[(step * PARTS + j) * 128 + threadIdx.x];
    const float sum = over_row(dot(s, own), dot(s, other));
    if (p.lane8 % 4 == 0) one.sums[which][step * 16 + p.group] = sum;
  }
  __syncthreads();
  float* entry = entry_of(a, page, slot);
  if (threadIdx.x == 0 && p.start == 0) keep_gates(a, entry, gate, rate, g.c, p.head);
  if (!has_row) return;
  const float u = added_by(g, v, __fmaf_rn(g.decay, one.sums[0][threadIdx.x], logged[0]));
  const float y = __fmaf_rn(g.decay, one.sums[1][threadIdx.x], __fmaf_rn(own_share, u, logged[1]));
  const int column = p.head * DV + p.start + threadIdx.x;
  a.out[(long long)row * VALUES + column] = output_of(y, v, skip);
  entry[a.cols + KEYS + column] = u;
}
