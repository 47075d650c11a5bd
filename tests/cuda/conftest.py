"""Kernels run on the GPU, or, where there is none, in Triton's interpreter on the host."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest


def dot(_: object, a: Any, b: Any, sums: Any, *__: object) -> Any:
    """The interpreter's product, with all rows added alike, as a GPU adds them.

    Its own leaves that to a BLAS, where on processors without AVX-512 the order depends on the
    place of a row in its tile.
    """
    x, y = (side.data.astype(sums.data.dtype) for side in (a, b))
    return type(sums)(np.einsum("mk,kn->mn", x, y) + sums.data, sums.dtype.scalar)


INSTALLED = all(importlib.util.find_spec(name) for name in ("torch", "triton"))
if INSTALLED:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        from triton.runtime.interpreter import InterpreterBuilder

        InterpreterBuilder.create_dot = dot
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
