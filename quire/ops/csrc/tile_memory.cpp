#include "tile_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "huge_page.h"
#include "sanitized.h"

namespace quire {
namespace {

constexpr int64_t CHUNK = 16 * HUGE_PAGE;

// Zeroed bytes that begin at a huge page's border.
std::shared_ptr<void> map(int64_t bytes) {
    if constexpr (SANITIZED) {
        void* data = nullptr;
        if (posix_memalign(&data, 64, size_t(bytes)) != 0) throw std::bad_alloc();
        return {std::memset(data, 0, size_t(bytes)), std::free};
    }
    const size_t size = size_t(bytes + HUGE_PAGE);
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    const std::shared_ptr<void> whole(data, [size](void* p) { munmap(p, size); });
    void* aligned = huge_border(data);
    advise_huge(aligned, bytes);
    return {whole, aligned};
}

}  // namespace

TileMemory TileArena::take(int64_t bytes) {
    TileMemory memory;
    memory.bytes_ = bytes;
    const int64_t size = SANITIZED ? bytes : round_up(bytes, 64);
    if (SANITIZED || size > CHUNK / 4) {
        memory.chunk_ = map(size);
        memory.data_ = static_cast<uint8_t*>(memory.chunk_.get());
        return memory;
    }
    std::lock_guard lock(mutex_);
    memory.chunk_ = chunk_.lock();
    if (!memory.chunk_ || size > left_) {
        memory.chunk_ = map(CHUNK);
        chunk_ = memory.chunk_;
        next_ = static_cast<uint8_t*>(memory.chunk_.get());
        left_ = CHUNK;
    }
    memory.data_ = next_;
    next_ += size;
    left_ -= size;
    return memory;
}

}  // namespace quire
