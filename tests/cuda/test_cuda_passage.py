"""Matrices that pass through a GPU are those that stay there, whatever else is computed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import FileError
from quire.ops.passing import PIECE, ROOMS
from quire.weights.open_file import OpenFile, Stored
from quire.weights.quant import GGMLType

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)


def part(kind: GGMLType, rows: int, cols: int) -> tuple[int, int, int, Any]:
    """Rows of a type, of random bytes."""
    return int(kind), rows, cols, RNG.integers(0, 256, kind.nbytes((rows, cols))).astype(np.uint8)


MATRICES = [
    [part(GGMLType.Q4_K, 4096, 2560), part(GGMLType.Q4_K, 40, 2560), part(GGMLType.Q6_K, 24, 2560)],
    [part(GGMLType.Q8_0, 100, 256)],
    [part(GGMLType.BF16, 4096, 2048)],
]  # fmt: skip
assert MATRICES[2][0][3].nbytes > PIECE


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Whether matrices have the same bytes."""
    pairs = zip(found, wanted, strict=True)
    both = [two for m, w in pairs for two in zip(m.segments, w.segments, strict=True)]
    return all(torch.equal(a.q.view(torch.uint8), b.q.view(torch.uint8)) for a, b in both)


def in_a_file(path: Path) -> list[list[Any]]:
    """The same parts, the bytes of each in pieces of a file that it is read from."""
    path.write_bytes(b"".join(part[3].tobytes() for parts in MATRICES for part in parts))
    file, at, found = OpenFile(path, FileError, ".bin"), 0, []
    for parts in MATRICES:
        found.append([])
        for kind, rows, cols, data in parts:
            cuts = 4 if rows % 64 == 0 else 1  # as experts are
            whole, size = Stored(file, at, data.size, "a part"), data.size // cuts
            at += data.size
            for i in range(cuts):
                part = whole[i * size : (i + 1) * size]
                found[-1].append((kind, rows // cuts, cols, part))
    return found


def check(ops: Any, passage: Any, turns: int, path: Path) -> None:
    """Fills one room after the other while the other is used, from memory or from a file."""
    wanted = [ops.pack(parts) for parts in MATRICES]
    order = [MATRICES, in_a_file(path)[::-1]]
    for turn in range(turns):
        room, parts = turn % ROOMS, order[turn % 3 % 2]
        made = passage.fill(room, lambda parts=parts: [passage.ops.pack(each) for each in parts])
        with passage.use(room):
            assert same(made if parts is MATRICES else made[::-1], wanted), turn
            first = passage._rooms[room].data_ptr()
            for matrix in made:
                for segment in matrix.segments:
                    assert first <= segment.q.data_ptr() < first + passage._size
    passage.close()


class Stand:
    """A stream or an event of a GPU that is not there."""

    def __init__(self, *_: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


def test_rooms_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is packed where, with the host in place of the GPU."""
    pytest.importorskip("triton")
    from quire.ops.cuda import CudaOps, Machine
    from quire.ops.cuda.passing import CudaPassage

    empty = torch.empty
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, Stand)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", Stand)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    ops = CudaOps(Machine(None))
    check(ops, CudaPassage(ops, 40 << 20), 4, tmp_path / "w.bin")
    assert ops.machine.ring is None


@pytest.mark.gpu
def test_rooms_while_the_gpu_is_busy(tmp_path: Path) -> None:
    """On streams of their own; what was packed before goes on being used."""
    from quire.ops.cuda import CudaOps, Machine

    ops: Any = CudaOps(Machine(0))
    before = ops.machine.weights
    busy = torch.ones((4096, 4096), device="cuda")
    for _ in range(50):
        busy = busy @ busy
    check(ops, ops.passage(40 << 20), 9, tmp_path / "w.bin")
    assert ops.machine.weights == before  # others' memory, and gone
