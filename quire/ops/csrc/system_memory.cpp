#include "system_memory.h"

#include <cstdlib>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <malloc.h>
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace quire {

#if defined(_WIN32)

void* map_bytes(int64_t bytes) {
    return VirtualAlloc(nullptr, size_t(bytes), MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}
void unmap_bytes(void* data, int64_t) { VirtualFree(data, 0, MEM_RELEASE); }
void* line_bytes(int64_t bytes) { return _aligned_malloc(size_t(bytes), 64); }
void free_line_bytes(void* data) { _aligned_free(data); }

#else

namespace {

constexpr int64_t PAGE = 64 << 10;  // the largest of any system: maps are cut at borders of pages

// The first border of a huge page at or after `data`.
char* huge_border(void* data) {
    const int64_t at = reinterpret_cast<int64_t>(data);
    return static_cast<char*>(data) + (round_up(at, HUGE_PAGE) - at);
}

// Advice: where it is refused, small pages serve.
void advise_huge(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    madvise(data, size_t(bytes), MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

}  // namespace

// What lies around a large block goes back at once, so that it shares no huge page with another.
void* map_bytes(int64_t bytes) {
    bytes = round_up(bytes, PAGE);
    const int64_t slack = bytes < HUGE_PAGE ? 0 : HUGE_PAGE;
    void* data = mmap(nullptr, size_t(bytes + slack), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
    if (slack == 0) return data;
    char *const start = static_cast<char*>(data), *const block = huge_border(data), *const end = block + bytes;
    if (block > start) munmap(start, size_t(block - start));
    if (start + bytes + slack > end) munmap(end, size_t(start + bytes + slack - end));
    advise_huge(block, bytes / HUGE_PAGE * HUGE_PAGE);
    return block;
}

void unmap_bytes(void* data, int64_t bytes) {
    // A map that is cut in two may be one too many for the system: then the bytes go, the addresses stay.
    const size_t whole = size_t(round_up(bytes, PAGE));
    if (munmap(data, whole) != 0) madvise(data, whole, MADV_DONTNEED);
}

void* line_bytes(int64_t bytes) {
    void* data = nullptr;
    return posix_memalign(&data, 64, size_t(bytes)) == 0 ? data : nullptr;
}
void free_line_bytes(void* data) { std::free(data); }

#endif

}  // namespace quire
