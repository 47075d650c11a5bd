// Who computes what of attention in one step: tiles of tokens that are attended together, and their parts.
//
// Where sequences side by side begin with the same pages, as forks do, and have one new token each, these attend to
// those pages together: they come from memory once, not once for each sequence.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"

namespace quire {

// Part of a tile for one kv head: what a thread takes at a time.
struct Item {
    int32_t tile, head, from, to;
    int32_t join;  // index of its join when the tile is split by segments, else -1
};

// Slots that need not be read again before what several have in common is worth a pass of its own.
constexpr int64_t LEAST_SHARED = 256;

// The same for every layer with this grouping and window, so it is made once per step.
struct Plan {
    struct Join {
        int64_t rows_before;  // rows of partial results before this one's
        int32_t parts;
    };

    int group, n_kv_heads, window, threads;
    std::vector<int32_t> begin, end;  // the slots each token sees
    std::vector<Tile> tiles;
    std::vector<Item> items;  // those of shared tiles, then the others, which go on from them
    int64_t shared_items = 0;
    int64_t sums = 0;  // tokens of shared tiles
    std::vector<Join> joins;
    std::unique_ptr<std::atomic<int32_t>[]> left;  // parts of each join still to come
    int64_t partial_rows = 0;
    int64_t scores = 0;  // to compute in tiles that are not shared, over all heads
    int most_rows = 1;   // tokens of the largest tile
    bool single = true;  // whether those that are not shared have one token each
};

// What of a step's pages its plans depend on.
struct Known {
    const PageView& view;
    const int32_t *first, *length, *seq_rows;
    int64_t n_seqs, n_tokens;
    const std::vector<bool>& ordered;  // of each sequence: whether what a token sees is one range
};

class Planner {
  public:
    Planner(const Known& known, const AttentionShape& shape, int threads)
        : known_(known), view_(known.view), most_(std::max(TILE_ROWS / shape.group, 1)), plan_(std::make_unique<Plan>()) {
        plan_->group = shape.group;
        plan_->n_kv_heads = shape.n_kv_heads;
        plan_->window = shape.window;
        plan_->threads = threads;
        plan_->begin.resize(size_t(known.n_tokens));
        plan_->end.resize(size_t(known.n_tokens));
    }

    std::unique_ptr<Plan> make() {
        for (int64_t i = 0; i < known_.n_tokens; i++) see(i);
        add_tiles();
        for (size_t i = 0; i < plan_->tiles.size(); i++) add_items(i);
        sort_items();
        plan_->left = std::make_unique<std::atomic<int32_t>[]>(plan_->joins.size());
        for (size_t j = 0; j < plan_->joins.size(); j++) plan_->left[j] = plan_->joins[j].parts;
        return std::move(plan_);
    }

  private:
    // The range of slots that token i sees; [0, 0) for none.
    void see(int64_t i) {
        const int64_t s = known_.seq_rows[i];
        const int32_t position = view_.positions[i], first = known_.first[s];
        const int32_t after = plan_->window > 0 && position >= plan_->window ? position - plan_->window : -1;
        int32_t begin = 0, end = known_.length[s];
        if (view_.slot_positions) {
            const int32_t* p = view_.slot_positions + s * view_.max_slots;
            while (end > 0 && !(p[end - 1] > after && p[end - 1] <= position)) end--;
            while (begin < end && !(p[begin] > after && p[begin] <= position)) begin++;
        } else {
            begin = std::max(after + 1 - first, 0);
            end = std::min(position + 1 - first, end);
        }
        plan_->begin[size_t(i)] = begin < end ? begin : 0;
        plan_->end[size_t(i)] = begin < end ? end : 0;
    }

    // Tokens of one sequence that follow each other.
    struct Run {
        int64_t seq, row, rows;
        int32_t from = 0;   // slots before these are summed up by shared tiles
        int32_t sums = -1;  // and the sums are there
    };

    std::vector<Run> runs() const {
        std::vector<Run> found;
        for (int64_t row = 0; row < known_.n_tokens; row++) {
            const int64_t s = known_.seq_rows[row];
            if (found.empty() || found.back().seq != s) found.push_back({s, row, 0});
            found.back().rows++;
        }
        return found;
    }

    // Slots of whole segments with which the sequences of two runs begin alike, and which both see.
    int32_t in_common(const Run& a, const Run& b) const {
        const int32_t first = known_.first[a.seq], phase = view_.phase[a.seq];
        if (view_.slot_positions || first != known_.first[b.seq]) return 0;
        const int32_t most = std::min(view_.positions[a.row], view_.positions[b.row]) - first;
        const int32_t *x = view_.tables + a.seq * view_.max_pages, *y = view_.tables + b.seq * view_.max_pages;
        int32_t slots = 0;
        while (slots < most && *x++ == *y++) slots += view_.page_tokens;
        slots = (std::min(slots, most) + phase) / SEGMENT * SEGMENT - phase;
        return slots > std::max(plan_->begin[size_t(a.row)], plan_->begin[size_t(b.row)]) ? slots : 0;
    }

    // How many runs from the i-th on read their beginning together, and its slots: as many as save most.
    std::pair<size_t, int32_t> together(const std::vector<Run>& runs, size_t i) const {
        size_t count = 1;
        int32_t slots = 0;
        for (; i + count < runs.size() && runs[i].rows == 1 && runs[i + count].rows == 1; count++) {
            const int32_t common = in_common(runs[i], runs[i + count]);
            const int32_t fewer = count > 1 ? std::min(slots, common) : common;
            const int64_t saved = std::max<int64_t>(int64_t(count - 1) * slots, LEAST_SHARED);
            if (int64_t(count) * fewer <= saved) break;
            slots = fewer;
        }
        return {count, slots};
    }

