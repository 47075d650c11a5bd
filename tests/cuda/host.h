// CUDA C++ on the host, in place of csrc/common.cu: the threads of a block, or of a cluster's blocks, are fibers
// that take turns in random order. What lanes do together waits for all lanes. Copies that a kernel does not wait
// for happen at once or as late as they may (`late`), so that a missing wait and a missing barrier both show; until
// then, and when a block starts, memory is NaN.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
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
struct uint2 { u32 x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
struct Place { unsigned x, y, z; };

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __align__(n)
#define __launch_bounds__(...)
#define __grid_constant__

constexpr int THREADS = 256, UNIT = 64, MOST = 8, ROOM = 256 << 10;

struct Copy { u32 to; const void* from; int size; };  // from null: zeros

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool ended;
  int waits;   // for the lanes of its warp, its block, its cluster; -1: for nobody
  int met[3];  // how often it came to them
  u64 given[2][6];  // to the lanes of its warp
  std::deque<std::vector<Copy>> copies;
  std::vector<Copy> open;
};

static Fiber fibers[MOST * THREADS];
static ucontext_t scheduler;
static u8 rooms[MOST][ROOM] __attribute__((aligned(128)));
static Place places[MOST], gridDim;
static int now, threads, blocks, ended;  // threads of a block, blocks of a cluster
static bool late;
static std::vector<int> meetings[3][MOST * THREADS / 32];

static Place thread() { return {(unsigned)(now % threads), 0, 0}; }
#define threadIdx thread()
#define blockIdx places[now / threads]
#define memory rooms[now / threads]
#define shared_memory ((float4*)memory)

// Whether all fibers of its warp, block or cluster came as often as this one; who ended is not waited for.
static bool met_all(int i, int kind) {
  const int sizes[3] = {32, threads, blocks * threads}, size = sizes[kind];
  return meetings[kind][i / size][fibers[i].met[kind] - 1] + (kind == 2 ? ended : 0) >= size;
}
static void meet(int kind, int size) {
  auto& arrived = meetings[kind][now / size];
  const size_t time = fibers[now].met[kind]++;
  if (arrived.size() <= time) arrived.resize(time + 1);
  ++arrived[time];
  fibers[now].waits = kind;
  if (!met_all(now, kind)) swapcontext(&fibers[now].context, &scheduler);
  fibers[now].waits = -1;
}
static void __syncwarp() { meet(0, 32); }
static void __syncthreads() { meet(1, threads); }
static void meet_cluster() { meet(2, blocks * threads); }
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
static int __float_as_int(float v) { return (int)__float_as_uint(v); }
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
static float rsqrtf(float a) { return 1.0f / sqrtf(a); }
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
  if (c.from) memcpy(memory + c.to, c.from, c.size);
  else memset(memory + c.to, 0, c.size);
}
static void begin_copy(u32 to, const void* from, int size) {
  if (to % size || (u64)from % size) fprintf(stderr, "a copy is not aligned\n"), abort();
  memset(memory + to, 0xff, size);
  if (late) fibers[now].open.push_back({to, from, size});
  else copy({to, from, size});
}
static void copy4(u32 to, const void* from) { begin_copy(to, from, 4); }
static void copy16(u32 to, const void* from) { begin_copy(to, from, 16); }
static void copy16_if(u32 to, const void* from, bool inside) { begin_copy(to, inside ? from : nullptr, 16); }
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
  static constexpr bool scaled = true;
  static float low(u32 two) { return (float)value(two, 0); }
  static float high(u32 two) { return (float)value(two, 1); }
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

struct Bfloat {
  static constexpr bool scaled = false;
  static float low(u32 two) { return __int_as_float(two << 16); }
  static float high(u32 two) { return __int_as_float(two & 0xffff0000u); }
  static u32 bits(float v) { u32 b = __float_as_uint(v); return (b + 0x7fff + (b >> 16 & 1)) >> 16; }
  static u32 pack(float low, float high) { return bits(low) | bits(high) << 16; }
};

