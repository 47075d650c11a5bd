"""Checks, and the bytes of pages by address."""

from __future__ import annotations

import ctypes

import numpy as np

from quire.ops import Int32, Refused
from quire.ops.reference.kv import Bytes


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


def bytes_at(address: int, count: int) -> Bytes:
    """The bytes at an address, not a copy of them."""
    found: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))
    return found


def page_rows(base: int, page_bytes: int, count: int) -> Bytes:
    """The first pages of a range: [pages, bytes of a page]."""
    need(page_bytes > 0, f"pages of {page_bytes} bytes")
    return bytes_at(base, count * page_bytes).reshape(count, page_bytes)
