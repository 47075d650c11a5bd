"""Kernels with a fault each, for `sanitize.sh` to find: what finds none of these finds nothing.

python tests/cuda/planted.py outside|race
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

RACE = r"""
extern "C" __global__ void race(int* out) {
    __shared__ int shared[64];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[(threadIdx.x + 32) % 64];  // what another warp may not have written
}
"""


@triton.jit
def outside(values, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes one value behind the end."""
    at = tl.arange(0, BLOCK)
    tl.store(values + at, at, mask=at <= n)


def main() -> None:
    """Runs one of them."""
    if sys.argv[1] == "outside":
        outside[(1,)](torch.zeros(512, dtype=torch.int32, device="cuda"), 512, BLOCK=1024)
    else:
        kernel = torch.cuda._compile_kernel(RACE, "race")  # type: ignore[attr-defined]
        kernel((1, 1, 1), (64, 1, 1), (torch.zeros(64, dtype=torch.int32, device="cuda"),))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
