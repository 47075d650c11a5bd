// Quantised weights as the float16 that products make of them, row-major: for prompts, whose tiles
// would unpack each weight again and again. A warp takes some units; all are on their way at once.

struct ExpandArgs {
  const u8* w;
  u16* out;
  int rows, cols;
  int bfloat;  // rounded on to bfloat16
};

constexpr int UNITS = 4;

extern "C" __global__ void __launch_bounds__(THREADS) expand(const __grid_constant__ ExpandArgs a) {
  typedef WEIGHTS W;
  __shared__ __align__(16) u16 room[THREADS / 32][16][UNIT + 8];
  let_next_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 units = (a.cols + UNIT - 1) / UNIT, all = (a.rows + 15) / 16 * units;
  const u32 first = (blockIdx.x * (THREADS / 32) + warp) * UNITS;
  typename W::Raw raw[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; ++i)
    if (first + i < all) raw[i] = W::read(a.w + (u64)(first + i) * W::bytes, lane);
  wait_for_previous();  // which may still read what `out` held before
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    if (first + i >= all) break;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      u32 w[4];
      W::operand(raw[i], s, w);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (a.bfloat) w[j] = to_bfloat2(Half::low(w[j]), Half::high(w[j]));
        *(u32*)&room[warp][g + j % 2 * 8][s * 16 + j / 2 * 8 + t * 2] = w[j];
      }
    }
    __syncwarp();
    const u32 tile = (first + i) / units, unit = (first + i) % units;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int r = k * 4 + lane / 8, c = lane % 8 * 8, row = tile * 16 + r, col = unit * UNIT + c;
      if (row >= a.rows || col >= a.cols) continue;
      u16* to = a.out + (u64)row * a.cols + col;
      if (a.cols % 8 == 0) {
        *(uint4*)to = *(const uint4*)&room[warp][r][c];
      } else {
        for (int j = 0; j < 8 && col + j < a.cols; ++j) to[j] = room[warp][r][c + j];
      }
    }
    __syncwarp();
  }
}
