// Attention kernels for one instruction set (see attention.h for the layout and the order of sums).
#include "attention.h"

#include "kv.h"
#include "prepare.h"
#include "products.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Types from here on cost more to read than to convert once, when it takes several passes over them.
#if defined(QUIRE_PORTABLE)
constexpr KvType COSTLY = KvType::f16;
#else
constexpr KvType COSTLY = KvType::q8_0;
#endif
constexpr float MINUS_INFINITY = -__builtin_inff();

// ---- the keys and values of one segment ----

struct Segment {
    const void* keys[SEGMENT_BLOCKS];
    ValueBlock values[SEGMENT_BLOCKS];
    bool stage_keys, stage_values;
    bool fetched;                              // they come from memory, and are fetched ahead
    int base;                                  // slot of key 0 (negative before the first page)
    int from, to;                              // keys that the tile sees
    uint16_t seen[TILE_ROWS][SEGMENT_BLOCKS];  // with holes: which of them each token sees
};

struct Scratch {
    float *q, *s, *state, *part, *keys, *values;
};

inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
inline int64_t state_stride(const AttentionShape& s) { return s.dv_padded + STATE_EXTRA; }

int64_t scratch(const AttentionShape& s, int rows) {
    const int64_t n = int64_t(rows) * s.group;
    return padded(n * s.dk) + ROWS * SEGMENT + 2 * n * state_stride(s) + int64_t(SEGMENT) * (s.dk + s.dv_padded);
}

inline Scratch carve(const AttentionShape& s, int rows, float* p) {
    const int64_t n = int64_t(rows) * s.group;
    Scratch c;
    c.q = p;
    c.s = c.q + padded(n * s.dk);
    c.state = c.s + ROWS * SEGMENT;
    c.part = c.state + n * state_stride(s);
    c.keys = c.part + n * state_stride(s);
    c.values = c.keys + int64_t(SEGMENT) * s.dk;
    return c;
}

inline uint16_t seen_keys(const int32_t* slot_positions, int position, int window) {
    const int after = window > 0 && position >= window ? position - window : -1;
    unsigned bits = 0;
    for (int t = 0; t < BLOCK; t++)
        bits |= unsigned(slot_positions[t] > after && slot_positions[t] <= position) << t;
    return uint16_t(bits);
}

// Which keys of block b any row needs; with holes also who sees what.
unsigned needed_keys(const AttendJob& job, const Tile& tile, Segment& g, int b) {
    const PageView& pages = *job.pages;
    int32_t at[BLOCK];
    const int from = g.from - b * BLOCK, to = g.to - b * BLOCK;
    const unsigned inside = (~0u << (from > 0 ? from : 0)) & ((1u << (to < BLOCK ? to : BLOCK)) - 1);
    unsigned needed = 0;
    if (!pages.slot_positions) return inside;
    const int32_t* positions = pages.slot_positions + tile.seq * pages.max_slots + g.base + b * BLOCK;
    for (int t = 0; t < BLOCK; t++) at[t] = inside >> t & 1 ? positions[t] : -1;
    for (int r = 0; r < tile.rows; r++) {
        g.seen[r][b] = seen_keys(at, pages.positions[tile.row + r], job.shape->window);
        needed |= g.seen[r][b];
    }
    return needed;
}

inline const char* keys_at(const AttendJob& job, const Tile& tile, int head, int slot) {
    const AttentionShape& s = *job.shape;
    const PageView& pages = *job.pages;
    const int64_t page = pages.tables[tile.seq * pages.max_pages + slot / pages.page_tokens];
    const char* part = pages.base + page * pages.page_bytes + job.k_offset;
    return part + head * pages.page_tokens * row_bytes(s.type_k, s.dk) + key_block(s.type_k, s.dk, slot % pages.page_tokens);
}

