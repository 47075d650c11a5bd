"""Kernels run on the GPU, or, where there is none, in Triton's interpreter on the host."""

from __future__ import annotations

import importlib.util
import os

import pytest

INSTALLED = all(importlib.util.find_spec(name) for name in ("torch", "triton"))
if INSTALLED:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """A mark for what only a GPU can do, or can do in time."""
    config.addinivalue_line("markers", "gpu: needs a GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what needs a GPU where there is none."""
    if INSTALLED and torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))
