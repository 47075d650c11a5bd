// How work is cut: sizes that suit the caches, and pieces that let threads finish together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "threads.h"
#include "tiles.h"

namespace quire {

constexpr int64_t PANEL_BYTES = 384 << 10;  // activations that stay in a core's second cache
constexpr int64_t ENOUGH_TOKENS = 16;       // of one thread, for it to read all weights
constexpr int64_t MANY_ROWS = 8 << 10;      // of one thread, beside which laying out tokens costs next to nothing
constexpr int64_t CHUNK_BYTES = 32 << 10;   // weights worth handing out when reading them is the work
constexpr int64_t SERIAL = 8 << 10;         // activations that are prepared sooner than a thread joins in

inline int64_t blocks_of(const Part& part, int lanes) { return (part.rows + lanes - 1) / lanes; }

// Calls f(begin, end, thread) for pieces of [0, count): each thread's part of it in halves, half of it, half of the
// rest, and so on down to about `least`. Weights are read fastest in long runs, and the small pieces at the end let
// the threads finish together.
template <class F>
void in_pieces(ThreadPool& pool, int64_t count, int64_t least, F&& f) {
    const int64_t threads = pool.size();
    int64_t pieces = 1;  // of a thread
    while ((count >> (pieces + 1)) / threads >= std::max<int64_t>(least, 1)) pieces++;
    pool.parallel(threads * pieces, 1, [&](int64_t piece, int64_t last, int thread) {
        for (; piece < last; piece++) {
            const int64_t owner = piece / pieces, i = piece % pieces;
            const int64_t end = count * (owner + 1) / threads, all = end - count * owner / threads;
            f(end - (all >> i), i + 1 == pieces ? end : end - (all >> (i + 1)), thread);
        }
    });
}

}  // namespace quire
