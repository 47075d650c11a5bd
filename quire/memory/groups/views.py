"""What kernels see of a group in one micro-batch: ids of pages, and nothing else.

A view is valid until the next micro-batch. Where pages lie, the device knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.memory.groups.layout import AttentionLayout, Int32
from quire.memory.groups.state_layout import StateLayout


@dataclass(frozen=True, slots=True)
class Subset:
    """Some of the new tokens of a micro-batch."""

    seqs: Int32
    """Rows of the sequences that have any."""
    tokens: NDArray[np.int64]
    """Rows of the tokens."""
    starts: Int32
    """For each sequence, how many of its new tokens come before."""
    counts: Int32
    """For each sequence, how many there are."""
    behind: Int32
    """For each sequence, how many come after."""


@dataclass(slots=True)
class PageView:
    """A group of attention layers.

    Row s belongs to the micro-batch's s-th sequence. Its slot i lies in page
    `tables[s, i // page_tokens]` (the *block table*); entries behind its last page are -1.
    """

    layout: AttentionLayout
    page_bytes: int
    page_tokens: int
    tables: Int32
    """[n_seqs, max_pages] page ids."""
    first: Int32
    """[n_seqs] position of slot 0, where slot_positions does not say otherwise."""
    length: Int32
    """[n_seqs] slots, the new tokens' included."""
    slots: Int32
    """[n_tokens] page * page_tokens + slot in the page, where each new token goes."""
    slot_positions: Int32 | None
    """[n_seqs, max_slots] position by slot, -1 for none; None while all slots count up."""

    def part(self, part: Subset) -> PageView:
        """What the kernels see when only some of the new tokens are computed."""
        seqs, positions = part.seqs, self.slot_positions
        return PageView(
            self.layout, self.page_bytes, self.page_tokens, self.tables[seqs], self.first[seqs],
            self.length[seqs] - part.behind, self.slots[part.tokens],
            None if positions is None else positions[seqs],
        )  # fmt: skip


@dataclass(slots=True)
class StateView:
    """A recurrent group.

    Row s belongs to the micro-batch's s-th sequence. What it remembers before its new tokens is
    the state in page `state_in`, then `log_length` raw inputs in page `log_in`. The new tokens
    either go into the log (append) or are run into a new state (scan):

        append   state_out = -1   raw inputs → page log_out, entries log_length, log_length + 1, …
        scan     the state after all new tokens but the last `tail` → page state_out, and
                 the raw inputs of those → page log_out, entries 0 … tail-1; where log_kept is
                 not -1, those before → page log_kept, entries log_length, log_length + 1, …

    So after a scan too, the last tokens can be taken back, and where the log before is kept, all.
    """

    layout: StateLayout
    state_page_bytes: int
    log_page_bytes: int
    log_stride: int
    """Bytes from one entry of a layer to the next."""
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
    log_kept: Int32
    """[n_seqs] page id, that of `log_in` if that is not -1; -1 where only a scan's tail is kept."""
    room: Int32
    """[n_seqs] entries behind `state_in` up to where logs are folded, if that is at positions."""

    def part(self, part: Subset) -> StateView:
        """What the kernels see when only some of the new tokens are computed: of logs, any."""
        seqs, starts, ends = part.seqs, part.starts, part.starts + part.counts
        scans, kept = self.state_out[seqs] >= 0, self.log_kept[seqs]
        whole = scans & (kept < 0)
        assert not (starts + part.behind)[whole].any(), "a scan is computed as a whole"
        head = ends + part.behind - self.tail[seqs]  # tokens of a scan before its tail
        before = scans & ~whole & (ends <= head)  # they only go into the log that is kept
        after = scans & ~whole & (starts > head)  # they only go into the new one
        scans = scans & ~before & ~after
        length = np.where(after, starts - head, self.log_length[seqs] + starts)
        log_out = np.where(before, kept, self.log_out[seqs])
        own = np.where(scans, kept, log_out)  # where the entries of earlier parts are
        log_in = np.where(whole, self.log_in[seqs], np.where(length > 0, own, -1))
        tail = np.where(scans, self.tail[seqs] - part.behind, 0)
        columns = (
            np.where(after, self.state_out[seqs], self.state_in[seqs]),
            np.where(scans, self.state_out[seqs], -1), log_in, length, log_out, tail,
            np.where(scans, kept, -1),
            np.where(after, self.layout.log_tokens, self.room[seqs]),
        )  # fmt: skip
        sizes = self.layout, self.state_page_bytes, self.log_page_bytes, self.log_stride
        return StateView(*sizes, *(column.astype(np.int32) for column in columns))


View = PageView | StateView
