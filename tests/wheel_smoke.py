"""Runs a small model with the quire that is installed, on every instruction set of the machine.

Not a test of its own: whoever has built a wheel calls it where the wheel was installed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import quire  # before the source tree is looked at, so that it is the installed one
from quire.ops import _cpu
from quire.ops.cpu import CpuOps

sys.path.append(str(Path(__file__).parents[1]))

from tests import tiny


def main() -> None:
    """Fails where something does; says what ran."""
    installed = Path(quire.__file__).parent
    assert installed != Path(__file__).parents[1] / "quire", "this is the source tree's own"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        tiny.write(path, tiny.Tiny())
        with quire.load(path) as llm:
            made = llm.generate("hello", max_tokens=8)
            logits = llm.logits([1, 2, 3, 4])
            assert len(made.token_ids) > 0 and np.isfinite(logits).all()
            best = llm.ops.name
        with quire.load(path, device="reference") as llm:
            assert np.abs(llm.logits([1, 2, 3, 4]) - logits).max() < 0.3
    assert CpuOps(1, isa="portable").name and _cpu.Cpu(1).isa in best
    print(f"quire {quire.__version__} in {installed}: {best}")


if __name__ == "__main__":
    main()
