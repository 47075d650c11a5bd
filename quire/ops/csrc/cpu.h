// The CPU as a device: its threads, its instruction set, the arena of its arrays.
#pragma once

#include <memory>
#include <string>

#include "array.h"
#include "threads.h"
#include "tile_memory.h"

namespace quire {

enum class Isa { portable, avx2, avx_vnni, avx512, neon, i8mm };

Isa best_isa();                           // the widest this machine runs
Isa isa_from_name(const std::string& s);  // "auto" or a name; throws std::invalid_argument
const char* isa_name(Isa isa);

struct Cpu {
    Isa isa;
    bool exact;  // float32 activations throughout, instead of int8 in products with quantised weights
    ThreadPool pool;
    std::shared_ptr<Arena> arena = std::make_shared<Arena>();
    TileArena tiles;

    Cpu(int threads, Isa i, bool e) : isa(i), exact(e), pool(threads) {}
    Array array(int64_t rows, int64_t cols) { return Array(arena, rows, cols); }
};

}  // namespace quire
