// What tokens have to do with those between them and their state. TOKENS: that a block takes, one after
// the other.

constexpr int SHARERS = HEADS / K_HEADS;  // heads that share a key

struct Steps {
  float by[2][ENTRIES];  // products with k and with q
  float dt[SHARERS][ENTRIES], c[SHARERS][ENTRIES];
};

__device__ __forceinline__ int sharer(int shared, int h) { return TILED ? shared + h * K_HEADS : shared * SHARERS + h; }

// Steps and log-decays of entries up to n of a row, token i of its sequence, for all heads of a key;
// those before `from` are known.
__device__ __forceinline__ void decays(Steps& steps, const RecurArgs& a, const float* log, int row, int i, int from, int n,
                                       int shared) {
  const int start = max(from, n - i);  // entries before are in the log
  for (int at = threadIdx.x; at < SHARERS * ENTRIES; at += 128) {
    const int h = at / ENTRIES, e = at % ENTRIES, head = sharer(shared, h);
    if (e < from || e > n) continue;
    if (e >= start) steps.dt[h][e] = step_of(a, load(gates_at(a, row - n + e) + GATE_AT + head), a.dt_bias[head]);
    else steps.c[h][e] = load(log + e * a.log_stride + KEYS + VALUES + head);
  }
  __syncthreads();
  for (int h = threadIdx.x; h < SHARERS; h += 128) {
    const float by = a.a[sharer(shared, h)];
    float c = start ? steps.c[h][start - 1] : 0.f;
    for (int e = start; e <= n; e++) steps.c[h][e] = c = __fmaf_rn(by, steps.dt[h][e], c);
  }
  __syncthreads();
}

// Block x has tokens, block y a key. Nothing here waits for a sum over the tokens before, so blocks run
// together. Eight threads have an entry's key, which stays what it is until the next fold.
extern "C" __global__ void __launch_bounds__(128) relate(const RecurArgs a) {
  Steps& steps = *(Steps*)shared_memory;
  const int lane8 = threadIdx.x & 7, group = threadIdx.x >> 3, shared = blockIdx.y;
  wait_for_previous();
  let_next_start();
  float4 key[PARTS];
  for (int t = 0, last = -1, last_seq = -1; t < TOKENS; t++) {
    const int row = blockIdx.x * TOKENS + t;
    if (row >= a.tokens) return;
    const int seq = a.seq[row], n = a.entry[row], i = row - a.first[seq], back = n - group;
    const bool follows = seq == last_seq && n == last + 1;
    last = n, last_seq = seq;
    const float* log = a.logs + a.log_in[seq] * a.log_words + a.log_at + a.cols;
    float4 k[PARTS], q[PARTS];
    load_part(k, token(a, row) + K_AT + shared * DK, lane8);
    load_part(q, token(a, row) + Q_AT + shared * DK, lane8);
    const float* before = back <= i ? token(a, row - back) + K_AT : log + group * a.log_stride;
    if (back > 0 && !follows) load_part(key, before + shared * DK, lane8);
    if (back <= 0)
#pragma unroll
      for (int j = 0; j < PARTS; j++) key[j] = back ? zero4() : k[j];
    const float by_k = DELTA ? over_row(dot(key, k)) : 0.f, by_q = over_row(dot(key, q));
    if (lane8 == 0) steps.by[0][group] = by_k, steps.by[1][group] = by_q;
    decays(steps, a, log, row, i, follows ? n : 0, n, shared);
    const int page = a.page[row], slot = a.slot[row];
    for (int at = threadIdx.x; at < SHARERS * ENTRIES; at += 128) {
      const int h = at / ENTRIES, e = at % ENTRIES, head = sharer(shared, h);
      float* out = a.related + ((long long)row * HEADS + head) * RELATED;
      const float c = steps.c[h][n], share = e < n ? expf(__fsub_rn(c, steps.c[h][e])) : 0.f;
      out[e] = __fmul_rn(steps.by[0][e], share);
      out[ENTRIES + e] = e == n ? steps.by[1][e] : __fmul_rn(steps.by[1][e], share);
      if (e) continue;
      const float* raw = gates_at(a, row) + head;
      const float gate = load(raw + GATE_AT), rate = DELTA ? load(raw + RATE_AT) : 0.f;
      *(float4*)(out + 2 * ENTRIES) = {c, expf(c), DELTA ? rate_of(rate) : 0.f, steps.dt[h][n]};
      if (page >= 0) keep_gates(a, entry_of(a, page, slot), gate, rate, c, head);
    }
    __syncthreads();
  }
}
