"""Finds a place for a model: which devices there are, what goes where, and who is made for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from quire.api.devices import HOST, budget_of, device_of, find_devices
from quire.config import NOT_ON_GPUS, LoadConfig
from quire.devices.budget import Budget
from quire.devices.device import Device
from quire.errors import DoesNotFit, RequestError
from quire.models.loader import Part, Place
from quire.models.registry import Model, open_weights
from quire.ops import Ops
from quire.placement.blueprint import Blueprint
from quire.placement.compute import compute_of, rehearse
from quire.placement.described import Described
from quire.placement.facts import ModelFacts, model_facts
from quire.placement.fit import fit
from quire.placement.plan import Load, Plan, lay_out, passing_room
from quire.placement.wanted import FLOOR, Wanted, moot
from quire.weights.file import WeightFile

if TYPE_CHECKING:
    from quire.models.streaming import Streaming

_ODD = 1 << 16  # bytes that matrices may take to begin at round addresses


@dataclass(frozen=True)
class Placed:
    """A model's devices, that with the output first, and where its parts are."""

    devices: tuple[Device, ...]
    blueprint: Blueprint
    _described: tuple[Described, ...]
    _settings: LoadConfig
    _found: Plan | None = None

    @property
    def split(self) -> bool:
        """Whether it is on several devices."""
        return len(self.devices) > 1

    @property
    def n_ctx(self) -> int:
        """The longest context that was planned, or that the model was made for."""
        return self._found.load.n_ctx if self._found else self.blueprint.n_ctx_train

    def elsewhere(self, groups: Mapping[str, object]) -> dict[str, Device]:
        """The groups that are not on the first device; their names end in that of their device."""
        by_name = {device.name: device for device in self.devices}
        return {name: by_name[name.rpartition(" on ")[2]] for name in groups} if self.split else {}

    def weight_bytes(self, part_bytes: Mapping[Part, int]) -> dict[Device, int]:
        """What weights take of each device."""
        sizes = dict.fromkeys(self.devices, 0)
        names = {device.name: device for device in self.devices}
        for part, size in part_bytes.items():
            at = self._found.device_of(part) if self.split and self._found else ""
            sizes[names[at] if at else self.devices[0]] += size
        return sizes

    @property
    def streaming_bytes(self) -> dict[Device, int]:
        """What devices have room for to run networks of the host on the first; often nothing."""
        if not self.split or self._found is None:
            return {}
        planned = {one.device.name: one.streaming for one in self._found.devices}
        return {device: planned[device.name] for device in self.devices if planned[device.name]}

    def _kind(self, device: Device) -> str:
        """What kind of device it is, to plans."""
        return next(one.kind for one in self._described if one.name == device.name)

    def stream(self, model: Model, begins: Callable[[], None]) -> Streaming:
        """Lets long prompts run networks of the host on the first device; the file stays open."""
        from quire.models.streaming import Streaming

        host = next(device for device in self.devices if device.name == HOST)
        assert self._found is not None
        places, kind = self._found.places, self._kind(self.devices[0])
        room = passing_room(self._found.model, kind, places, len(self._found.devices) - 1)
        passage = self.devices[0].ops.passage(room + _ODD)
        kit = self.blueprint.kit(passage.ops, passage.reads)
        streaming = Streaming(kit, host.ops, passage, begins)
        model.stream(streaming)
        return streaming

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed, and what was asked for and could not be."""
        return self._found.notes if self._found else self._moot

    @property
    def _moot(self) -> tuple[str, ...]:
        """What was asked for of GPUs, where there are none."""
        return tuple(moot(wanted_of(self._settings, self._described), self._described))

    @cached_property
    def plan(self) -> Plan:
        """What was planned; for a model that had no choice, what it comes to."""
        if self._found:
            return self._found
        (one,) = self._described
        with open_weights(self.blueprint.path) as file:
            looks = {one.kind: self.blueprint}
            facts = facts_of(file, looks, {one.kind: self.devices[0].ops}, self._settings)
        places = dict.fromkeys([*facts.parts[one.kind], *facts.ends], 0)
        load = Load(self._settings.n_ctx or facts.n_ctx_train, self._settings.n_parallel)
        return lay_out(facts, [one], places, load, self._moot)


def place_model(
    file: WeightFile, settings: LoadConfig, budget: Budget | None = None, like: Device | None = None
) -> Placed:
    """Devices for a model, and a look at its file with every part where it will be.

    A `budget` that is given is that of one device, which is of the kind of another one (`like`).
    """
    described = find_devices(settings)
    if budget is not None and like is not None and settings.device == "auto":
        described = [Described(like.name, like.name.partition(":")[0], budget.free)]
        if described[0].kind == "cuda" and settings.activations == "f32":
            raise RequestError(NOT_ON_GPUS)
    if len(described) == 1 or budget is not None:
        one = described[-1] if settings.gpu is None else described[0]
        device = device_of(one, settings, budget or budget_of(one, settings))
        blueprint = Blueprint.read(file, device.ops, settings)
        return Placed((device,), blueprint, (one,), settings)
    return _spread(file, settings, described)


def _spread(file: WeightFile, settings: LoadConfig, described: list[Described]) -> Placed:
    """The best plan over several devices, carried out."""
    made = [device_of(one, settings, budget_of(one, settings)) for one in described]
    looks: dict[str, Blueprint] = {}
    for one, device in zip(described, made, strict=True):
        if one.kind not in looks:
            looks[one.kind] = Blueprint.read(file, device.ops, settings)
    for look in looks.values():
        look.raise_errors()
    ops = {one.kind: device.ops for one, device in zip(described, made, strict=True)}
    plan = best_plan(facts_of(file, looks, ops, settings), described, settings)
    made = [made[described.index(one.device)] for one in plan.devices]
    used = [made[at] for at in dict.fromkeys(plan.places.values())]
    main = made[plan.places[Part("output")]]
    if len(used) == 1:
        kind = plan.devices[made.index(main)].device.kind
        return Placed((main,), looks[kind], tuple(described), settings, plan)
    place = _place_of(plan, made)
    devices = tuple(dict.fromkeys([main, *used]))
    blueprint = Blueprint.read(file, main.ops, settings, place)
    return Placed(devices, blueprint, tuple(described), settings, plan)


def best_plan(
    facts: ModelFacts, described: list[Described], settings: LoadConfig, checkpoints: int = 0,
    draft: ModelFacts | None = None,
) -> Plan:  # fmt: skip
    """The best plan; where nobody asked for several GPUs, one of them if it is enough."""
    wanted = wanted_of(settings, described, checkpoints)
    *gpus, host = described
    by_hand = wanted.tensor_split or wanted.overrides or (wanted.main_gpu or 0) >= len(gpus)
    if settings.device == "auto" and len(gpus) > 1 and not by_hand:
        main = wanted.main_gpu
        first = max(gpus, key=lambda one: one.limit) if main is None else gpus[main]
        try:
            alone = fit(facts, [first, host], replace(wanted, main_gpu=None), draft)
        except DoesNotFit:
            pass
        else:
            if not alone.notes:
                return alone
    return fit(facts, described, wanted, draft)


def _place_of(plan: Plan, made: list[Device]) -> Callable[[Part], Place]:
    def place(part: Part) -> Place:
        device = made[plan.places[part]]
        return Place(device.name, device.ops)

    return place


def facts_of(
    file: WeightFile, looks: Mapping[str, Blueprint], ops: Mapping[str, Ops], settings: LoadConfig
) -> ModelFacts:
    """What a plan has to know of a model."""
    rehearsed = {kind: rehearse(file, ops[kind], kind, settings) for kind in looks}
    return model_facts(looks, settings, compute_of(rehearsed))


def wanted_of(
    settings: LoadConfig, described: Sequence[Described], checkpoints: int = 0
) -> Wanted:  # fmt: skip
    """What the settings ask of a plan; on one device any context is better than none."""
    asked = settings.n_gpu_layers
    return Wanted(
        n_ctx=settings.n_ctx, sequences=settings.n_parallel, checkpoints=checkpoints,
        n_gpu_layers=asked if isinstance(asked, int) else None, n_cpu_moe=settings.n_cpu_moe,
        tensor_split=settings.shares(), main_gpu=settings.main_gpu,
        overrides=settings.overrides(), kv_offload=settings.kv_offload, fit=settings.fit,
        streams=not settings.exact_batches,
        floor=settings.page_tokens if len(described) == 1 else FLOOR,
    )  # fmt: skip
