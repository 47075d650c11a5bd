// Bytes from the system, page by page as they are first written.
#pragma once

#include <cstdint>

namespace quire {

constexpr int64_t HUGE_PAGE = int64_t(2) << 20;

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Zeroed bytes, or null where there are none. From the size of a huge page on they begin at the border
// of one and are huge pages where the system has some: fewer faults, and prefetching follows further.
void* map_bytes(int64_t bytes);
void unmap_bytes(void* data, int64_t bytes);

// Bytes of the allocator that begin at a cache line; null where there are none.
void* line_bytes(int64_t bytes);
void free_line_bytes(void* data);

}  // namespace quire