// The keys that are read after a block's values: the same block's of the next head, or where others have that one, of
// the next segment.
inline const char* next_keys(const AttendJob& job, const Tile& tile, int head, int slot) {
    if (!tile.shared) return head + 1 < job.shape->n_kv_heads ? keys_at(job, tile, head + 1, slot) : nullptr;
    return slot + SEGMENT < tile.end ? keys_at(job, tile, head, slot + SEGMENT) : nullptr;
}

// Keys and values are read in place or staged: converted to float32 once. Staging also clears holes,
// so that what lies there cannot reach a sum; a page of holes only is not touched.
void open_block(const AttendJob& job, const Tile& tile, int head, const Scratch& c, Segment& g, int b) {
    const AttentionShape& s = *job.shape;
    const PageView& pages = *job.pages;
    float* keys = c.keys + int64_t(b) * BLOCK * s.dk;
    float* values = c.values + int64_t(b) * BLOCK * s.dv_padded;
    g.keys[b] = keys;
    g.values[b] = {values, nullptr};
    const unsigned needed = needed_keys(job, tile, g, b);
    if (!needed) {
        std::memset(values, 0, size_t(BLOCK * s.dv_padded) * 4);
        return;
    }
    const int slot = g.base + b * BLOCK, in_page = slot % pages.page_tokens;
    const int64_t page = pages.tables[tile.seq * pages.max_pages + slot / pages.page_tokens];
    const char* start = pages.base + page * pages.page_bytes;
    const char* v_part = start + job.v_offset + head * pages.page_tokens * row_bytes(s.type_v, s.dv);
    const char* block = keys_at(job, tile, head, slot);
    if (g.stage_keys) load_keys(s.type_k, block, s.dk, keys);
    else g.keys[b] = block;
    if (g.stage_values) load_values(s.type_v, v_part, s.dv, pages.page_tokens, in_page, needed, values, s.dv_padded);
    else g.values[b] = value_block(s.type_v, v_part, s.dv, pages.page_tokens, in_page);
    if (g.fetched) g.values[b].next = next_keys(job, tile, head, slot);
}

void open_segment(const AttendJob& job, const Tile& tile, int head, int number, const Scratch& c, Segment& g) {
    const AttentionShape& s = *job.shape;
    const bool holes = job.pages->slot_positions, many = tile.rows * s.group > ROWS;
    g.stage_keys = holes || (many && s.type_k >= COSTLY);
    g.stage_values = holes || (many && s.type_v >= COSTLY) || s.dv != s.dv_padded;
    g.fetched = tile.rows == 1 || tile.shared;
    g.base = number * SEGMENT - job.pages->phase[tile.seq];
    g.from = tile.begin > g.base ? tile.begin - g.base : 0;
    g.to = tile.end - g.base < SEGMENT ? tile.end - g.base : SEGMENT;
    for (int b = g.from / BLOCK; b * BLOCK < g.to; b++) open_block(job, tile, head, c, g, b);
}

// ---- softmax of one row of a segment ----

inline float exp_one(float x) {
    float t[LANES];
    store(t, exp(set1(x)));
    return t[0];
}

inline vf soft_cap(vf x, float cap) {
    const vf e = exp(mul(x, set1(2.0f / cap)));  // tanh(y) = 1 - 2 / (e^2y + 1)
    return mul(sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))), set1(cap));
}

// Scores to weights in place; leaves the maximum and the total. Keys outside [from, to) or without
// their bit in `seen` weigh exactly 0. A visible score that is not finite makes the total NaN.
void softmax(float* s, int from, int to, const uint16_t* seen, float cap, float* maximum, float* total) {
    constexpr unsigned ALL = (1u << LANES) - 1;
    const int first = from / LANES * LANES;
    vf high = set1(MINUS_INFINITY), bad = zero(), sum = zero();
    for (int j = first; j < to; j += LANES) {
        vf x = load(s + j);
        unsigned bits = ALL;
        if (j < from) bits &= ~0u << (from - j);
        if (j + LANES > to) bits &= (1u << (to - j)) - 1;
        if (seen) bits &= unsigned(seen[j / BLOCK]) >> (j % BLOCK);
        if (bits != ALL) x = choose(bits, x, zero());
        bad = fma(x, zero(), bad);
        if (cap != 0.0f) x = soft_cap(x, cap);
        if (bits != ALL) x = choose(bits, x, set1(MINUS_INFINITY));
        high = max(high, x);
        if (bits != ALL || cap != 0.0f) store(s + j, x);
    }
    const float m = reduce_max(high);
    for (int j = first; j < to; j += LANES) {
        const vf e = exp(sub(load(s + j), set1(m)));
        sum = add(sum, e);
        store(s + j, e);
    }
    *maximum = m;
    *total = reduce_add(add(sum, bad));
}

