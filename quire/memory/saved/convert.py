"""Saved pages of one order of bytes as pages of another: the same numbers, bit for bit.

    lanes16   CPUs   K [head][block of 16 tokens][dim][16], states [head][block of 16][dk][16]
    rows      GPUs   K [head][token][dim], V so in both,    states [head][dv][dk]

Quantised rows have the levels first, then the scales: of a block in lanes, of a head in rows. A
GPU's log has derived values behind the raw inputs of a token: they are left out, or computed anew
by the device once the pages are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.memory.groups.layout import AttentionLayout, KVType
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout, StateParts

Bytes: TypeAlias = NDArray[np.uint8]
Convert: TypeAlias = Callable[[Bytes, Bytes], None]
"""convert(page of the file, page to be filled)"""

LANES, ROWS = "lanes16", "rows"
_BLOCK = 16
_OWN = {"bytes", "state_bytes", "log_bytes", "parts"}
"""What pages of two orders may differ in."""


class Conversion:
    """How pages are read: for each pool of a group, their size, and what they become."""

    raw_only = False
    """Whether logs have raw inputs alone where more is needed."""

    def __init__(
        self, layout: AttentionLayout | StateLayout, ours: Mapping[str, Any],
        theirs: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """ValueError unless pages described so can become pages of this layout."""
        if all(theirs.get(key) == ours.get(key) for key in _OWN):
            self.sizes = page_sizes(layout)
            self.pages: list[Convert] = [_copy for _ in self.sizes]
            return
        self._reorder(layout, str(ours["bytes"]), str(theirs["bytes"]), theirs)

    def _reorder(
        self, layout: AttentionLayout | StateLayout, ours: str, order: str,
        theirs: Mapping[str, Any],
    ) -> None:  # fmt: skip
        (ending, _, here), (other, _, self.order) = ours.partition(", "), order.partition(", ")
        if {here, self.order} != {LANES, ROWS} or ending != other:
            raise ValueError(f"pages of {order!r} cannot be read as {ours!r}")
        self.raw_only = self.order == LANES
        if isinstance(layout, AttentionLayout):
            if layout.page_tokens % _BLOCK:
                raise ValueError(f"keys of {layout.page_tokens} tokens to a page lie in no blocks")
            self.sizes = page_sizes(layout)
            self.pages = [_keys(layout, self.order)]
            return
        parts = layout.spec.parts or _parts(theirs["parts"])
        source = _source(layout.spec, theirs, parts, self.order)
        self.sizes = page_sizes(source)
        self.pages = [_states(layout, source, parts, self.order), _logs(layout, source, parts)]


def page_sizes(layout: AttentionLayout | StateLayout) -> list[int]:
    """Bytes of a page of each pool."""
    if isinstance(layout, AttentionLayout):
        return [layout.page_bytes]
    return [layout.state_page_bytes, layout.log_page_bytes]


def _copy(source: Bytes, target: Bytes) -> None:
    target[:] = source


def same_but_order(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether two descriptions differ only in what a conversion bridges."""
    return all(theirs[key] == value for key, value in ours.items() if key not in _OWN)


def _parts(numbers: Any) -> StateParts:
    """Parts as a file says them."""
    if not isinstance(numbers, list) or len(numbers) != 6:
        raise ValueError("it does not say what its states are made of")
    if not all(type(n) is int and 0 <= n < 2**31 for n in numbers):
        raise ValueError("its states are made of what cannot be")
    return StateParts(*numbers)


def _source(
    spec: RecurrentSpec, theirs: Mapping[str, Any], parts: StateParts, order: str
) -> StateLayout:
    """The layout of the file, whose sizes must be those of its order."""
    state = parts.tail + (parts.lanes if order == LANES else parts.rows)
    raw = parts.raw if order == LANES else parts.raw + parts.derived
    wanted = {"state_bytes": 4 * state, "log_bytes": 4 * raw}
    if any(theirs[key] != value for key, value in wanted.items()):
        raise ValueError(f"its states and logs are not of the sizes {wanted}")
    ours = 4 * (parts.tail + parts.lanes), 4 * parts.raw
    if order == ROWS and ours != (spec.state_bytes, spec.log_bytes):
        raise ValueError(f"its states and logs are not those of {ours} bytes")
    try:
        sizes = wanted["state_bytes"], wanted["log_bytes"], spec.log_tokens
        return StateLayout(RecurrentSpec(spec.name, spec.layers, *sizes))
    except ModelError as error:
        raise ValueError(str(error)) from error


