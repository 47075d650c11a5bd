#include "tile_memory.h"

#include <sys/mman.h>

#include <new>

namespace quire {
namespace {

constexpr int64_t HUGE_PAGE = int64_t(2) << 20, CHUNK = 16 * HUGE_PAGE;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Maps `bytes` that begin at a huge page's border.
std::shared_ptr<void> map(int64_t bytes) {
    const size_t size = size_t(bytes + HUGE_PAGE);
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    const std::shared_ptr<void> whole(data, [size](void* p) { munmap(p, size); });
    void* aligned = reinterpret_cast<void*>(round_up(reinterpret_cast<int64_t>(data), HUGE_PAGE));
#if defined(MADV_HUGEPAGE)
    madvise(aligned, size_t(bytes), MADV_HUGEPAGE);  // advice: where it is refused, small pages serve
#endif
    return {whole, aligned};
}

}  // namespace

TileMemory TileArena::take(int64_t bytes) {
    TileMemory memory;
    memory.bytes_ = bytes;
    const int64_t size = round_up(bytes, 64);
    if (size > CHUNK / 4) {
        memory.chunk_ = map(size);
        memory.data_ = static_cast<uint8_t*>(memory.chunk_.get());
        return memory;
    }
    if (size > left_) {
        chunk_ = map(CHUNK);
        next_ = static_cast<uint8_t*>(chunk_.get());
        left_ = CHUNK;
    }
    memory.chunk_ = chunk_;
    memory.data_ = next_;
    next_ += size;
    left_ -= size;
    return memory;
}

}  // namespace quire
