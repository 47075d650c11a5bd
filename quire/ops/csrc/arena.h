// Bytes for arrays. What is freed is kept, so that a step in the same shapes as the last one
// allocates nothing; what is not kept is the system's again, so that `held` is what it costs.
//
// Large blocks are mapped one by one: a general allocator keeps what it is given back, in case it
// is asked again, and would hold a second copy of what is counted here as free.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

namespace quire {

class Arena {
  public:
    Arena() = default;
    ~Arena() { trim(); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    float* take(int64_t floats);  // throws std::bad_alloc, and nothing has changed
    void give(float* data, int64_t floats) noexcept;
    void trim() noexcept;  // returns what no array uses to the system

    int64_t held() const {
        std::lock_guard lock(mutex_);
        return held_;
    }

  private:
    struct Size {
        int64_t bytes;
        size_t list;  // of the free blocks that are as large
    };
    struct Free {  // at the start of a free block
        Free* next;
        int64_t bytes;
    };
    static Size size_of(int64_t floats);
    void release() noexcept;

    mutable std::mutex mutex_;
    std::array<Free*, 160> free_{};
    int64_t held_ = 0, kept_ = 0;
};

}  // namespace quire
