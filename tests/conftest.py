"""What every process that runs tests does first."""

from __future__ import annotations

import gc
import os

# `make test` runs a process on each of two cores: a NumPy that divides every product between both
# cores spends twice the time, most of it waiting. Read when NumPy is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


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
