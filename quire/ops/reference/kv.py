"""Keys and values in pages, byte by byte, in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.ops.reference.matrices import Floats

Bytes = NDArray[np.uint8]

BLOCK = 16
"""Tokens whose values of one dimension lie side by side in the keys of a page."""


def kv_row_bytes(kind: str, dims: int) -> int:
    """Bytes of one token's row of one kv head."""
    if kind in ("q8_0", "q4_0"):
        return dims // 32 * {"q8_0": 34, "q4_0": 18}[kind]
    return dims * {"f32": 4, "f16": 2, "bf16": 2}[kind]


def to_bf16(x: Floats) -> NDArray[np.uint16]:
    """The upper half of a float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def quantize(kind: str, x: Floats) -> tuple[Bytes, NDArray[np.float16]]:
    """Rows of groups of 32 as bytes and scales, in ggml's way; q4_0 puts d and d+16 in a byte."""
    groups = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    at = np.abs(groups).argmax(-1)[..., None]
    extreme = np.take_along_axis(groups, at, -1)
    with np.errstate(divide="ignore"):
        scale = np.abs(extreme) / np.float32(127) if kind == "q8_0" else extreme / np.float32(-8)
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    y = groups * inverse
    if kind == "q8_0":
        whole = np.floor(np.abs(y))
        q = np.copysign(whole + (np.abs(y) - whole >= 0.5), y).astype(np.int8).view(np.uint8)
    else:
        n = np.minimum(np.trunc(y + np.float32(8.5)), 15).astype(np.uint8)
        q = n[..., :16] | n[..., 16:] << 4
    return q.reshape(*x.shape[:-1], -1), scale[..., 0].astype(np.float16)


def dequantize(kind: str, q: Bytes, scales: NDArray[np.float16]) -> Floats:
    """The inverse of quantize."""
    groups = np.ascontiguousarray(q).reshape(*scales.shape, -1)
    if kind == "q8_0":
        values = groups.view(np.int8).astype(np.float32)
    else:
        values = np.concatenate([groups & 15, groups >> 4], -1).astype(np.float32) - 8
    out: Floats = values * scales[..., None].astype(np.float32)
    return out.reshape(*scales.shape[:-1], -1)


_DENSE: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def _dense(kind: str, x: Floats) -> NDArray[np.generic]:
    return to_bf16(x) if kind == "bf16" else x.astype(_DENSE[kind])


def _widen(kind: str, x: NDArray[np.generic]) -> Floats:
    if kind == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def _key_views(part: Bytes, kind: str, heads: int, dims: int) -> tuple[Bytes, NDArray[np.float16]]:
    """Bytes [head, block, rows, 16] and scales [head, block, dims/32, 16] of quantised keys."""
    blocks = part.reshape(heads, -1, BLOCK * kv_row_bytes(kind, dims))
    n = BLOCK * dims // (1 if kind == "q8_0" else 2)
    shape = (heads, blocks.shape[1], -1, BLOCK)
    return blocks[..., :n].reshape(shape), blocks[..., n:].view(np.float16).reshape(shape)


def store_keys(part: Bytes, kind: str, slot: int, x: Floats) -> None:
    """Puts one token's keys x [heads, dims] into a slot of a page's K part."""
    heads, dims = x.shape
    block, lane = divmod(slot, BLOCK)
    if kind in _DENSE:
        view = part.view(_DENSE[kind]).reshape(heads, -1, dims, BLOCK)
        view[:, block, :, lane] = _dense(kind, x)
        return
    q, scales = _key_views(part, kind, heads, dims)
    q[:, block, :, lane], scales[:, block, :, lane] = quantize(kind, x)


def load_keys(part: Bytes, kind: str, heads: int, dims: int) -> Floats:
    """A page's keys as float32 [page_tokens, heads, dims]."""
    if kind in _DENSE:
        values = _widen(kind, part.view(_DENSE[kind]).reshape(heads, -1, dims, BLOCK))
        return values.transpose(1, 3, 0, 2).reshape(-1, heads, dims)
    q, scales = _key_views(part, kind, heads, dims)
    order = (1, 3, 0, 2)
    return dequantize(kind, q.transpose(order), scales.transpose(order)).reshape(-1, heads, dims)


def _value_views(
    part: Bytes, kind: str, heads: int, dims: int
) -> tuple[Bytes, NDArray[np.float16]]:
    """Bytes [head, token, bytes] and scales [head, token, dims/32] of quantised values."""
    rows = part.reshape(heads, -1)
    tokens = rows.shape[1] // kv_row_bytes(kind, dims)
    n = tokens * dims // (1 if kind == "q8_0" else 2)
    shape = (heads, tokens, -1)
    return rows[:, :n].reshape(shape), rows[:, n:].view(np.float16).reshape(shape)


def store_values(part: Bytes, kind: str, slot: int, x: Floats) -> None:
    """Puts one token's values x [heads, dims] into a slot of a page's V part."""
    heads, dims = x.shape
    if kind in _DENSE:
        part.view(_DENSE[kind]).reshape(heads, -1, dims)[:, slot] = _dense(kind, x)
        return
    q, scales = _value_views(part, kind, heads, dims)
    q[:, slot], scales[:, slot] = quantize(kind, x)


def load_values(part: Bytes, kind: str, heads: int, dims: int) -> Floats:
    """A page's values as float32 [page_tokens, heads, dims]."""
    if kind in _DENSE:
        return _widen(kind, part.view(_DENSE[kind]).reshape(heads, -1, dims)).transpose(1, 0, 2)
    q, scales = _value_views(part, kind, heads, dims)
    return dequantize(kind, q, scales).reshape(heads, -1, dims).transpose(1, 0, 2)


def move_key(
    source: Bytes, target: Bytes, kind: str, heads: int, dims: int, slot: int, to: int
) -> None:
    """Copies one token's keys, whatever they are, between the K parts of pages."""
    shape = (heads, -1, dims, BLOCK)
    views = [
        (part.view(_DENSE[kind]).reshape(shape),)
        if kind in _DENSE
        else _key_views(part, kind, heads, dims)
        for part in (source, target)
    ]
    for old, new in zip(*views, strict=True):
        new[:, to // BLOCK, :, to % BLOCK] = old[:, slot // BLOCK, :, slot % BLOCK]


def move_value(
    source: Bytes, target: Bytes, kind: str, heads: int, dims: int, slot: int, to: int
) -> None:
    """Copies one token's values between the V parts of pages."""
    shape = (heads, -1, dims)
    views = [
        (part.view(_DENSE[kind]).reshape(shape),)
        if kind in _DENSE
        else _value_views(part, kind, heads, dims)
        for part in (source, target)
    ]
    for old, new in zip(*views, strict=True):
        new[:, to] = old[:, slot]
