// One group's pages in one step as Python describes them, and the plan of who computes what.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "attention.h"
#include "check.h"
#include "numpy.h"

namespace quire {

// Part of a tile for one kv head: what a thread takes at a time.
struct Item {
    int32_t tile, head, from, to;
    int32_t join;  // index of its join when the tile is split by segments, else -1
};

// The same for every layer with this grouping and window, so it is made once per step.
struct Plan {
    struct Join {
        int64_t rows_before;  // rows of partial results before this one's
        int32_t parts;
    };

    int group, n_kv_heads, window, threads;
    std::vector<int32_t> begin, end;  // the slots each token sees
    std::vector<Tile> tiles;
    std::vector<Item> items;
    std::vector<Join> joins;
    std::unique_ptr<std::atomic<int32_t>[]> left;  // parts of each join still to come
    int64_t partial_rows = 0;
    int64_t scores = 0;  // to compute, over all heads
    int most_rows = 1;   // tokens of the largest tile
};

class Pages {
  public:
    Pages(int64_t base, int64_t page_bytes, int page_tokens, IntRows tables, Ints first, Ints length, Ints slots,
          Ints positions, Ints seq_rows, std::optional<IntRows> slot_positions)
        : tables_(tables), first_(first), length_(length), slots_(slots), positions_(positions), seq_rows_(seq_rows),
          slot_positions_(slot_positions), n_seqs_(int64_t(tables.shape(0))) {
        n_tokens = int64_t(slots.shape(0));
        view = {};
        view.base = reinterpret_cast<char*>(base);
        view.page_bytes = page_bytes;
        view.page_tokens = page_tokens;
        view.tables = tables.data();
        view.max_pages = int64_t(tables.shape(1));
        view.slots = slots.data();
        view.positions = positions.data();
        if (slot_positions) {
            view.slot_positions = slot_positions->data();
            view.max_slots = int64_t(slot_positions->shape(1));
        }
        check();
        for (int64_t s = 0; s < n_seqs_; s++) {
            phase_.push_back(first.data()[s] % SEGMENT / BLOCK * BLOCK);
            ordered_.push_back(ordered(s));
        }
        view.phase = phase_.data();
    }
    Pages(const Pages&) = delete;

    Plan& plan(const AttentionShape& shape, int threads) {
        for (auto& p : plans_)
            if (p->group == shape.group && p->n_kv_heads == shape.n_kv_heads && p->window == shape.window &&
                p->threads == threads)
                return *p;
        plans_.push_back(make_plan(shape, threads));
        return *plans_.back();
    }

    PageView view;
    int64_t n_tokens;

  private:
    void check() const {
        need(view.page_tokens > 0 && view.page_tokens % BLOCK == 0, "Pages: page_tokens is ", view.page_tokens,
             ", it must be a multiple of 16");
        need(int64_t(first_.shape(0)) == n_seqs_ && int64_t(length_.shape(0)) == n_seqs_,
             "Pages: first and length need one entry per sequence");
        need(int64_t(positions_.shape(0)) == n_tokens && int64_t(seq_rows_.shape(0)) == n_tokens,
             "Pages: positions and seq_rows need one entry per slot");
        need(!slot_positions_ || int64_t(slot_positions_->shape(0)) == n_seqs_,
             "Pages: slot_positions needs one row per sequence");
        for (int64_t s = 0; s < n_seqs_; s++) check_sequence(s);
        for (int64_t i = 0; i < n_tokens; i++) check_token(i);
    }

    void check_sequence(int64_t s) const {
        const int64_t length = length_.data()[s], room = view.max_pages * view.page_tokens;
        need(length >= 0 && length <= room, "Pages: sequence ", s, " has ", length, " slots, its table holds ", room);
        need(!view.slot_positions || length <= view.max_slots, "Pages: sequence ", s, " has ", length,
             " slots, slot_positions has ", view.max_slots);
        need(first_.data()[s] >= 0, "Pages: sequence ", s, " starts before position 0");
        if (view.slot_positions) return;  // pages of holes are never read
        for (int64_t p = 0; p * view.page_tokens < length; p++)
            need(view.tables[s * view.max_pages + p] >= 0, "Pages: sequence ", s, " has no page ", p);
    }

    void check_token(int64_t i) const {
        const int64_t s = seq_rows_.data()[i], slot = slots_.data()[i];
        need(s >= 0 && s < n_seqs_ && slot >= 0, "Pages: token ", i, " has no sequence or slot");
        need(i == 0 || seq_rows_.data()[i - 1] != s || positions_.data()[i - 1] < positions_.data()[i],
             "Pages: token ", i, " does not come after the one before it");
        if (view.slot_positions) return;
        const int64_t at = int64_t(positions_.data()[i]) - first_.data()[s], tokens = view.page_tokens;
        need(at >= 0 && at < length_.data()[s], "Pages: token ", i, " lies outside its sequence");
        need(slot == view.tables[s * view.max_pages + at / tokens] * tokens + at % tokens, "Pages: token ", i,
             " has slot ", slot, ", not the one of its position");
    }

    // Whether the slots that are no holes have rising positions: then what a token sees is one range.
    bool ordered(int64_t s) const {
        if (!view.slot_positions) return true;
        const int32_t* p = view.slot_positions + s * view.max_slots;
        int32_t last = -1;
        for (int64_t i = 0; i < length_.data()[s]; i++) {
            if (p[i] < 0) continue;
            if (p[i] < last) return false;
            last = p[i];
        }
        return true;
    }