// ---- rows of a tile over one segment ----

// Up to ROWS rows at once. Keys that all of them see are weighed together, the rest row by row, so
// that no row ever multiplies a value it does not see.
void attend_rows(const AttentionShape& s, const Segment& g, int n, const float* q, float* scores,
                 const int* from, const int* to, const uint16_t* const* seen, float* part) {
    const int64_t stride = state_stride(s);
    int low = SEGMENT, high = 0, all_from = 0, all_to = SEGMENT;
    for (int r = 0; r < n; r++) {
        float* sums = part + r * stride;
        std::memset(sums, 0, size_t(stride) * 4);
        all_from = from[r] > all_from ? from[r] : all_from;
        all_to = to[r] < all_to ? to[r] : all_to;
        if (from[r] >= to[r]) continue;
        low = from[r] < low ? from[r] : low;
        high = to[r] > high ? to[r] : high;
    }
    if (low >= high) return;
    const KvType type_k = g.stage_keys ? KvType::f32 : s.type_k, type_v = g.stage_values ? KvType::f32 : s.type_v;
    const ValueBlock* fetched = g.fetched ? g.values : nullptr;
    scores_of[int(type_k)][n - 1](q, s.dk, g.keys, fetched, low / BLOCK, (high + BLOCK - 1) / BLOCK, scores);
    for (int r = 0; r < n; r++) {
        if (from[r] >= to[r]) continue;
        float* sums = part + r * stride;
        softmax(scores + r * SEGMENT, from[r], to[r], seen[r], s.softcap, sums + s.dv_padded, sums + s.dv_padded + 1);
    }
    const Weigh* weighs = weighs_of[int(type_v)];
    const bool together = all_from < all_to;
    for (int r = 0; r < n; r++) {
        const int stop = together ? all_from : to[r];
        if (from[r] < stop)
            weighs[0](scores + r * SEGMENT, g.values, s.dv_padded, from[r], stop, part + r * stride, stride);
    }
    if (!together) return;
    weighs[n - 1](scores, g.values, s.dv_padded, all_from, all_to, part, stride);
    for (int r = 0; r < n; r++)
        if (all_to < to[r])
            weighs[0](scores + r * SEGMENT, g.values, s.dv_padded, all_to, to[r], part + r * stride, stride);
}

void attend_segment(const AttendJob& job, const Tile& tile, Segment& g, const Scratch& c, float* part) {
    const AttentionShape& s = *job.shape;
    const int rows = tile.rows * s.group;
    const int steps = (rows + ROWS - 1) / ROWS, step = (rows + steps - 1) / steps;
    for (int r = 0; r < rows; r += step) {
        const int n = rows - r < step ? rows - r : step;
        int from[ROWS], to[ROWS];
        const uint16_t* seen[ROWS];
        for (int i = 0; i < n; i++) {
            const int token = (r + i) / s.group;
            const int begin = job.pages->begin[tile.row + token] - g.base;
            const int end = job.pages->end[tile.row + token] - g.base;
            from[i] = begin > 0 ? begin : 0;
            to[i] = end < SEGMENT ? end : SEGMENT;
            seen[i] = job.pages->slot_positions ? g.seen[token] : nullptr;
        }
        attend_rows(s, g, n, c.q + int64_t(r) * s.dk, c.s, from, to, seen, part + r * state_stride(s));
        if (!g.fetched) continue;
        g.fetched = false;  // once is enough
        for (ValueBlock& values : g.values) values.next = nullptr;
    }
}

