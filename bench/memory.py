"""What memory costs and saves: checkpoints, forks, prefix hits, waste, and what is given back.

Tables are measured on memories of their own, without a model: their cost does not depend on one.
Prefix hits, planned bytes and the process's memory are measured on a model.

    python bench/memory.py [--model smollm2] [--out bench/out]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _plot import Line, chart

import quire
from quire.config import process_memory
from quire.devices.budget import Budget
from quire.devices.device import GroupKernels
from quire.devices.host import HostDevice
from quire.memory.batch import SeqTokens
from quire.memory.groups.attention import AttentionGroup
from quire.memory.groups.layout import AttentionLayout, GroupSpec, KVType
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout
from quire.memory.memory import Memory
from quire.ops.cpu import CpuOps

MIB = 2**20
SMOLLM2 = GroupSpec("attention", "attention", tuple(range(30)), 3, 64, 64)
ROUNDS = 2000


def main() -> None:
    """Measures everything, prints a table, draws the plots, ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    args = parser.parse_args()
    result: dict[str, Any] = {
        "checkpoints": checkpoints(args.out),
        "fork_8k": fork(),
        "waste_2k": waste(),
        "churn": churn(args.out),
        **on_a_model(args.model, args.out),
    }
    for name, value in result.items():
        print(f"{name}:")
        for row in value if isinstance(value, list) else [value]:
            print("   ", ", ".join(f"{key} {_short(figure)}" for key, figure in row.items()))
    print(json.dumps(result))


def _short(figure: Any) -> str:
    return f"{figure:,.4g}" if isinstance(figure, int | float) else str(figure)


# -- tables alone ---------------------------------------------------------------------------------


def append(memory: Memory, seq: int, n: int) -> None:
    """So many tokens more, without any kernel but those that copy pages."""
    with memory.reserve([SeqTokens(seq, np.zeros(n, np.int32))]) as lease:
        memory.run(lease.ubatch.work)
        lease.commit({seq: n})


def device(limit: int) -> HostDevice:
    """The host's memory."""
    return HostDevice(Budget(limit), CpuOps(threads=1))


def attention(limit: int = 8 << 30, page_tokens: int = 16) -> Memory:
    """Memory as SmolLM2 has it."""
    layout = AttentionLayout(SMOLLM2, KVType.F16, KVType.F16, page_tokens)
    return Memory([AttentionGroup(layout, device(limit))])


