// What tokens have to do with those between them and their state.

constexpr int SHARERS = HEADS / K_HEADS;  // heads that share a key

struct Steps {
  float by[2][ENTRIES];  // products with k and with q
  float dt[SHARERS][ENTRIES], c[SHARERS][ENTRIES];
};

// For all heads of a key: block x has a token, block y a key. Nothing here waits for a sum over the
// tokens before, so they run together.
extern "C" __global__ void __launch_bounds__(128) relate(const RecurArgs a) {
  Steps& steps = *(Steps*)shared_memory;
  const int lane8 = threadIdx.x & 7, group = threadIdx.x >> 3, shared = blockIdx.y;
  const int row = blockIdx.x, seq = a.seq[row], n = a.entry[row], page = a.page[row], slot = a.slot[row];
  wait_for_previous();
  let_next_start();
  const int i = row - a.first[seq], back = n - group;
  const float* log = a.logs + a.log_in[seq] * a.log_words + a.log_at + a.cols;
  float4 k[PARTS], q[PARTS], key[PARTS];
  load_part(k, token(a, row) + K_AT + shared * DK, lane8);
  load_part(q, token(a, row) + Q_AT + shared * DK, lane8);
  if (back < 0) {
#pragma unroll
    for (int j = 0; j < PARTS; j++) key[j] = zero4();
  } else if (back <= i) {
    load_part(key, token(a, row - back) + K_AT + shared * DK, lane8);
  } else {
    load_part(key, log + group * a.log_stride + shared * DK, lane8);
  }
  const float by_k = DELTA ? over_row(dot(key, k)) : 0.f, by_q = over_row(dot(key, q));
  if (lane8 == 0) steps.by[0][group] = by_k, steps.by[1][group] = by_q;
  for (int at = threadIdx.x; at < SHARERS * ENTRIES; at += 128) {
    const int h = at / ENTRIES, e = at % ENTRIES, head = TILED ? shared + h * K_HEADS : shared * SHARERS + h;
    if (e <= n && n - e <= i) steps.dt[h][e] = step_of(a, load(gates_at(a, row - n + e) + GATE_AT + head), a.dt_bias[head]);
    else if (e <= n) steps.c[h][e] = load(log + e * a.log_stride + KEYS + VALUES + head);
  }
  __syncthreads();
  for (int h = threadIdx.x; h < SHARERS; h += 128) {
    const int start = n > i ? n - i : 0;
    const float by = a.a[TILED ? shared + h * K_HEADS : shared * SHARERS + h];
    float c = start ? steps.c[h][start - 1] : 0.f;
    for (int e = start; e <= n; e++) steps.c[h][e] = c = __fmaf_rn(by, steps.dt[h][e], c);
  }
  __syncthreads();
  for (int at = threadIdx.x; at < SHARERS * ENTRIES; at += 128) {
    const int h = at / ENTRIES, e = at % ENTRIES, head = TILED ? shared + h * K_HEADS : shared * SHARERS + h;
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
}
