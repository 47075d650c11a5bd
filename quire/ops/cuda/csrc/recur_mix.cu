// What tokens' recurrences take: silu of the convolution of raw inputs, keys and queries of the delta
// rule brought to length 1. WIDTH: of the convolution; TOKENS: that a warp takes, one after the other.

constexpr int UNITS = 2 * K_HEADS + HEADS;  // vectors of a token: keys, queries, values
constexpr int PASSES = ((DK > DV ? DK : DV) + 127) / 128;

// The channels of a vector that a lane has: four from `at` on, and again 128 further on.
struct Channels {
  int at, left;
  bool normed;
  __device__ __forceinline__ Channels(int unit, int lane) {
    constexpr int FIRST = DELTA ? 2 * K_HEADS : HEADS, SIZE = DELTA ? DK : DV, REST = DELTA ? DV : DK;
    const bool first = unit < FIRST;
    normed = DELTA && first;
    at = (first ? unit * SIZE : FIRST * SIZE + (unit - FIRST) * REST) + 4 * lane;
    left = (first ? SIZE : REST) - 4 * lane;
  }
  __device__ __forceinline__ bool has(int pass) const { return 128 * pass < left; }
};

__device__ __forceinline__ float silu(float y) { return __fdiv_rn(y, __fadd_rn(1.f, expf(-y))); }

// A sequence of which a warp takes tokens.
struct Sequence {
  int first, length, state_out, end;
  const float *entries, *tail;  // no tail: zeros
  __device__ __forceinline__ void load(const RecurArgs& a, int seq) {
    first = a.first[seq], length = a.length[seq], state_out = a.state_out[seq], end = a.state_end[seq];
    const int state_in = a.state_in[seq];
    entries = a.logs + a.log_in[seq] * a.log_words + a.log_at;
    tail = state_in < 0 ? nullptr : a.states + state_in * a.state_words + a.tail_at;
  }
  // Raw inputs of the token `back` before a row: new, in the log, or in the tail.
  __device__ __forceinline__ float4 before(const RecurArgs& a, int row, int back, int c) const {
    const int ahead = row - first - back, old = length + ahead;
    if (ahead >= 0) return load4(a.x + (long long)(row - back) * a.cols + c);
    if (old >= 0) return load4(entries + old * a.log_stride + c);
    return tail ? load4(tail + (WIDTH - 1 + old) * a.channels + c) : zero4();
  }
};

// Silu of a convolution, of its inputs from old to new.
__device__ __forceinline__ float4 convolved(const float4 (&taps)[WIDTH], const float (&w)[4 * WIDTH], float4 bias) {
  float4 y = zero4();
#pragma unroll
  for (int j = 0; j < WIDTH; j++) {
    y.x = __fmaf_rn(taps[j].x, w[j], y.x), y.y = __fmaf_rn(taps[j].y, w[WIDTH + j], y.y);
    y.z = __fmaf_rn(taps[j].z, w[2 * WIDTH + j], y.z), y.w = __fmaf_rn(taps[j].w, w[3 * WIDTH + j], y.w);
  }
  return {silu(__fadd_rn(y.x, bias.x)), silu(__fadd_rn(y.y, bias.y)), silu(__fadd_rn(y.z, bias.z)),
          silu(__fadd_rn(y.w, bias.w))};
}

// What divides a vector by its length; lanes that have nothing of it have zeros.
__device__ __forceinline__ float inverse_length(const float4 (&y)[PASSES]) {
  float sum = 0.f;
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) sum = chain(sum, y[pass], y[pass]);
#pragma unroll
  for (int step = 16; step; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
  return __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(sum, 1e-6f)));
}

// Block x has tokens, block y four vectors of theirs, one for each warp. Keeps raw inputs and keys in
// logs, and the tail of a state that is written.
extern "C" __global__ void __launch_bounds__(128) mix(const RecurArgs a) {
  const int unit = blockIdx.y * 4 + threadIdx.x / 32, start = blockIdx.x * TOKENS;
  if (unit >= UNITS) return;
  const Channels mine(unit, threadIdx.x % 32);
  float w[PASSES][4 * WIDTH];
  float4 bias[PASSES], taps[PASSES][WIDTH], now[TOKENS][PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int c = mine.at + 128 * pass;
    bias[pass] = a.bias && mine.has(pass) ? load4(a.bias + c) : zero4();
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      const float4 four = mine.has(pass) ? load4(a.weight + c * WIDTH + 4 * j) : zero4();
      w[pass][4 * j] = four.x, w[pass][4 * j + 1] = four.y, w[pass][4 * j + 2] = four.z, w[pass][4 * j + 3] = four.w;
    }
  }
  int seqs[TOKENS], pages[TOKENS], slots[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    const int row = min(start + t, a.tokens - 1);
    seqs[t] = a.seq[row], pages[t] = a.page[row], slots[t] = a.slot[row];
  }
  Sequence of;
  of.load(a, seqs[0]);
  wait_for_previous();
  let_next_start();
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int c = mine.at + 128 * pass;
#pragma unroll
    for (int j = 1; j < WIDTH; j++) taps[pass][j] = mine.has(pass) ? of.before(a, start, WIDTH - j, c) : zero4();
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const bool there = start + t < a.tokens && mine.has(pass);
      now[t][pass] = there ? load4(a.x + (long long)(start + t) * a.cols + c) : zero4();
    }
  }
  int known = seqs[0];  // the sequence that taps are of
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    const int row = start + t, seq = seqs[t], page = pages[t];
    if (row >= a.tokens) return;
    const bool follows = seq == known;
    if (!follows) of.load(a, seq);
    known = page < 0 && of.state_out < 0 ? -1 : seq;
    if (known < 0) continue;  // padding
    float4 y[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll
      for (int j = 0; j < WIDTH - 1; j++) {
        if (follows) taps[pass][j] = taps[pass][j + 1];
        else taps[pass][j] = mine.has(pass) ? of.before(a, row, WIDTH - 1 - j, mine.at + 128 * pass) : zero4();
      }
      taps[pass][WIDTH - 1] = now[t][pass];
      y[pass] = convolved(taps[pass], w[pass], bias[pass]);
    }
    if (mine.normed) {
      const float by = inverse_length(y);
#pragma unroll
      for (int pass = 0; pass < PASSES; pass++) y[pass] = scaled(y[pass], by);
    }
    const bool last = of.state_out >= 0 && row - of.first == max(of.end, 1) - 1;
    float* kept = a.states + of.state_out * a.state_words + a.tail_at;
    float* entry = entry_of(a, page, slots[t]);
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      const int c = mine.at + 128 * pass;
      if (!mine.has(pass)) continue;
      *(float4*)(a.mixed + (long long)row * a.channels + c) = y[pass];
      if (page >= 0) *(float4*)(entry + c) = taps[pass][WIDTH - 1];
      if (page >= 0 && c >= K_AT && c < K_AT + KEYS) *(float4*)(entry + a.cols + c - K_AT) = y[pass];
      if (last)
#pragma unroll
        for (int j = 0; j < WIDTH - 1; j++)
          *(float4*)(kept + j * a.channels + c) = of.end > 0 ? taps[pass][j + 1] : taps[pass][j];
    }
  }
}
