"""The memory a model needs, from the groups it declares."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quire.devices.device import Device, GroupKernels
from quire.errors import BudgetError, ModelError, RequestError
from quire.memory.groups.attention import AttentionGroup
from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import AttentionLayout, GroupSpec, KVType
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout
from quire.memory.groups.window import WindowGroup
from quire.memory.memory import Memory

_ENDLESS = 2**26  # pages of a sequence, at most: where its memory does not grow, or has no end


class MemorySettings(Protocol):
    """What a user can choose about memory; the names are those of `quire.load`."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def type_k(self) -> str: ...
    @property
    def type_v(self) -> str: ...
    @property
    def kv_cache_tokens(self) -> int | None: ...
    @property
    def kv_cache_demand_paged(self) -> bool: ...
    @property
    def swa_full(self) -> bool: ...


def build_memory(
    groups: Sequence[GroupSpec | RecurrentSpec], device: Device, settings: MemorySettings,
    kernels: Mapping[str, GroupKernels], n_ctx: int | None = None,
    elsewhere: Mapping[str, Device] | None = None, sequences: int = 1,
) -> Memory:  # fmt: skip
    """The memory of a model with these groups, and kernels by the names of groups.

    What is taken all at once is for kv_cache_tokens, or else for so many sequences.
    `elsewhere` says which groups are on other devices. Nothing is taken ahead but for so many
    sequences of n_ctx tokens.
    """
    if not groups:
        raise ModelError("the model declares no groups, so there is nothing to remember with")
    if not settings.kv_cache_demand_paged:
        check_up_front(groups, settings)
    none, away = GroupKernels(), elsewhere or {}
    tokens = settings.kv_cache_tokens
    if tokens is None and not settings.kv_cache_demand_paged:
        tokens = n_ctx and up_front_tokens(n_ctx, sequences, settings.page_tokens)
    made = [
        _group(g, away.get(g.name, device), settings, kernels.get(g.name, none), tokens)
        for g in groups
    ]
    if n_ctx is not None:
        for group in made:
            for pool, pages in group.most_pages(0, sequences * n_ctx):  # what tokens alone take
                pool.expected = pages
    return Memory(made)


def attention_layout(group: GroupSpec, settings: MemorySettings) -> AttentionLayout:
    """The pages of a group with attention, as these settings make them."""
    type_k, type_v = KVType(settings.type_k), KVType(settings.type_v)
    return AttentionLayout(group, type_k, type_v, settings.page_tokens)


def _group(
    group: GroupSpec | RecurrentSpec, device: Device, settings: MemorySettings,
    kernels: GroupKernels, tokens: int | None,
) -> AnyGroup:  # fmt: skip
    if group.kind == "recurrent":
        if kernels.fold is None:
            raise ModelError(f"group {group.name!r} is recurrent; the model gives no way to fold")
        return RecurrentGroup(StateLayout(group), device, kernels)
    layout = attention_layout(group, settings)
    common = (layout, device, kernels, tokens, settings.kv_cache_demand_paged)
    if group.kind == "window":
        return WindowGroup(*common, swa_full=settings.swa_full)
    return AttentionGroup(*common)


def check_up_front(groups: Sequence[GroupSpec | RecurrentSpec], settings: MemorySettings) -> None:
    """Several pools can only be taken up front if it is said how large each is to be."""
    for group in groups:
        if group.kind == "recurrent":
            raise RequestError(
                f"kv_cache_demand_paged=False takes all pages at once, and how many states group "
                f"{group.name!r} will need is not known then; leave it at True for this model"
            )
    if len(groups) > 1 and settings.kv_cache_tokens is None:
        names = ", ".join(repr(group.name) for group in groups)
        raise RequestError(
            f"kv_cache_demand_paged=False takes all pages at once, and the groups {names} share "
            "one budget; set kv_cache_tokens, so that each takes pages for as many tokens"
        )


def up_front_tokens(n_ctx: int, sequences: int, page_tokens: int) -> int:
    """Tokens of the pages that so many sequences of n_ctx tokens take."""
    return sequences * -(-n_ctx // page_tokens) * page_tokens


def longest_on_each(
    groups: Mapping[Device, Sequence[GroupSpec | RecurrentSpec]], free: Callable[[Device], int],
    settings: MemorySettings,
) -> int:  # fmt: skip
    """How many tokens one sequence can have in what each device has free."""
    return min(
        longest_sequence(some, free(device), settings, device.granularity)
        for device, some in groups.items()
    )


def longest_sequence(
    groups: Sequence[GroupSpec | RecurrentSpec], n_bytes: int, settings: MemorySettings,
    granule: int,
) -> int:  # fmt: skip
    """How many tokens one sequence can have in so many bytes; BudgetError if not even a page.

    Only full attention grows with them: a window and a state, with a second state to fold into,
    are there from the start.
    """
    pools, cap = _pools(groups, settings, granule), settings.kv_cache_tokens
    per_page = sum(size for _, size in pools)
    most = min(n_bytes // per_page, _ENDLESS) if per_page else _ENDLESS
    if cap is not None and per_page:
        most = min(most, -(-cap // settings.page_tokens))
    pages = bisect_right(range(most + 1), n_bytes, key=lambda n: _taken(pools, n, granule)) - 1
    if pages < 1:
        raise BudgetError(
            f"{n_bytes:,} bytes are left for memory, and one sequence of the shortest kind takes "
            f"{_taken(pools, 1, granule):,}; raise memory_budget"
        )
    return pages * settings.page_tokens


def sequence_bytes(
    groups: Sequence[GroupSpec | RecurrentSpec], n_tokens: int, settings: MemorySettings,
    granule: int,
) -> int:  # fmt: skip
    """The least bytes in which one sequence can have so many tokens."""
    pages = max(-(-n_tokens // settings.page_tokens), 1)
    return _taken(_pools(groups, settings, granule), pages, granule)


def _taken(pools: Sequence[tuple[int, int]], pages: int, granule: int) -> int:
    """Bytes of a sequence with so many pages of tokens: each pool takes whole granules."""
    return sum(-(-(fixed + size * pages) // granule) * granule for fixed, size in pools)


def _pools(
    groups: Sequence[GroupSpec | RecurrentSpec], settings: MemorySettings, granule: int
) -> list[tuple[int, int]]:
    """Bytes that a sequence takes of each pool from the start, and with each page of tokens."""
    found = []
    for group in groups:
        if group.kind == "recurrent":
            layout = StateLayout(group)
            for size in (layout.state_page_bytes, layout.log_page_bytes):
                found.append((2 * size + min(size, granule), 0))  # which may lie apart
            continue
        kv = attention_layout(group, settings)
        if group.window is not None and not settings.swa_full:
            found.append(((kv.pages_for(group.window) + 1) * kv.page_bytes, 0))
        else:
            found.append((0, kv.page_bytes))
    return found
