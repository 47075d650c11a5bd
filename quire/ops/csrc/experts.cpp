// Tokens are sorted by expert, so that each expert's tokens are the rows of one product, and all
// those products are one job for the threads:
//
//     pairs (token, expert), by expert, then token:  | expert 0: t0 t3 | expert 2: t1 | expert 5: t0 …
//
// A row of a product is the same whatever its neighbours (see matmul.h), and a token adds its
// experts' rows in the order of their ranks, so a token never notices the sorting.
#include "experts.h"

#include <algorithm>
#include <cmath>

#include "panels.h"
#include "pieces.h"

namespace quire {
namespace {

// The pairs of a batch. Pairs [first[e], first[e + 1]) belong to expert e.
struct Pairs {
    std::vector<int64_t> first;
    std::vector<int32_t> expert;  // of a token's k-th choice, at token · used + k
    std::vector<float> weight;    // likewise
    std::vector<int64_t> place;   // likewise: which pair it is
    std::vector<int64_t> choice;  // of a pair: token · used + k
    std::vector<int64_t> token;   // of a pair
    int64_t count() const { return int64_t(token.size()); }

    // Once experts are known: the places of pairs, sorted by expert.
    void sort(int64_t experts, int64_t used) {
        first.assign(size_t(experts + 1), 0);
        for (int32_t e : expert) first[size_t(e + 1)]++;
        for (int64_t e = 0; e < experts; e++) first[size_t(e + 1)] += first[size_t(e)];
        std::vector<int64_t> next(first.begin(), first.end() - 1);
        place.resize(expert.size());
        choice.resize(expert.size());
        token.resize(expert.size());
        for (size_t i = 0; i < expert.size(); i++) {
            place[i] = next[size_t(expert[i])]++;
            choice[size_t(place[i])] = int64_t(i);
            token[size_t(place[i])] = int64_t(i) / used;
        }
    }
};

void choose(const float* logits, int64_t n, const Routing& routing, uint8_t* taken, int32_t* ids, float* weights) {
    std::fill(taken, taken + n, 0);
    for (int64_t k = 0; k < routing.used; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
        taken[best] = 1;
        ids[k] = int32_t(best);
    }
    const float top = logits[ids[0]];
    float all = 0, chosen = 0;  // a NaN among the logits reaches every weight
    for (int64_t e = 0; e < n; e++) all += std::exp(logits[e] - top);
    for (int64_t k = 0; k < routing.used; k++) chosen += weights[k] = std::exp(logits[ids[k]] - top) / all;
    const float factor = routing.normalize ? routing.scale / chosen : routing.scale;
    for (int64_t k = 0; k < routing.used; k++) weights[k] *= factor;
}

Pairs route(Cpu& cpu, const Array& logits, const Routing& routing) {
    const int64_t n = logits.rows, count = logits.cols, used = routing.used;
    Pairs pairs;
    pairs.expert.resize(size_t(n * used));
    pairs.weight.resize(size_t(n * used));
    std::vector<uint8_t> taken(size_t(cpu.pool.size() * count));
    cpu.pool.parallel(n, 16, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t t = begin; t < end; t++)
            choose(logits.row(t), count, routing, &taken[size_t(thread * count)], &pairs.expert[size_t(t * used)],
                   &pairs.weight[size_t(t * used)]);
    });
    pairs.sort(count, used);
    return pairs;
}

// Row blocks of one part × a strip of one expert's tokens.
struct Segment {
    Product product;
    bool unpacks;  // quantised tiles, float32 activations
    int64_t blocks, token, token_end;
    int64_t cost;   // of a block, about; reading it counts as a few tokens
    int64_t begin;  // costs of all segments before
};

