// Attention of prompts on Hopper, over heads of 128 dimensions in pages of 16 bits: what kernels/attend.py
// does, in the same order, so that bits are the same. A block takes a tile of queries that share a KV
// head: four warps copy pages, four multiply and keep all sums in registers.
//
// Given: TYPE f16 or bf16 of queries, keys and values; BFLOAT: the type of the output, 0 float.

constexpr int QUERIES = 64, SLOTS = 64, SPAN = 128, DIMS = 128;
constexpr int HALF = SLOTS * 128;                // bytes of 64 dimensions of a block's slots
constexpr int STAGES = 3, STAGE = 4 * HALF;      // keys, then values; each in halves of 64 dimensions
constexpr int ONES = 2 * HALF + STAGES * STAGE;  // behind the queries and the ring
constexpr int BARRIERS = ONES + 512;

struct PromptArgs {
  TensorMap pages;     // all memory of the pool as rows of 256 bytes, in boxes of 16 rows by 64 dimensions
  const u16* q;        // [tokens, heads, 128]
  void* out;           // the same
  const int *tables, *first, *length, *positions, *tile_row, *tile_count, *tile_seq;
  int page_rows, k_row, v_row;  // rows of a page, and where in it keys and values start
  int page_tokens, table_cols, heads, kv_heads, window;
  float scale;
};

// Rows of 16 bytes, eight to 128: of ones, which may lie in any order.
__device__ __forceinline__ u64 ones_at(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)8 << 16 | (u64)8 << 32;
}

#define KIND ".f32." TEXT(TYPE) "." TEXT(TYPE)
#define FIRST_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NEXT_32 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// Scores of 64 queries and slots over 16 dimensions.
__device__ __forceinline__ void score(float (&d)[32], u64 q, u64 k, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16" KIND " {" FIRST_32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24) : "l"(q), "l"(k), "r"(add));
}

// Values of 16 slots, and their masses: tensor cores add in one order, which a sum over a row would not.
__device__ __forceinline__ void weigh(float (&d)[64], const u32 (&p)[4], u64 v) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16" KIND " {" FIRST_32 "," NEXT_32 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
               : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

__device__ __forceinline__ void weigh_ones(float (&d)[4], const u32 (&p)[4], u64 ones) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16" KIND " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(ones));
}

__device__ __forceinline__ void products_done() {
  products_end();
  products_wait<0>();
}

__device__ __forceinline__ float power(float x) {
  float e;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, 1.4426950408889634f)));
  return e;
}

__device__ __forceinline__ float none() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float safe_of(float top) { return top == none() ? 0.0f : top; }

__device__ __forceinline__ u32 pack(float low, float high) {
  constexpr bool bfloat = sizeof(TEXT(TYPE)) == 5;  // "bf16"
  return bfloat ? to_bfloat2(low, high) : to_half2(low, high);
}

// What is known of two rows of a thread: the largest score, the mass below it, and the sum of values.
struct Known {
  float most[2], mass[2], part[64];
};

__device__ __forceinline__ void merge(Known& all, const float (&most)[2], const float (&mass)[4], const float (&part)[64]) {
#pragma unroll
  for (int two = 0; two < 2; ++two) {
    const float top = fmaxf(all.most[two], most[two]), safe = safe_of(top);
    const float before = power(__fsub_rn(all.most[two], safe)), now = power(__fsub_rn(most[two], safe));
    all.most[two] = top;
    all.mass[two] = __fmaf_rn(all.mass[two], before, __fmul_rn(mass[two * 2], now));
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if (i / 2 % 2 == two) all.part[i] = __fmaf_rn(all.part[i], before, __fmul_rn(part[i], now));
  }
}

// The slots that a tile looks at, in blocks that are cut at absolute positions.
struct Range {
  int start, slots, shift, first, last;
};

