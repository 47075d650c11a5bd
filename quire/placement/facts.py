"""What a plan has to know of a model: bytes of its parts, by kind of device, and its memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from quire.config import LoadConfig
from quire.memory.build import MemorySettings, attention_layout
from quire.memory.groups.layout import GroupSpec
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout
from quire.models.loader import DOWN, EMBEDDING, EXPERTS, MIXER, NETWORK, OUTPUT, Part
from quire.placement.blueprint import Blueprint

Compute = Callable[[str, frozenset[Part], int, int], int]
"""Bytes of arrays: of a kind of device, some parts, a context and a number of sequences."""


@dataclass(frozen=True)
class GroupFacts:
    """What one layer of a group takes; layers of a group are all alike."""

    name: str
    kind: str
    layers: frozenset[int]
    page_tokens: int
    page_bytes: int
    """Of K and V of one layer in a page."""
    window: int | None = None
    """Tokens that are kept, if not all."""
    state_bytes: int = 0
    log_bytes: int = 0
    log_tokens: int = 1
    most_pages: int | None = None
    """Of all sequences together (`kv_cache_tokens`)."""
    up_front: bool = False
    """Whether all of these are taken at the start."""

    def needed(
        self, layers: int, n_ctx: int, sequences: int, checkpoints: int, granule: int
    ) -> list[int]:
        """Bytes of each pool that so many layers take, in whole granules."""
        pages, *sizes = self._pages(layers, n_ctx, sequences, checkpoints)
        # Large pages lie where cached ones left room: an idle one often apart from those in use.
        apart = self.kind == "recurrent"
        each = (pages * size + apart * min(size, granule) for size in sizes)
        return [-(-size // granule) * granule for size in each]

    def _pages(self, layers: int, n_ctx: int, sequences: int, checkpoints: int) -> list[int]:
        """How many, and the bytes of one in each pool."""
        if self.kind == "recurrent":
            # As many pages stay idle as the next step is likely to fold into.
            pages = sequences + checkpoints + 1 + sequences // self.log_tokens
            return [pages, layers * self.state_bytes, layers * self.log_bytes]
        pages = -(-n_ctx // self.page_tokens)
        if self.window is not None:
            most = -(-self.window // self.page_tokens) + 1
            held = min(pages, most) * checkpoints
            pages = min(pages, most)
        else:
            held = checkpoints  # all but the last page are shared
        total = pages * sequences + held
        if self.most_pages is not None:
            total = self.most_pages if self.up_front else min(total, self.most_pages)
        return [total, layers * self.page_bytes]

    def most_sequences(self, n_ctx: int) -> float:
        """How many of so many tokens have pages at once, however many bytes there are."""
        if self.most_pages is None or self.window is not None:
            return math.inf
        return self.most_pages // -(-n_ctx // self.page_tokens)


@dataclass(frozen=True)
class ModelFacts:
    """A model, for plans. Made of a blueprint for each kind of device, or of thin air in tests."""

    name: str
    n_layers: int
    n_ctx_train: int
    """Or less, where memory is not to hold so many."""
    tied: bool
    groups: tuple[GroupFacts, ...]
    parts: Mapping[str, Mapping[Part, int]]
    """By kind of device: bytes of weights of each part."""
    compute: Compute
    """Bytes of arrays that these parts take on a kind of device, at most."""
    active: float = 1.0
    """The share of experts that a token uses."""
    tensors: Mapping[Part, tuple[str, ...]] | None = None
    """Names of the matrices of each part."""

    def weights(self, kind: str, part: Part, alone: bool = True) -> int:
        """Bytes of a part on a kind of device; a tied output takes some only where it is alone."""
        if part.kind == OUTPUT and self.tied:
            return self.parts[kind][Part(EMBEDDING)] if alone else 0
        return self.parts[kind].get(part, 0)

    @property
    def ends(self) -> tuple[Part, Part]:
        """The parts that every model has."""
        return Part(EMBEDDING), Part(OUTPUT)

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(part.kind == EXPERTS for part in next(iter(self.parts.values())))

    @cached_property
    def layer_parts(self) -> list[list[Part]]:
        """The parts that each layer has."""
        known = next(iter(self.parts.values()))
        kinds = (MIXER, NETWORK, EXPERTS, DOWN)
        layers = ([Part(kind, i) for kind in kinds] for i in range(self.n_layers))
        return [[part for part in parts if part in known] for parts in layers]


def model_facts(
    blueprints: Mapping[str, Blueprint], settings: LoadConfig,
    compute: Compute,
) -> ModelFacts:  # fmt: skip
    """The facts of a model whose file was looked at for each kind of device."""
    one = next(iter(blueprints.values()))
    tensors: dict[Part, list[str]] = {}
    for name in one.tensor_bytes:
        tensors.setdefault(part_of(name), []).append(name)
    if one.tied:
        tensors[Part(OUTPUT)] = ["output.weight"]  # which can be named all the same
    groups = tuple(group_facts(spec, settings) for spec in one.groups)
    longest = [g.most_pages * g.page_tokens for g in groups if g.most_pages and g.window is None]
    return ModelFacts(
        one.path.name, one.active.layers, min([one.n_ctx_train, *longest]), one.tied, groups,
        {kind: blueprint.part_bytes for kind, blueprint in blueprints.items()},
        compute, one.expert_share, {part: tuple(names) for part, names in tensors.items()},
    )  # fmt: skip


def part_of(name: str) -> Part:
    """The part that a matrix belongs to, by its name."""
    layer = re.match(r"blk\.(\d+)\.(.*)", name)
    if not layer:
        return Part(OUTPUT if name.startswith("output") else EMBEDDING)
    rest, kind = layer[2], NETWORK
    if not rest.startswith("ffn_"):
        kind = MIXER
    elif rest.startswith("ffn_down_exps"):
        kind = DOWN
    elif "_exps" in rest or rest.startswith("ffn_gate_inp."):
        kind = EXPERTS
    return Part(kind, int(layer[1]))


def group_facts(spec: GroupSpec | RecurrentSpec, settings: MemorySettings) -> GroupFacts:
    """By the layouts that memory is made with."""
    layers = frozenset(spec.layers)
    if spec.kind == "recurrent":
        pages = StateLayout(spec)
        return GroupFacts(
            spec.name, spec.kind, layers, 1, 0, None, pages.state_page_bytes // len(layers),
            pages.log_page_bytes // len(layers), spec.log_tokens,
        )  # fmt: skip
    layout = attention_layout(spec, settings)
    window = None if settings.swa_full else spec.window
    size = layout.page_bytes // len(layers)
    cap = settings.kv_cache_tokens
    most = None if cap is None else layout.pages_for(cap)
    return GroupFacts(
        spec.name, spec.kind, layers, layout.page_tokens, size, window, most_pages=most,
        up_front=not settings.kv_cache_demand_paged,
    )  # fmt: skip