// Two float16 in a word, as weights.cu computes with them; products and sums of two are exact in double.
static u32 fma2(u32 a, u32 b, u32 c) {
  auto one = [&](int i) { return (float)(Half::value(a, i) * Half::value(b, i) + Half::value(c, i)); };
  return Half::pack(one(0), one(1));
}
static u32 sub2(u32 a, u32 b) { return fma2(a, 0x3c003c00, b ^ 0x80008000); }
static u32 mul2(u32 a, u32 b) { return fma2(a, b, 0x80008000); }
static u32 low_twice(u32 word) { return (word & 0xffff) * 0x10001; }
static u32 high_twice(u32 word) { return (word >> 16) * 0x10001; }
template <u32 MASK> static u32 masked_1024(u32 word) { return (word & MASK) | 0x64006400; }
static u32 __byte_perm(u32 a, u32 b, u32 which) {
  u32 made = 0;
  for (int i = 0; i < 4; ++i) made |= (u32)(((u64)b << 32 | a) >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return made;
}

static float4 row4(const float* row, int at, int cols) {
  float v[4] = {};
  for (int i = 0; i < 4 && at + i < cols; ++i) v[i] = row[at + i];
  return {v[0], v[1], v[2], v[3]};
}
static float activate(int, float gate, float up) { return gate / (1 + exponential(-gate)) * up; }
static float4 activate4(int act, float4 g, float4 u) {
  return {activate(act, g.x, u.x), activate(act, g.y, u.y), activate(act, g.z, u.z), activate(act, g.w, u.w)};
}

// ---- launches ---------------------------------------------------------------------------------------

static void (*body)(const void*);
static const void* arguments;

static void start() {
  body(arguments);
  fibers[now].ended = true;
  swapcontext(&fibers[now].context, &scheduler);
}

// Blocks that run at once, until all have ended; false if nobody can go on.
static bool run_blocks() {
  for (auto& of : meetings)
    for (auto& each : of) each.clear();
  for (int i = 0; i < blocks; ++i) memset(rooms[i], 0xff, ROOM);
  for (int i = 0; i < blocks * threads; ++i) {
    Fiber& f = fibers[i];
    f.ended = false, f.waits = -1, f.met[0] = f.met[1] = f.met[2] = 0;
    f.copies.clear(), f.open.clear();
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
    makecontext(&f.context, start, 0);
  }
  ended = 0;
  for (int idle = 0; ended < blocks * threads;) {
    const int before = ended, warp = rand() % (blocks * threads / 32);
    for (int turns = 1 + rand() % 4; turns; --turns)
      for (now = warp * 32; now < warp * 32 + 32; ++now)
        if (!fibers[now].ended && (fibers[now].waits < 0 || met_all(now, fibers[now].waits))) {
          const int me = now;
          swapcontext(&scheduler, &fibers[now].context);
          now = me, ended += fibers[now].ended;
        }
    idle = ended == before ? idle + 1 : 0;
    if (idle > 1 << 22) return false;
  }
  return true;
}

// A grid in random order; `cluster` blocks of one x and y run at once.
static bool launch(void (*kernel)(const void*), const void* given, int size, int x, int y, int z, int cluster, int seed) {
  srand(seed), late = seed % 2;
  body = kernel, arguments = given, threads = size, blocks = cluster;
  gridDim = {(unsigned)x, (unsigned)y, (unsigned)z};
  std::vector<int> order(x * y * z / blocks);
  for (int i = 0; i < (int)order.size(); ++i) order[i] = i, std::swap(order[i], order[rand() % (i + 1)]);
  for (const int block : order) {
    for (int i = 0; i < blocks; ++i)
      places[i] = {(unsigned)(block % x), (unsigned)(block / x % y), (unsigned)(block / x / y * blocks + i)};
    if (!run_blocks()) return false;
  }
  return true;
}
