"""CUDA C++ kernels on the host, thread by thread: slow, but their indices and barriers are real."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from quire.ops.cuda import nvrtc

HEADER = Path(__file__).with_name("host.h")
RUN = r"""
static const void* arguments;
static void start() {
  KERNEL(*(const ARGUMENTS*)arguments);
  fibers[now].ended = true;
  swapcontext(&fibers[now].context, &scheduler);
}

// Runs blocks in random order, those of a cluster at once; false if nobody can go on.
extern "C" bool run(const void* given, int x, int y, int z, int cluster, int seed) {
  srand(seed);
  arguments = given, blocks = cluster, gridDim = {(unsigned)x, (unsigned)y, (unsigned)z};
  std::vector<int> order(x * y * z / blocks);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i, std::swap(order[i], order[rand() % (i + 1)]);
  for (const int block : order) {
    for (auto& of : meetings)
      for (auto& each : of) each.clear();
    for (int i = 0; i < blocks; ++i) {
      memset(rooms[i], 0xff, ROOM);
      places[i] = {(unsigned)(block % x), (unsigned)(block / x % y), (unsigned)(block / x / y * blocks + i)};
    }
    for (int i = 0; i < blocks * THREADS; ++i) {
      Fiber& f = fibers[i];
      f.ended = false, f.met[0] = f.met[1] = f.met[2] = 0;
      f.copies.clear(), f.open.clear();
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
      makecontext(&f.context, start, 0);
    }
    ended = 0;
    for (int turn = 0, idle = 0; ended < blocks * THREADS; ++turn) {
      const int before = ended, warp = rand() % (blocks * THREADS / 32);
      for (int turns = 1 + rand() % 4; turns; --turns)
        for (now = warp * 32; now < warp * 32 + 32; ++now)
          if (!fibers[now].ended) {
            const int me = now;
            swapcontext(&scheduler, &fibers[now].context);
            now = me, ended += fibers[now].ended;
          }
      idle = ended == before ? idle + 1 : 0;
      if (idle > 1 << 22) return false;
    }
  }
  return true;
}
"""


@cache
def has_compiler() -> bool:
    """Whether C++ can be compiled here."""
    try:
        return subprocess.run(["c++", "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def _without_assembly(source: str) -> str:
    """Functions that the header has in place of those in assembly."""
    kept = re.split(r"(?m)^(?=__device__ |struct |// |constexpr |extern )", source)
    return "".join(part for part in kept if "asm" not in part.split("\n}\n")[0])


class HostKernel:
    """One kernel, compiled for the host."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run: Callable[..., Any] = library.run
        self._run.restype = ctypes.c_bool
        self.launched = 0

    def resident(self, shared: int) -> int:
        """Blocks that fit."""
        return int(shared <= 256 << 10)

    def launch(
        self, stream: int, grid: tuple[int, int, int], shared: int, arguments: ctypes.Structure,
        cluster: int = 1,
    ) -> None:  # fmt: skip
        """Runs it to its end."""
        self.launched += 1
        assert self._run(ctypes.byref(arguments), *grid, cluster, self.launched), "a barrier hangs"


class HostNative:
    """What `nvrtc.Native` is on a GPU."""

    processors, clusters, stream = 4, True, 0

    def __init__(self, folder: Path, late: bool) -> None:
        self._folder, self._late = folder, late
        self._kernels: dict[str, HostKernel] = {}

    def kernel(
        self, files: tuple[str, ...], name: str, threads: int, **defines: object
    ) -> HostKernel:
        """A kernel of these files with these definitions; common.cu is the header's."""
        given = {**defines, "LATE": int(self._late)}
        source = _without_assembly(nvrtc.source_of(files[1:]))
        source = source.replace("extern __shared__ __align__(128) u8 memory[];", "")
        text = "".join(f"#define {key} {value}\n" for key, value in given.items())
        run = RUN.replace("KERNEL", name).replace("ARGUMENTS", f"{name.capitalize()}Args")
        text += f'#include "{HEADER}"\n{source}{run}'
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key not in self._kernels:
            path = self._folder / f"{key}.so"
            options = ["-O1", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
            command = ["c++", *options, "-x", "c++", "-", "-o", str(path)]
            subprocess.run(command, input=text.encode(), check=True)
            self._kernels[key] = HostKernel(ctypes.CDLL(str(path)))
        return self._kernels[key]