def _keys(layout: AttentionLayout, order: str) -> Convert:
    """Keys in blocks and keys in rows; values are the same in both."""
    heads, dims, kind = layout.spec.n_kv_heads, layout.spec.head_dim_k, layout.type_k
    size = layout.page_tokens * heads * kind.row_bytes(dims)
    starts = [layout.k_offset(layer) for layer in layout.spec.layers]
    blocks = layout.page_tokens // _BLOCK
    parts = _key_parts(kind, dims)
    whole = sum(parts)

    def convert(source: Bytes, target: Bytes) -> None:
        target[:] = source
        for start in starts:
            a, b = (page[start : start + size].reshape(heads, -1) for page in (source, target))
            for at, width, unit in _spans(parts, kind):
                lanes, rows = (a, b) if order == LANES else (b, a)
                first = at * _BLOCK
                in_lanes = lanes.reshape(heads, blocks, _BLOCK * whole)
                in_lanes = in_lanes[..., first : first + width * _BLOCK]
                in_lanes = in_lanes.reshape(heads, blocks, width // unit, _BLOCK, unit)
                first = at * _BLOCK * blocks
                in_rows = rows[:, first : first + width * _BLOCK * blocks]
                in_rows = in_rows.reshape(heads, blocks, _BLOCK, width // unit, unit)
                if order == LANES:
                    in_rows[:] = in_lanes.transpose(0, 1, 3, 2, 4)
                else:
                    in_lanes[:] = in_rows.transpose(0, 1, 3, 2, 4)

    return convert


def _key_parts(kind: KVType, dims: int) -> list[int]:
    """Bytes of a token's row, part by part: values, or levels and scales."""
    row = kind.row_bytes(dims)
    if kind in (KVType.Q8_0, KVType.Q4_0):
        scales = dims // 32 * 2
        return [row - scales, scales]
    return [row]


def _spans(parts: list[int], kind: KVType) -> list[tuple[int, int, int]]:
    """Where each part of a row starts, how long it is, and the bytes of one of its numbers."""
    if len(parts) == 2:
        return [(0, parts[0], 1), (parts[0], parts[1], 2)]
    return [(0, parts[0], 4 if kind is KVType.F32 else 2)]


def _states(layout: StateLayout, source: StateLayout, parts: StateParts, order: str) -> Convert:
    heads, dk, dv, tail = parts.heads, parts.dk, parts.dv, parts.tail
    blocks = -(-dv // _BLOCK)

    def convert(old: Bytes, new: Bytes) -> None:
        new[:] = 0
        for (from_at, _), (to_at, _) in zip(source.offsets, layout.offsets, strict=True):
            a = old[from_at : from_at + source.spec.state_bytes].view(np.float32)
            b = new[to_at : to_at + layout.spec.state_bytes].view(np.float32)
            b[:tail] = a[:tail]
            lanes, rows = (a, b) if order == LANES else (b, a)
            in_lanes = lanes[tail : tail + parts.lanes].reshape(heads, blocks, dk, _BLOCK)
            in_rows = rows[tail : tail + heads * dk * dv].reshape(heads, dv, dk)
            if order == LANES:
                whole = in_lanes.transpose(0, 1, 3, 2).reshape(heads, blocks * _BLOCK, dk)
                in_rows[:] = whole[:, :dv]
            else:
                whole = np.zeros((heads, blocks * _BLOCK, dk), np.float32)
                whole[:, :dv] = in_rows
                in_lanes[:] = whole.reshape(heads, blocks, _BLOCK, dk).transpose(0, 1, 3, 2)

    return convert


def _logs(layout: StateLayout, source: StateLayout, parts: StateParts) -> Convert:
    """Raw inputs; what is derived from them is left out."""
    n, raw = layout.log_tokens, 4 * parts.raw

    def convert(old: Bytes, new: Bytes) -> None:
        new[:] = 0
        for (_, from_at), (_, to_at) in zip(source.offsets, layout.offsets, strict=True):
            a = old[from_at : from_at + n * source.log_stride].reshape(n, -1)
            new[to_at : to_at + n * layout.log_stride].reshape(n, -1)[:, :raw] = a[:, :raw]

    return convert