// ---- folding segments ----

void fold(const AttentionShape& s, float* state, const float* part) {
    const int n = s.dv_padded;
    if (part[n + 1] == 0.0f) return;
    if (state[n + 1] == 0.0f) {
        std::memcpy(state, part, size_t(n + 2) * 4);
        return;
    }
    const bool keep = state[n] > part[n];
    const float other = exp_one(keep ? part[n] - state[n] : state[n] - part[n]);  // e^0 is exactly 1
    const float m = keep ? state[n] : part[n], a = keep ? 1.0f : other, b = keep ? other : 1.0f;
    for (int d = 0; d < n; d += LANES)
        store(state + d, fma(load(part + d), set1(b), mul(load(state + d), set1(a))));
    state[n] = m;
    state[n + 1] = state[n + 1] * a + part[n + 1] * b;
}

void finish(const AttendJob& job, const Tile& tile, int head, const float* state) {
    const AttentionShape& s = *job.shape;
    for (int r = 0; r < tile.rows * s.group; r++, state += state_stride(s)) {
        float* out = job.out + ((tile.row + r / s.group) * int64_t(s.n_heads) + head * s.group + r % s.group) * s.dv;
        const float total = state[s.dv_padded + 1];
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        for (int d = 0; d < s.dv; d++) out[d] = state[d] * inverse + 0.0f;  // never -0
    }
}

inline void clear(const AttentionShape& s, int rows, float* state) {
    std::memset(state, 0, size_t(rows * state_stride(s)) * 4);
}

// Where a tile's rows are summed up, if not in a thread's own memory.
inline float* sums_of(const AttendJob& job, const Tile& tile, int head) {
    if (tile.sums < 0) return nullptr;
    return job.sums + (head * job.n_sums + tile.sums) * job.shape->group * state_stride(*job.shape);
}

// Whether others have summed up what lies before a tile.
inline bool goes_on(const Tile& tile) { return tile.sums >= 0 && !tile.shared; }

void attend(const AttendJob& job, const Tile& tile, int head, int from, int to, float* partial, float* memory) {
    const AttentionShape& s = *job.shape;
    const int rows = tile.rows * s.group;
    const Scratch c = carve(s, tile.rows, memory);
    for (int r = 0; r < rows; r++) {
        const float* q = job.q + (tile.row + r / s.group) * job.q_stride + (head * s.group + r % s.group) * s.dk;
        for (int d = 0; d < s.dk; d++) c.q[int64_t(r) * s.dk + d] = q[d] * s.scale;
    }
    float* sums = sums_of(job, tile, head);
    float* state = sums ? sums : c.state;
    if (!partial && !goes_on(tile)) clear(s, rows, state);
    Segment g;
    for (int i = from; i < to; i++) {
        open_segment(job, tile, head, tile.first_segment + i, c, g);
        float* part = partial ? partial + i * rows * state_stride(s) : c.part;
        attend_segment(job, tile, g, c, part);
        if (partial) continue;
        for (int r = 0; r < rows; r++) fold(s, state + r * state_stride(s), part + r * state_stride(s));
    }
    if (!partial && !tile.shared) finish(job, tile, head, state);
}

void join(const AttendJob& job, const Tile& tile, int head, float* partial) {
    const AttentionShape& s = *job.shape;
    const int64_t rows = tile.rows * s.group, stride = state_stride(s);
    float* state = goes_on(tile) ? sums_of(job, tile, head) : partial;
    for (int i = goes_on(tile) ? 0 : 1; i < tile.segments; i++)
        for (int64_t r = 0; r < rows; r++) fold(s, state + r * stride, partial + (i * rows + r) * stride);
    finish(job, tile, head, state);
}

}  // namespace

extern const AttentionKernels attention_kernels = {prepare, scratch, attend, join, rotate_part};

}  // namespace quire::QUIRE_ISA
