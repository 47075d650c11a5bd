"""A second Ctrl-C while the first is being dealt with: nothing is left to run, nothing is lost."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.api import appending
from quire.engine.endings import Endings, Holder
from quire.engine.loop import Loop
from quire.engine.signals import SignalsLater
from tests import tiny

GO: dict[str, Any] = {"ignore_eos": True, "max_tokens": 5}


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[quire.LLM]:
    tiny.write(tmp_path / "tiny.gguf", tiny.Tiny())
    with quire.load(tmp_path / "tiny.gguf", threads=1) as made:
        yield made


def interrupt_twice(patch: pytest.MonkeyPatch) -> None:
    """The first comes when somebody waits, and the second before anything is tidied up."""
    real = Loop.call

    def wait(*_: object) -> None:
        def call(*_: object) -> None:
            patch.setattr(Loop, "call", real)
            raise KeyboardInterrupt

        patch.setattr(Loop, "call", call)
        raise KeyboardInterrupt

    patch.setattr(Loop, "wait", wait)


DEEDS: dict[str, Callable[[quire.LLM, quire.Session], object]] = {
    "append": lambda llm, s: s.append([7, 8, 9]),
    "generate": lambda llm, s: s.generate(**GO),
    "logits": lambda llm, s: s.rewind(-1).logits(),
    "generate without a session": lambda llm, s: llm.generate([[4, 5], [6]], **GO),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_all_goes_on_while_the_interrupt_is_dealt_with(llm: quire.LLM, deed: str) -> None:
    s = llm.session().append([1, 2, 3])
    before = len(llm.engine._sequences)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_twice(patch)
        try:
            DEEDS[deed](llm, s)
        except KeyboardInterrupt:  # its traceback holds everything that was under way
            patch.undo()
            assert s.position == {"logits": 2, "generate": 4}.get(
                deed, 3
            )  # its first token was known
            assert len(llm.engine._sequences) == before and not llm.engine.scheduler.active
            assert s.append([4]).tokens[-1] == 4
        else:
            raise AssertionError("nothing was interrupted")
    llm.memory.audit()
    assert not llm.loop.seat.endings._held


def test_what_is_computed_beside_is_given_back(llm: quire.LLM) -> None:
    before = len(llm.engine._sequences)
    real, calls = Loop.call, []

    def call(loop: Loop, fn: Callable[[], Any]) -> Any:
        calls.append(fn)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(loop, fn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "call", call)
        try:
            llm.logits([1, 2, 3])
        except KeyboardInterrupt:
            patch.undo()
            assert len(llm.logits([4, 5])) == 2
            assert len(llm.engine._sequences) == before
    assert len(calls) == 3


def test_a_prompt_with_several_answers_is_given_back(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the interrupt comes as the session is about to be closed that computed it."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quire.Session, "__exit__", leave)
        try:
            llm.generate([1, 2, 3], n=3, **GO)
        except KeyboardInterrupt:  # its traceback holds the session
            assert llm.generate([4], **GO).token_ids
            assert not llm.engine._sequences and not llm.engine.scheduler.active
        else:
            raise AssertionError("nothing was interrupted")
    assert not llm.loop.seat.endings._held


@pytest.mark.parametrize("opens", [False, True])
def test_files_that_are_written_or_read(llm: quire.LLM, opens: bool, tmp_path: Path) -> None:
    """What they hold comes back: others would wait for it for ever."""
    s = llm.session().append([1, 2, 3])
    s.save(tmp_path / "a.quire")
    real = Loop.call

    def call(loop: Loop, fn: Callable[[], Any]) -> Any:
        if llm.budget.whole.passing:
            raise KeyboardInterrupt
        return real(loop, fn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "call", call)
        try:
            llm.open(tmp_path / "a.quire") if opens else s.save(tmp_path / "b.quire")
        except KeyboardInterrupt:
            patch.undo()
            assert llm.budget.whole.passing == 1
            assert s.append([4]).tokens == [1, 2, 3, 4]
            assert llm.budget.whole.passing == 0 and len(llm.engine._sequences) == 1
            assert not llm.memory.checkpoints["names"]
    assert not llm.budget.whole.passing and not (tmp_path / "b.quire").exists()


@pytest.mark.parametrize("when", ["at once", "after it has begun", "once it is computed"])
def test_an_append_that_is_awaited(llm: quire.LLM, when: str) -> None:
    s = llm.session().append([1, 2, 3])
    real = appending.off_the_loop

    async def interrupted(do: Callable[[], Any], *_: object) -> Any:
        if when != "at once" and not llm.loop._work:
            return await real(do)
        raise KeyboardInterrupt

    async def wait_async(loop: Loop, work: Any) -> None:
        while when == "once it is computed" and not work.done:
            loop.seat.turn(loop)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(appending, "off_the_loop", interrupted)
        patch.setattr(Loop, "wait_async", wait_async)
        try:
            asyncio.run(s.aappend([7, 8, 9]))
        except KeyboardInterrupt:
            patch.undo()
            assert s.position == 3
            assert s.append([4]).tokens == [1, 2, 3, 4]
        else:
            raise AssertionError("nothing was interrupted")
    assert not llm.loop.seat._guests
    llm.memory.audit()


def test_coroutines_of_an_event_loop_that_is_closed_wait_no_more(llm: quire.LLM) -> None:
    """An event loop that a second interrupt has broken leaves its coroutines where they are."""
    s = llm.session().append([1, 2, 3])
    llm.loop.seat.take()  # nobody computes anything meanwhile
    home = asyncio.new_event_loop()
    task = home.create_task(s.aappend([7] * 40))
    try:
        home.run_until_complete(asyncio.wait([task], timeout=0.1))
    finally:
        home.call_soon(home.stop)
        home.run_forever()
        llm.loop.seat.leave()
    assert not task.done()
    executor = home._default_executor  # type: ignore[attr-defined]
    home._default_executor = None  # type: ignore[attr-defined]
    home.close()
    executor.shutdown(wait=True)
    assert s.append([4]).tokens == [1, 2, 3, 4]
    task.get_coro().close()  # type: ignore[union-attr]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_call_that_nobody_waits_for_is_not_made(llm: quire.LLM) -> None:
    """Somebody else drives; the caller is interrupted twice, and goes."""
    s, seat = llm.session().append([1, 2, 3]), llm.loop.seat
    holds, ready = threading.Event(), threading.Event()

    def drive() -> None:
        seat.take()
        ready.set()
        holds.wait(10)
        seat.tidy()
        seat.leave()

    thread = threading.Thread(target=drive)
    thread.start()
    ready.wait(10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.engine.seat.Call.finished", _raise)
        with pytest.raises(KeyboardInterrupt):
            s.rewind(-2)
    holds.set()
    thread.join(10)
    assert s.tokens == [1, 2, 3]


def _raise(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_somebody_left_is_ended_behind_what_they_put_off() -> None:
    endings, holder, order = Endings(), Holder(), list[str]()
    with holder.lock:
        endings.when_left(holder, holder, lambda: order.append("left"))
        endings.run()
        assert not order and not endings.left
        endings.later(lambda: order.append("put off"))
    assert endings.left
    endings.run()
    endings.run()
    assert order == ["put off", "left"] and not endings.left


def test_every_handler_comes_back_and_every_signal_is_told() -> None:
    """Though a handler raises while the others are still to come."""
    told: list[int] = []

    def handler(number: int, _: object) -> None:
        told.append(number)
        raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        with pytest.raises(KeyboardInterrupt), SignalsLater():
            for number in numbers:
                signal.raise_signal(number)
        assert sorted(told) == sorted(numbers)
        assert [signal.getsignal(number) for number in numbers] == [handler] * 3
        later = SignalsLater()
        later.__enter__()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.engine.signals._set_handler", _once_raising())
            with pytest.raises(KeyboardInterrupt):
                later.__exit__(None, None, None)
        assert [signal.getsignal(number) for number in numbers] == [handler] * 3
    finally:
        for number, one in zip(numbers, before, strict=True):
            signal.signal(number, one)


def _once_raising() -> Callable[..., Any]:
    """Sets handlers; a signal comes before the second is set."""
    calls = 0

    def set_handler(number: int, handler: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return signal.signal(number, handler)

    return set_handler


@pytest.mark.parametrize("awaits", [False, True])
def test_a_stream_whose_reader_was_interrupted(llm: quire.LLM, awaits: bool) -> None:
    """It is over, though nobody came to close it, and somebody still holds it."""
    s = llm.session().append([1, 2, 3])

    def close(*_: object) -> None:
        raise KeyboardInterrupt

    async def aclose(*_: object) -> None:
        raise KeyboardInterrupt

    async def read(stream: quire.AsyncStream) -> None:
        async for _ in stream:
            pass

    stream = s.astream(**GO) if awaits else s.stream(**GO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quire.Stream, "close", close)
        patch.setattr(quire.AsyncStream, "aclose", aclose)
        patch.setattr(Loop, "wait", close)
        patch.setattr(Loop, "wait_async", aclose)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(read(stream)) if isinstance(stream, quire.AsyncStream) else list(stream)
    assert s.append([4]).tokens[-1] == 4
    assert stream.completion.finish_reason == "cancelled"
    assert not llm.loop.seat.endings._held


def test_a_stream_that_is_let_go_of_between_two_pieces(llm: quire.LLM) -> None:
    stream = llm.stream([1, 2, 3], **GO)
    next(stream)
    del stream
    assert llm.generate([4], **GO).token_ids and not llm.engine._sequences
    assert not llm.loop.seat.endings._held