    // The range of slots that token i sees; [0, 0) for none.
    void see(Plan& plan, int64_t i) const {
        const int64_t s = seq_rows_.data()[i];
        const int32_t position = positions_.data()[i], first = first_.data()[s];
        const int32_t after = plan.window > 0 && position >= plan.window ? position - plan.window : -1;
        int32_t begin = 0, end = length_.data()[s];
        if (view.slot_positions) {
            const int32_t* p = view.slot_positions + s * view.max_slots;
            while (end > 0 && !(p[end - 1] > after && p[end - 1] <= position)) end--;
            while (begin < end && !(p[begin] > after && p[begin] <= position)) begin++;
        } else {
            begin = std::max(after + 1 - first, 0);
            end = std::min(position + 1 - first, end);
        }
        plan.begin[size_t(i)] = begin < end ? begin : 0;
        plan.end[size_t(i)] = begin < end ? end : 0;
    }

    void add_tile(Plan& plan, int64_t row, int64_t rows) const {
        const int64_t s = seq_rows_.data()[row];
        Tile tile{int32_t(s), int32_t(row), int32_t(rows), INT32_MAX, 0, 0, 0};
        for (int64_t i = row; i < row + rows; i++) {
            see(plan, i);
            if (plan.end[size_t(i)] == 0) continue;
            tile.begin = std::min(tile.begin, plan.begin[size_t(i)]);
            tile.end = std::max(tile.end, plan.end[size_t(i)]);
        }
        if (tile.end > 0) {
            tile.first_segment = (tile.begin + phase_[size_t(s)]) / SEGMENT;
            tile.segments = (tile.end + phase_[size_t(s)] - 1) / SEGMENT + 1 - tile.first_segment;
            plan.scores += int64_t(tile.end - tile.begin) * rows * plan.group * plan.n_kv_heads;
        }
        plan.most_rows = std::max(plan.most_rows, tile.rows);
        plan.tiles.push_back(tile);
    }

    std::unique_ptr<Plan> make_plan(const AttentionShape& shape, int threads) const {
        auto plan = std::make_unique<Plan>();
        plan->group = shape.group;
        plan->n_kv_heads = shape.n_kv_heads;
        plan->window = shape.window;
        plan->threads = threads;
        plan->begin.resize(size_t(n_tokens));
        plan->end.resize(size_t(n_tokens));
        for (int64_t row = 0; row < n_tokens;) {
            const int32_t s = seq_rows_.data()[row];
            const int64_t most = ordered_[size_t(s)] ? std::max(TILE_ROWS / shape.group, 1) : 1;
            int64_t rows = 1;
            while (rows < most && row + rows < n_tokens && seq_rows_.data()[row + rows] == s) rows++;
            add_tile(*plan, row, rows);
            row += rows;
        }
        for (size_t i = 0; i < plan->tiles.size(); i++) add_items(*plan, i);
        auto cost = [&](const Item& item) {
            return int64_t(item.to - item.from) * plan->tiles[size_t(item.tile)].rows;
        };
        const bool by_heads = read_again(*plan);
        std::stable_sort(plan->items.begin(), plan->items.end(), [&](const Item& a, const Item& b) {
            return by_heads && a.head != b.head ? a.head < b.head : cost(a) > cost(b);
        });
        plan->left = std::make_unique<std::atomic<int32_t>[]>(plan->joins.size());
        for (size_t j = 0; j < plan->joins.size(); j++) plan->left[j] = plan->joins[j].parts;
        return plan;
    }

    // Whether several tiles read the same pages, of one sequence or a shared prefix: one head's stay in the cache.
    bool read_again(const Plan& plan) const {
        if (plan.most_rows > 1 && int64_t(plan.tiles.size()) > n_seqs_) return true;
        for (int64_t s = 1; plan.most_rows > 1 && s < n_seqs_; s++)
            if (view.tables[s * view.max_pages] == view.tables[(s - 1) * view.max_pages]) return true;
        return false;
    }

    // A tile that is long beside a quarter of each thread's share is split by segments.
    void add_items(Plan& plan, size_t i) const {
        const Tile& t = plan.tiles[i];
        int64_t parts = 1;
        if (plan.threads > 1) {
            const int64_t mine = int64_t(t.end > 0 ? t.end - t.begin : 0) * t.rows * plan.group;
            const int64_t share = std::max<int64_t>(1, plan.scores / (plan.threads * 4));
            parts = std::clamp<int64_t>(mine / share, 1, std::max(1, t.segments));
        }
        for (int32_t h = 0; h < plan.n_kv_heads; h++) {
            const int32_t join = parts > 1 ? int32_t(plan.joins.size()) : -1;
            if (parts > 1) {
                plan.joins.push_back({plan.partial_rows, int32_t(parts)});
                plan.partial_rows += int64_t(t.segments) * t.rows * plan.group;
            }
            for (int64_t p = 0; p < parts; p++)
                plan.items.push_back({int32_t(i), h, int32_t(t.segments * p / parts),
                                      int32_t(t.segments * (p + 1) / parts), join});
        }
    }

    IntRows tables_;
    Ints first_, length_, slots_, positions_, seq_rows_;
    std::optional<IntRows> slot_positions_;
    int64_t n_seqs_;
    std::vector<int32_t> phase_;
    std::vector<bool> ordered_;
    std::vector<std::unique_ptr<Plan>> plans_;
};

}  // namespace quire
