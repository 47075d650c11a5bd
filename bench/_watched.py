"""A process that loads a model on a GPU, and another one that looks on: what the driver says.

Whoever holds a context sees how many bytes of the GPU are free for all. So the watcher reads what
the other process takes, its context and the code of its kernels included. The other one tells in
lines of JSON where it is, and waits after each until it was looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

import quire

MIB = 1 << 20


def free_bytes() -> int:
    """What the GPU has free, whoever asks."""
    return int(torch.cuda.mem_get_info()[0])


def held_now() -> int:
    """What the driver says that this process holds of the GPU, whoever else uses it."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    found = dict(line.split(", ") for line in said.splitlines())
    return int(found[str(os.getpid())]) * MIB


def watch(script: str, *words: str) -> Iterator[tuple[dict[str, Any], int]]:
    """What a child says, each time with the bytes that it holds of the GPU by then."""
    before = free_bytes()
    child = subprocess.Popen(
        [sys.executable, script, "--child", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin and child.stdout
    try:
        for line in child.stdout:
            if not line.startswith("{"):
                print(line, end="", flush=True)
                continue
            yield json.loads(line), before - free_bytes()
            child.stdin.write("\n")
            child.stdin.flush()
    finally:
        child.stdin.close()
        if child.wait() != 0:
            raise SystemExit(f"the child with {' '.join(words)} ended with {child.returncode}")


def tell(stage: str, **facts: Any) -> None:
    """Says where this process is, and waits until it was looked at."""
    torch.cuda.synchronize()
    print(json.dumps({"stage": stage, **facts}), flush=True)
    sys.stdin.readline()


def held(llm: quire.LLM) -> dict[str, int]:
    """What the model's GPU is known to hold: by the budget's uses, by torch, and in pages."""
    device: Any = next((d for d in llm.devices if d.name.startswith("cuda")), None)
    if device is None:
        return {"torch": int(torch.cuda.memory_reserved()), "pages": 0, "graphs": 0}
    slabs = sum(len(backing._slabs) for backing in device.backings.values())
    steps: Any = llm.engine.runner.steps
    known = steps._steps._known.values() if steps else ()
    return {
        **device.budget.breakdown, "torch": int(torch.cuda.memory_reserved()),
        "allocated": int(torch.cuda.memory_allocated()),
        "pages": slabs * device.granularity, "graphs": sum(s.graph is not None for s in known),
    }  # fmt: skip


def planned(llm: quire.LLM) -> dict[str, int]:
    """What was planned for the GPU."""
    one = llm.plan.devices[0]
    if not one.parts or not one.device.name.startswith("cuda"):
        return dict.fromkeys(("weights", "memory", "compute", "graphs", "libraries", "total"), 0)
    return {
        "weights": sum(one.weights.values()), "memory": sum(one.memory.values()),
        "compute": one.compute, "graphs": one.graphs, "libraries": one.libraries,
        "total": one.total,
    }  # fmt: skip