__device__ __forceinline__ void copy_pages(const PromptArgs& a, const Range& r, const int* table, int head, u32 base) {
  const int page = threadIdx.x % GROUP / 32;  // of the four of a block; one warp each
  u32 stage = 0, phase = 1;
  for (int block = r.first; block < r.last; block += SLOTS) {
    const u32 full = base + BARRIERS + stage * 8, empty = full + STAGES * 8;
    const int slot = block - r.shift + page * 16;
    const bool there = slot >= 0 && slot < r.slots;
    const int row = there ? table[slot / a.page_tokens] * a.page_rows + head * a.page_tokens + slot % a.page_tokens : 0;
    barrier_wait(empty, phase);
    if (page == 0) {
      int pages = 0;
      for (int i = 0; i < 4; ++i) pages += slot + i * 16 >= 0 && slot + i * 16 < r.slots;
      barrier_expect(full, pages * 8192);
    }
    if (there) {
      const u32 to = base + 2 * HALF + stage * STAGE + page * 2048;
      copy_box(to, a.pages, 0, row + a.k_row, full);
      copy_box(to + HALF, a.pages, 64, row + a.k_row, full);
      copy_box(to + 2 * HALF, a.pages, 0, row + a.v_row, full);
      copy_box(to + 3 * HALF, a.pages, 64, row + a.v_row, full);
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
}

// Zeros for values of slots that hold nothing: zero times what lies there might be no number.
__device__ __forceinline__ void clear_values(u32 values, int from, int to) {
  const uint4 zero = {0, 0, 0, 0};
  for (int i = threadIdx.x; i < SLOTS * 16; i += GROUP) {
    const int row = i / 16;
    if (row >= from && row < to) continue;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(values + i % 16 / 8 * HALF + row * 128 + i % 8 * 16), "r"(zero.x), "r"(zero.y), "r"(zero.z), "r"(zero.w) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;\nbar.sync 1, 128;" ::: "memory");
}

__device__ __forceinline__ void attend_blocks(const PromptArgs& a, const Range& r, const int (&place)[2], int earliest, int latest, u32 base, Known& all) {
  const int lane = threadIdx.x % 32;
  float most[2] = {none(), none()}, mass[4] = {}, part[64] = {};
  u32 stage = 0, phase = 0;
  for (int block = r.first; block < r.last; block += SLOTS) {
    const u32 full = base + BARRIERS + stage * 8, keys = base + 2 * HALF + stage * STAGE, values = keys + 2 * HALF;
    barrier_wait(full, phase);
    float s[32];
    products_begin();
#pragma unroll
    for (int i = 0; i < 8; ++i) score(s, matrix_at(base + i / 4 * HALF, 16) + i % 4 * 2, matrix_at(keys + i / 4 * HALF, 16) + i % 4 * 2, i > 0);
    products_done();
    const int slot = block - r.shift, at = r.start + slot;
    if (slot < 0 || slot + SLOTS > r.slots) clear_values(values, -slot, r.slots - slot);
    const bool whole = slot >= 0 && at + SLOTS - 1 <= earliest && (a.window <= 0 || at > latest - a.window);
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = __fmul_rn(s[i], a.scale);
    if (!whole) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int mine = i / 4 * 8 + lane % 4 * 2 + i % 2, where = place[i / 2 % 2];
        const bool seen = slot + mine >= 0 && slot + mine < r.slots && at + mine <= where && (a.window <= 0 || at + mine > where - a.window);
        if (!seen) s[i] = none();
      }
    }
    float safe[2], fade[2];
#pragma unroll
    for (int two = 0; two < 2; ++two) {
      float top = most[two];
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 2 % 2 == two) top = fmaxf(top, s[i]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      safe[two] = safe_of(top);
      fade[two] = power(__fsub_rn(most[two], safe[two]));
      most[two] = top;
    }
    u32 p[4][4];  // of 16 slots each: an operand of `wgmma`
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float m = safe[i % 2];
      p[i / 4][i % 4] = pack(power(__fsub_rn(s[2 * i], m)), power(__fsub_rn(s[2 * i + 1], m)));
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) part[i] = __fmul_rn(part[i], fade[i / 2 % 2]);
#pragma unroll
    for (int i = 0; i < 4; ++i) mass[i] = __fmul_rn(mass[i], fade[i / 2]);
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weigh(part, p[i], matrix_at(values, HALF) + i * 128);
      weigh_ones(mass, p[i], ones_at(base + ONES));
    }
    products_done();
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(full + STAGES * 8) : "memory");
    if (++stage == STAGES) stage = 0, phase ^= 1;
    if ((block + SLOTS) % SPAN == 0 || block + SLOTS >= r.last) {
      merge(all, most, mass, part);
      most[0] = most[1] = none();
#pragma unroll
      for (int i = 0; i < 4; ++i) mass[i] = 0;
#pragma unroll
      for (int i = 0; i < 64; ++i) part[i] = 0;
    }
  }
}

