// A float32 matrix that flows between operations. Its bytes come from an arena that keeps what
// was freed, so that a step in the same shapes as the last one allocates nothing.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace quire {

class Arena {
  public:
    ~Arena() { trim(); }

    float* take(int64_t floats) {
        const int64_t bytes = room_for(floats);
        {
            std::lock_guard lock(mutex_);
            auto found = free_.find(bytes);
            if (found != free_.end() && !found->second.empty()) {
                float* data = found->second.back();
                found->second.pop_back();
                kept_ -= bytes;
                return data;
            }
            held_ += bytes;
        }
        void* data = std::aligned_alloc(64, size_t(bytes));
        if (!data) throw std::bad_alloc();
        return static_cast<float*>(data);
    }

    void give(float* data, int64_t floats) {
        const int64_t bytes = room_for(floats);
        std::lock_guard lock(mutex_);
        if (kept_ + bytes > MOST_KEPT) {  // shapes have changed: what is kept fits them no more
            std::free(data);
            held_ -= bytes;
            release();
            return;
        }
        free_[bytes].push_back(data);
        kept_ += bytes;
    }

    // Returns what no array uses to the system.
    void trim() {
        std::lock_guard lock(mutex_);
        release();
    }

    int64_t held() const { return held_; }

  private:
    static constexpr int64_t MOST_KEPT = 128 << 20;

    // Four sizes for each power of two, so that steps of many lengths share a few.
    static int64_t room_for(int64_t floats) {
        int64_t step = 64;
        while (step * 8 < floats * 4) step *= 2;
        return (floats * 4 + step - 1) / step * step;
    }

    void release() {
        for (auto& [bytes, list] : free_)
            for (float* data : list) std::free(data);
        free_.clear();
        held_ -= kept_;
        kept_ = 0;
    }

    std::mutex mutex_;
    std::map<int64_t, std::vector<float*>> free_;
    int64_t held_ = 0, kept_ = 0;
};

struct Array {
    std::shared_ptr<Arena> arena;
    float* data;
    int64_t rows, cols;

    Array(std::shared_ptr<Arena> a, int64_t r, int64_t c)
        : arena(std::move(a)), data(arena->take(r * c)), rows(r), cols(c) {}
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
};

}  // namespace quire
