"""The group `PageOps` of the table, but for folds: one launch for each kind of work."""

from __future__ import annotations

import numpy as np
import torch
import triton

from quire.ops import HeadsHandle, Int32, Int64, RopeHandle
from quire.ops.cuda.arrays import Arrays
from quire.ops.cuda.kernels import heads as kernels
from quire.ops.cuda.machine import need, need_apart, need_ids, power_of_two
from quire.ops.cuda.paged import TYPES, Layer, layer_of, need_placed, rope_of

_PIECE = 4096  # words of a page that one program copies


class PageWork(Arrays):
    """The group `PageOps` of the table."""

    @property
    def page_layout(self) -> str:
        """The order of bytes inside pages: rows of tokens, head by head; states [dv, dk]."""
        return "rows"

    @property
    def folds_at_positions(self) -> bool:
        """Yes: outputs are computed from the last state and what its log has derived."""
        return True

    def copy_pages(self, base: int, page_bytes: int, sources: Int32, targets: Int32) -> None:
        """Copies whole pages."""
        need_ids("copy_pages", sources, len(sources))
        need_ids("copy_pages", targets, len(sources))
        need_apart("copy_pages", sources, targets)
        need(page_bytes > 0, f"pages of {page_bytes} bytes")
        if len(sources) == 0:
            return
        dtype = torch.int64 if page_bytes % 8 == 0 and base % 8 == 0 else torch.uint8
        words = page_bytes // dtype.itemsize
        kernels.copy_pages[(len(sources), triton.cdiv(words, _PIECE))](
            base, *self.machine.upload_all([sources, targets]), words, TYPE=TYPES[dtype],
            BLOCK=_PIECE,
        )  # fmt: skip

    def rotate_pages(
        self, heads: HeadsHandle, rope: RopeHandle, base: int, page_bytes: int, page_tokens: int,
        pages: Int32, deltas: Int32, k_offsets: Int64,
    ) -> None:  # fmt: skip
        """Turns stored keys on by deltas[i, slot] positions in each of these pages."""
        layer, turn = layer_of(heads), rope_of(rope)
        for k in k_offsets:
            need_placed(layer, page_bytes, page_tokens, int(k), 0)
        need_ids("rotate_pages", pages, len(pages))
        need(deltas.shape == (len(pages), page_tokens), f"deltas are {deltas.shape}")
        need(turn.rope.n_rot <= layer.heads.head_dim_k, "rope wider than a head")
        if len(pages) == 0 or len(k_offsets) == 0:
            return
        ids, by = self.machine.upload_all([pages, deltas.astype(np.int32, copy=False)])
        kv_heads, dims = layer.heads.n_kv_heads, layer.heads.head_dim_k
        kernels.rotate[(deltas.size, len(k_offsets) * kv_heads)](
            base, ids, by, turn.turns(by, 1.0),
            self.machine.upload(k_offsets), page_bytes, KV_HEADS=kv_heads, D=dims,
            DP=power_of_two(dims, 32), TOKENS=page_tokens, N_ROT=turn.rope.n_rot,
            NEOX=turn.rope.neox, TYPE=TYPES[layer.k.dtype], KIND=layer.k.kind,
            SIZE=layer.k.size, ROW=layer.k.row(dims), num_warps=1,
        )  # fmt: skip

    def move_tokens(
        self, heads: HeadsHandle, base: int, page_bytes: int, page_tokens: int,
        from_pages: Int32, from_slots: Int32, to_pages: Int32, to_slots: Int32,
        k_offsets: Int64, v_offsets: Int64,
    ) -> None:  # fmt: skip
        """Copies tokens from a slot of a page to a slot of a page, as if one after the other."""
        need(len(k_offsets) == len(v_offsets), "each layer needs offsets of K and of V")
        layer = layer_of(heads)
        for k, v in zip(k_offsets, v_offsets, strict=True):
            need_placed(layer, page_bytes, page_tokens, int(k), int(v))
        for pages, slots in ((from_pages, from_slots), (to_pages, to_slots)):
            need_ids("move_tokens", pages, len(from_pages))
            need(len(slots) == len(pages), "move_tokens: a slot for each token")
            need(((slots >= 0) & (slots < page_tokens)).all(), "move_tokens: a slot of no page")
        columns = [from_pages, from_slots, to_pages, to_slots]
        for part in _independent(columns, page_tokens):
            moved = self.machine.upload_all([column[part] for column in columns])
            for offsets, which in ((k_offsets, "k"), (v_offsets, "v")):
                self._move(layer, which, base, page_bytes, page_tokens, moved, offsets)

    def _move(
        self, layer: Layer, which: str, base: int, page_bytes: int, page_tokens: int,
        moved: list[torch.Tensor], offsets: Int64,
    ) -> None:  # fmt: skip
        h = layer.heads
        kind, dims = (layer.k, h.head_dim_k) if which == "k" else (layer.v, h.head_dim_v)
        kernels.move[(len(moved[0]), len(offsets) * h.n_kv_heads)](
            base, *moved, self.machine.upload(offsets),
            page_bytes, KV_HEADS=h.n_kv_heads, TOKENS=page_tokens, ROW=kind.row(dims),
            LEVELS=kind.levels(dims), BLOCK=power_of_two(kind.levels(dims)), num_warps=1,
        )  # fmt: skip


def _independent(columns: list[Int32], page_tokens: int) -> list[slice]:
    """All moves at once where no token is both read and written, or written twice; else singly."""
    n = len(columns[0])
    source = columns[0].astype(np.int64) * page_tokens + columns[1]
    target = columns[2].astype(np.int64) * page_tokens + columns[3]
    apart = len(np.unique(target)) == n and not np.isin(target, source).any()
    if apart:
        return [slice(0, n)] if n else []
    return [slice(i, i + 1) for i in range(n)]
