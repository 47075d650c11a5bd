"""What is checked of saved state before any of it goes into memory."""

from __future__ import annotations

from collections.abc import Sequence

from quire.devices.budget import Budget
from quire.errors import BudgetError, PagesError
from quire.memory.groups.group import AnyGroup
from quire.memory.groups.table import Table
from quire.memory.pages.demand import fit_together
from quire.memory.pages.pool import PagePool
from quire.memory.saved.format import Container
from quire.memory.saved.holders import Held, describe
from quire.memory.saved.regroup import Regrouping
from quire.memory.saved.sources import PAGES
from quire.memory.saved.types import Extra, Found, StateFlags

FORMAT = "quire saved state"
VERSION = 3
"""To be raised with every change of what a file means, the order of bytes in a page included."""

EXTRA = "extra "


def split_groups(
    groups: Sequence[AnyGroup], flags: StateFlags
) -> tuple[list[AnyGroup], list[AnyGroup]]:
    """What is written, and what is left out."""
    if StateFlags.PARTIAL not in flags:
        return list(groups), []
    return (
        [group for group in groups if group.kind != "attention"],
        [group for group in groups if group.kind == "attention"],
    )


def flag_name(flags: StateFlags) -> str:
    """How a file calls it."""
    return "partial" if StateFlags.PARTIAL in flags else "whole"


def check_header(
    container: Container, kind: str, flags: StateFlags, model: str, groups: Sequence[AnyGroup]
) -> Regrouping | None:
    """Refuses another format, version, kind, model or layout, and says which.

    Returns how pages become those of these groups, where they are not as they are in the file.
    """
    found = container.metadata
    if found.get("format") != FORMAT:
        container.refuse(f"not a session file: its format is {found.get('format')!r}")
    version = found.get("version", "")
    if version != str(VERSION):
        container.refuse(
            f"it has version {version[:20]!r} of the format, and this is version {VERSION}; "
            "use a release of Quire that knows it, or compute the session again"
        )
    for key, wanted in (("kind", kind), ("flags", flag_name(flags))):
        if found.get(key) != wanted:
            container.refuse(f"{key} of its state: {found.get(key)!r}, asked for {wanted!r}")
    if found.get("model") != model:
        container.refuse(
            "it is from another model, or the same one loaded otherwise (activations, quantize, "
            f"n_layer_exit, moe_n_expert): its weights have the fingerprint "
            f"{found.get('model')!r}, those loaded {model!r}"
        )
    for key in ("state", "extra"):
        if key not in found:
            container.refuse(f"its header has no {key!r}")
    return _regrouping(container, groups)


def _regrouping(container: Container, groups: Sequence[AnyGroup]) -> Regrouping | None:
    ours = {group.name: describe(group) for group in groups}
    if container.json(container.metadata.get("layout", "")) == ours:
        return None
    return Regrouping(container, groups)


def page_counts(container: Container, groups: Sequence[AnyGroup]) -> dict[str, int]:
    """How many pages of each pool there are; refuses tensors of another shape or name."""
    counts: dict[str, int] = {}
    pools = [pool for group in groups for pool in group.pools]
    for pool in pools:
        place = container.tensors.get(PAGES + pool.name)
        if place is None or place.dtype != "U8" or place.shape[1:] != (pool.page_bytes,):
            container.refuse(f"it has no pages of {pool.use} of {pool.page_bytes} bytes each")
        counts[pool.name] = place.shape[0]
    others = [name for name in container.tensors if not name.startswith(EXTRA)]
    if len(others) != len(pools):
        container.refuse(f"it has tensors that do not belong there: {others[:5]}")
    return counts


def check_kind(container: Container, kind: str, flags: StateFlags, held: Sequence[Held]) -> None:
    """Refuses a file that holds more or less than it says."""
    n_seqs = sum(one.name is None for one in held)
    if (kind == "sequence" and n_seqs != 1) or (
        kind == "checkpoint" and (n_seqs, len(held)) != (0, 1)
    ):
        container.refuse(f"it is said to hold one {kind}, and does not")
    if StateFlags.PARTIAL in flags and n_seqs != len(held):
        container.refuse("it is a partial state and has checkpoints, which cannot be partial")


def read_extra(container: Container) -> Extra:
    """What the caller saved beside the state."""
    facts = container.json(container.metadata["extra"])
    if not isinstance(facts, dict):
        container.refuse("what was saved beside its state is not a table")
    names = [name for name in container.tensors if name.startswith(EXTRA)]
    return Extra(facts, {name[len(EXTRA) :]: container.array(name) for name in names})


def findings(held: Sequence[Held], groups: Sequence[AnyGroup], extra: Extra) -> Found:
    """What a file has, for the caller to judge."""
    ends = {one.seq: one.end for one in held if one.name is None}
    checkpoint_ends = {one.name: one.end for one in held if one.name is not None}
    full = {group.name for group in groups if group.kind == "attention"}
    complete = all(
        table.pending is None and (group not in full or table.gapless)
        for one in held
        for group, table in one.tables.items()
        if isinstance(table, Table)
    )
    return Found(ends, checkpoint_ends, complete, extra)


def check_size(container: Container, demand: Sequence[tuple[PagePool, int]]) -> None:
    """Refuses more pages than there would be if nobody else held any: nobody gives way then."""
    for pool, n in demand:
        if n > pool.max_pages:
            container.refuse(f"it has {n} {pool.use}, and there are {pool.max_pages} in all")
    for budget in {id(pool.budget.whole): pool.budget.whole for pool, _ in demand}.values():
        mine = [(pool, n) for pool, n in demand if pool.budget.whole is budget]
        n_bytes = sum(pool.page_bytes * n for pool, n in mine)
        most = max(budget.limit - _stays(budget), 0)
        if n_bytes > most:
            container.refuse(
                f"its pages take {n_bytes:,} bytes, and weights and the like leave {most:,} of a "
                f"budget of {budget.limit:,}; raise memory_budget"
            )


def _stays(budget: Budget) -> int:
    """Bytes that nobody gives way with, of all who share a budget: all but pages and arrays."""
    uses = [(use.rpartition(": ")[2], size) for use, size in budget.breakdown.items()]
    return sum(n for use, n in uses if use != "compute" and not use.startswith("pages of "))


def check_fits(demand: Sequence[tuple[PagePool, int]]) -> None:
    """Refuses more pages than could be allocated now."""
    if fit_together(demand):
        return
    for pool, n in demand:
        if not pool.has(n):
            raise PagesError(
                f"{n} {pool.use} needed, {pool.max_pages - pool.used} of {pool.max_pages} are "
                "free; free sequences or checkpoints, or raise kv_cache_tokens or memory_budget"
            )
    for budget in {id(pool.budget.whole): pool.budget for pool, _ in demand}.values():
        mine = [(pool, n) for pool, n in demand if pool.budget.whole is budget.whole]
        if not fit_together(mine):
            needs = ", ".join(f"{n} {pool.use}" for pool, n in mine if n)
            n_bytes = sum(pool.page_bytes * n for pool, n in mine)
            raise BudgetError(
                f"{needs} needed, {n_bytes:,} bytes; {budget.free:,} of the {budget.limit:,} bytes "
                "of the budget are free; free sequences or checkpoints, or raise memory_budget"
            )
