// How work is cut: sizes that suit the caches, and pieces that let threads finish together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "threads.h"
#include "tiles.h"

namespace quire {

constexpr int64_t PANEL_BYTES = 384 << 10;  // activations that stay in a core's second cache
constexpr int64_t CHUNK_BYTES = 32 << 10;   // weights worth handing out when reading them is the work
constexpr int64_t SERIAL = 8 << 10;         // activations that are prepared sooner than a thread joins in

inline int64_t blocks_of(const Part& part, int lanes) { return (part.rows + lanes - 1) / lanes; }

// Calls f(begin, end, thread) for pieces of [0, count): half of it in one piece per thread, then half
// of the rest, and so on down to about `least`. Weights are read fastest in long runs, and the small
// pieces at the end let the threads finish together.
template <class F>
void in_pieces(ThreadPool& pool, int64_t count, int64_t least, F&& f) {
    const int64_t threads = pool.size();
    int rounds = 0;
    while ((count >> (rounds + 2)) / threads >= std::max<int64_t>(least, 1)) rounds++;
    auto border = [&](int64_t piece) {
        const int64_t round = piece / threads;
        if (round > rounds) return count;
        const int64_t from = count - (count >> round);
        const int64_t to = round == rounds ? count : count - (count >> (round + 1));
        return from + (to - from) * (piece % threads) / threads;
    };
    pool.parallel(threads * (rounds + 1), 1, [&](int64_t piece, int64_t last, int thread) {
        for (; piece < last; piece++) f(border(piece), border(piece + 1), thread);
    });
}

}  // namespace quire
