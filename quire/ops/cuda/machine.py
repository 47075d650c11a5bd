"""The GPU as the operations see it: where tensors live, and what may be launched."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.ops import Int32, Refused

if TYPE_CHECKING:
    from quire.ops.cuda.passing import Ring

OLDEST = (8, 0)
"""The oldest compute capability that kernels are written for: Ampere."""


def need(holds: object, message: str) -> None:
    """Refuses what cannot be done, before anything is."""
    if not holds:
        raise Refused(message)


def need_ids(what: str, pages: Int32, n: int, least: int = 0) -> None:
    """Refuses anything but n page ids."""
    need(len(pages) == n, f"{what}: {len(pages)} pages where {n} are needed")
    need((pages >= least).all(), f"{what}: there is no page {pages.min(initial=0)}")


def need_apart(what: str, read: Int32, written: Int32) -> None:
    """Refuses work that would depend on its order: pages written twice, or written and read."""
    need(len(np.unique(written)) == len(written), f"{what}: a page is written twice")
    need(not np.isin(written, read).any(), f"{what}: a page is written and read")


class OnDevice:
    """Integers that lie on the device already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)


_ALIGN = 256  # bytes that matrices begin at multiples of
_ODD = 1 << 16  # bytes that this may take in all
_LARGE = 1 << 15  # bytes of activations that are worth being staged
_weights: Counter[torch.device] = Counter()
"""Bytes that matrices hold of each GPU: what torch tells is of the whole process too."""
_records = threading.RLock()
"""Held by who records a graph. Nobody else may then record, or wait for a whole GPU."""


