// CUDA C++ on the host, in place of csrc/common.cu: the threads of a block, or of a cluster's blocks, are fibers
// that take turns in random order. What lanes do together waits for all lanes. Copies that a kernel does not wait
// for happen at once or as late as they may (`late`), so that a missing wait and a missing barrier both show.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
using std::max;
using std::min;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
struct Place { unsigned x, y, z; };

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n)
#define __launch_bounds__(...)
#define __grid_constant__

constexpr int THREADS = 256, MOST = 8, ROOM = 256 << 10;

struct Copy { u32 to; const void* from; bool inside; };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool ended;
  int met[3];  // how often it met the lanes of its warp, its block, its cluster
  u64 given[2][6];  // to the lanes of its warp
  std::deque<std::vector<Copy>> copies;
  std::vector<Copy> open;
};

static Fiber fibers[MOST * THREADS];
static ucontext_t scheduler;
static u8 rooms[MOST][ROOM] __attribute__((aligned(128)));
static Place places[MOST], gridDim;
static int now, blocks, ended;
static bool late;
static std::vector<int> meetings[3][MOST * THREADS / 32];

static Place thread() { return {(unsigned)now % THREADS, 0, 0}; }
#define threadIdx thread()
#define blockIdx places[now / THREADS]
#define memory rooms[now / THREADS]

// Waits until all `size` fibers around this one came here as often; those that ended are not waited for.
static void meet(int kind, int size) {
  auto& arrived = meetings[kind][now / size];
  const size_t time = fibers[now].met[kind]++;
  if (arrived.size() <= time) arrived.resize(time + 1);
  ++arrived[time];
  while (meetings[kind][now / size][time] + (kind == 2 ? ended : 0) < size) swapcontext(&fibers[now].context, &scheduler);
}
static void __syncwarp() { meet(0, 32); }
static void __syncthreads() { meet(1, THREADS); }
static void meet_cluster() { meet(2, blocks * THREADS); }
static float2 load2_of(u32 rank, u32 at) { return *(float2*)(rooms[rank] + at); }

// What the lanes of a warp gave, each up to six words; valid until they meet twice more.
template <class... Words> static Fiber* share(int& which, Words... words) {
  which = fibers[now].met[0] & 1;
  u64* to = fibers[now].given[which];
  ((*to++ = words), ...);
  meet(0, 32);
  return fibers + now / 32 * 32;
}

static u32 __float_as_uint(float v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
static float __int_as_float(u32 bits) { float v; memcpy(&v, &bits, 4); return v; }
static float __shfl_xor_sync(u32, float v, int o) {
  int at;
  Fiber* warp = share(at, __float_as_uint(v));
  return __int_as_float((u32)warp[now % 32 ^ o].given[at][0]);
}
static u32 __reduce_max_sync(u32, u32 v) {
  int at;
  Fiber* warp = share(at, v);
  for (int i = 0; i < 32; ++i) v = max(v, (u32)warp[i].given[at][0]);
  return v;
}
static u32 __reduce_add_sync(u32, u32 v) {
  int at;
  Fiber* warp = share(at, v);
  v = 0;
  for (int i = 0; i < 32; ++i) v += (u32)warp[i].given[at][0];
  return v;
}

static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static long long __float2ll_rz(float v) { return (long long)v; }
static float __ll2float_rn(long long v) { return (float)v; }
static float exponential(float x) { return exp2f(x * 1.4426950408889634f); }
static float divided(float a, float b) { return a / b; }
static void __threadfence() {}
static int atomicAdd(int* at, int v) { return (*at += v) - v; }

static void let_next_start() {}
static void wait_for_previous() {}
static void prefetch(const void*) {}
static float load(const float* at) { return *at; }
static float2 load2(const float* at) { return *(const float2*)at; }
static float4 load4(const float* at) { return *(const float4*)at; }
static int load_int(const int* at) { return *at; }
static u32 shared_address(const void* at) { return (u32)((const u8*)at - memory); }

static void copy(const Copy& c) {
  if (c.inside) memcpy(memory + c.to, c.from, 16);
  else memset(memory + c.to, 0, 16);
}
static void copy16_if(u32 to, const void* from, bool inside) {
  if (late) fibers[now].open.push_back({to, from, inside});
  else copy({to, from, inside});
}
static void copy16(u32 to, const void* from) { copy16_if(to, from, true); }
static void commit_copies() {
  fibers[now].copies.push_back(fibers[now].open);
  fibers[now].open.clear();
}
template <int PENDING> static void wait_copies() {
  for (auto& of = fibers[now].copies; of.size() > PENDING; of.pop_front())
    for (const Copy& c : of.front()) copy(c);
}

static void load_tiles(u32 r[4], u32 at) {
  int which;
  Fiber* warp = share(which, at);
  for (int m = 0; m < 4; ++m) memcpy(&r[m], memory + warp[m * 8 + now % 32 / 4].given[which][0] + now % 4 * 4, 4);
  __syncwarp();
}
static void load_turned(u32 r[4], u32 at) {
  int which;
  Fiber* warp = share(which, at);
  for (int i = 0; i < 8; ++i)
    memcpy((u16*)r + i, memory + warp[i / 2 * 8 + now % 4 * 2 + i % 2].given[which][0] + now % 32 / 4 * 2, 2);
  __syncwarp();
}

struct Half {
  static u32 bits(float v) { _Float16 h = (_Float16)v; u16 b; memcpy(&b, &h, 2); return b; }
  static u32 pack(float low, float high) { return bits(low) | bits(high) << 16; }
  static double value(u64 two, int which) { u16 b = (u16)(two >> which * 16); _Float16 h; memcpy(&h, &b, 2); return h; }
  static void multiply(float c[4], const u32 a[4], u32 b0, u32 b1) {
    int at;
    Fiber* warp = share(at, a[0], a[1], a[2], a[3], b0, b1);
    for (int i = 0; i < 4; ++i) {
      double sum = c[i];
      for (int k = 0; k < 16; ++k)
        sum += value(warp[now % 32 / 4 * 4 + k % 8 / 2].given[at][i / 2 + k / 8 * 2], k % 2) *
               value(warp[(now % 4 * 2 + i % 2) * 4 + k % 8 / 2].given[at][4 + k / 8], k % 2);
      c[i] = (float)sum;
    }
    __syncwarp();
  }
};
