"""CUDA C++ kernels on the host, thread by thread: slow, but their indices and barriers are real."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from quire.ops.cuda import nvrtc

HERE = Path(__file__).parent
COMPILER = shutil.which("c++")
KERNEL = re.compile(r'extern "C" __global__ .*? (\w+)\(const (?:__grid_constant__ )?(\w+) a\)')
RUN = """
extern "C" bool run_{0}(const void* given, int threads, int x, int y, int z, int cluster, int seed) {{
  return launch([](const void* a) {{ {2}::{0}(*(const {2}::{1}*)a); }}, given, threads, x, y, z, cluster, seed);
}}
"""  # noqa: E501


def _without_assembly(source: str) -> str:
    """Functions that the header has in place of those in assembly."""
    kept = re.split(r"(?m)^(?=__device__ |struct |// |constexpr |extern )", source)
    return "".join(part for part in kept if "asm" not in part.split("\n}\n")[0])


@cache
def _compiled(files: tuple[str, ...], **defines: object) -> ctypes.CDLL:
    """All kernels of these files; what is in common.cu, the header has."""
    folder = Path(mkdtemp())
    source = _without_assembly(nvrtc.source_of(files[1:]))
    source = re.sub(r"extern __shared__ .*\n", "", source)
    source = re.sub(
        r"(?ms)^#ifdef (\w+)\n.*?^#endif\n", lambda m: m[0] if m[1] in defines else "", source
    )
    space = folder.name  # its own: what templates hold, libraries of one process would share
    runs = "".join(RUN.format(*kernel, space) for kernel in KERNEL.findall(source))
    text = f'#include "host.h"\nnamespace {space} {{\n{source}}}\n{runs}'
    (folder / "kernels.cpp").write_text(text)
    options = ["-O1", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{HERE}"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    made = folder / "kernels.so"
    run = [str(COMPILER), *options, str(folder / "kernels.cpp"), "-o", str(made)]
    subprocess.run(run, check=True)
    return ctypes.CDLL(str(made))


class HostKernel:
    """One kernel, compiled for the host."""

    def __init__(self, run: Any, threads: int) -> None:
        self._run, self._threads = run, threads
        run.restype = ctypes.c_bool

    def resident(self, shared: int) -> int:
        """Blocks that fit."""
        return min((256 << 10) // max(shared, 1), 2)

    def launch(
        self, stream: int, grid: tuple[int, int, int], shared: int, arguments: ctypes.Structure,
        cluster: int = 1,
    ) -> None:  # fmt: skip
        """Runs it to its end; every other time, copies are made as late as they may be."""
        assert self.resident(shared)
        given = ctypes.byref(arguments), self._threads, *grid, cluster, stream
        assert self._run(*given), "threads wait for each other"


class HostNative:
    """What `nvrtc.Native` is on a GPU."""

    clusters = True
    most_shared = 227 << 10

    def __init__(self, processors: int) -> None:
        self.processors = processors
        self.asked: list[str] = []
        """Kernels, each time that one is launched."""

    def kernel(
        self, files: tuple[str, ...], name: str, threads: int, **defines: object
    ) -> HostKernel:
        """A kernel of these files with these definitions."""
        self.asked.append(name)
        return HostKernel(getattr(_compiled(files, **defines), f"run_{name}"), threads)

    @property
    def stream(self) -> int:
        """Another one each time: what threads do in which order follows it."""
        return len(self.asked)
