// A float32 matrix that flows between operations.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "arena.h"

namespace quire {

struct Array {
    std::shared_ptr<Arena> arena;
    float* data;
    int64_t rows, cols;

    Array(std::shared_ptr<Arena> a, int64_t r, int64_t c)
        : arena(std::move(a)), data(arena->take(count(r, c))), rows(r), cols(c) {}
    ~Array() {
        if (data) arena->give(data, rows * cols);
    }
    Array(Array&& o) noexcept : arena(std::move(o.arena)), data(o.data), rows(o.rows), cols(o.cols) {
        o.data = nullptr;
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    float* row(int64_t r) { return data + r * cols; }
    const float* row(int64_t r) const { return data + r * cols; }

  private:
    static int64_t count(int64_t rows, int64_t cols) {
        int64_t n;
        if (rows < 0 || cols < 0 || __builtin_mul_overflow(rows, cols, &n)) throw std::bad_alloc();
        return n;
    }
};

}  // namespace quire
