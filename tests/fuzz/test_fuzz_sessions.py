"""Damaged session files: refused, and the model goes on as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

import quire
from tests import tiny
from tests.fuzz.bounds import attempt, within
from tests.fuzz.mutate import mutate_bytes


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[quire.LLM]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(path, tiny.Tiny(context=128, tied=False))
    with quire.load(path) as loaded:
        yield loaded
        loaded.memory.audit()


def run(llm: quire.LLM, folder: Path, seeds: range) -> None:
    path = folder / "story.quire"
    with llm.session() as session:
        session.append([5, 6, 7, 8, 9, 10]).save(path)
        expected = llm.logits([5, 6, 7, 8, 9, 10])
    data = path.read_bytes()
    for seed in seeds:
        path.write_bytes(mutate_bytes(Random(seed), data))
        with within(2, 100):
            attempt(lambda: llm.open(path).close())
    llm.memory.audit()
    assert np.array_equal(llm.logits([5, 6, 7, 8, 9, 10]), expected)
    path.write_bytes(data)
    llm.open(path).close()


def test_damaged_files(llm: quire.LLM, tmp_path: Path) -> None:
    run(llm, tmp_path, range(200))


@pytest.mark.slow
def test_damaged_files_at_length(llm: quire.LLM, tmp_path: Path) -> None:
    run(llm, tmp_path, range(200, 10_000))
