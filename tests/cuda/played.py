"""A Hopper GPU that is not there: operations choose kernels as on one, and none of them runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from quire.ops.cuda import CudaOps, Machine, many, nvrtc
from tests.cuda.launches import recording


class PlayedMachine(Machine):
    """Tensors on the host, of zeros."""

    hopper = launches_ahead = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(None)
        self.interpreted = False

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def send(self, values: NDArray[np.float32]) -> torch.Tensor:
        return self.upload(values)  # nothing is pinned without a GPU

    def fetch(self, values: torch.Tensor) -> NDArray[np.float32]:
        found: NDArray[np.float32] = values.numpy()
        return found


class PlayedKernel:
    """Writes down that it was launched."""

    def __init__(self, name: str, found: set[str]) -> None:
        self._name, self._found = name, found

    def resident(self, shared: int) -> int:
        """Blocks that fit."""
        return 2

    def launch(self, *_: Any) -> None:
        """All that happens."""
        self._found.add(self._name)


class PlayedNative:
    """What `nvrtc.Native` is on an H200."""

    processors, most_shared, clusters, stream = 132, 227 << 10, True, 0

    def __init__(self, found: set[str]) -> None:
        self._found = found

    def kernel(self, files: tuple[str, ...], name: str, *_: int, **__: object) -> PlayedKernel:
        """A kernel of these files."""
        return PlayedKernel(f"{files[-1]}.cu {name}", self._found)


@contextmanager
def played(run: bool = False) -> Iterator[tuple[CudaOps, set[str]]]:
    """The table on such a GPU, and the kernels that it launches; Triton's do run if told so."""
    with ExitStack() as stack:
        found = stack.enter_context(recording(run))
        on, real = PlayedNative(found), nvrtc.native
        for name, module in list(sys.modules.items()):
            if name.startswith("quire.ops.cuda.") and getattr(module, "native", None) is real:
                stack.enter_context(mock.patch.object(module, "native", lambda _: on))
        stack.enter_context(mock.patch.object(many, "call", lambda *_: None))
        yield CudaOps(PlayedMachine()), found
