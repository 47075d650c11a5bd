"""Cold start, load time and memory: a fresh process for every measurement, taking turns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _machine import Quiet
from _peers import Side, turns
from _report import Row

COLD = ("start", "load", "memory")
PROMPT = "The capital of France is"
N_CTX = 512
START_TARGET = 1.0
MEMORY_TARGET = 1.25

Answers = dict[str, list[dict[str, Any]]]


class ColdRuns:
    """The fresh processes of all files, and the text that each engine answered with."""

    def __init__(self, sides: list[Side], threads: int, rounds: int, quiet: Quiet) -> None:
        self.texts: dict[str, dict[str, str]] = {}
        self._sides, self._threads, self._rounds = sides, threads, rounds
        self._quiet = quiet

    def rows(self, name: str, path: Path, questions: list[str]) -> Iterator[Row]:
        """The asked-for figures of one file, all from the same processes."""
        if not set(COLD) & set(questions):
            return
        disturbed = self._quiet.disturbed
        answers = self._answers(path)
        disturbed = self._quiet.disturbed - disturbed
        self.texts[name] = {who: given[0]["text"] for who, given in answers.items()}
        if "start" in questions:
            yield from _start(name, answers, disturbed)
        if "load" in questions:
            loads = _samples(answers, "loaded", "imported", 1e3)
            yield Row(name, "load", "ms", loads, more_is_better=False, disturbed=disturbed)
        if "memory" in questions:
            yield from _memory(name, answers, path.stat().st_size / 1e6)

    def _answers(self, path: Path) -> Answers:
        """What the processes said; the round before the first one fills the file cache."""
        settings = {"model": str(path), "threads": self._threads, "n_ctx": N_CTX, "sequences": 1}
        answers: Answers = {side.name: [] for side in self._sides}
        for turn in range(self._rounds + 1):
            for side in turns(self._sides, turn):
                once = partial(side.cold, settings, PROMPT)
                answer = self._quiet.measure([], once)
                if turn > 0:
                    answers[side.name].append(answer)
        return answers


def _samples(answers: Answers, of: str, less: str | None, scale: float) -> dict[str, list[float]]:
    """One figure, or the difference of two, of every process."""
    return {
        who: [(one[of] - (one[less] if less else 0)) * scale for one in given]
        for who, given in answers.items()
    }


def _start(name: str, answers: Answers, disturbed: int) -> Iterator[Row]:
    first = _samples(answers, "first", None, 1e3)
    yield Row(name, "cold start", "ms", first, False, START_TARGET, disturbed=disturbed)
    imports = _samples(answers, "imported", None, 1e3)
    yield Row(name, "- until imported", "ms", imports, False, disturbed=disturbed)


def _memory(name: str, answers: Answers, file_size: float) -> Iterator[Row]:
    """The peak has a ceiling that follows the file's size; the other rows explain the peak."""
    ceiling = MEMORY_TARGET * file_size
    peak = _samples(answers, "peak_bytes", None, 1e-6)
    question = f"peak memory (file {file_size:.0f})"
    yield Row(name, question, "MB", peak, more_is_better=False, ceiling=ceiling)
    maxrss = _samples(answers, "maxrss_bytes", None, 1e-6)
    yield Row(name, "- as ru_maxrss", "MB", maxrss, more_is_better=False)
    bare = _samples(answers, "bare_bytes", None, 1e-6)
    yield Row(name, "- once imported", "MB", bare, more_is_better=False)
    net = _samples(answers, "peak_bytes", "bare_bytes", 1e-6)
    yield Row(name, "- peak less imports", "MB", net, more_is_better=False)
    own = _samples(answers, "anon_bytes", None, 1e-6)
    yield Row(name, "- at the end, without file pages", "MB", own, more_is_better=False)
