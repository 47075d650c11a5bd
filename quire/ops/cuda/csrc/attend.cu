// Attention of one token of each sequence, from q, k and v to the output. A block has eight warps; it takes
// some spans of slots of one KV head, a tile after the other: each warp scores slots that it fetched itself,
// then each sums a part of the dimensions. Its arithmetic, and so every bit, is that of kernels/attend.py:
// products in steps of 16, blocks of BN slots that fade what came before, spans that start afresh and are
// merged in order. TYPE, DIMS, STAGES and BLOCKS come from the host.

struct Decode : Slots {
  using Slots::Slots;

  // Whether blocks have one span each and read each other's memory.
  __device__ __forceinline__ bool clustered() const { return EACH == 1 && programs == span_to - span_from && cluster_size() >= programs; }

  // Scores of the warp's slots, and the largest of each query in shared memory.
  __device__ __forceinline__ void score(int tile, const u32 q[STEPS][4], float s[SCORED][4]) const {
    const u32 keys = ring(2 * tile) + (warp * MINE + lane % 8) * ROW;
#pragma unroll
    for (int n = 0; n < SCORED; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2)
#pragma unroll
      for (int n = 0; n < SCORED; ++n) {
        u32 k[4];
        load_tiles(k, keys + n * 8 * ROW + (((step * 2 + lane / 8) ^ (lane % 8)) << 4));
        T::multiply(s[n], q[step], k[0], k[1]);
        T::multiply(s[n], q[step + 1], k[2], k[3]);
      }
    float most[2] = {NONE, NONE};
#pragma unroll
    for (int n = 0; n < SCORED; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int slot = first_slot(tile) + n * 8 + lane % 4 * 2 + i % 2;
        s[n][i] = slot >= low && slot < high ? __fmul_rn(s[n][i], a.scale) : NONE;
        most[i / 2] = fmaxf(most[i / 2], s[n][i]);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
      if (lane % 4 == 0) ((float*)(memory + MAX_AT))[(lane / 4 + i * 8) * WARPS + warp] = most[i];
    }
  }

  // Scores become weights in shared memory: below the largest of their block and those before it.
  __device__ __forceinline__ void weigh(const float s[SCORED][4], float most[2], float fade[2][2]) const {
    float safe[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4* of = (const float4*)(memory + MAX_AT) + (lane / 4 + i * 8) * 2;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const float4 m = of[block];
        const float top = fmaxf(fmaxf(most[i], fmaxf(m.x, m.y)), fmaxf(m.z, m.w));
        fade[block][i] = exponential(__fsub_rn(most[i], finite(top)));
        if (warp / (WARPS / 2) == block) safe[i] = finite(top);
        most[i] = top;
      }
    }
#pragma unroll
    for (int n = 0; n < SCORED; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float p0 = exponential(__fsub_rn(s[n][2 * i], safe[i])), p1 = exponential(__fsub_rn(s[n][2 * i + 1], safe[i]));
        u8* to = memory + P_AT + (lane / 4 + i * 8) * P_ROW + (warp * MINE + n * 8 + lane % 4 * 2) * 2;
        *(u32*)to = T::pack(p0, p1);
      }
  }

  // The warp's dimensions of the sum of values, and the mass of the weights.
  __device__ __forceinline__ void sum(int tile, const float fade[2][2], float mass[4], float part[SUMMED][4]) const {
    const u32 weights = shared_address(memory) + P_AT + lane % 16 * P_ROW + lane / 16 * 16, one = T::pack(1.0f, 1.0f);
    const u32 values = ring(2 * tile + 1) + lane * ROW;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mass[i] = __fmul_rn(mass[i], fade[block][i / 2]);
#pragma unroll
        for (int n = 0; n < SUMMED; ++n) part[n][i] = __fmul_rn(part[n][i], fade[block][i / 2]);
      }
#pragma unroll
      for (int slot = block * BN; slot < (block + 1) * BN; slot += 32) {
        u32 p[2][4];
        load_tiles(p[0], weights + slot * 2);
        load_tiles(p[1], weights + slot * 2 + 32);
        T::multiply(mass, p[0], one, one);
        T::multiply(mass, p[1], one, one);
#pragma unroll
        for (int n = 0; n < SUMMED; ++n) {
          u32 v[4];
          load_turned(v, values + slot * ROW + (((warp * SUMMED + n) ^ (lane & 7)) << 4));
          T::multiply(part[n], p[0], v[0], v[1]);
          T::multiply(part[n], p[1], v[2], v[3]);
        }
      }
    }
  }

  __device__ __forceinline__ long long query(int row) const { return (long long)seq * a.heads + head * group + row; }

  // Hands `put(query, dimension, index)` each pair of sums that this thread has.
  template <class Put> __device__ __forceinline__ void each(Put put) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (lane / 4 + i * 8 < group)
