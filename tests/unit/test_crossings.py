"""Where threads, coroutines, interrupts and garbage meet: nobody waits for ever, nothing stays."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import quire
from quire.devices.budget import Budget
from quire.engine.seat import Seat
from quire.engine.waiting import Bell, Waiter
from quire.errors import ClosedError, RequestError
from quire.speculate.draft_model import Follower
from tests.budgets import pages

GO: dict[str, Any] = {"ignore_eos": True}
PROMPT = [5, 6, 7] * 4


def test_a_stream_that_is_closed_while_it_begins(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, gate, real = llm.session().append(PROMPT), threading.Event(), llm.matcher

    def matcher(request: Any) -> Any:
        gate.wait()
        return real(request)

    monkeypatch.setattr(llm, "matcher", matcher)

    async def use() -> None:
        stream = session.astream(max_tokens=100, **GO)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        await stream.aclose()
        gate.set()
        with pytest.raises(StopAsyncIteration):
            await reader
        assert session.append([9]).tokens[-1] == 9  # while the stream is held

    asyncio.run(use())
    session.close()  # the reader's error holds its frame, and that the reader


@pytest.mark.parametrize("callers", [1, 2, 4])
def test_coroutines_have_their_turn_beside_who_calls_in_a_loop(
    llm: quire.LLM, callers: int
) -> None:
    """Whoever calls has the seat again before the thread that drives for them has woken up."""
    done, begun = threading.Event(), threading.Event()
    made = [0] * callers

    def calls(i: int) -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until and not done.is_set():
            llm.loop.call(lambda: time.sleep(0.003))  # as if it computed
            made[i] += 1
            begun.set()

    async def use() -> float:
        calling = [asyncio.create_task(asyncio.to_thread(calls, i)) for i in range(callers)]
        await asyncio.to_thread(begun.wait)
        started = time.monotonic()
        await llm.agenerate(PROMPT, max_tokens=20, **GO)
        took = time.monotonic() - started
        done.set()
        await asyncio.gather(*calling)
        return took

    assert asyncio.run(use()) < 15
    assert min(made) > 1  # nor does one of them keep the others out


def asked(llm: quire.LLM, found: list[object], for_: Callable[[], object]) -> threading.Thread:
    """A thread that waits for whoever drives to do something."""
    calls = llm.loop.seat._calls
    before = len(calls)
    thread = threading.Thread(target=lambda: found.append(llm.loop.call(for_)), daemon=True)
    thread.start()
    while len(calls) == before:
        time.sleep(0.001)
    return thread


def test_nobody_is_forgotten_where_an_ending_fails(llm: quire.LLM) -> None:
    """Whoever drives is told; those who asked it for something behind that wait for the next."""
    seat, found = llm.loop.seat, list[object]()

    def fail() -> None:
        raise MemoryError("of an ending")

    assert seat.take()
    asking = [asked(llm, found, lambda: llm.loop.later(fail)), asked(llm, found, lambda: 7)]
    with pytest.raises(MemoryError, match="of an ending"):
        seat.tidy()
    seat.leave()
    for thread in asking:
        thread.join(60)
        assert not thread.is_alive()
    assert found in ([None, 7], [7, None])  # both were done, and may say so in any order


def test_turns_that_an_ending_takes_leave_nobody_out(llm: quire.LLM) -> None:
    """Behind one request comes one that uses the model itself, and does what others asked for."""
    seat, session, found = llm.loop.seat, llm.session(), list[object]()
    assert seat.take()
    uses = asked(llm, found, lambda: llm.loop.let_use(lambda: session.append(PROMPT)))
    other = asked(llm, found, lambda: 7)
    seat.tidy()
    seat.leave()
    for thread in (uses, other):
        thread.join(60)
    assert found in ([None, 7], [7, None]) and session.tokens == PROMPT
    session.close()


def test_a_coroutine_that_comes_while_the_seats_own_thread_goes(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done when it comes, and the thread is gone when it rings."""
    asyncio.run(llm.agenerate(PROMPT, max_tokens=1))  # the thread is there for a second
    seat, real = llm.loop.seat, Seat.add_guest
    own = seat._thread
    assert own is not None

    class LateBell(Bell):
        def ring(self) -> None:
            own.join()
            bell.ring()

        def wait(self, seconds: float) -> bool:
            return bell.wait(seconds)

    def add_guest(seat: Seat, guest: Waiter) -> None:
        while not guest.done():  # somebody else drives
            seat.turn(guest.steps)
        real(seat, guest)

    bell = seat._news
    monkeypatch.setattr(Seat, "add_guest", add_guest)
    monkeypatch.setattr(seat, "_news", LateBell())

    async def ask() -> quire.Completion:
        return await asyncio.wait_for(llm.agenerate(PROMPT, max_tokens=2, **GO), 30)

    assert len(asyncio.run(ask()).token_ids) == 2


