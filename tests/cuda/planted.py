"""Kernels with a fault each, for `sanitize.sh` to find: what finds none of these finds nothing.

python tests/cuda/planted.py outside|race
"""

from __future__ import annotations

import ctypes
import sys

import torch
import triton
import triton.language as tl

from quire.ops.cuda import nvrtc
from quire.ops.cuda.driver import call

RACE = r"""
struct RaceArgs { int* out; };

extern "C" __global__ void race(const RaceArgs a) {
  extern __shared__ int shared[];
  shared[threadIdx.x] = threadIdx.x;
  a.out[threadIdx.x] = shared[(threadIdx.x + 32) % 64];  // what another warp may not have written
}
"""


class Race(ctypes.Structure):
    """RaceArgs."""

    _fields_ = (("out", ctypes.c_void_p),)


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
        out, module = torch.zeros(64, dtype=torch.int32, device="cuda"), ctypes.c_void_p()
        here = nvrtc.native(torch.device("cuda", 0))
        code = nvrtc.compile_source(RACE, here.architecture, {})
        call("cuModuleLoadData", ctypes.byref(module), code)
        kernel = nvrtc.Kernel(module, "race", 64, 1024, early=False)
        kernel.launch(here.stream, (1, 1, 1), 256, Race(out.data_ptr()))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