#pragma unroll
        for (int n = 0; n < SUMMED; ++n) put(query(lane / 4 + i * 8), (warp * SUMMED + n) * 8 + lane % 4 * 2, n, i);
  }

  __device__ __forceinline__ void keep(int span, const float most[2], const float mass[4], const float part[SUMMED][4]) const {
    const long long at = (long long)span * a.seqs * a.heads;
    each([&](long long q, int d, int n, int i) {
      *(float2*)(a.parts + (at + q) * DIMS + d) = {part[n][2 * i], part[n][2 * i + 1]};
      if (d == 0) a.tops[at + q] = most[i], a.masses[at + q] = mass[2 * i];
    });
  }

  __device__ __forceinline__ int* counter() const { return a.arrived + (u64)seq * a.kv_heads + head; }

  // Whether this block came last of those that share the spans of a head; then all are kept.
  __device__ __forceinline__ bool came_last() const {
    __shared__ int last;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(counter(), 1) == programs - 1;
      __threadfence();
      if (last) *counter() = 0;
    }
    __syncthreads();
    return last;
  }

  // The same for the blocks of a cluster, which have one span each: in shared memory, where keys were.
  __device__ __forceinline__ void join_cluster(const float most[2], const float mass[4], const float part[SUMMED][4]) const {
    float2* sums = (float2*)memory;
    float2* tops = sums + 16 * DIMS / 2;
    each([&](long long, int d, int n, int i) {
      sums[((lane / 4 + i * 8) * DIMS + d) / 2] = {part[n][2 * i], part[n][2 * i + 1]};
      if (d == 0) tops[lane / 4 + i * 8] = {most[i], mass[2 * i]};
    });
    meet_cluster();
    if (blockIdx.z == 0)
      for (int i = threadIdx.x; i < group * DIMS / 2; i += THREADS) {
        const int row = i / (DIMS / 2);
        Known known;
        float2 result = {0.0f, 0.0f}, part[8], top[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < programs) {
            top[j] = load2_of(j, shared_address(tops + row));
            part[j] = load2_of(j, shared_address(sums + i));
          }
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < programs) {
            known.join(top[j].x, top[j].y);
            result.x = known.joined(result.x, part[j].x), result.y = known.joined(result.y, part[j].y);
          }
        *(float2*)(a.out + query(row) * DIMS + i % (DIMS / 2) * 2) = {known.result(result.x), known.result(result.y)};
      }
    meet_cluster();
  }

  // Joins all spans in order, eight at a time in flight.
  __device__ __forceinline__ void merge() const {
    for (int i = threadIdx.x * 2; i < group * DIMS; i += THREADS * 2) {
      const long long q = query(i / DIMS), step = (long long)a.seqs * a.heads;
      Known known;
      float2 result = {0.0f, 0.0f};
      for (int from = span_from; from < span_to; from += 8) {
        float most[8], mass[8];
        float2 part[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (from + j < span_to) {
            const long long at = (from + j) * step + q;
            most[j] = load(a.tops + at), mass[j] = load(a.masses + at);
            part[j] = load2(a.parts + at * DIMS + i % DIMS);
          }
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (from + j < span_to) {
            known.join(most[j], mass[j]);
            result.x = known.joined(result.x, part[j].x), result.y = known.joined(result.y, part[j].y);
          }
      }
      *(float2*)(a.out + q * DIMS + i % DIMS) = {known.result(result.x), known.result(result.y)};
    }
  }

  // Weights of a model pass through the cache between two layers: what is read later is called back now.
  __device__ __forceinline__ void call_back() const {
    const int at = threadIdx.x * 32;
    if (at < DIMS && a.q_norm) prefetch(a.q_norm + at);
    if (at < DIMS && a.k_norm) prefetch(a.k_norm + at);
    if (at < a.n_rot) prefetch(a.rope + (u64)seq * a.n_rot + at);
    if (threadIdx.x == 0 && programs > 1) prefetch(counter());
  }

  __device__ __forceinline__ void run() {
    let_next_start();
    if (!place()) return;
    find_pages(0, pages);
    find_pages(1, next);
#pragma unroll
    for (int unit = 0; unit < STAGES; ++unit) fetch(unit);
    for (int i = threadIdx.x; i < EACH * Q_ROW; i += THREADS) ((uint4*)(memory + Q_AT))[i] = {0, 0, 0, 0};
    call_back();
    __syncthreads();
    wait_for_previous();
    const int rows = group + (owner() ? 2 : 0);
    for (int r = warp; r < EACH * rows; r += WARPS) take(r / rows, r % rows);
    __syncthreads();
    float most[2], mass[4], part[SUMMED][4];
    for (int i = 0; i < EACH; ++i, ++head) {
      Known known[2];
      float result[SUMMED][4] = {};
      u32 q[STEPS][4];
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        load_tiles(q[step], shared_address(memory) + Q_AT + (i * 16 + lane % 16) * Q_ROW + lane / 16 * 16 + step * 32);
      for (int tile = i * tiles; tile < (i + 1) * tiles; ++tile) {
        const int in_span = (tile - i * tiles) % (SPAN / TILE);
        if (in_span == 0) {
          most[0] = most[1] = NONE;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            mass[i] = 0.0f;
#pragma unroll
            for (int n = 0; n < SUMMED; ++n) part[n][i] = 0.0f;
          }
        }
        float s[SCORED][4], fade[2][2];
        arrive(2 * tile);
        __syncwarp();
        score(tile, q, s);
        __syncthreads();
        fetch(2 * tile + STAGES);
        weigh(s, most, fade);
        arrive(2 * tile + 1);
        __syncthreads();
        sum(tile, fade, mass, part);
        __syncthreads();
        fetch(2 * tile + 1 + STAGES);
        if (in_span != SPAN / TILE - 1) continue;
        if (programs > 1) {
          if (clustered()) break;
          keep(my_from + (tile - i * tiles) / (SPAN / TILE), most, mass, part);
          continue;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          known[i].join(most[i], mass[2 * i]);
#pragma unroll
          for (int n = 0; n < SUMMED; ++n)
#pragma unroll
            for (int j = 2 * i; j < 2 * i + 2; ++j) result[n][j] = known[i].joined(result[n][j], part[n][j]);
        }
      }
      if (programs == 1)
        each([&](long long q, int d, int n, int j) {
          *(float2*)(a.out + q * DIMS + d) = {known[j].result(result[n][2 * j]), known[j].result(result[n][2 * j + 1])};
        });
      else if (clustered())
        join_cluster(most, mass, part);
      else if (came_last())
        merge();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend(const __grid_constant__ AttendArgs a) {
  Decode(a).run();
}
