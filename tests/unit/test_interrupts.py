"""Ctrl-C at any moment: a step is whole or was not, and everything goes on afterwards."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import quire
from quire.engine.endings import Holder
from quire.engine.seat import Seat
from quire.engine.signals import SignalsLater
from quire.engine.waiting import Call, Waiter
from quire.errors import RequestError
from tests import session_kinds, tiny
from tests.model_folders import MODELS, model_folder

GO: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_timer_that_rang_all_the_while_is_heard_as_often() -> None:
    told: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    with SignalsLater():
        for _ in range(5000):
            interrupt()
    assert len(told) == 5000


def test_a_handler_may_have_the_next_signal_ignored() -> None:
    told: list[int] = []

    def handler(number: int, _: FrameType | None) -> None:
        told.append(number)
        signal.signal(number, signal.SIG_IGN)

    signal.signal(signal.SIGINT, handler)
    with SignalsLater():
        interrupt()
        interrupt()
    assert told == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_signal_waits_for_the_end_of_the_block() -> None:
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt), SignalsLater():
        interrupt()
        for _ in range(1000):
            seen.append("on")
    assert len(seen) == 1000
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupt()
        time.sleep(1)


def test_handlers_of_others_are_called_and_stay() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    with SignalsLater():
        interrupt()
        assert seen == []
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with SignalsLater():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_leave_handlers_alone() -> None:
    found: list[object] = []

    def use() -> None:
        with SignalsLater():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.host
def test_an_interrupt_waits_for_one_step_only(tmp_path: Path) -> None:
    tiny.write(tmp_path / "tiny.gguf", tiny.Tiny())
    with quire.load(tmp_path / "tiny.gguf", threads=1) as llm:
        real, steps = llm.engine.runner.forward, []

        def forward(plan: Any, lease: Any) -> Any:
            steps.append(len(steps))
            if len(steps) == 5:
                interrupt()
            return real(plan, lease)

        llm.engine.runner.forward = forward  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([1, 2, 3], max_tokens=40, **GO)
        assert len(steps) == 5 and not llm.engine._sequences


def interrupted(rng: random.Random, deed: Callable[[], object]) -> None:
    """Does something; an interrupt comes at any moment of it, or just afterwards."""

    def fire(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, fire)
    try:
        signal.setitimer(
            signal.ITIMER_REAL, rng.choice([0.0005, 0.003, 0.01]) * rng.random() + 1e-6
        )
        try:
            deed()
        except quire.errors.QuireError as error:
            assert "open lease" not in str(error), error
        time.sleep(0.02)
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Person:
    """Interrupts everything now and then, and goes on."""

    def __init__(self, llm: quire.LLM, roomy: quire.LLM, seed: int) -> None:
        self.llm, self.roomy = llm, roomy
        self.rng = random.Random(seed)
        self.session = llm.session()
        self.streams: list[quire.Stream] = []

    def deeds(self) -> list[Callable[[], object]]:
        s, rng = self.session, self.rng
        tokens = [rng.randrange(3, 250) for _ in range(rng.randint(1, 40))]
        return [
            lambda: s.append(tokens),
            lambda: s.generate(max_tokens=8, **GO),
            lambda: s.rewind(-rng.randint(1, max(s.position, 1))),
            lambda: s.logits(),
            lambda: self.fork(),
            lambda: self.llm.generate([tokens, tokens[:3]], max_tokens=6, **GO),
            lambda: self.llm.logits(tokens),
            lambda: self.stream(tokens),
            lambda: [next(stream, "") for stream in self.streams],
        ]

    def fork(self) -> None:
        with self.session.fork() as twin:
            twin.append([5])

    def stream(self, tokens: list[int]) -> None:
        self.streams = [*self.streams[-1:], self.llm.stream(tokens, max_tokens=9, **GO)]

    def check(self) -> None:
        """The books balance, and what the session holds is what its tokens give."""
        self.llm.memory.audit()
        s = self.session
        if s.position > 300:
            s.close()
            self.session = s = self.llm.session()
        if s.position:
            assert np.array_equal(s.logits(), self.roomy.logits(s.tokens)[-1])


def run(model: Path, deeds: int, seed: int, **settings: Any) -> None:
    with quire.load(model, n_ctx=400, threads=1) as roomy:
        llm = quire.load(model, n_ctx=400, threads=1, **settings)
        person = Person(llm, roomy, seed)
        for _ in range(deeds):
            interrupted(person.rng, person.rng.choice(person.deeds()))
            person.check()
        wanted = roomy.generate([7, 8, 9], max_tokens=20, **GO).token_ids
        assert llm.generate([7, 8, 9], max_tokens=20, **GO).token_ids == wanted
        llm.close()
        assert llm.budget.used == 0


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid"])
def test_interrupts_anywhere(name: str, tmp_path: Path) -> None:
    run(model_folder(name, tmp_path), 120, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-dense", "tiny-window", "tiny-recurrent", "tiny-hybrid"])
def test_many_interrupts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for seed in range(2, 5):
        run(model_folder(name, tmp_path), 400, seed)


def test_a_late_interrupt_undoes_nothing_of_another_thread(tmp_path: Path) -> None:
    """It comes when the append is over, and somebody else has gone on with the session."""
    tiny.write(tmp_path / "tiny.gguf", tiny.Tiny())
    with quire.load(tmp_path / "tiny.gguf", threads=1) as llm, llm.session() as s:
        real, came = llm.loop.call, threading.Event()

        def call(fn: Callable[[], Any]) -> Any:
            made = real(fn)
            if s.position == 3 and not llm.loop._work and not came.is_set():
                came.set()
                thread = threading.Thread(target=lambda: s.append([4, 5]))
                thread.start()
                thread.join()
                raise KeyboardInterrupt
            return made

        llm.loop.call = call  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            s.append([1, 2, 3])
        llm.loop.call = real  # type: ignore[method-assign]
        assert came.is_set() and s.tokens == [1, 2, 3, 4, 5]
        assert np.array_equal(s.logits(), llm.logits([1, 2, 3, 4, 5])[-1])


def test_an_append_that_failed_is_undone_before_others_go_on(tmp_path: Path) -> None:
    tiny.write(tmp_path / "tiny.gguf", tiny.Tiny())
    with quire.load(tmp_path / "tiny.gguf", threads=1, n_ctx=300, kv_cache_tokens=64) as llm:
        s = llm.session().append([1, 2, 3])
        real = llm.loop.wait

        def wait(work: Any, done: Any = None) -> None:
            real(work, done)
            if work.error:  # whoever asked is not told yet
                llm.loop.wait = real  # type: ignore[method-assign]
                assert s.position == 3
                s.append([4, 5])

        llm.loop.wait = wait  # type: ignore[assignment]
        with pytest.raises(quire.errors.QuireError):
            s.append([7] * 200)
        assert s.tokens == [1, 2, 3, 4, 5]
        assert np.array_equal(s.logits(), llm.logits([1, 2, 3, 4, 5])[-1])


def interrupted_at(nth: int, call: Callable[[], object]) -> bool:
    """Whether an interrupt before the nth bytecode of a call came before its end."""
    left = nth

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return traced

    sys.settrace(traced)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_who_is_interrupted_asleep_or_waking_harms_no_other_thread() -> None:
    sleeper, other = Waiter(lambda: None, lambda: False), Waiter(lambda: None, lambda: False)  # type: ignore[arg-type]
    errors: list[BaseException] = []
    turns, over = 0, False

    def wake_and_sleep() -> None:
        nonlocal turns
        try:
            while not over:
                sleeper.wake()
                other.sleep()
                turns += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wake_and_sleep, daemon=True)
    thread.start()
    for call in (sleeper.sleep, other.wake):
        nth = 1
        while interrupted_at(nth, call):
            nth += 1
    over, before = True, turns
    other.wake()
    thread.join(10)
    assert not thread.is_alive() and not errors and turns > before


def test_what_was_let_go_of_ends_before_what_is_asked_then() -> None:
    """Though somebody drives who is at what was asked before."""
    seat, order, holder = Seat(), [], Holder()
    lets_go = Call(lambda: seat.later(lambda: order.append("let go")), holder)
    with holder.lock:
        seat._calls += [lets_go, Call(lambda: order.append("asked"), holder)]
        seat.call(lambda: None)
    assert order == ["let go", "asked"]


@pytest.mark.parametrize("way", ["ngram", "early-exit"])
def test_what_a_broken_step_chose_is_not_told_to_the_next_request(way: str) -> None:
    """Some of a draft was judged when it broke off: the session has it, the next answer has not."""
    with quire.load(MODELS / "tiny-dense", n_ctx=128, threads=1) as llm:
        for nth in range(1, 9):
            calls = iter(range(1, 99))

            def process(_: list[int], row: Any, nth: int = nth, calls: Any = calls) -> Any:
                if next(calls) == nth:
                    raise KeyboardInterrupt
                return row

            with llm.session() as session:
                session.append([5, 6, 7, 8] * 8)
                with pytest.raises(KeyboardInterrupt):
                    how = {"speculate": way, "logit_processors": [process]}
                    session.generate(max_tokens=20, temperature=0.0, **how, **GO)
                kept = session.position
                made = session.generate(max_tokens=6, temperature=0.0, **GO)
                assert made.token_ids == session.tokens[kept:] and len(made.token_ids) == 6


def test_an_interrupt_ends_what_cannot_be_computed_once_more(tmp_path: Path) -> None:
    """A window may have passed what the last token of an edited session saw: it waits for nothing.

    What it holds stays, and goes on behind more tokens.
    """
    path = session_kinds.write("window", tmp_path)
    with quire.load(path, n_ctx=160, page_tokens=16, threads=1) as llm:
        step, steps, passed = llm.engine.step, iter(range(1000)), 0
        llm.engine.step = lambda: (next(steps), step())[1]  # type: ignore[method-assign]
        for length in range(60, 78):
            with llm.session() as session:
                session.append(range(5, 25)).remove(0, 4)
                session.append([7 + i % 90 for i in range(length)])
                calls = iter(range(1, 99))

                def process(_: list[int], row: Any, calls: Any = calls) -> Any:
                    if next(calls) == 4:
                        raise KeyboardInterrupt
                    return row

                with pytest.raises(KeyboardInterrupt):
                    session.generate(max_tokens=8, logit_processors=[process], **GO)
                kept = session.tokens
                assert len(kept) == 16 + length + 3
                try:
                    session.logits()
                except RequestError:
                    passed += 1
                assert session.tokens == kept
                session.append([9]).generate(max_tokens=2, **GO)
        assert passed
