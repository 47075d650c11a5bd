"""A plan: which part of a model goes to which device, and what that takes, byte by byte."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from quire.models.loader import DOWN, EMBEDDING, EXPERTS, MIXER, NETWORK, OUTPUT, Part
from quire.ops.passing import ROOMS, STAGED, UNPACKED
from quire.placement.described import Described
from quire.placement.facts import ModelFacts

_LAYER = (MIXER, NETWORK, EXPERTS, DOWN)
Places = Mapping[Part, int]
"""The number of the device that each part is on; the host is the last."""


@dataclass(frozen=True)
class Load:
    """What is to be remembered: for how many sequences of how many tokens, with how many marks."""

    n_ctx: int
    sequences: int = 1
    checkpoints: int = 0
    streams: bool = False
    """Whether long prompts may run networks of the host on the GPU with the output."""


@dataclass(frozen=True)
class DevicePlan:
    """What goes to one device, in bytes."""

    device: Described
    parts: tuple[Part, ...]
    weights: Mapping[str, int]
    """By kind of part."""
    memory: Mapping[str, int]
    """By pool: K and V, states, logs."""
    compute: int = 0
    libraries: int = 0
    graphs: int = 0
    draft: int = 0
    """All that a draft model takes."""
    streaming: int = 0
    """Room for networks of the host that pass through: one that is used, and the next; and of the
    host, what they are staged in."""

    @property
    def total(self) -> int:
        """All of it."""
        fixed = self.compute + self.libraries + self.graphs + self.draft + self.streaming
        return sum(self.weights.values()) + sum(self.memory.values()) + fixed

    @property
    def left(self) -> int:
        """Bytes of its limit that stay free; below 0 where it does not fit."""
        return self.device.limit - self.total

    @property
    def layers(self) -> int:
        """Layers whose mixer is here."""
        return sum(part.kind == MIXER for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "name": self.device.name,
            "free_bytes": self.device.free,
            "reserve_bytes": self.device.margin,
            "limit_bytes": self.device.limit,
            "layers": self.layers,
            "weights": dict(self.weights),
            "memory": dict(self.memory),
            "compute_bytes": self.compute,
            "libraries_bytes": self.libraries,
            "graphs_bytes": self.graphs,
            "draft_bytes": self.draft,
            "streaming_bytes": self.streaming,
            "total_bytes": self.total,
            "left_bytes": self.left,
        }


@dataclass(frozen=True)
class Outlook:
    """What a plan leaves room for, and how fast it may be."""

    longest_context: int
    """Tokens that one sequence could have, with every part where it is."""
    most_sequences: int
    """Sequences of the planned context that fit at once."""
    next_gib: Mapping[str, str]
    """What one more GiB would buy, by device."""
    tokens_per_second: tuple[float, float, float] | None = None
    """Of one sequence, as far as reading bounds it, by the quartiles of how fast reading was;
    None where a device was not there to be measured."""


@dataclass(frozen=True, repr=False)
class Plan:
    """What goes where. Made by `quire.plan`, and by `quire.load` for what it loads."""

    model: ModelFacts
    devices: tuple[DevicePlan, ...]
    places: Places
    load: Load
    notes: tuple[str, ...] = ()
    """What was changed to make it fit, and what was asked for and could not be, a line each."""
    draft: ModelFacts | None = None
    outlook: Outlook | None = None

    @property
    def fits(self) -> bool:
        """Whether no device is over its limit, nor the host with those that share its memory."""
        return not over(self.devices)

    @property
    def n_gpu_layers(self) -> int:
        """Layers that are not on the host as a whole; the output counts as one."""
        host = len(self.devices) - 1
        away = {part.layer for part, at in self.places.items() if part.layer >= 0 and at != host}
        return len(away) + (self.places[Part(OUTPUT)] != host)

    @property
    def n_cpu_moe(self) -> int:
        """So many first layers have experts on the host, all or their last matrix; 0 if only those
        that are there."""
        host = len(self.devices) - 1
        return max(
            (
                part.layer + 1
                for part, at in self.places.items()
                if part.kind in (EXPERTS, DOWN) and at == host
                if self.places[Part(MIXER, part.layer)] != host
            ),
            default=0,
        )

    @property
    def splits(self) -> int:
        """How often activations change device on their way through the model."""
        way = [self.places[Part(EMBEDDING)]]
        for i in range(self.model.n_layers):
            parts = self.model.layer_parts[i]
            way += [self.places[part] for part in parts]
            for part in (Part(EXPERTS, i), Part(NETWORK, i)):
                if Part(DOWN, i) in parts and part in parts:
                    way.append(self.places[part])  # back the way it came
        way.append(self.places[Part(OUTPUT)])
        return sum(a != b for a, b in pairwise(way))

    def device_of(self, part: Part) -> str:
        """The name of the device that a part is on."""
        return self.devices[self.places[part]].device.name

    def with_load(self, load: Load) -> Plan:
        """The same places for other sequences."""
        devices = [one.device for one in self.devices]
        return lay_out(self.model, devices, self.places, load, self.notes, self.draft)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "model": self.model.name,
            "n_ctx": self.load.n_ctx,
            "sequences": self.load.sequences,
            "checkpoints": self.load.checkpoints,
            "n_gpu_layers": self.n_gpu_layers,
            "n_cpu_moe": self.n_cpu_moe,
            "splits": self.splits,
            "fits": self.fits,
            "notes": list(self.notes),
            "devices": [one.as_dict() for one in self.devices],
            **({} if self.outlook is None else vars(self.outlook)),
        }

    def __repr__(self) -> str:
        from quire.placement.show import title

        return f"<Plan {title(self)}; print it>"

    def __str__(self) -> str:
        from quire.placement.show import shown

        return shown(self)


def over(devices: Sequence[DevicePlan]) -> list[tuple[DevicePlan, int, int]]:
    """Devices that would be over their limits, with need and have."""
    found = [(one, one.total, one.device.limit) for one in devices if one.left < 0]
    host = devices[-1]
    shared = sum(one.total for one in devices[:-1] if one.device.unified)
    if shared and not found and host.total + shared > host.device.limit:
        found.append((host, host.total + shared, host.device.limit))
    return found


def lay_out(
    model: ModelFacts, devices: Sequence[Described], places: Places, load: Load,
    notes: Sequence[str] = (), draft: ModelFacts | None = None,
) -> Plan:  # fmt: skip
    """What each device takes when every part is where it is said to be."""
    found = []
    drafts = places[Part(OUTPUT)]  # a draft model is where the output is
    last = Part(MIXER, model.n_layers - 1)  # where this is the output's device, steps are recorded
    for at, device in enumerate(devices):
        here = tuple(part for part, place in places.items() if place == at)
        extra = draft_bytes(draft, device, load) if draft and at == drafts else 0
        found.append(DevicePlan(
            device, here, _weights(model, device.kind, here), _memory(model, device, here, load),
            _arrays(model, device.kind, here, load),
            device.libraries if here else 0,
            device.graphs if at == drafts == places[last] else 0, extra,
            _streaming(model, devices, places, at, load) if load.streams else 0,
        ))  # fmt: skip
    if len(devices) == 1 and devices[0].kind != "cuda":
        found = [_giving_way(found[0])]
    return Plan(model, tuple(found), places, load, tuple(notes), draft)


def _giving_way(one: DevicePlan) -> DevicePlan:
    """Arrays of the host have what is left: where that is little, steps are small."""
    return replace(one, compute=max(min(one.compute, one.compute + one.left), 0))


def _arrays(model: ModelFacts, kind: str, parts: Collection[Part], load: Load) -> int:
    """What arrays of steps take."""
    return model.compute(kind, frozenset(parts), load.n_ctx, load.sequences) if parts else 0


def _weights(model: ModelFacts, kind: str, parts: Sequence[Part]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    alone = Part(EMBEDDING) not in parts
    for part in parts:
        size = model.weights(kind, part, alone)
        sizes[part.kind] = sizes.get(part.kind, 0) + size
    return {kind: size for kind, size in sizes.items() if size}


def _streaming(
    model: ModelFacts, devices: Sequence[Described], places: Places, at: int, load: Load
) -> int:  # fmt: skip
    """Of the device with the output: two rooms, what packing takes, and more arrays than its own
    layers have; of the host: staging."""
    main, host = places[Part(OUTPUT)], len(devices) - 1
    kind = devices[main].kind
    room = passing_room(model, kind, places, host) if at in (main, host) and main != host else 0
    if not room:
        return 0
    on_gpu = kind == "cuda"
    if at == host:
        return STAGED * on_gpu
    here, passing = (
        frozenset(part for part, place in places.items() if place == each and part.kind in kinds)
        for each, kinds in ((main, _LAYER), (host, _LAYER[1:]))
    )  # fmt: skip
    arrays = _arrays(model, kind, passing, load) - _arrays(model, kind, here, load)
    return ROOMS * room + UNPACKED * on_gpu + max(arrays, 0)


def passing_room(model: ModelFacts, kind: str, places: Places, host: int) -> int:
    """Bytes of the largest network, or experts of a network, that are on the host."""
    sizes = [0]
    for i in range(model.n_layers):
        away = [part for part in model.layer_parts[i] if part.kind != MIXER]
        if away and all(places[part] == host for part in away if part.kind != NETWORK):
            sizes.append(sum(model.weights(kind, p) for p in away if places[p] == host))
    return max(sizes)


def _memory(
    model: ModelFacts, device: Described, parts: Sequence[Part], load: Load
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    mixers = {part.layer for part in parts if part.kind == MIXER}
    for group in model.groups:
        if here := len(mixers & group.layers):
            wanted = load.n_ctx, load.sequences, load.checkpoints
            each = group.needed(here, *wanted, device.granularity)
            names = [group.name] if len(each) == 1 else [f"{group.name} state", f"{group.name} log"]
            sizes |= zip(names, each, strict=True)
    return sizes


def draft_bytes(draft: ModelFacts, device: Described, load: Load) -> int:
    """All that a draft model takes, with a sequence for each of those that it follows."""
    parts = tuple(draft.parts[device.kind])
    follows = Load(min(load.n_ctx, draft.n_ctx_train), load.sequences)
    memory = _memory(draft, device, parts, follows)
    return (
        sum(_weights(draft, device.kind, parts).values())
        + sum(memory.values())
        + _arrays(draft, device.kind, parts, follows)
    )