    // A tile of rows, and of their slots in [from, to).
    Tile& add_tile(int64_t row, int64_t rows, int32_t from = 0, int32_t to = INT32_MAX) {
        const int64_t s = known_.seq_rows[row];
        Tile tile{int32_t(s), int32_t(row), int32_t(rows), INT32_MAX, 0, 0, 0, false, -1};
        for (int64_t i = row; i < row + rows; i++) {
            if (plan_->end[size_t(i)] == 0) continue;
            tile.begin = std::min(tile.begin, std::max(plan_->begin[size_t(i)], from));
            tile.end = std::max(tile.end, std::min(plan_->end[size_t(i)], to));
        }
        if (tile.end > tile.begin) {
            tile.first_segment = (tile.begin + view_.phase[s]) / SEGMENT;
            tile.segments = (tile.end + view_.phase[s] - 1) / SEGMENT + 1 - tile.first_segment;
        }
        plan_->most_rows = std::max(plan_->most_rows, tile.rows);
        plan_->tiles.push_back(tile);
        return plan_->tiles.back();
    }

    // Even tiles of the tokens of several runs: few, that keep all threads busy.
    void add_shared(int64_t row, int64_t rows, int32_t slots) {
        const int64_t heads = plan_->n_kv_heads;
        int64_t tiles = (rows + most_ - 1) / most_;
        while (tiles < rows && tiles * heads % plan_->threads && tiles * heads < 32 * plan_->threads) tiles++;
        int64_t each = (rows + tiles - 1) / tiles;
        while (each < most_ && each * plan_->group % ROWS) each++;
        for (int64_t i = 0; i < rows; i += each) {
            Tile& tile = add_tile(row + i, std::min(each, rows - i), 0, slots);
            tile.shared = true;
            tile.sums = int32_t(plan_->sums + i);
        }
    }

    // The tiles of one run; of what others have summed up before it, it goes on.
    void add_own(const Run& run) {
        const int64_t most = known_.ordered[size_t(run.seq)] ? most_ : 1;
        for (int64_t i = 0; i < run.rows; i += most) {
            Tile& tile = add_tile(run.row + i, std::min(most, run.rows - i), run.from);
            tile.sums = run.sums;
            const int64_t slots = std::max(tile.end - tile.begin, 0);
            plan_->scores += slots * tile.rows * plan_->group * plan_->n_kv_heads;
            plan_->single = plan_->single && tile.rows == 1;
        }
    }

    void add_tiles() {
        std::vector<Run> all = runs();
        for (size_t i = 0; i < all.size();) {
            const auto [count, slots] = together(all, i);
            if (slots > 0) add_shared(all[i].row, int64_t(count), slots);
            for (const size_t stop = i + count; i < stop; i++)
                if (slots > 0) all[i].from = slots, all[i].sums = int32_t(plan_->sums++);
        }
        plan_->shared_items = int64_t(plan_->tiles.size()) * plan_->n_kv_heads;
        for (const Run& run : all) add_own(run);
    }

    // A tile that is long beside a quarter of each thread's share is split by segments.
    void add_items(size_t i) {
        const Tile& t = plan_->tiles[i];
        int64_t parts = 1;
        if (plan_->threads > 1 && !t.shared) {
            const int64_t mine = std::max<int64_t>(t.end - t.begin, 0) * t.rows * plan_->group;
            const int64_t share = std::max<int64_t>(1, plan_->scores / (plan_->threads * 4));
            parts = std::clamp<int64_t>(mine / share, 1, std::max(1, t.segments));
        }
        for (int32_t h = 0; h < plan_->n_kv_heads; h++) {
            const int32_t join = parts > 1 ? int32_t(plan_->joins.size()) : -1;
            if (parts > 1) {
                plan_->joins.push_back({plan_->partial_rows, int32_t(parts)});
                plan_->partial_rows += int64_t(t.segments) * t.rows * plan_->group;
            }
            for (int64_t p = 0; p < parts; p++)
                plan_->items.push_back({int32_t(i), h, int32_t(t.segments * p / parts),
                                      int32_t(t.segments * (p + 1) / parts), join});
        }
    }

    // Whether several tiles read the same pages, of one sequence or a shared prefix: one head's stay in the cache.
    bool read_again() const {
        if (plan_->single) return false;
        const int64_t own = int64_t(plan_->tiles.size()) - plan_->shared_items / plan_->n_kv_heads;
        if (own > known_.n_seqs) return true;
        for (int64_t s = 1; s < known_.n_seqs; s++)
            if (view_.tables[s * view_.max_pages] == view_.tables[(s - 1) * view_.max_pages]) return true;
        return false;
    }

    // The largest come first.
    void sort_items() {
        const bool by_heads = read_again();
        auto cost = [&](const Item& item) {
            return int64_t(item.to - item.from) * plan_->tiles[size_t(item.tile)].rows;
        };
        auto& items = plan_->items;
        const auto behind = items.begin() + plan_->shared_items;
        std::stable_sort(items.begin(), behind, [](const Item& a, const Item& b) { return a.head < b.head; });
        std::stable_sort(behind, items.end(), [&](const Item& a, const Item& b) {
            return by_heads && a.head != b.head ? a.head < b.head : cost(a) > cost(b);
        });
    }

    const Known known_;
    const PageView& view_;
    const int64_t most_;  // tokens of a tile
    std::unique_ptr<Plan> plan_;
};

}  // namespace quire
