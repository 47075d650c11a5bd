"""How much Python one decode step is: calls, and modules that are entered."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import quire
from tests import tiny
from tests.model_folders import model_folder

pytestmark = pytest.mark.host
ROOT = str(Path(quire.__file__).parent)


def counted(llm: quire.LLM, n_sequences: int) -> tuple[int, int]:
    """Calls and quire's modules of the median of some steps in which everybody generates."""
    streams = [
        llm.stream([i + 3, 4, 5], max_tokens=60, ignore_eos=True) for i in range(n_sequences)
    ]
    for stream in streams:
        next(stream)
    found = []
    for _ in range(9):
        entered: list[str] = []

        def count(frame: FrameType, event: str, _: Any, entered: list[str] = entered) -> None:
            if event == "call":
                entered.append(frame.f_code.co_filename)

        sys.setprofile(count)
        try:
            llm.engine.step()
        finally:
            sys.setprofile(None)
        found.append((len(entered), len({name for name in entered if name.startswith(ROOT)})))
    for stream in streams:
        stream.close()
    return sorted(found)[len(found) // 2]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=512))
    return made


def test_a_dense_step(dense: Path) -> None:
    with quire.load(dense) as llm:
        calls, modules = counted(llm, 1)
    assert calls <= 86 and modules <= 19


def test_a_hybrid_step(tmp_path: Path) -> None:
    with quire.load(model_folder("tiny-hybrid", tmp_path)) as llm:
        calls, modules = counted(llm, 1)
    assert calls <= 140 and modules <= 26


def test_calls_grow_slowly_with_the_batch(dense: Path) -> None:
    with quire.load(dense) as llm:
        one, _ = counted(llm, 1)
        many, _ = counted(llm, 64)
    assert (many - one) / 63 <= 25