std::vector<Segment> segments_of(Cpu& cpu, const Matrix& w, const Pairs& pairs, const Panels& panels, Array& out) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    const int64_t experts = int64_t(pairs.first.size()) - 1, step = kernels.token_step;
    const int64_t bytes = std::max(panels.quantized_bytes, panels.float_bytes);
    const int64_t strip = std::max(step, PANEL_BYTES / bytes / step * step);
    std::vector<Segment> segments;
    int64_t cost = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t first = pairs.first[size_t(e)], n = pairs.first[size_t(e + 1)] - first;
        for (int64_t token = 0; token < n; token += strip) {
            int64_t row = 0;  // of the expert
            for (size_t p = size_t(e); p < w.parts.size(); p += size_t(experts)) {
                const Part& part = w.parts[p];
                const bool dense = is_dense(part.tile), floats = dense || cpu.exact;
                const int64_t token_bytes = floats ? panels.float_bytes : panels.quantized_bytes;
                const uint8_t* panel = (floats ? panels.floats : panels.quantized) + first * token_bytes;
                const Product product{part, panel, token_bytes, nullptr, out.row(first) + row, out.cols, false};
                const int64_t end = std::min(n, token + strip), blocks = blocks_of(part, kernels.lanes);
                segments.push_back({product, floats && !dense, blocks, token, end, 3 + end - token, cost});
                cost += blocks * (3 + end - token);
                row += part.rows;
            }
        }
    }
    return segments;
}

void multiply(Cpu& cpu, const std::vector<Segment>& segments, const Panels& panels) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    const Segment& last = segments.back();
    const int64_t cost = last.begin + last.blocks * last.cost;
    int64_t blocks = 0, tokens = 0;
    for (const Segment& s : segments) blocks += s.blocks, tokens += s.token_end - s.token;
    const bool reading = tokens < kernels.token_step * int64_t(segments.size());
    const int64_t least = reading ? std::max<int64_t>(1, CHUNK_BYTES / last.product.part.stride) : 3;  // blocks
    in_pieces(cpu.pool, cost, least * cost / blocks, [&](int64_t begin, int64_t end, int thread) {
        for (const Segment& s : segments) {  // blocks that begin in the piece
            if (end <= s.begin) break;
            const int64_t from = std::max<int64_t>(0, (begin - s.begin + s.cost - 1) / s.cost);
            const int64_t to = std::min(s.blocks, (end - s.begin + s.cost - 1) / s.cost);
            if (from >= to) continue;
            if (s.unpacks)
                kernels.multiply_exact(s.product, from, to, s.token, s.token_end, panels.rooms + thread * panels.room);
            else kernels.multiply(s.product, from, to, s.token, s.token_end);
        }
    });
}

// Each pair's row times its expert's matrix. `row_of(pair, room)` gives the row; room is for making it.
template <class RowOf>
void multiply_pairs(Cpu& cpu, const Matrix& w, const Pairs& pairs, RowOf&& row_of, Array& out) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    const Panels panels = take_panels(cpu, w, pairs.count(), 1, cpu.exact);  // one for each expert, in a row
    auto fill = [&](int64_t begin, int64_t end, int thread) {
        auto next = std::upper_bound(pairs.first.begin(), pairs.first.end(), begin);
        for (int64_t pair = begin; pair < end; pair++) {
            while (*next <= pair) ++next;
            const int64_t first = *(next - 1), n = *next - first;
            const float* row = row_of(pair, panels.rooms + thread * panels.room);
            if (panels.quantized_bytes)
                kernels.put_quantized(row, w.cols, panels.quantized + first * panels.quantized_bytes, pair - first, n);
            if (panels.float_bytes)
                kernels.put_float(row, w.cols, panels.floats + first * panels.float_bytes, pair - first, n);
        }
    };
    const int64_t count = pairs.count();
    if (count * w.cols < SERIAL) fill(0, count, 0);
    else cpu.pool.parallel(count, tokens_at_once(cpu, count), fill);
    multiply(cpu, segments_of(cpu, w, pairs, panels, out), panels);
}

// out += Σ weight · row over a token's pairs, in the order of their ranks.
void add_rows(const Pairs& pairs, int64_t token, int64_t used, const Array& rows, float* out) {
    constexpr int64_t COLUMNS = 256;
    float sum[COLUMNS];
    for (int64_t at = 0; at < rows.cols; at += COLUMNS) {
        const int64_t n = std::min(COLUMNS, rows.cols - at);
        std::fill(sum, sum + n, 0.0f);
        for (int64_t i = token * used; i < (token + 1) * used; i++) {
            const float* row = rows.row(pairs.place[size_t(i)]) + at;
            const float weight = pairs.weight[size_t(i)];
            for (int64_t c = 0; c < n; c++) sum[c] += weight * row[c];
        }
        for (int64_t c = 0; c < n; c++) out[at + c] += sum[c];
    }
}

