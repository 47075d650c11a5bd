// Quantised weights as the float16 that products make of them, row-major: for prompts, whose tiles
// would unpack each weight again and again. A warp takes a unit.

struct ExpandArgs {
  const u8* w;
  u16* out;
  int rows, cols;
};

extern "C" __global__ void __launch_bounds__(THREADS) expand(const __grid_constant__ ExpandArgs a) {
  typedef WEIGHTS W;
  __shared__ __align__(16) u16 room[THREADS / 32][16][UNIT + 8];
  let_next_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int units = (a.cols + UNIT - 1) / UNIT, unit = blockIdx.y * (THREADS / 32) + warp;
  if (unit < units) {
    const typename W::Raw raw = W::read(a.w + ((u64)blockIdx.x * units + unit) * W::bytes, lane);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      u32 w[4];
      W::operand(raw, s, w);
#pragma unroll
      for (int i = 0; i < 4; ++i) *(u32*)&room[warp][g + i % 2 * 8][s * 16 + i / 2 * 8 + t * 2] = w[i];
    }
    __syncwarp();
  }
  wait_for_previous();  // which may still read what `out` held before
  if (unit >= units) return;
  const bool whole = a.cols % 8 == 0;
  for (int i = lane; i < 16 * UNIT / 8; i += 32) {
    int r = i / (UNIT / 8), c = i % (UNIT / 8) * 8, row = blockIdx.x * 16 + r, col = unit * UNIT + c;
    if (row >= a.rows || col >= a.cols) continue;
    u16* to = a.out + (u64)row * a.cols + col;
    if (whole) {
      *(uint4*)to = *(const uint4*)&room[warp][r][c];
    } else {
      for (int j = 0; j < 8 && col + j < a.cols; ++j) to[j] = room[warp][r][c + j];
    }
  }
}
