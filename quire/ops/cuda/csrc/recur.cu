// What the kernels of recurrent layers share. The formulas are those of kernels/recur.py, which is what
// runs where shapes are odd.
//
// A state is a row of DK values for each column of its values. A sum over a row is two chains for each
// of eight parts of it, then a tree over the eight; a token adds to it what each entry of the log has
// in it, one after the other. So what a token gets depends on its head's values alone, whether it
// comes by itself (`decode`) or with others (`recur`). Compiled for one shape: DK (a multiple of 32),
// DV, HEADS, K_HEADS, TILED and DELTA. Blocks have 128 threads where nothing else is said.

constexpr int ENTRIES = 16;  // of a log, at most
constexpr int PARTS = DK / 32;
constexpr int RELATED = 2 * ENTRIES + 4;  // shares of entries in sums with k and with q; c, decay, rate and dt
constexpr int KEYS = K_HEADS * DK, VALUES = HEADS * DV;

struct RecurArgs {
  const float *x, *weight, *bias, *a, *dt_bias, *skip;
  float *mixed, *out;
  float *states, *logs;
  const int *first, *count, *state_in, *log_in, *length, *state_out, *state_end, *room, *seq, *page, *slot, *entry;
  float* related;  // [tokens][HEADS][RELATED], what `relate` tells `recur`
  long long tail_at, state_at, log_at, state_words, log_words, log_stride;
  int tokens, cols, channels, log_tokens;
  float dt_low, dt_high;
};

extern __shared__ float4 shared_memory[];

// Where a thread is: in a group of eight, of which there are 16; in a head, from a column on.
struct Place {
  int lane8, group, head, shared, start;
};

template <int COLUMNS_EACH> __device__ __forceinline__ Place place(int part = blockIdx.x) {
  constexpr int SPLITS = (DV + COLUMNS_EACH - 1) / COLUMNS_EACH;
  Place p;
  p.lane8 = threadIdx.x & 7, p.group = threadIdx.x >> 3;
  p.head = part / SPLITS, p.start = part % SPLITS * COLUMNS_EACH;
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

// ---- rows ---------------------------------------------------------------------------------------

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

// Two sums at once: what four lanes of eight call their own is what is `other` to the other four.
__device__ __forceinline__ float over_row(float own, float other) {
  float v = __fadd_rn(own, __shfl_xor_sync(~0u, other, 4));
  v = __fadd_rn(v, __shfl_xor_sync(~0u, v, 2));
  return __fadd_rn(v, __shfl_xor_sync(~0u, v, 1));
}

// What the first n entries have in a sum; more of them whose u is 0 change no bit.
__device__ __forceinline__ float of_entries(const float* shares, const float* u, int n) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < ENTRIES; e += 4) {
    if (e >= n) break;
    const float4 four = *(const float4*)(shares + e);
    sum = __fmaf_rn(four.x, u[e], sum);
    if (e + 1 < n) sum = __fmaf_rn(four.y, u[e + 1], sum);
    if (e + 2 < n) sum = __fmaf_rn(four.z, u[e + 2], sum);
    if (e + 3 < n) sum = __fmaf_rn(four.w, u[e + 3], sum);
  }
  return sum;
}

// Of vectors of DK values, those that a thread has: 4 · lane8 + 32 · j onwards.
__device__ __forceinline__ void load_part(float4* v, const float* from, int lane8) {
#pragma unroll
  for (int j = 0; j < PARTS; j++) v[j] = load4(from + 4 * lane8 + 32 * j);
}

// ---- tokens -------------------------------------------------------------------------------------

constexpr int V_AT = DELTA ? 2 * KEYS : 0, K_AT = DELTA ? KEYS : VALUES, Q_AT = DELTA ? 0 : VALUES + KEYS;
constexpr int RATE_AT = 0, GATE_AT = DELTA ? HEADS : 0;  // behind a token's channels

__device__ __forceinline__ float softplus(float x) {
  return __fadd_rn(fmaxf(x, 0.f), logf(__fadd_rn(1.f, expf(-fabsf(x)))));
}

__device__ __forceinline__ float step_of(const RecurArgs& a, float gate, float bias) {
  float dt = softplus(__fadd_rn(gate, bias));
  return DELTA ? dt : fminf(fmaxf(dt, a.dt_low), a.dt_high);
}

__device__ __forceinline__ float rate_of(float rate) { return __fdiv_rn(1.f, __fadd_rn(1.f, expf(-rate))); }

// Of a head, the same for all of its rows: c is the log-decay behind the state, dt its step.
struct Gates {
  float c, decay, rate, dt;
};

// What a token adds to the state in one row, of which the state and the log have `seen`.
__device__ __forceinline__ float added_by(const Gates& g, float v, float seen) {
  return DELTA ? __fmul_rn(g.rate, __fsub_rn(v, seen)) : __fmul_rn(g.dt, v);
}

__device__ __forceinline__ float output_of(float y, float v, float skip) {
  return DELTA ? __fmul_rn(y, rsqrtf((float)DK)) : __fmaf_rn(skip, v, y);
}

__device__ __forceinline__ const float* token(const RecurArgs& a, int row) { return a.mixed + (long long)row * a.channels; }

__device__ __forceinline__ const float* gates_at(const RecurArgs& a, int row) {
  return a.x + (long long)row * a.cols + a.channels;
}

__device__ __forceinline__ float* entry_of(const RecurArgs& a, int page, int slot) {
  return a.logs + (page < 0 ? 0 : page * a.log_words + a.log_at + slot * a.log_stride);
}

__device__ __forceinline__ void keep_gates(const RecurArgs& a, float* entry, float gate, float rate, float c, int head) {
  entry[a.cols + KEYS + VALUES + head] = c;
  entry[a.channels + GATE_AT + head] = gate;
  if (DELTA) entry[a.channels + RATE_AT + head] = rate;
}

// For some columns, of which each has a thread.
__device__ __forceinline__ void zeros(const RecurArgs& a, int first, int count, int head, int column, int columns) {
  const int at = column + threadIdx.x;
  for (int i = 0; i < count; i++)
    if (threadIdx.x < columns && at < DV) a.out[(long long)(first + i) * VALUES + head * DV + at] = 0.f;
}