def recurrent(state_bytes: int) -> Memory:
    """A sequence's state of so many bytes, and a log of a hundredth of it per token."""
    spec = RecurrentSpec("state", (0,), state_bytes, max(state_bytes // 100, 64))
    kernels = GroupKernels(fold=lambda *_: None)
    return Memory([RecurrentGroup(StateLayout(spec), device(8 << 30), kernels)])


def timed(action: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start) / 1000


class Copies:
    """Counts the bytes that a memory's device copies while it is open."""

    def __init__(self, memory: Memory) -> None:
        self.n_bytes = 0
        self._ops: Any = memory.devices[0].ops
        self._real = self._ops.copy_pages

    def __enter__(self) -> Copies:
        def copy_pages(base: int, page_bytes: int, sources: Any, targets: Any) -> None:
            self.n_bytes += page_bytes * len(sources)
            self._real(base, page_bytes, sources, targets)

        self._ops.copy_pages = copy_pages
        return self

    def __exit__(self, *_: object) -> None:
        self._ops.copy_pages = self._real


def checkpoints(out: Path) -> list[dict[str, Any]]:
    """Save, restore and delete, by the size of what is kept."""
    rows = []
    for size in (1, 4, 16, 50, 100, 200):
        memory = recurrent(size * MIB)
        append(memory, 0, 100)
        append(memory, 0, 3)
        rows.append({"kind": "recurrent", "state_mib": size, **checkpoint_times(memory)})
    memory = attention()
    append(memory, 0, 8190)
    held = memory.pools[0].used * memory.pools[0].page_bytes / MIB
    rows.append({"kind": "attention, 8k tokens", "state_mib": held, **checkpoint_times(memory)})
    states = [row for row in rows if row["kind"] == "recurrent"]
    sizes = [float(row["state_mib"]) for row in states]
    lines = [
        Line(f"{what}, median", sizes, [row[f"{what}_us"] for row in states])
        for what in ("save", "restore", "delete")
    ]
    chart(
        out / "checkpoints.svg", "Checkpoints take no longer for larger states", "MiB of state",
        "µs", lines, log_x=True,
    )  # fmt: skip
    return rows


def checkpoint_times(memory: Memory) -> dict[str, Any]:
    """Median and p99 of each operation, and the bytes that all of them moved."""
    times: dict[str, list[float]] = {"save": [], "restore": [], "delete": []}
    gc.collect()
    with Copies(memory) as copies:
        for _ in range(ROUNDS):
            times["save"].append(timed(lambda: memory.checkpoint_save(0, "here")))
            times["restore"].append(timed(lambda: memory.checkpoint_restore(0, "here")))
            times["delete"].append(timed(lambda: memory.checkpoint_delete("here")))
    row: dict[str, Any] = {}
    for what, samples in times.items():
        row[f"{what}_us"] = statistics.median(samples)
        row[f"{what}_p99_us"] = float(np.percentile(samples, 99))
    return {**row, "bytes_moved": copies.n_bytes}


def fork() -> dict[str, Any]:
    """A fork of 8k tokens, and what it takes until both have gone on by a token."""
    memory = attention()
    append(memory, 0, 8190)
    times = []
    for _ in range(ROUNDS):
        times.append(timed(lambda: memory.seq_cp(0, 1)))
        memory.seq_free(1)
    with Copies(memory) as copies:
        memory.seq_cp(0, 1)
        append(memory, 0, 1)
        append(memory, 1, 1)
    return {
        "us": statistics.median(times),
        "p99_us": float(np.percentile(times, 99)),
        "bytes_moved_until_both_went_on": copies.n_bytes,
    }


def waste() -> dict[str, Any]:
    """Bytes held for no token, with many sequences around 2k tokens long."""
    memory = attention()
    rng = random.Random(0)
    for seq in range(50):
        append(memory, seq, rng.randint(1900, 2150))
    figures = memory.stats()["attention"]
    return {"percent": figures["waste_percent"], "committed": figures["bytes_committed"]}


def churn(out: Path) -> dict[str, Any]:
    """Sequences that come, grow, fork and go: what is held, and what others would hold.

    A contiguous cache keeps a slot of n_ctx tokens for each sequence from start to end.
    """
    memory, rng = attention(), random.Random(1)
    n_ctx, per_token = 4096, memory.stats()["attention"]["bytes_per_token"]
    live: dict[int, int] = {}
    steps: list[float] = []
    held: list[float] = []
    used: list[float] = []
    contiguous: list[float] = []
    for step in range(600):
        crowd = 4 + 12 * (step // 100 % 2)
        if len(live) < crowd and rng.random() < 0.5:
            seq = memory.seq_new()
            append(memory, seq, rng.randint(50, 1500))
            live[seq] = memory.seq_pos_max(seq) + 1
        for seq in list(live):
            if live[seq] + 16 < n_ctx:
                append(memory, seq, 16)
                live[seq] += 16
            if rng.random() < (0.03 if len(live) <= crowd else 0.3):
                memory.seq_free(seq)
                del live[seq]
        steps.append(float(step))
        held.append(memory.pools[0].committed / MIB)
        used.append(sum(live.values()) * per_token / MIB)
        contiguous.append(len(live) * n_ctx * per_token / MIB)
    chart(
        out / "churn.svg", "Memory held follows the tokens that are alive", "step", "MiB",
        [Line("held in pages", steps, held), Line("live tokens", steps, used),
         Line("contiguous slots of 4,096", steps, contiguous)],
    )  # fmt: skip
    return {
        "held_over_live": sum(held) / sum(used),
        "contiguous_over_live": sum(contiguous) / sum(used),
    }


# -- on a model -----------------------------------------------------------------------------------


def on_a_model(name: str, out: Path) -> dict[str, Any]:
    """Prefix hits against cold prompts, planned against measured bytes, memory given back."""
    with quire.load(name) as llm:
        llm.generate([1] * 40, max_tokens=2)
        return {"prefix": prefix(llm, out), "process": given_back(llm)}


def prefix(llm: quire.LLM, out: Path) -> list[dict[str, Any]]:
    """The first token of a prompt that is new, and of one whose beginning is known."""
    rng = random.Random(2)
    rows = []
    for n in (128, 512, 1024, 2048):
        cold, warm = [], []
        for _ in range(3):
            prompt = [rng.randrange(1000, 20000) for _ in range(n)]
            for kind in (cold, warm, warm):
                completion = llm.generate([*prompt, rng.randrange(1000)], max_tokens=1)
                kind.append(completion.timings.first_token_s)
                assert (completion.cached_tokens >= n) == (kind is warm)
        rows.append(
            {
                "tokens": n,
                "cold_ms": statistics.median(cold) * 1000,
                "warm_ms": statistics.median(warm) * 1000,
                "share_percent": 100 * statistics.median(warm) / statistics.median(cold),
            }
        )
    sizes = [float(row["tokens"]) for row in rows]
    chart(
        out / "prefix.svg", "The first token, cold and from a cached prefix", "tokens of prompt",
        "ms", [Line("cold", sizes, [row["cold_ms"] for row in rows]),
               Line("cached", sizes, [row["warm_ms"] for row in rows])],
    )  # fmt: skip
    return rows


def given_back(llm: quire.LLM) -> dict[str, Any]:
    """What the process holds before, while and after eight sessions of 1,500 tokens."""
    llm.forget()
    with llm.session() as s:
        s.append([5] * 1500)  # compute buffers are there from now on
    llm.forget()
    gc.collect()
    before, planned_before = process_memory(), llm.budget.used
    sessions = [llm.session().append([i + 3] * 1500) for i in range(8)]
    during, planned = process_memory(), llm.budget.used
    for session in sessions:
        session.close()
    llm.forget()
    gc.collect()
    return {
        "planned_mib": (planned - planned_before) / MIB,
        "measured_mib": (during - before) / MIB,
        "difference_percent": 100 * abs((during - before) / (planned - planned_before) - 1),
        "left_behind_mib": (process_memory() - before) / MIB,
    }


if __name__ == "__main__":
    main()