// Who is chosen for each row of x, and what the experts' first matrix makes of it, pair by pair.
Pairs enter(Cpu& cpu, const Array& x, const Entrance& w, const Routing& routing, Array& gate_up) {
    Array h = cpu.array(x.rows, x.cols), logits = cpu.array(x.rows, w.count());
    rms_norm(cpu, x, w.norm, w.eps, h);
    Linear exact;  // a choice that flips is a large error
    exact.exact = true;
    linear(cpu, h, w.router, exact, logits);
    Pairs pairs = route(cpu, logits, routing);
    multiply_pairs(cpu, w.gate_up, pairs, [&](int64_t pair, float*) { return h.row(pairs.token[size_t(pair)]); },
                   gate_up);
    return pairs;
}

// out += what the experts' last matrix makes of the pairs' rows, weighed.
template <class RowOf>
void leave(Cpu& cpu, const Matrix& down, const Pairs& pairs, int64_t used, RowOf&& row_of, Array& out) {
    Array rows = cpu.array(pairs.count(), out.cols);
    multiply_pairs(cpu, down, pairs, row_of, rows);
    const int64_t n = out.rows;
    cpu.pool.parallel(n, std::max<int64_t>(1, n / (8 * cpu.pool.size())), [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; t++) add_rows(pairs, t, used, rows, out.row(t));
    });
}

}  // namespace

void experts(Cpu& cpu, const Array& x, const Entrance& w, const Matrix& down, const Routing& routing, Array& out) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    const int64_t ffn = down.cols;
    if (x.rows == 0) return;
    Array gate_up = cpu.array(x.rows * routing.used, 2 * ffn);
    const Pairs pairs = enter(cpu, x, w, routing, gate_up);
    leave(cpu, down, pairs, routing.used,
          [&](int64_t pair, float* room) {
              kernels.act_mul(gate_up.row(pair), Act::silu_mul, ffn, room);
              return room;
          },
          out);
}

void experts_in(Cpu& cpu, const Array& x, const Entrance& w, const Routing& routing, Array& chosen, Array& middle) {
    const MatmulKernels& kernels = matmul_kernels(cpu.isa);
    if (x.rows == 0) return;
    Array gate_up = cpu.array(middle.rows, 2 * middle.cols);
    const Pairs pairs = enter(cpu, x, w, routing, gate_up);
    for (int64_t t = 0; t < x.rows; t++)
        for (int64_t k = 0; k < routing.used; k++) {
            chosen.row(t)[k] = float(pairs.expert[size_t(t * routing.used + k)]);
            chosen.row(t)[routing.used + k] = pairs.weight[size_t(t * routing.used + k)];
        }
    cpu.pool.parallel(middle.rows, std::max<int64_t>(1, middle.rows / (8 * cpu.pool.size())),
                      [&](int64_t begin, int64_t end, int) {
                          for (int64_t i = begin; i < end; i++)
                              kernels.act_mul(gate_up.row(pairs.place[size_t(i)]), Act::silu_mul, middle.cols,
                                              middle.row(i));
                      });
}

void experts_out(Cpu& cpu, const Array& middle, const Array& chosen, int64_t count, const Matrix& down, Array& out) {
    const int64_t used = chosen.cols / 2;
    if (out.rows == 0) return;
    Pairs pairs;
    for (int64_t t = 0; t < chosen.rows; t++)
        for (int64_t k = 0; k < used; k++) {
            pairs.expert.push_back(int32_t(chosen.row(t)[k]));
            pairs.weight.push_back(chosen.row(t)[used + k]);
        }
    pairs.sort(count, used);
    leave(cpu, down, pairs, used, [&](int64_t pair, float*) { return middle.row(pairs.choice[size_t(pair)]); }, out);
}

void add_gated(Cpu& cpu, const Array& y, const Array& gate, Array& out) {
    cpu.pool.parallel(y.rows, 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; t++) {
            const float weight = 1.0f / (1.0f + std::exp(-gate.data[t]));
            for (int64_t c = 0; c < y.cols; c++) out.row(t)[c] += weight * y.row(t)[c];
        }
    });
}

}  // namespace quire
