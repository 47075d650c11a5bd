"""Damaged GGUF files: whatever happens to the bytes, GGUFError is all that comes out.

Every attempt is held to a limit of memory and of processor time.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import GGUFError
from quire.weights.gguf import GGUF, GGMLType, StringArray
from tests.gguf_writer import Typed, ValueType, gguf_bytes

Attempt: TypeAlias = Callable[[bytes], bool]

EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**50, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
SMALL = gguf_bytes(
    {
        "general.architecture": "llama",
        "general.alignment": 32,
        "byte": Typed(ValueType.UINT8, 7),
        "flag": True,
        "eps": 1e-5,
        "big": Typed(ValueType.FLOAT64, 0.1),
        "scores": [0.5, -1.0],
        "flags": [True, False],
        "tokens": ["a", "", "Ġthe", "🙂"],
        "offset": Typed(ValueType.INT64, -5),
    },
    {
        "w": (GGMLType.Q4_0, np.arange(72, dtype=np.uint8), (2, 64)),
        "v": np.ones((2, 2, 2, 2), np.float32),
    },
)
# Enough strings that both ways of finding them, and the seams between them, are at work.
LONG = gguf_bytes({"tokens": [f"t{i}" * (i % 5) for i in range(2000)] + ["x\0y", "z" * 70_000]})


@pytest.fixture(scope="module")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempt]:
    """Opens bytes as a file and uses all of it; tells whether the file was accepted."""
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"

    def run(content: bytes) -> bool:
        path.write_bytes(content)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        start = time.process_time()
        try:
            with GGUF.open(path) as file:
                use(file)
            accepted = True
        except GGUFError as error:
            assert len(str(error)) < len(str(path)) + 400
            accepted = False
        assert time.process_time() - start < 1.0
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak < 500_000 + 40 * len(content), f"{peak} bytes for a file of {len(content)}"
        return accepted

    tracemalloc.start()
    yield run
    tracemalloc.stop()


def use(file: GGUF) -> None:
    for value in file.metadata.values():
        if isinstance(value, StringArray):
            assert len(value.to_list()) == len(value)
        elif isinstance(value, np.ndarray):
            value.sum()
    for name, info in file.tensors.items():
        assert file.data(name).size == info.nbytes == info.type.nbytes(info.shape)
        file.data(name).sum()


def splice(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def test_the_files_are_sound_to_begin_with(attempt: Attempt) -> None:
    assert attempt(SMALL)
    assert attempt(LONG)


def test_truncated_at_every_byte(attempt: Attempt) -> None:
    assert not any(attempt(SMALL[:length]) for length in range(len(SMALL)))


def test_every_byte_changed(attempt: Attempt) -> None:
    for at, byte in enumerate(SMALL):
        for new in {0xFF, byte ^ 1}:
            attempt(splice(SMALL, at, bytes([new])))


def overwrite_everywhere(attempt: Attempt, code: str, numbers: list[int]) -> None:
    for number in numbers:
        for at in range(len(SMALL) - struct.calcsize(code) + 1):
            attempt(splice(SMALL, at, struct.pack(code, number)))


def test_extreme_numbers_at_every_byte(attempt: Attempt) -> None:
    overwrite_everywhere(attempt, "<I", [2**32 - 1])
    overwrite_everywhere(attempt, "<Q", [2**62])


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file after a few flips, overwrites, insertions, removals and copies of its own parts."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        match draw(st.integers(0, 5)):
            case 0:
                content = splice(content, at, draw(st.binary(min_size=1, max_size=4)))
            case 1:
                code = draw(st.sampled_from(["<I", "<Q"]))
                number = draw(st.sampled_from(EXTREMES)) & (2 ** (8 * struct.calcsize(code)) - 1)
                content = splice(content, at, struct.pack(code, number))
            case 2:
                number = draw(st.integers(0, 2 * len(content)))
                content = splice(content, at, struct.pack("<Q", number))
            case 3:
                content = content[:at] + draw(st.binary(max_size=16)) + content[at:]
            case 4:
                content = content[:at] + content[at + draw(st.integers(0, 64)) :]
            case _:
                source = draw(st.integers(0, len(content)))
                content = content[:at] + content[source : source + 64] + content[at:]
    return content


def fuzz(examples: int) -> settings:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


@fuzz(300)
@given(damaged(SMALL))
def test_damaged_small_files(attempt: Attempt, content: bytes) -> None:
    attempt(content)


@fuzz(60)
@given(damaged(LONG))
def test_damaged_string_arrays(attempt: Attempt, content: bytes) -> None:
    attempt(content)


@fuzz(100)
@given(st.binary(max_size=200))
def test_noise_after_the_header(attempt: Attempt, noise: bytes) -> None:
    attempt(SMALL[:24] + noise)


@pytest.mark.slow
@fuzz(10_000)
@given(damaged(SMALL))
def test_damaged_small_files_at_length(attempt: Attempt, content: bytes) -> None:
    attempt(content)


@pytest.mark.slow
@fuzz(2_000)
@given(damaged(LONG))
def test_damaged_string_arrays_at_length(attempt: Attempt, content: bytes) -> None:
    attempt(content)


@pytest.mark.slow
def test_all_extreme_numbers_at_every_byte(attempt: Attempt) -> None:
    overwrite_everywhere(attempt, "<I", [number for number in EXTREMES if number < 2**32])
    overwrite_everywhere(attempt, "<Q", EXTREMES)
