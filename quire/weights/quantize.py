"""Turns float32 weights into the blocks of GGUF's tensor types.

Types of 32 weights round as ggml's own tools do, bit for bit. Types of 256 weights have scales of
6 or 8 bits in two levels: several ways to round are tried for each 32 or 16 weights, each with the
scale (and minimum) of least squares, and the best is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.weights.quant import Bytes, Floats, GGMLType

__all__ = ["QUANTIZABLE", "quantize"]

# Work on this many weights at a time, so that temporaries stay in the processor's cache.
_CHUNK: Final = 1 << 16
_STRETCHES: Final = tuple(np.linspace(-1, 1, 9))
"""By how many levels more or fewer than there are weights are spread when roundings are tried."""
_TINY: Final = np.float32(1e-30)


def quantize(x: Floats, type: GGMLType) -> Bytes:
    """Float32 rows as blocks of this type, [..., bytes of a row]; refuses what cannot be held."""
    shrink = _SHRINK[type]
    if x.ndim == 0 or x.shape[-1] % type.block_size:
        need = f"rows of a multiple of {type.block_size} weights"
        raise ModelError(f"{type.name} needs {need}, the tensor has shape {x.shape}")
    blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(-1, type.block_size)
    out = np.empty((len(blocks), type.type_size), dtype=np.uint8)
    step = max(_CHUNK // type.block_size, 1)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            some = blocks[start : start + step]
            packed = out[start : start + step] = shrink(some)
            for at in _SCALES.get(type, ()):
                if not np.isfinite(packed[:, at : at + 2].copy().view("<f2")).all():
                    raise ModelError(
                        f"{type.name} cannot hold this tensor: it has NaN or too large weights"
                    )
    return out.reshape(*x.shape[:-1], -1)


def _inverse(scales: Floats) -> Floats:
    """1/scale, and 0 where the scale is so small that every weight rounds to nothing."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    inverse[np.isinf(inverse)] = 0
    return inverse


def _halves(scales: Floats) -> Bytes:
    return scales.astype("<f2").view(np.uint8)


def _join(scales: Floats, *packed: NDArray[np.generic]) -> Bytes:
    return np.hstack([_halves(scales), *(part.view(np.uint8) for part in packed)])


# ---- floats ---------------------------------------------------------------------------------


def _shrink_f32(x: Floats) -> Bytes:
    return x.astype("<f4").view(np.uint8)


def _shrink_f16(x: Floats) -> Bytes:
    return _halves(x)


def _shrink_bf16(x: Floats) -> Bytes:
    bits = x.view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    kept = np.where(nan, (bits >> 16) | 64, rounded)
    return kept.astype("<u2").view(np.uint8)


# ---- blocks of 32 ---------------------------------------------------------------------------


def _shrink_q8_0(blocks: Floats) -> Bytes:
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    exact = blocks * _inverse(scales)
    whole = np.trunc(exact)
    # Halves round away from zero, as C's roundf does.
    whole += np.copysign(np.abs(exact - whole) >= 0.5, exact)
    return _join(scales, whole.astype(np.int8))


def _around(blocks: Floats, middle: int) -> tuple[Floats, Bytes]:
    """Scales and levels; the weight of largest magnitude keeps its sign and becomes level 0."""
    largest = np.abs(blocks).argmax(axis=1, keepdims=True)
    scales = np.take_along_axis(blocks, largest, axis=1) / np.float32(-middle)
    levels = (blocks * _inverse(scales) + np.float32(middle + 0.5)).astype(np.uint8)
    return scales, np.minimum(levels, 2 * middle - 1)


def _above(blocks: Floats, top: int) -> tuple[Floats, Floats, Bytes]:
    """Scales, minima, and the levels between the least weight and the largest."""
    least = blocks.min(axis=1, keepdims=True)
    scales = (blocks.max(axis=1, keepdims=True) - least) / np.float32(top)
    levels = ((blocks - least) * _inverse(scales) + np.float32(0.5)).astype(np.uint8)
    return scales, least, np.minimum(levels, top)


def _nibbles(levels: Bytes, width: int) -> Bytes:
    """Two levels in a byte: of each 2·width, the first half is low and the second high."""
    low, high = levels.reshape(len(levels), -1, 2, width).transpose(2, 0, 1, 3)
    packed: Bytes = (low & np.uint8(15)) | (high & np.uint8(15)) << np.uint8(4)
    return packed.reshape(len(levels), -1)


