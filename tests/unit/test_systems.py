"""What other systems lack is done in another way, with the same result."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import quire
from quire import config, files
from quire.memory.tiers import tiers
from quire.weights import open_file
from tests import tiny


def test_reading_and_writing_at_a_place(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    try:
        assert files.seek_and_write(descriptor, [data[:300], data[300:]], 50) == 1000
        for offset, sizes in ((50, [1, 999]), (0, [50, 10]), (1000, [30, 30, 30]), (5000, [4])):
            ours, theirs = ([np.zeros(n, np.uint8) for n in sizes] for _ in range(2))
            count = os.preadv(descriptor, theirs, offset)
            assert files.seek_and_read(descriptor, ours, offset) == count
            assert all(map(np.array_equal, ours, theirs))
    finally:
        os.close(descriptor)


@pytest.mark.host
def test_a_model_runs_without_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files read through a place that moves, and as many threads as there are cores."""
    path = tmp_path / "m.gguf"
    tiny.write(path, tiny.Tiny())
    with quire.load(path) as llm:
        wanted = llm.generate("hello", max_tokens=6).token_ids
    monkeypatch.setattr(open_file, "read_at", files.seek_and_read)
    monkeypatch.setattr(tiers, "read_at", files.seek_and_read)
    monkeypatch.setattr(tiers, "write_at", files.seek_and_write)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    with quire.load(path) as llm:
        assert llm.settings.thread_count() == os.cpu_count() == config.usable_cores()
        assert llm.generate("hello", max_tokens=6).token_ids == wanted
