"""Native recurrent kernels without a GPU: compiled for the host, where threads take turns."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from quire.ops.cuda import nvrtc, recur_native
from quire.ops.cuda.machine import Machine

HERE = Path(__file__).parent
KERNELS = {"decode": "RecurArgs", "relate": "RecurArgs", "recur": "RecurArgs", "fold": "FoldArgs"}
COMPILER = shutil.which("g++")


class Kernel:
    """One of them, as `nvrtc.Kernel` is launched."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._run = getattr(library, f"run_{name}")

    def launch(self, stream: int, grid: tuple[int, ...], shared: int, args: Any) -> None:
        assert shared <= 1 << 18
        self._run(*grid, shared, ctypes.byref(args))


@cache
def library(**shape: int) -> ctypes.CDLL:
    """All of them for one shape of layer."""
    folder = Path(mkdtemp())
    source = '#include "emulated.h"\n' + nvrtc.source_of(["recur"])
    source += "float4 shared_memory[1 << 14];\n"
    for name, args in KERNELS.items():
        source += f'extern "C" void run_{name}(int x, int y, int z, int shared, const {args}* a) '
        source += f"{{ Launch<{args}>::grid({name}, x, y, z, shared, a); }}\n"
    (folder / "recur.cpp").write_text(source)
    defines = [f"-D{name}={value}" for name, value in shape.items()]
    made = folder / "recur.so"
    run = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off",
           f"-I{HERE}", *defines, folder / "recur.cpp", "-o", made]  # fmt: skip
    subprocess.run([str(part) for part in run], check=True)
    return ctypes.CDLL(str(made))


def kernel_of(machine: Machine, layer: Any, name: str, columns: int = 16) -> Any:
    """Takes the place of `recur_native.kernel_of`."""
    return Kernel(
        library(
            DK=layer.dk, DV=layer.dv, HEADS=layer.heads, K_HEADS=layer.k_heads,
            TILED=int(layer.tiled), DELTA=int(layer.kind == "delta"), COLUMNS=columns,
        ),
        name,
    )  # fmt: skip


takes = recur_native.takes


def takes_too(machine: Machine, layer: Any, log_tokens: int) -> bool:
    """Takes the place of `recur_native.takes`."""
    described: Any = type("Described", (), {"interpreted": False})()
    return takes(described, layer, log_tokens)