def _fifth_bits(levels: Bytes) -> Bytes:
    return np.packbits(levels >> np.uint8(4), axis=1, bitorder="little")


def _shrink_q4_0(blocks: Floats) -> Bytes:
    scales, levels = _around(blocks, 8)
    return _join(scales, _nibbles(levels, 16))


def _shrink_q4_1(blocks: Floats) -> Bytes:
    scales, least, levels = _above(blocks, 15)
    return _join(scales, _halves(least), _nibbles(levels, 16))


def _shrink_q5_0(blocks: Floats) -> Bytes:
    scales, levels = _around(blocks, 16)
    return _join(scales, _fifth_bits(levels), _nibbles(levels, 16))


def _shrink_q5_1(blocks: Floats) -> Bytes:
    scales, least, levels = _above(blocks, 31)
    return _join(scales, _halves(least), _fifth_bits(levels), _nibbles(levels, 16))


# ---- blocks of 256 --------------------------------------------------------------------------


def _weights(x: Floats) -> Floats:
    """How much an error of each weight counts: large weights are multiplied with more often
    large activations, and none counts for nothing."""
    spread: Floats = np.sqrt((x * x).mean(axis=-1, keepdims=True))
    return spread + np.abs(x)


def _sum(x: Floats) -> Floats:
    total: Floats = x.sum(axis=-1, keepdims=True)
    return total


def _levels(x: Floats, scale: Floats, top: int) -> Floats:
    levels: Floats = np.clip(np.rint(x * _inverse(scale)), 0, top)
    return levels


def _fit_above(x: Floats, top: int) -> tuple[Floats, Floats]:
    """Scale and minimum ≥ 0 of the last axis, x ≈ scale·level - minimum, tried several times."""
    w = _weights(x)
    least = np.minimum(x.min(axis=-1, keepdims=True), 0)
    spread = np.maximum(x.max(axis=-1, keepdims=True) - least, _TINY)
    best_scale, best_minimum = spread / np.float32(top), -least
    best = np.full_like(spread, np.inf)
    sw, sx = _sum(w), _sum(w * x)
    for stretch in _STRETCHES:
        level = _levels(x - least, spread / np.float32(top + stretch), top)
        wl = w * level
        sl, sll, sxl = _sum(wl), _sum(wl * level), _sum(wl * x)
        det = sw * sll - sl * sl
        scale = (sw * sxl - sx * sl) / np.maximum(det, _TINY)
        minimum = -(sll * sx - sl * sxl) / np.maximum(det, _TINY)
        below = (minimum < 0) | (det <= 0)  # a minimum above zero cannot be written
        scale = np.where(below, sxl / np.maximum(sll, _TINY), scale)
        minimum = np.where(below, 0, minimum)
        error = _sum(w * np.square(scale * level - minimum - x))
        better = error < best
        best = np.where(better, error, best)
        best_scale = np.where(better, scale, best_scale)
        best_minimum = np.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def _six_bits(parts: Floats) -> tuple[Floats, Bytes]:
    """Numbers ≥ 0 as multiples, up to 63, of one fp16 per block."""
    unit = (np.maximum(parts.max(axis=1, keepdims=True), 0) / 63).astype("<f2").astype(np.float32)
    return unit, _levels(np.maximum(parts, 0), unit, 63).astype(np.uint8)


def _shrink_k(blocks: Floats, top: int) -> tuple[Bytes, Bytes]:
    """What Q4_K and Q5_K share: the 16 bytes of scales and minima, and the levels."""
    x = blocks.reshape(len(blocks), 8, 32)
    scale, minimum = _fit_above(x, top)
    d, scales = _six_bits(scale[..., 0])
    dmin, minima = _six_bits(minimum[..., 0])
    for _ in range(2):  # the levels for these scales, then the best fp16 for these levels
        part, less = (d * scales)[..., None], (dmin * minima)[..., None]
        level = _levels(x + less, part, top)
        d, dmin = _refit(x, level * scales[..., None], minima[..., None], d, dmin)
    level = _levels(x + (dmin * minima)[..., None], (d * scales)[..., None], top)
    head = np.hstack([_halves(d), _halves(dmin), _pack_six(scales, minima)])
    return head, level.reshape(len(blocks), 256).astype(np.uint8)


