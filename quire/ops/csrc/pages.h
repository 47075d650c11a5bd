// One group's pages in one step as Python describes them, checked.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "attention_plan.h"
#include "check.h"
#include "numpy.h"

namespace quire {

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
        plans_.push_back(Planner(known(), shape, threads).make());
        return *plans_.back();
    }

    PageView view;
    int64_t n_tokens;

  private:
    Known known() const {
        return {view, first_.data(), length_.data(), seq_rows_.data(), n_seqs_, n_tokens, ordered_};
    }

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

    IntRows tables_;
    Ints first_, length_, slots_, positions_, seq_rows_;
    std::optional<IntRows> slot_positions_;
    int64_t n_seqs_;
    std::vector<int32_t> phase_;
    std::vector<bool> ordered_;
    std::vector<std::unique_ptr<Plan>> plans_;
};

}  // namespace quire
