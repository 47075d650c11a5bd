#include "arena.h"

#include <new>

#include "sanitized.h"
#include "system_memory.h"

namespace quire {
namespace {

constexpr int64_t MOST = int64_t(1) << 46;  // bytes of one block
constexpr int64_t MOST_KEPT = SANITIZED ? -1 : 128 << 20;
constexpr int64_t MAPPED = SANITIZED ? MOST + 1 : 64 << 10;  // smaller blocks are few, and the allocator's

// Null where there is none.
void* from_system(int64_t bytes) { return bytes >= MAPPED ? map_bytes(bytes) : line_bytes(bytes); }

void to_system(void* data, int64_t bytes) {
    if (bytes < MAPPED) free_line_bytes(data);
    else unmap_bytes(data, bytes);
}

}  // namespace

// Four sizes for each power of two, so that steps of many lengths share a few.
Arena::Size Arena::size_of(int64_t floats) {
    if (floats < 0 || floats > MOST / 4) throw std::bad_alloc();
    int64_t step = 64;
    size_t power = 0;
    for (; step * 8 < floats * 4; step *= 2) power++;
    const int64_t steps = floats == 0 ? 1 : (floats * 4 + step - 1) / step;
    return {SANITIZED ? floats * 4 : steps * step, power * 4 + size_t(steps)};
}

float* Arena::take(int64_t floats) {
    const Size size = size_of(floats);
    std::lock_guard lock(mutex_);
    if (Free* block = free_[size.list]) {
        free_[size.list] = block->next;
        kept_ -= size.bytes;
        return reinterpret_cast<float*>(block);
    }
    void* data = from_system(size.bytes);
    if (!data) {  // perhaps for what is kept here
        release();
        data = from_system(size.bytes);
    }
    if (!data) throw std::bad_alloc();
    held_ += size.bytes;
    return static_cast<float*>(data);
}

void Arena::give(float* data, int64_t floats) noexcept {
    const Size size = size_of(floats);
    std::lock_guard lock(mutex_);
    if (kept_ + size.bytes > MOST_KEPT) {  // shapes have changed: what is kept fits them no more
        to_system(data, size.bytes);
        held_ -= size.bytes;
        release();
        return;
    }
    free_[size.list] = new (data) Free{free_[size.list], size.bytes};
    kept_ += size.bytes;
}

void Arena::trim() noexcept {
    std::lock_guard lock(mutex_);
    release();
}

void Arena::release() noexcept {
    for (Free*& list : free_)
        while (Free* block = list) {
            list = block->next;
            to_system(block, block->bytes);
        }
    held_ -= kept_;
    kept_ = 0;
}

}  // namespace quire
