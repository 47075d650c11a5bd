"""Prefill and decode: two lasting workers that take turns, never both computing at once."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _machine import Bandwidth, Quiet, cpu_seconds
from _peers import Side, Worker, running, turns
from _report import PEER, Row


@dataclass(frozen=True)
class Speed:
    """How many prompts of which length, how many tokens after them, and room per sequence."""

    what: str
    prompts: int
    length: int
    steps: int
    n_ctx: int

    @property
    def tokens(self) -> int:
        """Tokens that the measured time bought."""
        return self.prompts * self.steps if self.what == "decode" else self.length


SPEEDS = {
    "prefill": Speed("prefill", prompts=1, length=512, steps=0, n_ctx=1024),
    "decode": Speed("decode", prompts=1, length=16, steps=128, n_ctx=1024),
    "decode16": Speed("decode", prompts=16, length=16, steps=64, n_ctx=128),
}
TARGETS = {
    "Q4_1": {"decode": 1.8, "decode16": 3.5, "prefill": 4.0},
    "Q4_0": {"decode": 1.5, "decode16": 2.0, "prefill": 2.0},
    "Q4_K_M": {"decode": 1.4, "decode16": 2.0, "prefill": 2.0},
    "Q8_0": {"decode": 1.5, "decode16": 2.0, "prefill": 1.7},
    "F16": {"decode": 1.2, "decode16": 1.2, "prefill": 1.2},
}
# The ids below are the default model's special tokens; random ids for all prompts stay clear.
FIRST_ID, END_ID = 100, 49_000
# Threads of the engine that was just measured may spin for some milliseconds before they sleep.
SETTLE_S = 0.1


@dataclass
class Idle:
    """Seconds that a worker waited while the other computed, and processor time it used in them."""

    waited: float = 0.0
    used: float = 0.0


class SpeedRuns:
    """The rounds of all files, with what was noticed on the way about engines and machine."""

    def __init__(
        self, sides: list[Side], threads: int, rounds: int, quiet: Quiet, bandwidth: Bandwidth
    ) -> None:
        self.engines: dict[str, dict[str, Any]] = {}
        self._idle = {side.name: Idle() for side in sides}
        self.limits: dict[str, float] = {}
        self._sides, self._threads, self._rounds = sides, threads, rounds
        self._quiet, self._bandwidth = quiet, bandwidth
        self._random = random.Random(512)

    def idle_shares(self) -> dict[str, float]:
        """How much of a core each worker used while the other one computed."""
        return {who: idle.used / idle.waited for who, idle in self._idle.items() if idle.waited}

    def rows(self, name: str, path: Path, questions: list[str]) -> Iterator[Row]:
        """The asked-for figures of one file; fresh workers, one model loaded at a time."""
        asked = [question for question in SPEEDS if question in questions]
        if not asked:
            return
        with ExitStack() as stack:
            workers = [stack.enter_context(running(side)) for side in self._sides]
            for question in asked:
                speed = SPEEDS[question]
                self._load(workers, path, speed)
                disturbed = self._quiet.disturbed
                rates = self._rates(workers, speed)
                disturbed = self._quiet.disturbed - disturbed
                target = TARGETS[name][question]
                yield Row(name, question, "tokens/s", rates, target=target, disturbed=disturbed)
                if question == "decode":
                    yield self._reached(name, rates, disturbed)

    def _load(self, workers: list[Worker], path: Path, speed: Speed) -> None:
        settings = {
            "model": str(path),
            "threads": self._threads,
            "n_ctx": speed.n_ctx,
            "sequences": speed.prompts,
        }
        for worker in workers:
            self.engines[worker.side.name] = worker.load(settings)

    def _rates(self, workers: list[Worker], speed: Speed) -> dict[str, list[float]]:
        """Tokens per second of each round; the round before the first one warms up."""
        rates: dict[str, list[float]] = {worker.side.name: [] for worker in workers}
        pids = [worker.pid for worker in workers]
        for turn in range(self._rounds + 1):
            for worker in turns(workers, turn):
                once = partial(self._ask, worker, workers, speed)
                seconds = self._quiet.measure(pids, once)
                if turn > 0:
                    rates[worker.side.name].append(speed.tokens / seconds)
        return rates

    def _ask(self, worker: Worker, workers: list[Worker], speed: Speed) -> float:
        """Seconds of one measurement, noting whether the other worker is really idle."""
        prompts = [self._prompt(speed.length) for _ in range(speed.prompts)]
        time.sleep(SETTLE_S)
        waiting = [other for other in workers if other is not worker]
        before = [cpu_seconds(other.pid) for other in waiting]
        seconds: float = worker.ask(speed.what, prompts=prompts, steps=speed.steps)
        for other, used in zip(waiting, before, strict=True):
            idle = self._idle[other.side.name]
            idle.waited += seconds
            idle.used += cpu_seconds(other.pid) - used
        return seconds

    def _prompt(self, length: int) -> list[int]:
        """New random ids every time, so that a prefix cache cannot help."""
        return [self._random.randrange(FIRST_ID, END_ID) for _ in range(length)]

    def _reached(self, name: str, rates: dict[str, list[float]], disturbed: int) -> Row:
        """Decode as bytes of weights read per second, beside what the machine can read."""
        weights: int = self.engines[PEER]["weight_bytes"]
        once = partial(self._bandwidth.measure, weights)
        limit = max(self._quiet.measure([], once) for _ in range(self._rounds))
        self.limits[name] = limit
        reached = {who: [rate * weights / 1e9 for rate in values] for who, values in rates.items()}
        question = f"decode reads (machine {limit / 1e9:.1f})"
        return Row(name, question, "GB/s", reached, disturbed=disturbed)
