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
extern "C" bool run(const void* given, int x, int y, int z, int cluster, int seed, bool wait) {
  srand(seed), late = wait;
  arguments = given, blocks = cluster, gridDim = {(unsigned)x, (unsigned)y, (unsigned)z};
  std::vector<int> order(x * y * z / blocks);
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = i, std::swap(order[i], order[rand() % (i + 1)]);
  for (const int block : order) {
    for (auto& of : meetings)
      for (auto& each : of) each.clear();
    for (int i = 0; i < blocks; ++i) {
      memset(rooms[i], 0xff, ROOM);
      const int z = block / x / y * blocks + i;
      places[i] = {(unsigned)(block % x), (unsigned)(block / x % y), (unsigned)z};
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

    def resident(self, shared: int) -> int:
        """Blocks that fit."""
        return int(shared <= 256 << 10)

    def launch(
        self, stream: int, grid: tuple[int, int, int], shared: int, arguments: ctypes.Structure,
        cluster: int = 1,
    ) -> None:  # fmt: skip
        """Runs it to its end; every other time, copies are made as late as they may be."""
        how = *grid, cluster, stream, bool(stream % 2)
        assert self._run(ctypes.byref(arguments), *how), "threads wait for each other"


@cache
def _compiled(folder: Path, files: tuple[str, ...], name: str, **defines: object) -> ctypes.CDLL:
    """A kernel of these files with these definitions; common.cu is the header's."""
    source = _without_assembly(nvrtc.source_of(files[1:]))
    source = source.replace("extern __shared__ __align__(128) u8 memory[];", "")
    text = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    run = RUN.replace("KERNEL", name).replace("ARGUMENTS", f"{name.capitalize()}Args")
    text += f'#include "{HEADER}"\n{source}{run}'
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    options = ["-O1", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-x", "c++", "-"]
    subprocess.run(["c++", *options, "-o", str(path)], input=text.encode(), check=True)
    return ctypes.CDLL(str(path))


class HostNative:
    """What `nvrtc.Native` is on a GPU."""

    processors, clusters = 4, True

    def __init__(self, folder: Path) -> None:
        self._folder, self._asked = folder, 0

    def kernel(
        self, files: tuple[str, ...], name: str, threads: int, **defines: object
    ) -> HostKernel:
        """A kernel of these files with these definitions."""
        return HostKernel(_compiled(self._folder, files, name, **defines))

    @property
    def stream(self) -> int:
        """Another one each time: what threads do in which order follows it."""
        self._asked += 1
        return self._asked
