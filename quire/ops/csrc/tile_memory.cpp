#include "tile_memory.h"

#include <cstring>
#include <new>

#include "sanitized.h"
#include "system_memory.h"

namespace quire {
namespace {

constexpr int64_t CHUNK = 16 * HUGE_PAGE;

std::shared_ptr<void> map(int64_t bytes) {
    if constexpr (SANITIZED) {
        void* data = line_bytes(bytes);
        if (!data) throw std::bad_alloc();
        return {std::memset(data, 0, size_t(bytes)), free_line_bytes};
    }
    void* data = map_bytes(bytes);
    if (!data) throw std::bad_alloc();
    return {data, [bytes](void* p) { unmap_bytes(p, bytes); }};
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
