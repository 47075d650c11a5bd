// The slots of one KV head that a block takes, and the rows that it fetches of them.
struct Slots {
  typedef TYPE T;

  const AttendArgs& a;
  const int warp, lane, seq, group;
  int head;                      // of the EACH that this block takes, one after the other
  int shift, low, high;          // visible slots; the token's own is the last of them
  int span_from, span_to;        // that there are
  int my_from, my_to, programs;  // that this block takes; blocks that share them
  int tiles, start;              // this block's, and the slot that the first of them begins with
  int pages[2], next[2];         // that the warp's slots of a tile lie in: of the next to fetch, and the one after

  __device__ __forceinline__ Slots(const AttendArgs& args)
      : a(args), warp(threadIdx.x / 32), lane(threadIdx.x % 32), seq(blockIdx.x),
        group(args.heads / args.kv_heads), head(blockIdx.y * EACH) {}

  __device__ __forceinline__ u32 ring(int unit) const { return shared_address(memory) + unit % STAGES * STAGE; }
  __device__ __forceinline__ bool owner() const { return my_to == span_to; }

  // Which spans are this block's; false if none.
  __device__ __forceinline__ bool place() {
    const int where = load_int(a.slots + seq), slots = load_int(a.length + seq);
    const int begin = load_int(a.first + seq), position = load_int(a.positions + seq);
    shift = begin % SPAN;
    high = min(slots, position - begin + 1);
    low = a.window > 0 ? max(position - a.window + 1 - begin, 0) : 0;
    span_from = (low + shift) / SPAN;
    span_to = (high + shift + SPAN - 1) / SPAN;
    const int count = span_to - span_from, per = max((count + (int)gridDim.z - 1) / (int)gridDim.z, a.least);
    programs = (count + per - 1) / per;
    my_from = span_from + (int)blockIdx.z * per;
    my_to = min(my_from + per, span_to);
    tiles = (my_to - my_from) * (SPAN / TILE);
    start = my_from * SPAN - shift;
    return where >= 0 && my_from < my_to;
  }

  // Tiles are counted on from one head to the next.
  __device__ __forceinline__ int which(int tile) const { return EACH == 1 ? 0 : tile / tiles; }
  __device__ __forceinline__ int tile_slot(int tile) const { return start + (tile - which(tile) * tiles) * TILE; }
  __device__ __forceinline__ int first_slot(int tile) const { return tile_slot(tile) + warp * MINE; }

  __device__ __forceinline__ void find_pages(int tile, int found[2]) const {
    const int page = max(first_slot(tile), 0) / a.page_tokens, used = tile < EACH * tiles ? (high - 1) / a.page_tokens : -1;
    const int* table = a.tables + (u64)seq * a.table_cols + page;
    found[0] = page <= used ? load_int(table) : 0;
    found[1] = page < used ? load_int(table + 1) : 0;
  }

  // Keys of a tile are one unit, its values the next. Slots that are not seen become zeros, and so does the
  // token's own, which is not there yet.
  __device__ __forceinline__ void fetch(int unit) {
    const int tile = unit / 2;
    if (tile < EACH * tiles) {
      const int slot = first_slot(tile), page = max(slot, 0) / a.page_tokens, edge = (page + 1) * a.page_tokens;
      const u8* part = a.base + (unit % 2 ? a.v_offset : a.k_offset) + (long long)(blockIdx.y * EACH + which(tile)) * a.page_tokens * ROW;
      const u8* here = part + pages[0] * a.page_bytes - (long long)(edge - a.page_tokens) * ROW;
      const u8* there = part + pages[1] * a.page_bytes - (long long)edge * ROW;
#pragma unroll
      for (int i = 0; i < MINE * CHUNKS / 32; ++i) {
        const int r = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS, at = slot + r;
        const u32 to = ring(unit) + (warp * MINE + r) * ROW + ((chunk ^ (r & 7)) << 4);
        copy16_if(to, (at < edge ? here : there) + (long long)at * ROW + chunk * 16, at >= low && at < high - 1);
      }
      if (unit % 2) {
        pages[0] = next[0], pages[1] = next[1];
        find_pages(tile + 2, next);
      }
    }
    commit_copies();
  }

  // A query, or the token's own key or value, which its page gets too.
  __device__ __forceinline__ void take(int i, int r) const {
    const int head = blockIdx.y * EACH + i;
    u8* to = memory + (r < group ? Q_AT + (i * 16 + r) * Q_ROW : NEW_AT + (i * 2 + r - group) * ROW);
    u8* stored = nullptr;
    if (r >= group) {
      const int where = load_int(a.slots + seq), page = where / a.page_tokens, slot = where % a.page_tokens;
      stored = a.base + page * a.page_bytes + (r == group ? a.k_offset : a.v_offset) +
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
      *(uint4*)to = *(const uint4*)(memory + NEW_AT + (which(unit / 2) * 2 + unit % 2) * ROW + lane * 16);
    }
  }
};
