#include "threads.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace quire {
namespace {

constexpr uint32_t OPEN = 1u << 31;
constexpr int SPINS = 2000;  // some 35 µs: the gap between two operations of a layer; ten times that gains nothing
                             // between steps, and costs a quarter where all threads share one core

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
    for (int t = 1; t < threads; t++) workers_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
    stopping_ = true;
    epoch_.fetch_add(1);
    futex_wake(epoch_);
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t count, int64_t chunk, Function function, void* context) {
    if (count <= 0) return;
    if (workers_.empty() || count <= chunk) {
        function(context, 0, count, 0);
        return;
    }
    std::lock_guard turn(turn_);
    function_ = function;
    context_ = context;
    count_ = count;
    chunk_ = chunk;
    next_.store(0, std::memory_order_relaxed);
    gate_.store(OPEN, std::memory_order_release);
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0) futex_wake(epoch_);
    take_chunks(0);
    uint32_t inside = gate_.fetch_and(~OPEN, std::memory_order_acq_rel) & ~OPEN;
    for (int spin = 0; inside != 0; spin++) {
        if (spin < SPINS) pause();
        else futex_wait(gate_, inside);
        inside = gate_.load(std::memory_order_acquire);
    }
}

void ThreadPool::take_chunks(int thread) {
    for (;;) {
        const int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
        if (begin >= count_) return;
        const int64_t end = begin + chunk_ < count_ ? begin + chunk_ : count_;
        function_(context_, begin, end, thread);
    }
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    for (;;) {
        for (int spin = 0; epoch_.load(std::memory_order_acquire) == seen; spin++) {
            if (spin < SPINS) {
                pause();
                continue;
            }
            sleepers_.fetch_add(1);
            if (epoch_.load() == seen) futex_wait(epoch_, seen);
            sleepers_.fetch_sub(1);
        }
        seen = epoch_.load(std::memory_order_acquire);
        if (stopping_) return;
        uint32_t gate = gate_.load(std::memory_order_acquire);
        while ((gate & OPEN) && !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
        }
        if (!(gate & OPEN)) continue;
        take_chunks(thread);
        // The last one out of a closed gate wakes a caller that went to sleep.
        if (gate_.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake(gate_);
    }
}

}  // namespace quire
