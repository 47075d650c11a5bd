#include "threads.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <climits>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "check.h"

namespace quire {
namespace {

constexpr uint32_t OPEN = 1u << 31;
constexpr int SPINS = 2000;  // some 35 µs: the gap between two operations of a layer; ten times that gains nothing
                             // between steps, and costs a quarter where all threads share one core

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // waits about as long; `yield` does nothing on most of them
#else
    std::this_thread::yield();
#endif
}

#if defined(__linux__)

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

#else

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) { word.wait(expected); }
void futex_wake(std::atomic<uint32_t>& word) { word.notify_all(); }

#endif

std::atomic<uint32_t> forks{0};

uint32_t count_forks() {
#if !defined(_WIN32)
    static const int watched = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    if (watched != 0) throw std::bad_alloc();
#endif
    return forks.load();
}

}  // namespace

ThreadPool::ThreadPool(int threads) : forks_(count_forks()), shares_(std::make_unique<Share[]>(size_t(threads))) {
    workers_->reserve(size_t(threads));
    try {
        for (int t = 1; t < threads; t++) workers_->emplace_back([this, t] { work(t); });
    } catch (const std::system_error& error) {
        const int started = size();
        stop();
        need(false, "threads=", threads, " could not be started: ", started, " could (", error.code().message(),
             "); pass fewer");
    }
}

ThreadPool::~ThreadPool() {
    if (forks.load() == forks_) stop();
    else workers_.release();  // they are the parent's: waiting for them would take for ever
}

void ThreadPool::stop() {
    stopping_ = true;
    epoch_.fetch_add(1);
    futex_wake(epoch_);
    for (auto& worker : *workers_) worker.join();
}

void ThreadPool::run(int64_t count, int64_t chunk, Function function, void* context) {
    if (count <= 0) return;
    const bool alone = workers_->empty();
    if (!alone && forks.load(std::memory_order_relaxed) != forks_)
        throw std::runtime_error("this process was forked and has none of its parent's threads; load the model in it");
    if (alone || count <= chunk) {
        function(context, 0, count, 0);
        return;
    }
    std::lock_guard turn(turn_);
    function_ = function;
    context_ = context;
    count_ = count;
    chunk_ = chunk;
    const int64_t chunks = (count + chunk - 1) / chunk, threads = size();
    for (int64_t t = 0; t < threads; t++) {
        shares_[t].next.store(chunks * t / threads, std::memory_order_relaxed);
        shares_[t].end = chunks * (t + 1) / threads;
    }
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
    if (!failed_.load(std::memory_order_relaxed)) return;
    failed_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::take_chunks(int thread) noexcept {
    const int threads = size();
    try {
        for (int i = 0; i < threads; i++) {  // its own share, then those of the threads after it
            Share& share = shares_[(thread + i) % threads];
            while (share.next.load(std::memory_order_relaxed) < share.end) {
                const int64_t taken = share.next.fetch_add(1, std::memory_order_relaxed);
                if (taken >= share.end) break;
                const int64_t begin = taken * chunk_, end = begin + chunk_ < count_ ? begin + chunk_ : count_;
                function_(context_, begin, end, thread);
            }
        }
    } catch (...) {
        if (!failed_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
        for (int t = 0; t < threads; t++) shares_[t].next.store(shares_[t].end, std::memory_order_relaxed);
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
