"""Models in several files: read as one, or refused with what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quire
from quire.errors import GGUFError
from quire.models.registry import open_weights
from tests import tiny
from tests.gguf_writer import Typed, ValueType, write_gguf, write_split

MODEL = tiny.Tiny()


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return write_split(tmp_path, "m", 3, tiny.metadata(MODEL), tiny.weights(MODEL))


def keys(number: int, count: int) -> dict[str, Typed]:
    return {
        "split.no": Typed(ValueType.UINT16, number),
        "split.count": Typed(ValueType.UINT16, count),
    }


def test_parts_are_the_whole(parts: list[Path], tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    tiny.write(whole, MODEL)
    with open_weights(parts[0]) as split, open_weights(whole) as one:
        assert set(split.tensors) == set(one.tensors)
        assert dict(split.metadata).keys() == dict(one.metadata).keys()
        for name in one.tensors:
            assert np.array_equal(split.data(name), one.data(name))
    with quire.load(parts[0]) as a, quire.load(whole) as b:
        assert np.array_equal(a.logits([1, 2, 3]), b.logits([1, 2, 3]))
        assert a.fingerprint == b.fingerprint


def test_a_file_that_was_split_into_one(tmp_path: Path) -> None:
    (path,) = write_split(tmp_path, "m", 1, tiny.metadata(MODEL), tiny.weights(MODEL))
    with open_weights(path) as file:
        assert "token_embd.weight" in file.tensors


def test_only_the_first_part_opens_the_model(parts: list[Path]) -> None:
    with pytest.raises(GGUFError, match=r"part 2 of 3; pass the first, m-00001-of-00003\.gguf"):
        open_weights(parts[1])


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(GGUFError, match=r"1 of its 3 parts are missing: m-00002-of-00003\.gguf"):
        open_weights(parts[0])


def test_a_part_of_another_model(parts: list[Path], tmp_path: Path) -> None:
    write_gguf(parts[2], keys(1, 3), {"x": np.zeros(4, np.float32)})
    with pytest.raises(GGUFError, match="says that it is part 2 of 3, not 3 of 3"):
        open_weights(parts[0])
    write_gguf(parts[2], keys(2, 3), {"x": np.zeros(4, np.float32)})
    with pytest.raises(GGUFError, match="hold 3 tensors together"):
        open_weights(parts[0])
    write_gguf(parts[2], keys(2, 3), {"token_embd.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(GGUFError, match=r"'token_embd\.weight' is in m-00001-of-00003\.gguf"):
        open_weights(parts[0])


def test_a_renamed_part(parts: list[Path]) -> None:
    moved = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(GGUFError, match=r"must be called name-00001-of-00003\.gguf"):
        open_weights(moved)


@pytest.mark.parametrize("count", [513, 65535])
def test_more_parts_than_can_be_opened(tmp_path: Path, count: int) -> None:
    path = write_gguf(tmp_path / f"m-00001-of-{count:05}.gguf", keys(0, count))
    with pytest.raises(GGUFError, match="at most 512"):
        open_weights(path)


def test_a_broken_part_is_refused_and_nothing_stays_open(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(GGUFError, match=r"m-00003-of-00003\.gguf.*fetch it again"):
        open_weights(parts[0])
    assert len(list(Path("/proc/self/fd").iterdir())) == before