class Machine:
    """One GPU, or the host under Triton's interpreter, which is how kernels run without one."""

    def __init__(self, index: int | None) -> None:
        """The GPU of this number; None for the interpreter."""
        self.interpreted = index is None
        self._room: torch.Tensor | None = None
        self.ring: Ring | None = None
        """Through which weights come, where they only pass through."""
        self.device = torch.device("cpu") if index is None else torch.device("cuda", index)

    @property
    def name(self) -> str:
        """For people."""
        if self.interpreted:
            return "cuda (interpreted)"
        return f"cuda ({torch.cuda.get_device_name(self.device)})"

    @property
    def architecture(self) -> str:
        """What kernels are compiled for."""
        if self.interpreted:
            return "interpreted"
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"sm_{major}{minor}"

    def upload(self, values: NDArray[Any]) -> torch.Tensor:
        """Host values as a tensor of the device."""
        plain = np.ascontiguousarray(values)
        if not plain.flags.writeable:  # torch warns of arrays that it must not write
            plain = plain.copy()
        return torch.from_numpy(plain).to(self.device, copy=True)

    def send(self, values: NDArray[np.float32]) -> torch.Tensor:
        """Activations for the device: larger ones through pinned memory, so that nobody waits."""
        if self.interpreted or values.nbytes < _LARGE:
            return self.upload(values)
        staged = torch.empty(values.shape, dtype=torch.float32, pin_memory=True)
        staged.numpy()[...] = values
        return staged.to(self.device, non_blocking=True)

    def fetch(self, values: torch.Tensor) -> NDArray[np.float32]:
        """Activations for the host, once the device has computed them."""
        if self.interpreted or values.nbytes < _LARGE:
            staged = values.cpu()
        else:
            staged = torch.empty(values.shape, dtype=torch.float32, pin_memory=True)
            staged.copy_(values)
        found: NDArray[np.float32] = staged.numpy()
        return found

    def integers(self, values: Int32 | OnDevice) -> torch.Tensor:
        """Integers as a tensor of the device."""
        return values.tensor if isinstance(values, OnDevice) else self.upload(values)

    def upload_all(self, columns: Sequence[NDArray[np.int32]]) -> list[torch.Tensor]:
        """Several arrays of int32 in one transfer."""
        sizes = [column.size for column in columns]
        packed = self.upload(np.concatenate([np.ravel(column) for column in columns]))
        ends = list(itertools.accumulate(sizes))
        return [packed[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor that nobody has written yet."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def half(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which values of a type are multiplied: the interpreter has no bfloat16."""
        return torch.float32 if self.interpreted and dtype is torch.bfloat16 else dtype

    @property
    def launches_ahead(self) -> bool:
        """Whether kernels may be launched before those that they wait for end (from Hopper on)."""
        return not self.interpreted and torch.cuda.get_device_capability(self.device) >= (9, 0)

    def expect(self, n_bytes: int) -> None:
        """Takes memory for so many bytes of weights that `weight` will ask for, until `trim`."""
        self._room = self.empty(n_bytes + _ODD, dtype=torch.uint8) if n_bytes else None

    def fill(self, room: torch.Tensor | None) -> None:
        """What `weight` is asked for lies in this memory from now on."""
        self._room = room

    def weight(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of a matrix: the next piece of what was taken at once, as long as there is some.

        It lives as long as any of its pieces.
        """
        n_bytes = math.prod(shape) * dtype.itemsize
        room = self._room
        if room is None or n_bytes > len(room):
            return self.empty(*shape, dtype=dtype)
        self._room = room[-(-n_bytes // _ALIGN) * _ALIGN :]
        return room[:n_bytes].view(dtype).view(*shape)

    def count_weights(self, matrix: object, n_bytes: int) -> None:
        """Counts what a matrix holds, for as long as it is there; not in memory of others."""
        if self.ring is not None:
            return
        _weights[self.device] += n_bytes
        weakref.finalize(matrix, _weights.subtract, {self.device: n_bytes})

    @property
    def weights(self) -> int:
        """Bytes that the matrices of all models in this process hold."""
        return _weights[self.device]

    @property
    def hopper(self) -> bool:
        """Whether the GPU has Hopper's own instructions, which no other has."""
        return not self.interpreted and torch.cuda.get_device_capability(self.device)[0] == 9

    @property
    def reserved(self) -> int:
        """Bytes that torch holds of the GPU, used or kept for later."""
        if self.interpreted:
            return 0
        # `torch.cuda.memory_reserved` flattens all statistics first, at a tenth of a millisecond.
        found = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(found["reserved_bytes"]["all"]["current"])

    def trim(self) -> None:
        """Returns what is only kept for later."""
        self._room = None
        if not self.interpreted:
            with _records:
                torch.cuda.empty_cache()


def power_of_two(n: int, least: int = 1) -> int:
    """The next power of two."""
    return max(1 << max(n - 1, 0).bit_length(), least)


def missing(index: int) -> str | None:
    """Why there is no GPU of this number to compute on, or None."""
    use_cpu = "or use device='cpu'"
    if torch.version.cuda is None:
        return (
            f"device='cuda' needs a PyTorch built for CUDA, and {torch.__version__} is not; "
            f"install one from pytorch.org, {use_cpu}"
        )
    if not torch.cuda.is_available():
        return (
            f"device='cuda' needs an NVIDIA driver that PyTorch {torch.__version__} (CUDA "
            f"{torch.version.cuda}) can use, and there is none, or no GPU; update it, {use_cpu}"
        )
    if not 0 <= index < torch.cuda.device_count():
        return f"there is no GPU {index}: this machine has {torch.cuda.device_count()}"
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST:
        return (
            f"{torch.cuda.get_device_name(index)} has compute capability {found[0]}.{found[1]}, "
            f"and kernels need {OLDEST[0]}.{OLDEST[1]} (Ampere) or newer; {use_cpu[3:]}"
        )
    return None


def wait(device: int | torch.device | None) -> None:
    """Until the GPU has done what it was told."""
    with _records:
        torch.cuda.synchronize(device)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """What is launched within is recorded, and not run.

    Models of other threads go on, but for what would break it: another recording, waiting for the
    whole GPU, and finalizers of somebody's garbage, which wait too.
    """
    with _records:
        collects = gc.isenabled()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                gc.disable()
                yield
        finally:
            if collects:
                gc.enable()


def pinned(size: int) -> NDArray[np.uint8]:
    """Host memory that the GPU copies from and to at full speed."""
    found: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return found