def _refit(x: Floats, up: Floats, down: Bytes, d: Floats, dmin: Floats) -> tuple[Floats, Floats]:
    """The two scales of a block by least squares, given all that they multiply."""
    w = _weights(x)

    def total(values: Floats) -> Floats:
        return _sum(values.reshape(len(values), -1))

    aa, ab, bb = total(w * up * up), total(w * up * down), total(w * down * down * np.ones_like(x))
    ax, bx = total(w * up * x), total(w * down * x)
    det = aa * bb - ab * ab
    safe = det > _TINY
    new = np.where(safe, (ax * bb - bx * ab) / np.where(safe, det, 1), d)
    new_min = np.where(safe, (ax * ab - bx * aa) / np.where(safe, det, 1), dmin)
    keep = (new > 0) & (new_min >= 0) & (new < 60000) & (new_min < 60000)
    new, new_min = np.where(keep, new, d), np.where(keep, new_min, dmin)
    return new.astype("<f2").astype(np.float32), new_min.astype("<f2").astype(np.float32)


def _pack_six(scales: Bytes, minima: Bytes) -> Bytes:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    high = np.uint8(4)
    return np.hstack([
        scales[:, :4] | scales[:, 4:] >> high << np.uint8(6),
        minima[:, :4] | minima[:, 4:] >> high << np.uint8(6),
        (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << high,
    ])  # fmt: skip


def _shrink_q4_k(blocks: Floats) -> Bytes:
    head, levels = _shrink_k(blocks, 15)
    return np.hstack([head, _nibbles(levels, 32)])


def _shrink_q5_k(blocks: Floats) -> Bytes:
    head, levels = _shrink_k(blocks, 31)
    fifth = (levels >> np.uint8(4)).reshape(len(levels), 8, 32)
    high = np.bitwise_or.reduce(fifth << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.hstack([head, high, _nibbles(levels, 32)])


def _fit_around(x: Floats, middle: int) -> Floats:
    """The scale of the last axis, x ≈ scale·level with levels from -middle, tried several times."""
    w = x * x
    largest = np.abs(x).argmax(axis=-1)[..., None]
    extreme = np.take_along_axis(x, largest, axis=-1)
    best_scale = extreme / np.float32(-middle)
    best = np.full_like(extreme, -np.inf)
    for stretch in _STRETCHES:
        start = extreme / np.float32(-middle - stretch)
        level = np.clip(np.rint(x * _inverse(start)), -middle, middle - 1)
        wl = w * level
        sxl, sll = _sum(wl * x), _sum(wl * level)
        gain = sxl * sxl / np.maximum(sll, _TINY)  # the error is what is left of Σ w x²
        better = gain > best
        best = np.where(better, gain, best)
        best_scale = np.where(better, sxl / np.maximum(sll, _TINY), best_scale)
    return best_scale


def _shrink_q6_k(blocks: Floats) -> Bytes:
    x = blocks.reshape(len(blocks), 16, 16)
    scale = _fit_around(x, 32)[..., 0]
    largest = np.abs(scale).argmax(axis=1)[:, None]
    d = (np.take_along_axis(scale, largest, axis=1) / -128).astype("<f2").astype(np.float32)
    scales = np.clip(np.rint(scale * _inverse(d)), -128, 127).astype(np.int8)
    inverse = _inverse((d * scales)[..., None])
    level = (np.clip(np.rint(x * inverse), -32, 31) + 32).astype(np.uint8)
    level = level.reshape(len(blocks), 256)
    quarters = (level >> np.uint8(4)).reshape(len(level), 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(quarters << shifts, axis=2).reshape(len(level), 64)
    return np.hstack([_nibbles(level, 64), high, scales.view(np.uint8), _halves(d)])


_SHRINK: Final[dict[GGMLType, Callable[[Floats], Bytes]]] = {
    GGMLType.F32: _shrink_f32,
    GGMLType.F16: _shrink_f16,
    GGMLType.BF16: _shrink_bf16,
    GGMLType.Q8_0: _shrink_q8_0,
    GGMLType.Q4_0: _shrink_q4_0,
    GGMLType.Q4_1: _shrink_q4_1,
    GGMLType.Q5_0: _shrink_q5_0,
    GGMLType.Q5_1: _shrink_q5_1,
    GGMLType.Q4_K: _shrink_q4_k,
    GGMLType.Q5_K: _shrink_q5_k,
    GGMLType.Q6_K: _shrink_q6_k,
}
# Where each type keeps the fp16 that a weight too large, or none, would spoil.
_SCALES: Final[dict[GGMLType, tuple[int, ...]]] = {
    GGMLType.F16: (0,),
    GGMLType.Q8_0: (0,),
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
}
QUANTIZABLE: Final = frozenset(_SHRINK)
