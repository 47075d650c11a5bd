"""Kernels compile for the architectures that are supported, with no GPU at hand.

Recurrent ones in CUDA C++ keep a state in registers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.cuda import nvrtc, recur_native
from quire.ops.cuda.machine import OLDEST
from tests.cuda.launches import wanted
from tests.cuda.test_cuda_native import registers, stack

SCRIPT = r"""
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.ops.cuda.kernels import fold, recur

POINTERS = {"x", "mixed", "out", "a_log", "dt_bias", "skip", "weight", "bias"}


def type_of(name):
    if name in POINTERS:
        return "*fp32"
    if name in ("states", "logs"):
        return "i64"
    if name.startswith(("seq_", "row_")) or name in ("state_in", "log", "n_entries", "state_out"):
        return "*i32"
    return {"offsets": "*i64", "dt_low": "fp32", "dt_high": "fp32"}.get(name, "i32")


def compiled(kernel, warps, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
                 if name not in constants and signature[name] != "fp32"}
    source = ASTSource(kernel, signature, constants, divisible)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


shape = {"HEADS": 48, "K_HEADS": 16, "TILED": False, "DK": 128, "DV": 128, "DKP": 128, "BV": 32,
         "LOG": 16}
for delta in (False, True):
    made = compiled(recur.recur, 4, **shape, DELTA=delta)
    assert "ld.global.v4" in made.asm["ptx"] and len(made.asm["cubin"]) > 0
compiled(fold.fold, 4, **shape)
compiled(fold.fold_tail, 4, WIDTH=4, BLOCK=512)
for gated in (False, True):
    compiled(recur.mix, 1, WIDTH=4, BLOCK=128, BIAS=gated, GATED=gated)
"""


@pytest.mark.parametrize("architecture", [10 * OLDEST[0] + OLDEST[1], 90, 100])
def test_recurrent_kernels_compile(architecture: int) -> None:
    compiling("-c", SCRIPT, str(architecture))


def test_kernels_compile_as_they_are_launched() -> None:
    """All but those of recurrent layers, and a few that are only for whole steps."""
    found = compiling(str(Path(__file__).with_name("compile_all.py")), "90").split()
    launched = {name.replace("/", " ") for name in found}
    elsewhere = {name for name in wanted() if name.startswith(("recur.py", "fold.py"))}
    steps = {"rows.py follow", "rows.py take"}
    assert not {name for name in wanted() if ".py " in name} - launched - elsewhere - steps


def compiling(*script: str) -> str:
    """What a script prints that compiles kernels, rather than interpreting them."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    run = [sys.executable, *script]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


SHAPES = {
    "Qwen3.5 27B": {"DK": 128, "DV": 128, "HEADS": 48, "K_HEADS": 16, "TILED": 0, "DELTA": 1},
    "Mamba-2": {"DK": 128, "DV": 64, "HEADS": 24, "K_HEADS": 1, "TILED": 0, "DELTA": 0},
    "wide": {"DK": 256, "DV": 128, "HEADS": 16, "K_HEADS": 16, "TILED": 0, "DELTA": 1},
    "small": {"DK": 32, "DV": 16, "HEADS": 4, "K_HEADS": 2, "TILED": 1, "DELTA": 1},
}


@pytest.mark.skipif(not nvrtc.has_compiler(), reason="there is no NVRTC")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("shape", SHAPES)
def test_native_kernels_keep_states_in_registers(shape: str, architecture: str) -> None:
    columns = min(SHAPES[shape]["DV"], (1 << 14) // SHAPES[shape]["DK"])
    more = {"COLUMNS": columns, "EACH": 2, "WIDTH": 4, "TOKENS": 4}
    defines: dict[str, object] = {**SHAPES[shape], **more}
    for kernel, file in recur_native.FILES.items():
        source = nvrtc.source_of(["common", "recur", f"recur_{file}"])
        code = nvrtc.compile_source(source, architecture, defines)
        assert set(registers(code)) == {kernel}
        assert stack(code) == 0
