"""Trouble at random moments: interrupts at any bytecode, kernels and tiers that fail."""

from __future__ import annotations

import dis
import gc
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import quire
from quire.errors import QuireError, TierError
from quire.ops import Refused


class Injected(Exception):
    """An error that nobody could expect."""


class Trouble:
    """Makes trouble for what is done, now and then."""

    def __init__(self, llm: quire.LLM, rng: random.Random, how_often: float) -> None:
        self._llm = llm
        self._rng = rng
        self._how_often = how_often
        self.counts = dict.fromkeys(("interrupts", "failures", "errors"), 0)

    def during(self, call: Callable[[], Any]) -> tuple[Any, str]:
        """What came of a call, with or without trouble, and what it raised instead, as text.

        Only errors that callers can expect come out of Quire, and the trouble itself.
        """
        trouble: Any = self._rng.choice([self._by_bytecode, self._by_failing])
        if self._rng.random() >= self._how_often:
            trouble = nullcontext
        try:
            with trouble():
                return call(), ""
        except QuireError as error:
            assert "open lease" not in str(error), error
            self.counts["errors"] += 1
            return None, f"{type(error).__name__}: {error}"
        except Injected:
            self.counts["failures"] += 1
            return None, "Injected"
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} reached the caller: {error}") from error
        gc.collect()  # what its frames held
        return None, "KeyboardInterrupt"

    @contextmanager
    def _by_bytecode(self) -> Iterator[None]:
        """A signal comes behind the nth bytecode that Quire executes, as soon as it can."""
        left = int(10 ** self._rng.uniform(0, 4.5))

        def traced(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if "/quire/" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left <= 0 and frame.f_lasti in _moments(frame.f_code):
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGINT)
            return traced

        before = sys.gettrace()
        sys.settrace(traced)
        try:
            yield
        finally:
            sys.settrace(before)

    @contextmanager
    def _by_failing(self) -> Iterator[None]:
        """The nth call of something below the engine fails."""
        engine, rng = self._llm.engine, self._rng
        disk = engine.tiers.tiers[-1]  # a GPU has pinned memory before it
        places: list[tuple[Any, str, list[type[Exception]]]] = [
            (engine.runner, "run", [Injected, Refused]),
            (engine.runner, "run", [Injected, Refused]),
            (engine.runner.model, "logits", [Injected, Refused]),
            (engine.runner.device, "run", [Injected, Refused]),
            (disk, "store", [TierError]),
            (disk, "load", [TierError]),
        ]
        if steps := engine.runner.steps:  # then layers run there, and tokens are read late
            ways = [way for way in ("run", "read") if hasattr(steps, way)]
            places += 2 * [(steps, way, [Injected, Refused]) for way in ways]
        owner, name, errors = rng.choice(places)
        late = name == "run" and rng.random() < 0.5
        real, error = getattr(owner, name), rng.choice(errors)("injected")
        failing = _failing(real, rng.choice([1, 1, 2, 4]), error, late)
        setattr(owner, name, failing)
        try:
            yield
        finally:
            delattr(owner, name)


@cache
def _moments(code: CodeType) -> frozenset[int]:
    """Bytecodes before which Python looks for signals: behind calls, and where loops and functions
    begin.

    Nowhere else: a lock is always let go of at the end of its `with` (of 270,000 interrupts by a
    timer not one came before that), and an interrupt there would be one that nobody can meet.
    """
    handlers = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]

    def handled_at(offset: int) -> int | None:
        return next((one.target for one in handlers if one.start <= offset < one.end), None)

    def is_behind_a_call(before: dis.Instruction, one: dis.Instruction) -> bool:
        same = handled_at(before.offset) == handled_at(one.offset)  # by who would be told
        return before.opname.startswith("CALL") and same

    all = list(dis.get_instructions(code))
    begins = {i.offset for i in all if i.opname == "RESUME" or "JUMP_BACKWARD" in i.opname}
    behind = {one.offset for before, one in pairwise(all) if is_behind_a_call(before, one)}
    return frozenset(begins | behind)


def _failing(
    real: Callable[..., Any], nth: int, error: Exception, late: bool
) -> Callable[..., Any]:
    """A call that fails once, before or after it has done what it should."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not late:
            raise error
        result = real(*args, **kwargs)
        if calls == nth:
            raise error
        return result

    return call
