"""The smallest model of every kind, and rooms that are too small for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests import model_folders, random_hybrids, tiny

KINDS = ["dense", "window", "moe", "hybrid", "recurrent"]
TIGHT = [*KINDS[:3], *(pytest.param(kind, marks=pytest.mark.host) for kind in KINDS[3:])]
"""The same where room is little: states are counted in bytes, and a GPU's come in large pieces."""
N_CTX = 160


def write(kind: str, folder: Path) -> Path:
    """A small random model of a kind."""
    sizes = {
        "dense": tiny.Tiny(context=512),
        "window": tiny.Tiny(
            "qwen2", layers=3, window=24, sliding=(True, False, True), context=512, seed=14
        ),
        "moe": tiny.VARIANTS["moe"],
    }
    if kind in sizes:
        tiny.write(folder / f"{kind}.gguf", sizes[kind])
        return folder / f"{kind}.gguf"
    if kind == "recurrent":
        return model_folders.write_mamba2(folder / kind)
    config = random_hybrids.settings("Qwen3Next")
    return random_hybrids.write(folder / kind, config, random_hybrids.tensors(config))


def tight(kind: str, rng: random.Random, weight_bytes: int) -> dict[str, Any]:
    """Settings with too little room, and little, much or no room to swap."""
    swap: int | str = rng.choice([0, "60KB", "300KB", "1GiB", "1GiB"])
    if kind in ("hybrid", "recurrent"):
        more = rng.choice([0.3, 0.8, 2, 4]) if kind == "hybrid" else rng.choice([0.8, 1.5, 3, 5])
        room: dict[str, Any] = {"memory_budget": weight_bytes + int(more * 1e6)}
        if kind == "hybrid":
            room["kv_cache_tokens"] = rng.choice([112, 176, 400])
        else:
            swap = rng.choice([0, "600KB", "2MB", "1GiB", "1GiB"])
    else:
        room = {"kv_cache_tokens": rng.choice([80, 112, 176, 256, 400])}
    return {"swap_space": swap, "n_ctx": N_CTX, "threads": 1, **room}
