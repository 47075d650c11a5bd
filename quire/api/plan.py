"""Planning without loading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire import config
from quire.api.devices import HOST, device_of, find_devices, within_budget
from quire.api.placing import best_plan, facts_of, wanted_of
from quire.api.texts import tokenizer_of
from quire.devices.budget import Budget
from quire.errors import RequestError
from quire.models.registry import open_weights
from quire.ops import Ops
from quire.placement.blueprint import Blueprint
from quire.placement.described import Described, parse
from quire.placement.facts import ModelFacts
from quire.placement.plan import Outlook, Plan
from quire.placement.room import longest_context, most_sequences, next_gib
from quire.placement.speed import Bandwidth, expected, measure
from quire.placement.wanted import Wanted
from quire.speculate.draft_model import check_vocabulary
from quire.weights import pull
from quire.weights.file import WeightFile

_MOST_MARKS = 1 << 20


def plan(
    model: str | Path = "smollm2", *, devices: Sequence[str | Described] | None = None,
    draft: str | Path | None = None, checkpoints: int = 0, **settings: Any,
) -> Plan:  # fmt: skip
    """What would be loaded where, byte by byte, and what room that leaves; nothing is loaded.

    `devices` describes others than there are here, such as ["cuda:24GiB", "cpu:64GiB"]. A file's
    header is enough. `draft` is a model that drafts for this one, loaded beside it as it is. The
    settings are those of `load`.
    """
    chosen = config.settings_of(settings)
    if type(checkpoints) is not int or not 0 <= checkpoints <= _MOST_MARKS:
        raise RequestError(
            f"checkpoints is a whole number from 0 to {_MOST_MARKS}, not {checkpoints!r:.80}"
        )
    here = devices is None
    found = find_devices(chosen) if devices is None else _described(devices, chosen)
    path = pull.resolve(str(model), config.cache_folder())
    tables = {one.kind: _ops(one, chosen, here) for one in found}
    with open_weights(path, whole=False) as file:
        facts = _facts(file, tables, chosen)
        types = Counter[int]()
        for tensor in file.tensors.values():
            types[int(tensor.type)] += tensor.nbytes
        follower = None if draft is None else _follower(str(draft), file, tables, chosen)
    asked = chosen if here else replace(chosen, device=",".join(one.name for one in found))
    made = best_plan(facts, found, asked, checkpoints, follower)
    rates = _rates(made, tables, types.most_common(1)[0][0], here)
    wanted = wanted_of(chosen, found, checkpoints)
    return replace(made, outlook=_outlook(made, wanted, follower, rates))


def _described(devices: Sequence[str | Described], settings: config.LoadConfig) -> list[Described]:
    """Those that are described, and the host, which is the last."""
    known = isinstance(devices, (list, tuple))
    if not known or not all(isinstance(d, (str, Described)) for d in devices):
        raise RequestError(f"devices is a list such as ['cuda:24GiB'], not {devices!r:.80}")
    found = [d for d in devices if isinstance(d, Described)]
    found += parse([d for d in devices if isinstance(d, str)])
    found = [one if _fits_budget(one, settings) else within_budget(one, settings) for one in found]
    hosts = [d for d in found if d.name == HOST]
    beside = [d for d in found if d.name != HOST]
    return [*beside, *(hosts or find_devices(replace(settings, device=HOST)))]


def _fits_budget(one: Described, settings: config.LoadConfig) -> bool:
    """Whether a device has no more than may be taken of it."""
    return one.free <= (settings.asked_bytes(one.name) or one.free)


def _ops(one: Described, settings: config.LoadConfig, here: bool) -> Ops:
    """What tells sizes on a kind of device; a GPU need not be there for that."""
    if one.kind != "cuda" or here:
        return device_of(one, settings, Budget(1)).ops  # nothing is taken of it
    from quire.placement.cuda_sizes import DescribedCuda

    return DescribedCuda(1)


def _facts(file: WeightFile, tables: dict[str, Ops], settings: config.LoadConfig) -> ModelFacts:
    looks = {kind: Blueprint.read(file, ops, settings) for kind, ops in tables.items()}
    for look in looks.values():
        look.raise_errors()
    return facts_of(file, looks, tables, settings)


def _follower(
    draft: str, model: WeightFile, tables: dict[str, Ops], settings: config.LoadConfig
) -> ModelFacts:
    """A model that drafts for another, which it must have the vocabulary of."""
    with open_weights(pull.resolve(draft, config.cache_folder()), whole=False) as file:
        check_vocabulary(tokenizer_of(model), tokenizer_of(file))
        return _facts(file, tables, config.LoadConfig(threads=settings.threads))


def _rates(
    plan: Plan, tables: dict[str, Ops], type: int, here: bool
) -> dict[str, Bandwidth]:  # fmt: skip
    """How fast devices that are here read weights of the type that most of them have."""
    used = [one.device for one in plan.devices if one.parts]
    if any(one.kind == "cuda" for one in used) and not here:
        return {}
    by_kind = {kind: measure(tables[kind], type) for kind in {one.kind for one in used}}
    return {one.name: by_kind[one.kind] for one in used}


def _outlook(
    plan: Plan, wanted: Wanted, draft: ModelFacts | None, rates: dict[str, Bandwidth]
) -> Outlook:
    speed = expected(plan, rates)
    devices = [one.device for one in plan.devices]
    return Outlook(
        longest_context(plan), most_sequences(plan),
        next_gib(plan, plan.model, devices, wanted, draft),
        None if speed is None else (speed.low, speed.middle, speed.high),
    )  # fmt: skip
