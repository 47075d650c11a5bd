// Attention of one token of each sequence, from q, k and v to the output. A block has eight warps; it takes
// some spans of slots of one KV head, a tile after the other: each warp scores slots that it fetched itself,
// then each sums a part of the dimensions. Its arithmetic, and so every bit, is that of kernels/attend.py:
// products in steps of 16, blocks of BN slots that fade what came before, spans that start afresh and are
// merged in order. TYPE, DIMS, STAGES and BLOCKS come from the host.

struct Decode : Slots {
  using Slots::Slots;

  // Whether blocks read each other's memory.
  __device__ __forceinline__ bool clustered() const { return per <= a.rooms; }

  // Scores of the warp's slots, and the largest of each query in shared memory.
  __device__ __forceinline__ void score(int tile, const u32 q[STEPS][4], float s[SCORED][4]) const {
    const u32 keys = ring(2 * tile) + (warp * MINE + lane % 8) * ROW;
#pragma unroll
    for (int n = 0; n < SCORED; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
    const int first = first_slot(tile);
    if (seen(first, MINE))
#pragma unroll
      for (int step = 0; step < STEPS; step += 2)
#pragma unroll
        for (int n = 0; n < SCORED; ++n) {
          u32 k[4];
          load_tiles(k, keys + n * 8 * ROW + (((step * 2 + lane / 8) ^ (lane % 8)) << 4));
          T::multiply(s[n], q[step], k[0], k[1]);
          T::multiply(s[n], q[step + 1], k[2], k[3]);
        }
    const bool whole = first >= low && first + MINE <= high;
    float most[2] = {NONE, NONE};
#pragma unroll
    for (int n = 0; n < SCORED; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int slot = first + n * 8 + lane % 4 * 2 + i % 2;
        s[n][i] = __fmul_rn(s[n][i], a.scale);
        if (!whole && (slot < low || slot >= high)) s[n][i] = NONE;
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
        if (!seen(tile_slot(tile) + slot, 32)) continue;
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

  // Hands `put` the query, dimension and place of each pair of sums that this thread has.
  template <class Put> __device__ __forceinline__ void each(Put put) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (lane / 4 + i * 8 < group)
#pragma unroll
        for (int n = 0; n < SUMMED; ++n) put(lane / 4 + i * 8, (warp * SUMMED + n) * 8 + lane % 4 * 2, n, i);
  }

  // Where another block reads what this one found of a span: sums of its queries, then tops and masses.
  __device__ __forceinline__ u8* room(int span) const { return memory + KEPT_AT + span % per * group * (DIMS * 4 + 8); }

  __device__ __forceinline__ void keep(int span, const float most[2], const float mass[4], const float part[SUMMED][4]) const {
    const long long at = (long long)span * a.seqs * a.heads + query(0);
    float* parts = clustered() ? (float*)room(span - span_from) : a.parts + at * DIMS;
    float* tops = clustered() ? parts + group * DIMS : a.tops + at * 2;
    each([&](int row, int d, int n, int i) {
      *(float2*)(parts + row * DIMS + d) = {part[n][2 * i], part[n][2 * i + 1]};
      if (d == 0) *(float2*)(tops + row * 2) = {most[i], mass[2 * i]};
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

  // Joins all spans in order, eight of them in flight: `load` finds what was kept of one.
  template <class Load> __device__ __forceinline__ void merge(Load load) const {
    for (int i = threadIdx.x * 2; i < group * DIMS; i += THREADS * 2) {
      Known known;
      float2 result = {0.0f, 0.0f};
      for (int from = 0; from < span_to - span_from; from += 8) {
        const int count = span_to - span_from - from;
        float2 top[8], part[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < count) load(from + j, i, top[j], part[j]);
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < count) {
            known.join(top[j].x, top[j].y);
            result.x = known.joined(result.x, part[j].x), result.y = known.joined(result.y, part[j].y);
          }
      }
      *(float2*)(a.out + query(0) * DIMS + i) = {known.result(result.x), known.result(result.y)};
    }
  }

  // The first block of a cluster reads the others' memory, who stay until it has.
  __device__ __forceinline__ void merge_cluster() const {
    meet_cluster();
    if (blockIdx.z == 0)
      merge([&](int span, int i, float2& top, float2& part) {
        const u32 at = shared_address(room(span));
        top = load2_of(span / per, at + group * DIMS * 4 + i / DIMS * 8);
        part = load2_of(span / per, at + i * 4);
      });
    meet_cluster();
  }

  __device__ __forceinline__ void merge_kept() const {
    merge([&](int span, int i, float2& top, float2& part) {
      const long long at = (long long)(span_from + span) * a.seqs * a.heads + query(0);
      top = load2(a.tops + (at + i / DIMS) * 2);
      part = load2(a.parts + at * DIMS + i);
    });
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
    for (int i = threadIdx.x; i < Q_ROW; i += THREADS) ((uint4*)(memory + Q_AT))[i] = {0, 0, 0, 0};
    call_back();
    __syncthreads();
    wait_for_previous();
    for (int r = warp; r < group + (owner() ? 2 : 0); r += WARPS) take(r);
    __syncthreads();
    u32 q[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      load_tiles(q[step], shared_address(memory) + Q_AT + lane % 16 * Q_ROW + lane / 16 * 16 + step * 32);
    Known known[2];
    float most[2], mass[4], part[SUMMED][4], result[SUMMED][4] = {};
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile % (SPAN / TILE) == 0) {
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
      if (tile + 1 < tiles) {
        __syncthreads();
        fetch(2 * tile + 1 + STAGES);
      }
      if (tile % (SPAN / TILE) != SPAN / TILE - 1) continue;
      if (programs > 1) {
        keep(my_from + tile / (SPAN / TILE), most, mass, part);
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
      each([&](int row, int d, int n, int i) {
        *(float2*)(a.out + query(row) * DIMS + d) = {known[i].result(result[n][2 * i]), known[i].result(result[n][2 * i + 1])};
      });
    else if (clustered())
      merge_cluster();
    else if (came_last())
      merge_kept();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend(const __grid_constant__ AttendArgs a) {
  Decode(a).run();
}
