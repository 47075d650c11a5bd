// The slots of one KV head that a block takes, and the rows that it fetches of them.
struct Slots {
  typedef TYPE T;

  const AttendArgs& a;
  const int warp, lane, seq, head, group;
  int where;                     // the token's own slot among those of all pages
  int shift, low, high;          // visible slots; the token's own is the last of them
  int span_from, span_to;        // that there are
  int my_from, my_to;            // that this block takes
  int per, programs;             // that a block takes; blocks that share them
  int tiles, start;              // this block's, and the slot that the first of them begins with
  int pages[2], next[2];         // that the warp's slots of a tile lie in: of the next to fetch, and the one after

  __device__ __forceinline__ Slots(const AttendArgs& args)
      : a(args), warp(threadIdx.x / 32), lane(threadIdx.x % 32), seq(blockIdx.x), head(blockIdx.y),
        group(args.heads / args.kv_heads) {}

  __device__ __forceinline__ u32 ring(int unit) const { return shared_address(memory) + unit % STAGES * STAGE; }
  __device__ __forceinline__ bool owner() const { return my_to == span_to; }

  // Which spans are this block's; false if none.
  __device__ __forceinline__ bool place() {
    where = load_int(a.slots + seq);
    const int slots = load_int(a.length + seq);
    const int begin = load_int(a.first + seq), position = load_int(a.positions + seq);
    shift = begin % SPAN;
    high = min(slots, position - begin + 1);
    low = a.window > 0 ? max(position - a.window + 1 - begin, 0) : 0;
    span_from = (low + shift) / SPAN;
    span_to = (high + shift + SPAN - 1) / SPAN;
    const int count = span_to - span_from;
    per = max(min((count + a.shares - 1) / a.shares, a.most), 1);
    programs = (count + per - 1) / per;
    my_from = span_from + (int)blockIdx.z * per;
    my_to = min(my_from + per, span_to);
    tiles = (my_to - my_from) * (SPAN / TILE);
    start = my_from * SPAN - shift;
    return where >= 0 && my_from < my_to;
  }

  __device__ __forceinline__ int tile_slot(int tile) const { return start + tile * TILE; }
  __device__ __forceinline__ bool seen(int slot, int count) const { return slot < high && slot + count > low; }
  __device__ __forceinline__ int first_slot(int tile) const { return tile_slot(tile) + warp * MINE; }

  __device__ __forceinline__ void find_pages(int tile, int found[2]) const {
    const int page = max(first_slot(tile), 0) >> a.page_bits, used = tile < tiles ? (high - 1) >> a.page_bits : -1;
    const int* table = a.tables + (u64)seq * a.table_cols + page;
    found[0] = page <= used ? load_int(table) : 0;
    found[1] = page < used ? load_int(table + 1) : 0;
  }

  // Keys of a tile are one unit, its values the next. Slots that are not seen become zeros, and so does the
  // token's own, which is not there yet. Eight rows lie in other banks each: chunk ^ row.
  __device__ __forceinline__ void fetch(int unit) {
    const int tile = unit / 2;
    if (tile < tiles) {
      const int slot = first_slot(tile), inside = slot & a.page_tokens - 1;
      const u8* part = a.base + (unit % 2 ? a.v_offset : a.k_offset) +
                       ((long long)head * ROW << a.page_bits);
      const u8* from = part + pages[0] * a.page_bytes + inside * ROW + lane * 16;
      const u32 to = ring(unit) + warp * MINE * ROW + ((lane ^ lane / CHUNKS) << 4);
      if (slot >= low && slot + MINE < high && inside + MINE <= a.page_tokens) {
#pragma unroll
        for (int i = 0; i < MINE * CHUNKS / 32; ++i) copy16((to ^ (i * 32 / CHUNKS & 7) << 4) + i * 512, from + i * 512);
      } else {
        fetch_some(slot, part, to);
      }
      if (unit % 2) {
        pages[0] = next[0], pages[1] = next[1];
        find_pages(tile + 2, next);
      }
    }
    commit_copies();
  }

  // The same where not all rows are wanted, or not all lie in one page.
  __device__ __forceinline__ void fetch_some(int slot, const u8* part, u32 to) const {
    const int edge = (max(slot, 0) >> a.page_bits) + 1 << a.page_bits;
#pragma unroll 1
    for (int i = 0; i < MINE * CHUNKS / 32; ++i) {
      const int at = slot + (i * 32 + lane) / CHUNKS;
      const u8* page = part + (at < edge ? pages[0] : pages[1]) * a.page_bytes;
      copy16_if((to ^ (i * 32 / CHUNKS & 7) << 4) + i * 512, page + (at & a.page_tokens - 1) * ROW + lane % CHUNKS * 16,
                at >= low && at < high - 1);
    }
  }

  // A query, or the token's own key or value, which its page gets too.
  __device__ __forceinline__ void take(int r) const {
    u8* to = memory + (r < group ? Q_AT + r * Q_ROW : NEW_AT + (r - group) * ROW);
    u8* stored = nullptr;
    if (r >= group) {
      const int slot = where & a.page_tokens - 1;
      stored = a.base + (where >> a.page_bits) * a.page_bytes + (r == group ? a.k_offset : a.v_offset) +
               ((long long)head * a.page_tokens + slot) * ROW;
      if (!a.store) {
        if (lane < CHUNKS) *(float4*)(to + lane * 16) = load4((const float*)(stored + lane * 16));
        return;
      }
    }
    const int which = r < group ? head * group + r : r == group ? a.heads + head : a.heads + a.kv_heads + head;
    const float* x = a.qkv + seq * a.stride + (long long)which * DIMS;
    float y[DIMS / 32];
    if (r <= group)
      turned(y, a, x, r < group ? a.q_norm : a.k_norm, lane);
    else
#pragma unroll
      for (int i = 0; i < DIMS / 32; ++i) y[i] = load(x + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < DIMS / 32; ++i) {
      const u16 bits = (u16)T::pack(y[i], 0.0f);
      ((u16*)to)[i * 32 + lane] = bits;
      if (stored) ((u16*)stored)[i * 32 + lane] = bits;
    }
  }

  // Waits for what this warp fetched; the token's own key or value goes where its slot was left empty.
  __device__ __forceinline__ void arrive(int unit) const {
    wait_copies<STAGES - 1>();
    __syncwarp();
    const int row = high - 1 - tile_slot(unit / 2);
    if (owner() && row >= 0 && row < TILE && row / MINE == warp && lane < CHUNKS) {
      u8* to = memory + unit % STAGES * STAGE + row * ROW + ((lane ^ (row & 7)) << 4);
      *(uint4*)to = *(const uint4*)(memory + NEW_AT + unit % 2 * ROW + lane * 16);
    }
  }
};
