// Recurrent layers for one instruction set: gates and convolution, the recurrence, gated norms.
#include "recurrent.h"

#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int BLOCK_VECTORS = STATE_LANES / LANES;
constexpr int SLICE = LANES == 16 ? 2 : 1;  // blocks of a scan: four chains of sums per vector hide their latency

// The first n lanes; the others are zeros and are not touched in memory.
inline vf load_some(const float* p, int64_t n) {
    if (n >= LANES) return load(p);
    float t[LANES] = {};
    for (int64_t i = 0; i < n; i++) t[i] = p[i];
    return load(t);
}

inline void store_some(float* p, vf a, int64_t n) {
    if (n >= LANES) return store(p, a);
    float t[LANES];
    store(t, a);
    for (int64_t i = 0; i < n; i++) p[i] = t[i];
}

inline vf sigmoid(vf x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

inline vf silu(vf x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// log(1 + e^x) = max(x, 0) + log(1 + z) with z = e^-|x|, and log(1 + z) = 2 atanh(z / (2 + z)): the
// series of atanh is short, as its argument is at most 1/3.
inline vf softplus(vf x) {
    const vf z = exp(min(x, sub(zero(), x)));
    const vf s = div(z, add(set1(2.0f), z)), s2 = mul(s, s);
    vf p = set1(1.0f / 15);
    p = fma(p, s2, set1(1.0f / 13));
    p = fma(p, s2, set1(1.0f / 11));
    p = fma(p, s2, set1(1.0f / 9));
    p = fma(p, s2, set1(1.0f / 7));
    p = fma(p, s2, set1(1.0f / 5));
    p = fma(p, s2, set1(1.0f / 3));
    p = fma(p, s2, set1(1.0f));
    return add(max(x, zero()), mul(add(s, s), p));
}

inline float dot(const float* a, const float* b, int64_t n) {
    vf sum = zero();
    for (int64_t i = 0; i < n; i += LANES) sum = fma(load_some(a + i, n - i), load_some(b + i, n - i), sum);
    return reduce_add(sum);
}

inline void scale(float* x, int64_t n, float by) {
    for (int64_t i = 0; i < n; i += LANES) store_some(x + i, mul(load_some(x + i, n - i), set1(by)), n - i);
}

// ---- preparation ----

// Channels [c, c + LANES) of the convolution that ends at rows[0].
inline vf convolve(const RecurrentShape& s, const float* const* rows, int64_t c) {
    const int64_t n = s.channels - c;
    vf sum = s.bias ? load_some(s.bias + c, n) : zero();
    for (int j = 0; j < s.width; j++)
        sum = fma(load_some(s.weight + j * s.channels + c, n), load_some(rows[j + 1 - s.width] + c, n), sum);
    return sum;
}

inline void convolve_silu(const RecurrentShape& s, const float* const* rows, int64_t from, int64_t n, float* out) {
    for (int64_t c = 0; c < n; c += LANES) store_some(out + from + c, silu(convolve(s, rows, from + c)), n - c);
}

void prepare_keys(const RecurrentJob& job, int64_t t, int head, float* out) {
    const RecurrentShape& s = *job.shape;
    const bool delta = s.kind == RecurrentKind::delta, wanted = t >= job.first_new;
    float *k = out + s.k_at + int64_t(head) * s.dk, *q = out + s.q_at + int64_t(head) * s.dk;
    convolve_silu(s, job.rows + t, k - out, s.dk, out);
    if (delta) scale(k, s.dk, 1.0f / __builtin_sqrtf(dot(k, k, s.dk) + 1e-6f));
    if (!wanted) return;
    convolve_silu(s, job.rows + t, q - out, s.dk, out);
    if (delta) scale(q, s.dk, 1.0f / (__builtin_sqrtf(dot(q, q, s.dk) + 1e-6f) * __builtin_sqrtf(float(s.dk))));
    out[s.channels + 2 * s.n_v + head] = dot(k, q, s.dk);
}

void prepare_gates(const RecurrentShape& s, const float* row, float* out) {
    float *alpha = out + s.channels, *beta = alpha + s.n_v;
    for (int64_t h = 0; h < s.n_v; h += LANES) {
        const int64_t n = s.n_v - h;
        const vf raw = load_some(row + s.beta_at + h, n), bias = load_some(s.dt_bias + h, n);
        vf step = softplus(add(load_some(row + s.alpha_at + h, n), bias));
        if (s.kind == RecurrentKind::ssd) step = min(max(step, set1(s.low)), set1(s.high));
        store_some(alpha + h, exp(mul(load_some(s.a + h, n), step)), n);
        store_some(beta + h, s.kind == RecurrentKind::delta ? sigmoid(raw) : step, n);
    }
}

// Channels [from, from + n) of the last raw inputs; behind the last channel zeros, so that equal states are equal bytes.
void save_tail(const RecurrentJob& job, int64_t from, int64_t n) {
    const RecurrentShape& s = *job.shape;
    if (!job.tail_out) return;
    for (int64_t j = 0; j < s.width - 1; j++)
        std::memcpy(job.tail_out + j * s.channels + from, job.rows[job.tokens - s.width + 1 + j] + from, size_t(n) * 4);
    const int64_t used = (s.width - 1) * s.channels;
    if (from + n == s.channels) std::memset(job.tail_out + used, 0, size_t(s.tail_bytes() - used * 4));
}

// New entries are put where the outputs go: the last output is computed first, and none needs a later entry.
void prepare_convolution(const RecurrentJob& job, int64_t block) {
    const RecurrentShape& s = *job.shape;
    const int64_t from = block * CONV_BLOCK, n = s.channels - from < CONV_BLOCK ? s.channels - from : CONV_BLOCK;
    for (int64_t i = 0; i < job.tokens - job.first_new; i++) {
        const float* x = job.x + i * s.in_cols + from;
        float* entry = job.out + i * s.out_cols + from;
        for (int64_t c = 0; c < n; c += LANES)
            store_some(entry + c, mul(load_some(x + c, n - c), load_some(x + 2 * s.channels + c, n - c)), n - c);
        if (job.log) std::memcpy(job.log + i * job.log_stride + from * 4, entry, size_t(n) * 4);
    }
    save_tail(job, from, n);
    for (int64_t i = job.tokens - job.first_new - 1; i >= 0; i--) {
        const float* gate = job.x + i * s.in_cols + s.channels + from;
        float* out = job.out + i * s.out_cols + from;
        for (int64_t c = 0; c < n; c += LANES) {
            const vf sum = convolve(s, job.rows + job.first_new + i, from + c);
            store_some(out + c, mul(load_some(gate + c, n - c), sum), n - c);
        }
    }
}

void prepare(const RecurrentJob& job, int64_t begin, int64_t end) {
    const RecurrentShape& s = *job.shape;
    for (int64_t i = begin; i < end; i++) {
        if (s.kind == RecurrentKind::conv) {
            prepare_convolution(job, i);
            continue;
        }
        const int64_t t = i % job.tokens, unit = i / job.tokens;
        float* out = job.prepared + t * s.prepared_cols;
        if (unit < s.n_k) {
            prepare_keys(job, t, int(unit), out);
        } else if (unit < s.n_k + s.n_v) {
            convolve_silu(s, job.rows + t, s.v_at + (unit - s.n_k) * s.dv, s.dv, out);
        } else {
            prepare_gates(s, job.rows[t], out);
            if (t >= job.first_new && job.log)
                std::memcpy(job.log + (t - job.first_new) * job.log_stride, job.rows[t], size_t(s.entry) * 4);
            if (t == job.tokens - 1) save_tail(job, 0, s.channels);
        }
    }
}

// ---- the recurrence ----

// What one token does to the state before the next one looks at it.
template <int V>
struct Change {
    const float* k;
    vf alpha, u[V];
};

// Sums over the rows of a state, for even and odd rows.
template <int V>
struct Sums {
    vf even[V], odd[V];

    void clear() {
        for (int v = 0; v < V; v++) even[v] = odd[v] = zero();
    }
    vf total(int v) const { return add(even[v], odd[v]); }
};

enum class Walk { look, change, change_unseen };  // unseen: nobody reads the state after this token

// One walk over the state: the last token's change to each row, and the sums of this token over what it became.
// So each token costs one walk, and the last of an append, or the only one, writes nothing.
template <int V, Walk walk, bool by_k, bool by_q>
inline void walk_rows(const float* from, float* to, int dk, const Change<V>& last, const float* k, const float* q,
                      Sums<V>& sk, Sums<V>& sq) {
    const int64_t block = int64_t(dk) * STATE_LANES;
    auto row = [&](int i, vf(&k_sum)[V], vf(&q_sum)[V]) {
        auto at = [&](int v) { return v / BLOCK_VECTORS * block + i * STATE_LANES + v % BLOCK_VECTORS * LANES; };
        // All loads before a store: blocks lie at equal offsets in their memory pages, and a load right behind such a
        // store may be held up until the store is done.
        vf a[V];
        for (int v = 0; v < V; v++) a[v] = load(from + at(v));
        for (int v = 0; v < V; v++) {
            if constexpr (walk != Walk::look) a[v] = fma(set1(last.k[i]), last.u[v], mul(last.alpha, a[v]));
            if constexpr (walk == Walk::change) store(to + at(v), a[v]);
            if constexpr (by_k) k_sum[v] = fma(set1(k[i]), a[v], k_sum[v]);
            if constexpr (by_q) q_sum[v] = fma(set1(q[i]), a[v], q_sum[v]);
        }
    };
    int i = 0;
    for (; i + 2 <= dk; i += 2) {
        row(i, sk.even, sq.even);
        row(i + 1, sk.odd, sq.odd);
    }
    if (i < dk) row(i, sk.even, sq.even);
}

template <int V, bool delta>
void scan_lanes(const RecurrentJob& job, int head, int64_t block, float* scratch) {
    const RecurrentShape& s = *job.shape;
    const int64_t at = head * s.head_floats() + block * s.dk * STATE_LANES, size = int64_t(V) * LANES * s.dk;
    const float* from = job.state ? job.state + at : scratch;
    if (!job.state) std::memset(scratch, 0, size_t(size) * 4);
    const int64_t lane = block * STATE_LANES, column = int64_t(head) * s.dv + lane;
    const int64_t key = int64_t(s.key_head(head)) * s.dk;
    Change<V> last{};
    Sums<V> sk, sq;
    for (int64_t t = 0; t < job.tokens; t++) {
        const float* row = job.prepared + t * s.prepared_cols;
        const float *k = row + s.k_at + key, *q = row + s.q_at + key, *gates = row + s.channels;
        const bool wanted = t >= job.first_new, unseen = t == job.tokens - 1 && !job.state_out;
        sk.clear();
        sq.clear();
        auto go = [&]<Walk walk>() {
            if (wanted) walk_rows<V, walk, delta, true>(from, scratch, s.dk, last, k, q, sk, sq);
            else walk_rows<V, walk, delta, false>(from, scratch, s.dk, last, k, q, sk, sq);
        };
        if (t == 0) {
            if (delta || wanted) go.template operator()<Walk::look>();
        } else if (unseen) {
            go.template operator()<Walk::change_unseen>();
        } else {
            go.template operator()<Walk::change>();
            from = scratch;
        }
        const vf alpha = set1(gates[head]), beta = set1(gates[s.n_v + head]);
        for (int v = 0; v < V; v++) {
            const int64_t n = s.dv - lane - v * LANES;
            const vf x = n > 0 ? load_some(row + s.v_at + column + v * LANES, n) : zero();
            const vf u = mul(beta, delta ? sub(x, mul(alpha, sk.total(v))) : x);
            last.u[v] = u;
            if (!wanted || n <= 0) continue;
            vf y = fma(set1(gates[2 * s.n_v + s.key_head(head)]), u, mul(alpha, sq.total(v)));
            if (s.d) y = fma(set1(s.d[head]), x, y);
            store_some(job.out + (t - job.first_new) * s.out_cols + column + v * LANES, y, n);
        }
        last.k = k;
        last.alpha = alpha;
    }
    if (job.state_out)
        walk_rows<V, Walk::change, false, false>(from, job.state_out + at, s.dk, last, nullptr, nullptr, sk, sq);
}

template <bool delta>
void scan_blocks(const RecurrentJob& job, int head, int64_t block, float* scratch) {
    if (block + SLICE <= job.shape->blocks()) {
        scan_lanes<SLICE * BLOCK_VECTORS, delta>(job, head, block, scratch);
        return;
    }
    for (; block < job.shape->blocks(); block++) scan_lanes<BLOCK_VECTORS, delta>(job, head, block, scratch);
}

void scan(const RecurrentJob& job, int head, int64_t block, float* scratch) {
    if (job.shape->kind == RecurrentKind::delta) scan_blocks<true>(job, head, block, scratch);
    else scan_blocks<false>(job, head, block, scratch);
}

// ---- gates and norms around a layer ----

void gated_norm(const float* x, const float* gate, const float* weight, float* out, int64_t cols, int64_t group,
                int64_t weights, float eps, bool gate_first) {
    for (int64_t g = 0; g < cols; g += group) {
        const float *w = weight + g % weights, *values = x + g;
        if (gate_first) {
            for (int64_t i = 0; i < group; i += LANES) {
                const vf y = mul(load_some(x + g + i, group - i), silu(load_some(gate + g + i, group - i)));
                store_some(out + g + i, y, group - i);
            }
            values = out + g;
        }
        const float by = 1.0f / __builtin_sqrtf(dot(values, values, group) / float(group) + eps);
        for (int64_t i = 0; i < group; i += LANES) {
            const int64_t n = group - i;
            vf y = mul(mul(load_some(values + i, n), set1(by)), load_some(w + i, n));
            if (!gate_first) y = mul(y, silu(load_some(gate + g + i, n)));
            store_some(out + g + i, y, n);
        }
    }
}

void gate_sigmoid(float* x, const float* gate, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        store_some(x + i, mul(load_some(x + i, n - i), sigmoid(load_some(gate + i, n - i))), n - i);
}

}  // namespace

extern const RecurrentKernels recurrent_kernels = {SLICE, prepare, scan, gated_norm, gate_sigmoid};

}  // namespace quire::QUIRE_ISA
