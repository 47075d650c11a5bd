"""Where the bytes of a recurrent sequence lie: a page for its state, a page for its log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.memory.layout import Int32, aligned


@dataclass(frozen=True)
class RecurrentSpec:
    """Recurrent layers of a model that share one table, as the model declares them."""

    name: str
    layers: tuple[int, ...]
    state_bytes: int
    """Bytes of one layer's state."""
    log_bytes: int
    """Bytes of one token's raw inputs to one layer."""
    log_tokens: int = 16
    """Tokens in the log before it is folded into the state."""
    kind: Literal["recurrent"] = field(default="recurrent", init=False)

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise ModelError(f"{where} needs distinct layers, numbered from 0; got {self.layers}")
        for what in ("state_bytes", "log_bytes", "log_tokens"):
            if getattr(self, what) < 1:
                raise ModelError(f"{where} needs {what} of at least 1; got {getattr(self, what)}")

    def only(self, keep: Callable[[int], bool]) -> RecurrentSpec:
        """This group with the layers that pass the filter."""
        layers = tuple(layer for layer in self.layers if keep(layer))
        if not layers:
            raise ModelError(f"no layer of group {self.name!r} passes the filter: {self.layers}")
        return replace(self, layers=layers)


@dataclass(frozen=True)
class StateLayout:
    """A state page: the state of each layer in order. A log page: for each layer all its entries.

    States and entries start at multiples of 64 bytes; what is inside is the kernels' business.
    """

    spec: RecurrentSpec
    log_stride: int = field(init=False)
    """Bytes from one entry of a layer to the next."""
    state_page_bytes: int = field(init=False)
    log_page_bytes: int = field(init=False)
    offsets: tuple[tuple[int, int], ...] = field(init=False)
    """For each layer in order: where its state lies in a state page, its entry 0 in a log page."""

    def __post_init__(self) -> None:
        spec = self.spec
        state, stride = aligned(spec.state_bytes), aligned(spec.log_bytes)
        entries = stride * spec.log_tokens
        for name, value in {
            "log_stride": stride,
            "state_page_bytes": len(spec.layers) * state,
            "log_page_bytes": len(spec.layers) * entries,
            "offsets": tuple((i * state, i * entries) for i in range(len(spec.layers))),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer that reads this memory."""
        return self.spec.layers

    @property
    def log_tokens(self) -> int:
        """Entries of a log page."""
        return self.spec.log_tokens

    @property
    def tail_tokens(self) -> int:
        """Entries that a scan leaves in the log: half of it, so that as many can follow."""
        return self.spec.log_tokens // 2


Fold = Callable[[int, int, int, int, StateLayout], None]
"""fold(state_in, log, n_entries, state_out, layout), with pages by address.

Replays the raw inputs of entries 0 … n_entries-1 one by one, in float32, on the state in page
`state_in` (address 0: the zero state), and writes the result to page `state_out`, in all layers.
It reads the first two pages and never writes them."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the new tokens of a micro-batch, as its views are told."""

    seqs: Int32
    """Rows of the sequences that have any."""
    tokens: NDArray[np.int64]
    """Rows of the tokens."""
    starts: Int32
    """For each sequence, how many of its new tokens come before."""
    behind: Int32
    """For each sequence, how many come after."""


@dataclass(slots=True)
class StateView:
    """A recurrent group as the kernels of one micro-batch see it; valid until the next one.

    Row s belongs to the micro-batch's s-th sequence. What it remembers before its new tokens is
    the state in page `state_in`, then `log_length` raw inputs in page `log_in`. The new tokens
    either go into the log (append) or are run into a new state (scan):

        append   state_out = -1   raw inputs → page log_out, entries log_length, log_length + 1, …
        scan     the state after all new tokens but the last `tail` → page state_out, and
                 the raw inputs of those → page log_out, entries 0 … tail-1

    So after a scan too, the last tokens can be taken back.
    """

    state_address: int
    log_address: int
    layout: StateLayout
    state_in: Int32
    """[n_seqs] page id, -1 for the zero state at position 0."""
    state_out: Int32
    """[n_seqs] page id, -1 for an append."""
    log_in: Int32
    """[n_seqs] page id, -1 when the log is empty."""
    log_length: Int32
    """[n_seqs] entries before this micro-batch; the first new one has this number."""
    log_out: Int32
    """[n_seqs] page id; of an append the one of `log_in` if that is not -1; -1 for no tail."""
    tail: Int32
    """[n_seqs] new tokens of a scan that go into its log; 0 for an append."""

    @property
    def state_page_bytes(self) -> int:
        """Bytes from one state page to the next."""
        return self.layout.state_page_bytes

    @property
    def log_page_bytes(self) -> int:
        """Bytes from one log page to the next."""
        return self.layout.log_page_bytes

    @property
    def log_stride(self) -> int:
        """Bytes from one entry of a layer to the next."""
        return self.layout.log_stride

    @property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """Offsets of state and log in their pages for each layer of the group."""
        return self.layout.offsets

    def part(self, part: Part) -> StateView:
        """What the kernels see when only a part of the new tokens is computed: of logs, any."""
        seqs = part.seqs
        scans = self.state_out[seqs] >= 0
        assert not (part.starts + part.behind)[scans].any(), "a scan is computed as a whole"
        length = self.log_length[seqs] + part.starts
        log = np.where(scans, self.log_in[seqs], np.where(length > 0, self.log_out[seqs], -1))
        return StateView(
            self.state_address, self.log_address, self.layout, self.state_in[seqs],
            self.state_out[seqs], log.astype(np.int32), length, self.log_out[seqs],
            self.tail[seqs],
        )  # fmt: skip
