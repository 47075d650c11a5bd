"""What operations take and give: handles of a device, and descriptions that handles are made of.

Models pass handles from one operation to the next and look at nothing but what is said here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Part = tuple[int, int, int, NDArray[np.uint8]]
"""Rows of a matrix as the file has them: ggml type number, rows, cols, bytes."""

SILU_MUL = 1
"""`act` of linear: x is [gate | up] and silu(gate) * up is what is multiplied."""
GELU_MUL = 2
"""The same with gelu (tanh approximation)."""


class Refused(ValueError):
    """Sizes or values that a device's kernels cannot work with."""


# ---- handles --------------------------------------------------------------------------------


class Array(Protocol):
    """A float32 matrix on the device."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""


class Matrix(Protocol):
    """A weight in the device's own tile format."""

    @property
    def rows(self) -> int:
        """Rows of all parts."""

    @property
    def cols(self) -> int:
        """Columns of each part."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes on the device."""


class Recurrent(Protocol):
    """A recurrent layer; a model declares the first two of these to memory."""

    @property
    def state_bytes(self) -> int:
        """Bytes of its state in a state page."""

    @property
    def log_bytes(self) -> int:
        """Bytes of one token in a log page."""

    @property
    def in_cols(self) -> int:
        """Columns of its input."""

    @property
    def out_cols(self) -> int:
        """Columns of its output."""


class Sampler(Protocol):
    """What one generation wants of its samples, and the tokens that penalties are about."""

    def observe(self, ids: Int32) -> None:
        """Counts tokens for the penalties."""

    def observe_prompt(self, ids: Int32) -> None:
        """Notes tokens for the repetition penalty alone."""

    def unobserve(self, ids: Int32) -> None:
        """Takes back what was observed."""


def count_bytes(n_vocab: int) -> int:
    """What a sampler with penalties holds on a device that counts tokens by itself: a word each."""
    return 4 * n_vocab


class Draw(NamedTuple):
    """How the token behind a row is chosen: by whom, and with which random number."""

    sampler: Sampler
    uniform: float
    top: int | None = None
    """How many of the likeliest tokens are told beside it, all with log-probabilities."""


class Drawn(Protocol):
    """Tokens that a step chooses on the device."""

    def read(self) -> Int32:
        """Waits for them; -1 where a row allows none, -2 where it is not numbers."""

    def logprobs(self, row: int, top: int) -> tuple[float, Int32, Float32]:
        """Of a row that asked for them, once they were read: of the token, and of the likeliest."""


RopeHandle = NewType("RopeHandle", object)
"""A rotary embedding on the device."""
HeadsHandle = NewType("HeadsHandle", object)
"""The shape of a layer's attention on the device."""
Pages = NewType("Pages", object)
"""One group's pages as the kernels of a step see them."""
States = NewType("States", object)
"""One recurrent group's states and logs as the kernels of a step see them."""


# ---- descriptions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `n_rot` dimensions; `neox` pairs i with i + n_rot/2."""

    n_rot: int
    freqs: NDArray[np.float64]
    neox: bool
    mscale: float = 1.0


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention."""

    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    scale: float
    window: int = 0
    softcap: float = 0.0


class PageTables(Protocol):
    """What `pages` reads of memory's view of an attention group; that says what the fields mean."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def tables(self) -> Int32: ...
    @property
    def first(self) -> Int32: ...
    @property
    def length(self) -> Int32: ...
    @property
    def slots(self) -> Int32: ...
    @property
    def slot_positions(self) -> Int32 | None: ...


class _LogSize(Protocol):
    @property
    def log_tokens(self) -> int: ...


class StateTables(Protocol):
    """What `states` reads of memory's view of a recurrent group."""

    @property
    def state_page_bytes(self) -> int: ...
    @property
    def log_page_bytes(self) -> int: ...
    @property
    def log_stride(self) -> int: ...
    @property
    def layout(self) -> _LogSize: ...
    @property
    def state_in(self) -> Int32: ...
    @property
    def state_out(self) -> Int32: ...
    @property
    def log_in(self) -> Int32: ...
    @property
    def log_length(self) -> Int32: ...
    @property
    def log_out(self) -> Int32: ...
    @property
    def tail(self) -> Int32: ...
    @property
    def log_kept(self) -> Int32: ...
    @property
    def room(self) -> Int32: ...
