// CUDA C++ on the host: what common.cu gives to kernels, for threads that take turns.
//
// A block's threads are fibers that change at barriers and shuffles only. Copies of cp.async arrive
// when they are waited for, and not before: until then their target holds NaN. Shared memory does so
// too when a block starts. What this does not show are races that happen between two barriers.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

typedef unsigned int u32;
struct float4 { float x, y, z, w; };
struct Dim { int x, y, z; };
using std::exp, std::fabs;

constexpr int FIBERS = 128, STACK = 1 << 16;
extern float4 shared_memory[];
static Dim threadIdx, blockIdx;

struct Copy { void* to; const void* from; int size; };

struct Fiber {
  ucontext_t at;
  std::vector<char> stack = std::vector<char>(STACK);
  std::vector<Copy> begun;
  std::deque<std::vector<Copy>> groups;
  bool ended;
};

struct Barrier { int waiting = 0; long passed = 0; };

static Fiber fibers[FIBERS];
static ucontext_t scheduler;
static Barrier whole, warps[FIBERS / 32];
static float told[FIBERS];

static void meet(Barrier& barrier, int size) {
  const int me = threadIdx.x;
  const long before = barrier.passed;
  if (++barrier.waiting == size) barrier.waiting = 0, barrier.passed++;
  while (barrier.passed == before) swapcontext(&fibers[me].at, &scheduler);
}

inline void __syncthreads() { meet(whole, FIBERS); }
inline void __syncwarp() { meet(warps[threadIdx.x / 32], 32); }

inline float __shfl_xor_sync(u32, float v, int mask) {
  const int me = threadIdx.x;
  told[me] = v;
  __syncwarp();
  const float theirs = told[me ^ mask];
  __syncwarp();
  return theirs;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float a) { return 1.f / sqrtf(a); }
inline int min(int a, int b) { return a < b ? a : b; }

inline float load(const float* at) { return *at; }
inline float4 load4(const float* at) { return *(const float4*)at; }
inline void let_next_start() {}
inline void wait_for_previous() {}

inline u32 shared_address(const void* at) { return (u32)((const char*)at - (const char*)shared_memory); }

static void begin_copy(u32 to, const void* from, int size) {
  if (to % size || (unsigned long long)from % size) fprintf(stderr, "a copy is not aligned\n"), abort();
  void* target = (char*)shared_memory + to;
  memset(target, 0xff, size);
  fibers[threadIdx.x].begun.push_back({target, from, size});
}

inline void copy16(u32 to, const void* from) { begin_copy(to, from, 16); }
inline void copy4(u32 to, const void* from) { begin_copy(to, from, 4); }
inline void copy16_if(u32 to, const void* from, bool inside) {
  static const float4 zeros{};
  begin_copy(to, inside ? from : &zeros, 16);
}

inline void commit_copies() {
  Fiber& me = fibers[threadIdx.x];
  me.groups.push_back(std::move(me.begun));
  me.begun.clear();
}

template <int PENDING> void wait_copies() {
  Fiber& me = fibers[threadIdx.x];
  for (; (int)me.groups.size() > PENDING; me.groups.pop_front())
    for (const Copy& copy : me.groups.front()) memcpy(copy.to, copy.from, copy.size);
}

template <class Args> struct Launch {
  static void (*kernel)(Args);
  static const Args* args;

  static void body() {
    kernel(*args);
    fibers[threadIdx.x].ended = true;
    swapcontext(&fibers[threadIdx.x].at, &scheduler);
  }

  static void block(int shared) {
    memset((void*)shared_memory, 0xff, shared);
    for (Fiber& fiber : fibers) {
      fiber.begun.clear(), fiber.groups.clear(), fiber.ended = false;
      getcontext(&fiber.at);
      fiber.at.uc_stack.ss_sp = fiber.stack.data(), fiber.at.uc_stack.ss_size = STACK;
      makecontext(&fiber.at, body, 0);
    }
    for (bool running = true; running;) {
      running = false;
      for (int i = 0; i < FIBERS; i++) {
        if (fibers[i].ended) continue;
        threadIdx = {i, 0, 0}, running = true;
        swapcontext(&scheduler, &fibers[i].at);
      }
    }
  }

  static void grid(void (*what)(Args), int x, int y, int z, int shared, const Args* with) {
    kernel = what, args = with;
    for (int k = 0; k < z; k++)
      for (int j = 0; j < y; j++)
        for (int i = 0; i < x; i++) blockIdx = {i, j, k}, block(shared);
  }
};
template <class Args> void (*Launch<Args>::kernel)(Args);
template <class Args> const Args* Launch<Args>::args;
