"""What every process that runs tests does first."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

# `make test` runs a process on each of two cores: a NumPy that divides every product between both
# cores spends twice the time, most of it waiting. Read when NumPy is imported. Where there are more
# cores each process has two of them as well: threads of many processes would wait for each other.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        first = 2 * int(worker.removeprefix("gw"))
        os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(2)})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests of the host find no GPU, nor do processes that they start; others take what is there.

    Of the host is what changes its steps, counts its bytes or calls, or holds its arithmetic to
    float32. All that such a test uses is made for it or for others of the same mark.
    """
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("host"):
            patch.setattr("quire.devices.cuda.gpu_count", lambda: 0)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def pytest_collection_finish() -> None:
    """Leaves modules and the list of tests out of garbage collection, for they all stay.

    Tests collect garbage thousands of times; looking through half a million objects that cannot
    go took longer than the tests. Whatever a test makes is made later and is still found.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries that count what is left at the end find everything gone."""
    gc.unfreeze()
