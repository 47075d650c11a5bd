// Threads that persist: work is cut into chunks, and each thread has a run of them that is its own. Whoever is done
// with those helps the others, so that one who sleeps delays nobody. The same thread gets the same rows in operation
// after operation: what it wrote is in its own cache, and lines seldom travel between cores.
//
// Why two things cannot race: a job is open from `run` until the caller has found no chunk left.
// A worker enters a job only by adding itself to `gate_` while the open bit is set, and the caller
// returns only after closing the gate and seeing that nobody is inside. So a worker that sleeps
// through a job never delays it, and none can touch a job after `run` has returned.
//
// What a job throws, in whatever thread, ends the job and is thrown by `run`.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

class ThreadPool {
  public:
    using Function = void (*)(void* context, int64_t begin, int64_t end, int thread);

    // The caller counts as one of them. Throws Refused where the system has not as many.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return int(workers_->size()) + 1; }

    // Calls function over [0, count) in pieces of at most `chunk`; returns when all are done. Thread t begins with
    // the t-th part of them. Jobs of several callers take turns. Throws in the child of a fork, which has no threads but its own.
    void run(int64_t count, int64_t chunk, Function function, void* context);

    // The same for a callable `f(begin, end, thread)`.
    template <class F>
    void parallel(int64_t count, int64_t chunk, F&& f) {
        run(count, chunk,
            [](void* context, int64_t begin, int64_t end, int thread) {
                (*static_cast<std::remove_reference_t<F>*>(context))(begin, end, thread);
            },
            &f);
    }

  private:
    // The chunks of one thread, in a line of their own.
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    void work(int thread);
    void take_chunks(int thread) noexcept;
    void stop();

    // Pointed to, so that they can be left alone where they do not exist any more.
    std::unique_ptr<std::vector<std::thread>> workers_ = std::make_unique<std::vector<std::thread>>();
    const uint32_t forks_;  // of this process and its parents, when the threads were started
    std::mutex turn_;
    // The job: written by the caller while the gate is closed, read by those inside.
    Function function_ = nullptr;
    void* context_ = nullptr;
    int64_t count_ = 0, chunk_ = 1;
    std::atomic<bool> failed_{false};
    std::exception_ptr failure_;  // written by whoever set `failed_`
    std::unique_ptr<Share[]> shares_;
    alignas(64) std::atomic<uint32_t> gate_{0};      // OPEN bit | how many workers are inside
    alignas(64) std::atomic<uint32_t> epoch_{0};     // one more for each job; workers wait on it
    alignas(64) std::atomic<uint32_t> sleepers_{0};  // workers in the kernel, to be woken
    std::atomic<bool> stopping_{false};
};

}  // namespace quire