// A tile's queries, of which a thread has two.
struct Queries {
  int row, count, head, share, heads;
  __device__ __forceinline__ int token(int m) const { return row + min(m / share, count - 1); }
  __device__ __forceinline__ long long at(int m) const { return ((long long)token(m) * heads + head * share + m % share) * DIMS; }
};

__device__ __forceinline__ void store_rows(const PromptArgs& a, const Known& all, const Queries& of, int m) {
#pragma unroll
  for (int two = 0; two < 2; ++two, m += 8) {
    if (m >= of.count * of.share) return;
    const long long start = of.at(m) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        asm("div.full.f32 %0, %1, %2;" : "=f"(v[i]) : "f"(all.part[j * 4 + two * 2 + i]), "f"(all.mass[two]));
        if (all.mass[two] == 0.0f) v[i] = 0.0f;
      }
      if (BFLOAT) *(u32*)((u16*)a.out + start + j * 8) = to_bfloat2(v[0], v[1]);
      else *(float2*)((float*)a.out + start + j * 8) = {v[0], v[1]};
    }
  }
}

__device__ __forceinline__ void multiply_tile(const PromptArgs& a, const Range& r, const Queries& of, int earliest, int latest, u32 base) {
  for (int i = threadIdx.x; i < QUERIES * 16; i += GROUP) {  // chunks of 16 bytes, swizzled
    const int m = i / 16, c = i % 16;
    const uint4 v = *(const uint4*)(a.q + of.at(m) + c * 8);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(base + c / 8 * HALF + m * 128 + ((c % 8 ^ m % 8) << 4)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + ONES + threadIdx.x * 4), "r"(pack(1.0f, 1.0f)) : "memory");
  asm volatile("fence.proxy.async.shared::cta;\nbar.sync 1, 128;" ::: "memory");
  const int m = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int place[2] = {a.positions[of.token(m)], a.positions[of.token(m + 8)]};
  Known all;
  all.most[0] = all.most[1] = none(), all.mass[0] = all.mass[1] = 0;
#pragma unroll
  for (int i = 0; i < 64; ++i) all.part[i] = 0;
  attend_blocks(a, r, place, earliest, latest, base, all);
  store_rows(a, all, of, m);
}

extern "C" __global__ void __launch_bounds__(2 * GROUP, 2) attend_prompt(const __grid_constant__ PromptArgs a) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  let_next_start();
  wait_for_previous();
  const int head = blockIdx.y;
  // Later tiles see more: where two blocks meet, one is short.
  const int tile = head * 2 >= a.kv_heads ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int row = a.tile_row[tile], count = a.tile_count[tile];
  if (count == 0) return;  // it only fills a graph
  const int seq = a.tile_seq[tile], earliest = a.positions[row], latest = a.positions[row + count - 1];
  Range r{a.first[seq], a.length[seq]};
  r.shift = r.start % SPAN;
  const int low = a.window > 0 ? max(earliest - a.window + 1 - r.start, 0) : 0;
  r.first = (low + r.shift) / SLOTS * SLOTS;
  r.last = min(r.slots, latest - r.start + 1) + r.shift;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_start(base + BARRIERS + s * 8, 1), barrier_start(base + BARRIERS + (STAGES + s) * 8, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x / GROUP == 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x % 32 == 0) copy_pages(a, r, a.tables + (long long)seq * a.table_cols, head, base);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    multiply_tile(a, r, Queries{row, count, head, a.heads / a.kv_heads, a.heads}, earliest, latest, base);
  }
}
