// Where tiles live: zeroed bytes straight from the system, in huge pages where it has them.
//
// Reading weights is what decoding does, and with pages of 4 KB it is a third slower: prefetching
// stops at their ends. So small matrices share chunks of several huge pages; a chunk goes back to
// the system with the last matrix in it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

namespace quire {

class TileMemory {
  public:
    uint8_t* data() const { return data_; }
    int64_t bytes() const { return bytes_; }

  private:
    friend class TileArena;
    std::shared_ptr<void> chunk_;
    uint8_t* data_ = nullptr;
    int64_t bytes_ = 0;
};

class TileArena {
  public:
    TileMemory take(int64_t bytes);  // zeroed; throws std::bad_alloc

  private:
    std::mutex mutex_;
    std::weak_ptr<void> chunk_;  // matrices hold it, and nobody else
    uint8_t* next_ = nullptr;
    int64_t left_ = 0;
};

}  // namespace quire
