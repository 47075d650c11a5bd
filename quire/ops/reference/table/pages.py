"""Work on pages by id."""

from __future__ import annotations

from collections.abc import Sequence

from quire.ops import HeadsHandle, Int32, Int64, Recurrent, RopeHandle
from quire.ops.reference import attention
from quire.ops.reference.kv import (
    Bytes,
    kv_row_bytes,
    move_key,
    move_value,
)
from quire.ops.reference.table.attention import placed, rope_of
from quire.ops.reference.table.memory import need, need_apart, need_ids, page_rows
from quire.ops.reference.table.recurrent import layer_of, need_placed


def _rows(base: int, page_bytes: int, *ids: Int32) -> Bytes:
    """Pages up to the last of these."""
    return page_rows(base, page_bytes, 1 + max(int(each.max(initial=0)) for each in ids))


class PageWork:
    """The group `PageOps` of the table."""

    @property
    def page_layout(self) -> str:
        """The order of bytes inside pages: that of the CPU's kernels."""
        return "lanes16"

    @property
    def folds_at_positions(self) -> bool:
        """No: tokens are replayed, so where a log was folded changes no bit."""
        return False

    def state_parts(self, layer: Recurrent) -> None:
        """Nothing that others need to be told."""

    def derive(self, *_: object) -> None:
        """Logs have raw inputs and nothing else."""

    def copy_pages(self, base: int, page_bytes: int, sources: Int32, targets: Int32) -> None:
        """Copies whole pages."""
        need_ids("copy_pages", sources, len(sources))
        need_ids("copy_pages", targets, len(sources))
        need_apart("copy_pages", sources, targets)
        pages = _rows(base, page_bytes, sources, targets)
        pages[targets] = pages[sources]

    def rotate_pages(
        self, heads: HeadsHandle, rope: RopeHandle, base: int, page_bytes: int, page_tokens: int,
        pages: Int32, deltas: Int32, k_offsets: Int64,
    ) -> None:  # fmt: skip
        """Turns stored keys on by deltas[i, slot] positions in each of these pages."""
        layers = [placed(heads, page_bytes, page_tokens, int(k), 0) for k in k_offsets]
        turn = rope_of(rope)
        need_ids("rotate_pages", pages, len(pages))
        need(deltas.shape == (len(pages), page_tokens), f"deltas are {deltas.shape}")
        need(all(turn.n_rot <= each.heads.head_dim_k for each in layers), "rope wider than a head")
        memory = _rows(base, page_bytes, pages)
        for page, delta in zip(pages, deltas, strict=True):
            for layer in layers:
                h, kind = layer.heads, layer.type_k
                size = h.n_kv_heads * page_tokens * kv_row_bytes(kind, h.head_dim_k)
                part = memory[page, layer.k_offset : layer.k_offset + size]
                attention.rotate_keys(part, kind, delta, h.n_kv_heads, h.head_dim_k, turn)

    def move_tokens(
        self, heads: HeadsHandle, base: int, page_bytes: int, page_tokens: int,
        from_pages: Int32, from_slots: Int32, to_pages: Int32, to_slots: Int32,
        k_offsets: Int64, v_offsets: Int64,
    ) -> None:  # fmt: skip
        """Copies tokens, one after the other, from a slot of a page to a slot of a page."""
        need(len(k_offsets) == len(v_offsets), "each layer needs offsets of K and of V")
        layers = [
            placed(heads, page_bytes, page_tokens, int(k), int(v))
            for k, v in zip(k_offsets, v_offsets, strict=True)
        ]
        for pages, slots in ((from_pages, from_slots), (to_pages, to_slots)):
            need_ids("move_tokens", pages, len(from_pages))
            need(len(slots) == len(pages), "move_tokens: a slot for each token")
            need(((slots >= 0) & (slots < page_tokens)).all(), "move_tokens: a slot of no page")
        memory = _rows(base, page_bytes, from_pages, to_pages)
        moves = zip(from_pages, from_slots, to_pages, to_slots, strict=True)
        for from_page, from_slot, to_page, to_slot in moves:
            for layer in layers:
                pair = int(from_slot), int(to_slot)
                _move(layer, page_tokens, memory[from_page], memory[to_page], *pair)

    def fold(
        self, layers: Sequence[Recurrent], offsets: Sequence[tuple[int, int]],
        state_base: int, state_page_bytes: int, log_base: int, log_page_bytes: int, log_stride: int,
        state_in: Int32, log: Int32, n_entries: Int32, state_out: Int32,
    ) -> None:  # fmt: skip
        """Replays log pages on state pages (-1: zeros) into other state pages, in all layers."""
        need(len(layers) == len(offsets), f"{len(layers)} layers, but offsets of {len(offsets)}")
        need_ids("fold", state_in, len(state_in), least=-1)
        need_ids("fold", log, len(state_in))
        need_ids("fold", state_out, len(state_in))
        need_apart("fold", state_in, state_out)
        need(len(n_entries) == len(state_in), "fold: one entry per fold")
        need((n_entries > 0).all(), "fold: there are no entries to fold")
        most = int(n_entries.max(initial=0))
        for layer, (state_at, log_at) in zip(layers, offsets, strict=True):
            sizes = state_at, state_page_bytes, log_at, log_page_bytes, log_stride
            need_placed(layer_of(layer), *sizes, most)
        states = _rows(state_base, state_page_bytes, state_in, state_out)
        logs = _rows(log_base, log_page_bytes, log)
        for before, page, count, after in zip(state_in, log, n_entries, state_out, strict=True):
            for layer, (state_at, log_at) in zip(layers, offsets, strict=True):
                host = layer_of(layer)
                start = host.load(states[before, state_at:] if before >= 0 else None)
                entries = host.entries(logs[page, log_at:], log_stride, 0, int(count))
                end = host.replay(entries, start)
                states[after, state_at : state_at + host.state_bytes] = end.page()


def _move(
    layer: attention.Layer, page_tokens: int, source: Bytes, target: Bytes, slot: int, to: int
) -> None:
    """One token of one layer."""
    h = layer.heads
    for move, offset, kind, dims in (
        (move_key, layer.k_offset, layer.type_k, h.head_dim_k),
        (move_value, layer.v_offset, layer.type_v, h.head_dim_v),
    ):
        part = slice(offset, offset + h.n_kv_heads * page_tokens * kv_row_bytes(kind, dims))
        move(source[part], target[part], kind, h.n_kv_heads, dims, slot, to)
