"""What is said of a plan that does not fit: need, have, and what would fit, each of it tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import DoesNotFit
from quire.placement.described import Described
from quire.placement.plan import DevicePlan, Plan, over
from quire.placement.wanted import FLOOR, Wanted
from quire.placement.words import size

Try = Callable[[Wanted], Plan]
"""The best plan for what is wanted, which may not fit."""
_FIELDS = {"n_parallel": "sequences"}
_PLACES = {"n_gpu_layers": "auto", "n_cpu_moe": None, "tensor_split": None}
_OPEN = ("auto", None)


def refusal(plan: Plan, wanted: Wanted, best: Try) -> DoesNotFit:
    """Of a plan that does not fit, the best there is."""
    need = "; ".join(
        f"{one.device.name} needs {size(needs)}{_uses(one)} and {_has(one.device, needs, has)}"
        for one, needs, has in over(plan.devices)
    )
    nearest: Plan | None = None
    advice: list[dict[str, Any]] = []
    if all(one.device.asked and needs <= one.device.real for one, needs, _ in over(plan.devices)):
        advice.append({"memory_budget": _budget(plan, wanted)})
    for changes in _ways_out(plan, wanted, best):
        nearest = nearest or best(_changed(wanted, changes))
        advice.append(changes)
    told = "what would fit: " + ", or ".join(map(_said, advice))
    if not advice:
        told = "ask for less, close other programs, or take a smaller model"
    return DoesNotFit(f"{plan.model.name} does not fit: {need}; {told}", nearest, tuple(advice))


def _has(device: Described, needs: int, has: int) -> str:
    """What there is, and where no budget would do, what there could be."""
    if device.asked and needs > device.real:
        return f"may have {size(has)}, of {size(device.real)} that are free"
    return f"has {size(has)}"


def _budget(plan: Plan, wanted: Wanted) -> str | dict[str, str]:
    """What would be enough for a plan, or for one of a useful context where that is left open.

    As it was asked for: for every device, or by name for some.
    """
    useful = max(plan.load.n_ctx, min(FLOOR, plan.model.n_ctx_train))
    roomy = plan if wanted.n_ctx else plan.with_load(replace(plan.load, n_ctx=useful))
    if any(one.device.asked and one.total > one.device.real for one in roomy.devices):
        roomy = plan
    needs = {one.device.name: one.total for one in roomy.devices}
    asked = {one.device.name: one.device.free for one in roomy.devices if one.device.asked}
    if asked.keys() == needs.keys() and len(set(asked.values())) == 1:
        return _written(max(needs.values()))
    return {name: _written(max(needs[name], has)) for name, has in asked.items()}


def _written(n_bytes: int) -> str:
    """Bytes as a user writes them, rounded up."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= one:
            return f"{math.ceil(n_bytes / one * 100) / 100:.2f}{unit}"
    return str(n_bytes)


def _uses(one: DevicePlan) -> str:
    uses = {
        "weights": sum(one.weights.values()), "memory": sum(one.memory.values()),
        "draft": one.draft, "compute": one.compute + one.streaming,
        "libraries": one.libraries + one.graphs,
    }  # fmt: skip
    return " (" + ", ".join(f"{use} {size(n)}" for use, n in uses.items() if n) + ")"


def _said(changes: Mapping[str, Any]) -> str:
    gone = [name for name, value in changes.items() if value in _OPEN]
    given = [f"{name}={value!r}" for name, value in changes.items() if name not in gone]
    return " and ".join([*given, *(f"without {name}" for name in gone)])


def _ways_out(plan: Plan, wanted: Wanted, best: Try) -> Iterator[dict[str, Any]]:
    """Each wish changed alone; where none of that is enough, several."""
    page = max([1, *(group.page_tokens for group in plan.model.groups)])
    alone = [_less_context(wanted, best, page), _elsewhere(wanted, best)]
    alone.append(_fewer(wanted, best))
    if found := [one for one in alone if one]:
        yield from found
        return
    several: tuple[dict[str, Any], ...] = ({}, {"n_parallel": 1, "checkpoints": 0})
    for fewer in several:
        changes = {k: v for k, v in fewer.items() if getattr(wanted, _FIELDS.get(k, k)) != v}
        changes |= _places(wanted)
        if less := _less_context(_changed(wanted, changes), best, page):
            yield {**changes, **less}
            return


def _changed(wanted: Wanted, changes: Mapping[str, Any]) -> Wanted:
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        fields[_FIELDS.get(name, name)] = None if value == "auto" else value
    return replace(wanted, **fields)


def _places(wanted: Wanted) -> dict[str, Any]:
    """The places that are asked for, left open."""
    return {name: open for name, open in _PLACES.items() if getattr(wanted, name) is not None}


def _less_context(wanted: Wanted, best: Try, page: int) -> dict[str, Any] | None:
    """The largest context that fits, if a smaller one does."""
    for floor in (wanted.floor, page):
        found = best(replace(wanted, n_ctx=None, fit=True, floor=floor))
        whole = wanted.n_ctx or found.model.n_ctx_train
        changes: dict[str, Any] = {"n_ctx": min(found.load.n_ctx, whole)}
        if found.fits and best(_changed(wanted, changes)).fits:
            return changes
        if found.fits and best(_changed(wanted, changes := {**changes, "fit": True})).fits:
            return changes
    return None


def _elsewhere(wanted: Wanted, best: Try) -> dict[str, Any] | None:
    """Other places than were asked for: as many layers on GPUs as fit."""
    given = _places(wanted) | ({} if wanted.fit else {"fit": True})
    if not given:
        return None
    found = best(_changed(wanted, given))
    if not found.fits:
        return None
    if wanted.n_gpu_layers is not None:
        exact = {**given, "n_gpu_layers": found.n_gpu_layers}
        return exact if best(_changed(wanted, exact)).fits else given
    return given


def _fewer(wanted: Wanted, best: Try) -> dict[str, Any] | None:
    """The most sequences that fit, if fewer do."""
    low, high = 0, wanted.sequences
    while high - low > 1:
        middle = (low + high) // 2
        fits = best(replace(wanted, sequences=middle)).fits
        low, high = (middle, high) if fits else (low, middle)
    return {"n_parallel": low} if low else None
