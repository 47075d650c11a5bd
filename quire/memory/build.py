"""The memory a model needs, from the groups it declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.errors import ModelError
from quire.memory.attention import AttentionMemory
from quire.memory.budget import Budget
from quire.memory.interface import Memory
from quire.memory.layout import AttentionLayout, GroupSpec, KVType


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


def build_memory(groups: Sequence[GroupSpec], budget: Budget, settings: MemorySettings) -> Memory:
    """The memory of a model with these groups."""
    if len(groups) != 1 or groups[0].kind != "attention":
        kinds = ", ".join(f"{group.name!r} ({group.kind})" for group in groups)
        raise ModelError(
            f"the model declares the groups {kinds or 'none'}; this version has memory for exactly "
            "one group, of kind attention"
        )
    type_k, type_v = KVType(settings.type_k), KVType(settings.type_v)
    layout = AttentionLayout(groups[0], type_k, type_v, settings.page_tokens)
    return AttentionMemory(layout, budget, settings.kv_cache_tokens, settings.kv_cache_demand_paged)
