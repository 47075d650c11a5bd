// Weights of 16 rows × 64 columns, as formats.py orders them: to shared memory, and as operands of `mma`.

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// The lower or the upper half of a word, twice: an instruction that takes halves reads it as it is.
__device__ __forceinline__ u32 low_twice(u32 word) {
  u32 d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(word));
  return d;
}

__device__ __forceinline__ u32 high_twice(u32 word) {
  u32 d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(word));
  return d;
}

template <u32 MASK> __device__ __forceinline__ u32 masked_1024(u32 word) {  // (word & MASK) | 1024.0 twice
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(word), "n"(MASK), "n"(0x64006400));
  return d;
}

// 16 rows × 64 columns of quantised weights. Lane (g, t) holds rows g and g+8, columns 2t, 2t+1, 2t+8,
// 2t+9 of each 16: its own operand of `mma`. Behind the levels, for each g: of each group of columns the
// scale (and minimum) of row g, then of row g+8.
template <int BITS, int GROUP, int MINIMUM> struct Quantised {
  typedef Half Type;
  static constexpr bool dense = false;
  static constexpr int levels = 128 * BITS;
  static constexpr int record = 2 * (UNIT / GROUP) * (1 + MINIMUM) * 2;
  static constexpr int bytes = levels + 8 * record;

  // Where a lane's part of a tile's unit lies; the next unit is `step` bytes further.
  static constexpr int step = bytes;
  static __device__ __forceinline__ u64 tile_bytes(int cols) { return (u64)((cols + UNIT - 1) / UNIT) * bytes; }
  static __device__ __forceinline__ const u8* find(const u8* w, u64 tile, int cols, int unit, int lane) {
    return w + (tile * ((cols + UNIT - 1) / UNIT) + unit) * bytes + lane * 16;
  }

  // A unit to shared memory, by one warp.
  static __device__ __forceinline__ void copy(u32 to, const u8* from, int, int, int lane) {
#pragma unroll
    for (int at = 0; at < bytes; at += 512)
      if (at + 512 <= bytes || lane * 16 < bytes - at) copy16(to + at + lane * 16, from + at);
  }

  // One unit or two neighbours.
  static __device__ __forceinline__ void copy_two(u32 to, const u8* from, bool both, int lane) {
    const int end = (both ? 2 * bytes : bytes) - lane * 16;
#pragma unroll
    for (int at = 0; at < 2 * bytes; at += 512)
      if (at < end) copy16(to + at + lane * 16, from + at);
  }

  // What a lane reads of a unit.
  struct Raw {
    uint4 w[BITS / 4];
    u32 factors[record / 4];
  };
  static __device__ __forceinline__ Raw read(const u8* unit, int lane) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < BITS / 4; ++i) raw.w[i] = *(const uint4*)(unit + i * 512 + lane * 16);
    const u8* at = unit + levels + lane / 4 * record;
#pragma unroll
    for (int i = 0; i < record; i += record < 16 ? 8 : 16)
      if (record < 16)
        *(uint2*)(raw.factors + i / 4) = *(const uint2*)(at + i);
      else
        *(uint4*)(raw.factors + i / 4) = *(const uint4*)(at + i);
    return raw;
  }

  // The operand of one of the unit's four steps of 16 columns.
  static __device__ __forceinline__ void operand(const Raw& raw, int s, u32 a[4]) {
    u32 level[4];
    const uint4 w = raw.w[BITS == 4 ? 0 : s / 2];
    if (BITS == 4) {
      u32 word = s == 0 ? w.x : s == 1 ? w.y : s == 2 ? w.z : w.w;
      level[0] = sub2(masked_1024<0x000f000f>(word), 0x64006400);
      level[1] = fma2(masked_1024<0x00f000f0>(word), 0x2c002c00, 0xd400d400);
      word >>= 8;
      level[2] = sub2(masked_1024<0x000f000f>(word), 0x64006400);
      level[3] = fma2(masked_1024<0x00f000f0>(word), 0x2c002c00, 0xd400d400);
    } else {
      u32 low = s % 2 ? w.z : w.x, high = s % 2 ? w.w : w.y;
      level[0] = sub2(__byte_perm(low, 0x64646464, 0x4140), 0x64806480);
      level[1] = sub2(__byte_perm(low, 0x64646464, 0x4342), 0x64806480);
      level[2] = sub2(__byte_perm(high, 0x64646464, 0x4140), 0x64806480);
      level[3] = sub2(__byte_perm(high, 0x64646464, 0x4342), 0x64806480);
    }
    const int group = s * 16 / GROUP;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows g and g+8 by turns
      const u32 both = raw.factors[MINIMUM ? group * 2 + i % 2 : group];
      if (MINIMUM)
        a[i] = fma2(level[i], low_twice(both), high_twice(both));
      else
        a[i] = mul2(level[i], i % 2 ? high_twice(both) : low_twice(both));
    }
  }
};

// 16 rows × 64 columns of row-major weights of 16 bits; chunks of 16 bytes are swizzled by their row.
template <class T> struct Dense {
  typedef T Type;
  static constexpr bool dense = true;
  static constexpr int bytes = 2048;

  static constexpr int step = UNIT * 2;
  static __device__ __forceinline__ u64 tile_bytes(int cols) { return (u64)cols * 16 * 2; }
  static __device__ __forceinline__ const u8* find(const u8* w, u64 tile, int cols, int unit, int lane) {
    return w + ((tile * 16 + lane / 8) * cols + unit * UNIT + lane % 8 * 8) * 2;
  }

  // Rows from `left` on, behind the last one, become zeros.
  static __device__ __forceinline__ void copy(u32 to, const u8* from, int left, int cols, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int r = i * 4 + lane / 8, c = lane % 8;
      copy16_if(to + r * 128 + ((c ^ (r & 7)) << 4), from + (u64)(i * 8) * cols, r < left);
    }
  }

  struct Raw {
    u32 a[4][4];
  };
  static __device__ __forceinline__ Raw read(const u8* unit, int lane) {
    Raw raw;
    int r = lane % 16;
    u32 row = shared_address(unit) + r * 128;
#pragma unroll
    for (int s = 0; s < 4; ++s)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(raw.a[s][0]), "=r"(raw.a[s][1]), "=r"(raw.a[s][2]), "=r"(raw.a[s][3])
                   : "r"(row + (((2 * s + lane / 16) ^ (r & 7)) << 4)) : "memory");
    return raw;
  }
  static __device__ __forceinline__ void operand(const Raw& raw, int s, u32 a[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = raw.a[s][i];
  }
};