def test_two_who_lose_their_pages_to_each_other_both_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one has computed makes way for the other before it has woken up to look at it."""
    with quire.load(path, n_ctx=160, threads=1, kv_cache_tokens=80, swap_space=0) as llm:
        sessions = [llm.session().append([first, *range(5, 80)]) for first in (3, 4)]
        real, ran = llm.engine.runner.run, []

        def run(ubatch: Any, *more: Any, **named: Any) -> Any:
            ran.append(len(ubatch.tokens))
            time.sleep(0.005)
            return real(ubatch, *more, **named)

        monkeypatch.setattr(llm.engine.runner, "run", run)
        monkeypatch.setattr(llm.engine.scheduler, "max_tokens", 8)
        for session in sessions:
            llm.loop.call(lambda one=session.sequence: llm.engine.room.lose(one))
        threads = [threading.Thread(target=session.logits, daemon=True) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), f"{sum(ran)} tokens were computed, where 152 would do"
        assert sum(ran) < 10 * 152


class Watched:
    """A lock that others hold while they wait for the seat."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def of(self, _: object) -> Watched:
        return self

    def __enter__(self) -> None:
        assert not self._seat.mine, "who holds it may wait for this thread"

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("how", ["logits", "embed", "save"])
def test_a_processor_waits_for_nobody(
    llm: quire.LLM, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, watched = llm.session().append(PROMPT), Watched(llm.loop.seat)
    uses: dict[str, Callable[[], object]] = {
        "logits": lambda: llm.logits([5]), "embed": lambda: llm.embed([5]),
        "save": lambda: session.save(tmp_path / "it.quire"),
    }  # fmt: skip
    for use in uses.values():
        use()  # by itself it can be done
    monkeypatch.setattr(llm.loop, "alone", watched)
    monkeypatch.setattr(llm, "writers", watched)

    def processor(*_: object) -> None:
        uses[how]()

    with pytest.raises(RequestError, match="in the middle of a step"):
        llm.generate(PROMPT, max_tokens=1, logit_processors=[processor])
    session.close()


@pytest.mark.parametrize("again", [True, False])
def test_a_session_whose_closing_was_interrupted(
    llm: quire.LLM, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, before = llm.session().append(PROMPT), Seat.call

    def call(*_: object) -> None:
        monkeypatch.setattr(Seat, "call", before)
        raise KeyboardInterrupt

    monkeypatch.setattr(Seat, "call", call)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    if again:
        llm.loop.seat.endings._later.clear()  # another interrupt came before it was noted
        session.close()
    assert pages(llm) == 0 and repr(session) == "<Session closed>"


def test_an_append_to_a_session_that_is_closed_meanwhile_says_so(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, real = llm.session(), llm.engine.runner.launch
    closing: list[threading.Thread] = []

    def launch(*args: Any) -> Any:
        if not closing:
            closing.append(threading.Thread(target=session.close))
            closing[0].start()
            while not llm.loop.seat._calls:
                time.sleep(0.001)
        return real(*args)

    monkeypatch.setattr(llm.engine.runner, "launch", launch)
    llm.engine.scheduler.max_tokens = 16
    with pytest.raises(ClosedError):
        session.append(PROMPT * 4)
    closing[0].join()
    assert pages(llm) == 0


USES: dict[str, Callable[[quire.LLM, quire.Session, Path], object]] = {
    "fork": lambda llm, s, path: s.fork(),
    "rewind": lambda llm, s, path: s.rewind(-1),
    "drop": lambda llm, s, path: s.drop("here"),
    "session": lambda llm, s, path: llm.session(),
    "save": lambda llm, s, path: s.save(path / "it.quire"),
    "generate": lambda llm, s, path: s.generate(max_tokens=1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", ["rewind", "fork", "close", "let go"])
def test_garbage_comes_into_the_middle_of_nothing(
    llm: quire.LLM, use: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is called when it is collected may use the model, whatever that is doing."""
    other, session = llm.session().append(PROMPT), llm.session().append([1, 2, 3])
    other.checkpoint("here")
    met: list[str] = []

    def meeting(real: Callable[..., Any]) -> Callable[..., Any]:
        def meets(*args: Any) -> Any:
            with pytest.raises(RequestError, match="garbage"):
                USES[use](llm, other, tmp_path)
            met.append("refused")
            return real(*args)

        return meets

    memory = llm.engine.memory
    for name in ("seq_rm", "seq_cp", "seq_free"):
        monkeypatch.setattr(memory, name, meeting(getattr(memory, name)))
    if where == "rewind":
        session.rewind(-1)
    elif where == "fork":
        session.fork()
    elif where == "close":
        session.close()
    else:
        del session
        llm.forget()
    assert met
    monkeypatch.undo()
    assert other.tokens == PROMPT and len(other.marks) == 1
    llm.memory.audit()


def test_nothing_is_kept_of_marks_that_were_shared(llm: quire.LLM) -> None:
    with llm.session().append(PROMPT) as session:
        session.checkpoint("here")
        first, second = session.fork(), session.fork()
        first.rewind("here").close()
        second.rewind("here").close()
    assert not llm.engine.history._shared and pages(llm) == 0


def test_garbage_gives_back_what_it_held_while_a_budget_is_asked() -> None:
    budget = Budget(100)
    budget.reserve(60, "pages")

    class Uses(dict[str, int]):
        def items(self) -> Any:
            asked = budget._lock.acquire(blocking=False)  # here garbage is collected
            assert asked, "who gives back would wait for itself"
            budget._lock.release()
            return super().items()

    budget._by_use = Uses(budget._by_use)
    with pytest.raises(quire.errors.BudgetError):
        budget.reserve(60, "pages")


BOOKS = ("api/llm.py", "api/ending.py", "devices/budget.py", "engine/loop.py", "memory/build.py")


def test_a_load_that_is_interrupted_at_any_line_leaves_a_shared_budget_as_it_was(
    llm: quire.LLM, path: Path
) -> None:
    whole = llm.budget.whole
    lines: dict[tuple[str, int], int] = {}

    def load(fire: Callable[[tuple[str, int]], bool]) -> None:
        def traced(frame: FrameType, event: str, _: Any) -> Any:
            if not frame.f_code.co_filename.endswith(BOOKS):
                return None
            if event == "line" and fire((frame.f_code.co_filename, frame.f_lineno)):
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return traced

        before = sys.gettrace()
        sys.settrace(traced)
        try:
            quire.load(path, beside=llm, threads=1).close()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)

    def held() -> tuple[Any, ...]:
        gc.collect()
        llm.session().close()
        everybody = len(whole.lenders), len(whole.followers), len(whole._savers)
        return whole.used, whole.breakdown, everybody

    def count(at: tuple[str, int]) -> bool:
        lines[at] = lines.get(at, 0) + 1
        return False

    load(count)
    wanted = held()
    for at, times in lines.items():
        left = times  # it comes the last time there

        def fire(here: tuple[str, int], at: tuple[str, int] = at) -> bool:
            nonlocal left
            left -= here == at
            return here == at and left == 0

        load(fire)
        assert held() == wanted, at


def test_no_two_wait_for_each_others_prompt(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append is cancelled whose tokens another waits for, and asked for once more."""
    prompt = [(7 * i) % 90 + 3 for i in range(120)]
    wanted = llm.generate([*prompt, 5], max_tokens=3, **GO).token_ids
    llm.forget()
    llm.engine.scheduler.max_tokens = 16
    begun, go, real = threading.Event(), threading.Event(), llm.engine.runner.launch

    def launch(*args: Any) -> Any:
        begun.set()
        go.wait()
        return real(*args)

    monkeypatch.setattr(llm.engine.runner, "launch", launch)

    async def use() -> None:
        session = llm.session()
        first = asyncio.create_task(session.aappend(prompt))
        await asyncio.to_thread(begun.wait)
        other = asyncio.create_task(
            asyncio.to_thread(lambda: llm.stream([*prompt, 5], max_tokens=3, **GO))
        )
        while not llm.loop.seat._calls:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        stream = await other
        await asyncio.wait_for(session.aappend(prompt), 30)
        assert session.tokens == prompt
        list(stream)
        assert stream.completion.token_ids == wanted

    asyncio.run(use())


def test_two_models_have_one_draft_for_them(
    path: Path, llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of another, in a thread of its own, comes into the middle of each that drafts."""
    wanted, real = llm.generate(PROMPT, max_tokens=12, **GO).token_ids, Follower.draft

    def drafted(source: Follower, requests: Any) -> Any:
        made = real(source, requests)

        def step() -> None:
            real(source, [])
            source.settle([])
            source.cancel()

        other = threading.Thread(target=step)
        other.start()
        other.join()
        return made

    monkeypatch.setattr(Follower, "draft", drafted)
    with quire.load(path, threads=1) as draft:
        got = llm.generate(PROMPT, max_tokens=12, speculate=draft, **GO)
        assert got.token_ids == wanted and got.speculation and got.speculation.accepted
        assert draft.loop.seat._driver is None, "nobody else could use it any more"
        assert pages(llm) == pages(draft) == 0


def test_a_draft_model_is_free_where_what_was_right_cannot_be_kept(
    path: Path, llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = llm.generate(PROMPT, max_tokens=12, **GO).token_ids

    def settle(*_: object) -> None:
        raise MemoryError("of a draft")

    with quire.load(path, threads=1) as draft:
        with monkeypatch.context() as patched, pytest.raises(MemoryError, match="of a draft"):
            patched.setattr(Follower, "settle", settle)
            llm.generate(PROMPT, max_tokens=12, speculate=draft, **GO)
        assert draft.loop.seat._driver is None, "nobody else could use it any more"
        assert llm.generate(PROMPT, max_tokens=12, speculate=draft, **GO).token_ids == wanted
        assert pages(llm) == pages(draft) == 0


def test_texts_that_break_repetitions_are_remembered_for_a_while(llm: quire.LLM) -> None:
    for i in range(99):
        breakers = (f"a{i}",)
        llm.generate([1], max_tokens=1, dry_multiplier=1, dry_sequence_breakers=breakers)
    assert len(llm.engine.constrainer._with) < 20
