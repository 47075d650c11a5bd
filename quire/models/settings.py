"""Whether the settings of a load make sense for a model: none of them may do nothing unsaid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.config import LoadConfig
from quire.errors import RequestError
from quire.memory.build import check_up_front
from quire.memory.groups.layout import GroupSpec
from quire.memory.groups.state_layout import RecurrentSpec

_BLOCKS = ("q8_0", "q4_0")
_BLOCK = 32


def settings_errors(
    path: Path, groups: Sequence[GroupSpec | RecurrentSpec], settings: LoadConfig
) -> list[RequestError]:
    """What a model with these groups of memory cannot do, or would not notice."""
    attention = [group for group in groups if isinstance(group, GroupSpec)]
    found: list[str] = []
    if settings.swa_full and not any(group.window for group in attention):
        found.append(f"swa_full is set, but {path} has no sliding windows; leave it out")
    usual = LoadConfig()
    for name in ("type_k", "type_v"):
        type = getattr(settings, name)
        if not attention and type != getattr(usual, name):
            found.append(f"{name} is {type}, but {path} has no attention; leave it out")
        sizes = {g.head_dim_k if name == "type_k" else g.head_dim_v for g in attention}
        found += [
            f"{name} {type} needs heads of a multiple of {_BLOCK}, this model has {size}; "
            "use f16, bf16 or f32"
            for size in sizes
            if type in _BLOCKS and size % _BLOCK
        ]
    errors = [RequestError(error) for error in found]
    if not settings.kv_cache_demand_paged:
        try:
            check_up_front(groups, settings)
        except RequestError as error:
            errors.append(error)
    return errors
