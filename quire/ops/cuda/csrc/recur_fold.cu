// Logs folded into states: a state and the n tokens behind it become a state.

constexpr int R = DV % 64 ? 1 : 4;  // rows of a thread: group, group + 16, … from the start on

struct FoldArgs {
  float *states, *logs;
  const long long* offsets;
  const int *state_in, *log, *n_entries, *state_out;
  long long state_words, log_words, log_stride;
  int n_layers, tail_words, cols;
};

// A log, and u of 16 · R columns times what is left of it.
struct Log {
  float keys[ENTRIES][DK];
  float u[ENTRIES][16 * R + 4];
};

// The first n entries of a log, from where derived values start.
__device__ __forceinline__ void load_log(Log& log, const float* derived, long long stride, int n, float last,
                                         const Place& p) {
  const float* mine = derived + p.group * stride + p.shared * DK;
  if (p.group < n)
#pragma unroll
    for (int j = 0; j < PARTS; j++)
      *(float4*)&log.keys[p.group][4 * p.lane8 + 32 * j] = load4(mine + 4 * p.lane8 + 32 * j);
  for (int i = threadIdx.x; i < n * 16 * R; i += 128) {
    const int e = i / (16 * R), column = i % (16 * R);
    if (p.start + column >= DV) continue;
    const float* us = derived + e * stride + KEYS;
    const float u = load(us + p.head * DV + p.start + column), c = load(us + VALUES + p.head);
    log.u[e][column] = __fmul_rn(expf(__fsub_rn(last, c)), u);
  }
}

// Block x has a part of a head, block y a fold, block z a layer.
extern "C" __global__ void __launch_bounds__(128, DK > 128 ? 2 : 4) fold(const FoldArgs a) {
  Log& log = *(Log*)shared_memory;
  const Place p = place<16 * R>();
  wait_for_previous();
  let_next_start();
  const int which = blockIdx.y, layer = blockIdx.z;
  const int state_in = a.state_in[which], n = a.n_entries[which], page = a.log[which];
  const long long state_at = a.offsets[layer] + a.tail_words, log_at = a.offsets[a.n_layers + layer];
  const long long mine = state_at + (long long)(p.head * DV + p.start + p.group) * DK + 4 * p.lane8;
  float4 s[R][PARTS];
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
      const bool there = state_in >= 0 && p.start + 16 * r + p.group < DV;
      s[r][j] = there ? load4(a.states + state_in * a.state_words + mine + 16 * r * DK + 32 * j) : zero4();
    }
  const float* derived = a.logs + page * a.log_words + log_at + a.cols;
  const float last = load(derived + (n - 1) * a.log_stride + KEYS + VALUES + p.head), decay = expf(last);
  load_log(log, derived, a.log_stride, n, last, p);
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int j = 0; j < PARTS; j++) s[r][j] = scaled(s[r][j], decay);
  __syncthreads();
#pragma unroll 2
  for (int e = 0; e < n; e++)
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
      const float4 k = *(const float4*)&log.keys[e][4 * p.lane8 + 32 * j];
#pragma unroll
      for (int r = 0; r < R; r++) s[r][j] = added(s[r][j], log.u[e][16 * r + p.group], k);
    }
  float* out = a.states + a.state_out[which] * a.state_words + mine;
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int j = 0; j < PARTS; j++)
      if (p.start + 16 * r + p.group < DV) *(float4*)(out + 16 * r * DK + 32 * j) = s[r][j];
}
