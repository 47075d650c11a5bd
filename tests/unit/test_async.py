"""Coroutines on one model: gathered, cancelled, slow, and in several event loops."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import quire
from quire.engine.seat import Seat
from quire.engine.waiting import Waiter
from quire.errors import RequestError
from tests import tiny
from tests.budgets import pages

GO: dict[str, Any] = {"ignore_eos": True}
PROMPTS = [[i, 7, i + 1] * 4 for i in range(6)]


@pytest.fixture
def llm(path: Path) -> Iterator[quire.LLM]:
    with quire.load(path, threads=1) as loaded:
        yield loaded


def slowed(llm: quire.LLM, seconds: float = 0.003) -> list[int]:
    """Steps take a while; returns how many sequences each of them had."""
    real, widths = llm.engine.runner.forward, []

    def forward(plan: Any, lease: Any) -> Any:
        widths.append(len(plan.entries))
        threading.Event().wait(seconds)
        return real(plan, lease)

    llm.engine.runner.forward = forward  # type: ignore[method-assign]
    return widths


@pytest.mark.host
def test_gathered_requests_are_one_batch(llm: quire.LLM) -> None:
    wanted = [llm.generate(p, max_tokens=20, **GO).token_ids for p in PROMPTS]
    llm.forget()
    widths = slowed(llm)

    async def use() -> list[Any]:
        return await asyncio.gather(*(llm.agenerate(p, max_tokens=20, **GO) for p in PROMPTS))

    assert [done.token_ids for done in asyncio.run(use())] == wanted
    assert max(widths) >= 4

    async def batch() -> Any:
        return await llm.agenerate(PROMPTS, max_tokens=20, **GO)

    assert [done.token_ids for done in asyncio.run(batch())] == wanted
    assert pages(llm) == 0


def test_streams_come_piece_by_piece(llm: quire.LLM) -> None:
    text = "".join(llm.stream("abc", max_tokens=30, **GO))

    async def use() -> tuple[list[str], quire.Completion]:
        stream = llm.astream("abc", max_tokens=30, **GO)
        with pytest.raises(RequestError, match="not begun"):
            _ = stream.completion
        pieces = [piece async for piece in stream]
        assert [piece async for piece in stream] == []
        return pieces, stream.completion

    pieces, done = asyncio.run(use())
    assert "".join(pieces) == done.text == text and len(pieces) > 3
    assert pages(llm) == 0


def test_chat_and_sessions(llm: quire.LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    wanted = llm.chat(messages, max_tokens=9, temperature=0).token_ids
    with llm.session() as plain:
        plain.append([1, 2, 3])
        first = plain.generate(max_tokens=8, **GO).token_ids
        second = plain.generate(max_tokens=8, **GO).text

    async def use() -> None:
        again = await llm.achat(messages, max_tokens=9, temperature=0)
        assert again.token_ids == wanted
        with llm.session() as s:
            assert await s.aappend([1, 2, 3]) is s
            assert (await s.agenerate(max_tokens=8, **GO)).token_ids == first
            pieces = []
            async for piece in s.astream(max_tokens=8, **GO):
                pieces.append(piece)
                with pytest.raises(RequestError, match="generates already"):
                    if len(s.tokens) < 19:
                        await s.agenerate(max_tokens=1)
                    else:
                        raise RequestError("generates already")  # it was done by then
            assert "".join(pieces) == second

    asyncio.run(use())
    assert pages(llm) == 0


@pytest.mark.host
def test_several_readers_share_one_stream(llm: quire.LLM) -> None:
    """One request, and each piece goes to one of them."""
    wanted = llm.generate([1, 2], max_tokens=60, **GO)
    widths = slowed(llm, 0.001)
    pieces: list[str] = []

    async def read(stream: quire.AsyncStream) -> None:
        async for piece in stream:
            pieces.append(piece)

    async def use() -> quire.Completion:
        stream = llm.astream([1, 2], max_tokens=60, **GO)
        await asyncio.gather(*(read(stream) for _ in range(3)))
        return stream.completion

    assert asyncio.run(use()).token_ids == wanted.token_ids
    assert "".join(pieces) == wanted.text and set(widths) == {1}


@pytest.mark.parametrize("when", [0.0, 0.001, 0.02, 0.05])
def test_a_cancelled_task_gives_its_pages_back(llm: quire.LLM, when: float) -> None:
    slowed(llm)

    async def use() -> None:
        tasks = [asyncio.create_task(llm.agenerate(p, max_tokens=400, **GO)) for p in PROMPTS]
        await asyncio.sleep(when)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, asyncio.CancelledError) for e in ended)
        await asyncio.sleep(0.1)

    asyncio.run(use())
    assert pages(llm) == 0 and not llm.engine._sequences


@pytest.mark.parametrize("streams", [False, True])
def test_nothing_comes_behind_a_cancelled_task(llm: quire.LLM, streams: bool) -> None:
    """Whenever it was cancelled, its session is at rest as soon as that is known."""
    wanted = llm.generate(PROMPTS[0], max_tokens=9, **GO).token_ids

    async def read(stream: quire.AsyncStream) -> None:
        async for _ in stream:
            pass

    async def cancelled(session: quire.Session, turns: int) -> None:
        going = session.astream if streams else session.agenerate
        made: Any = going(max_tokens=9, **GO)
        task = asyncio.create_task(read(made) if streams else made)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        session.append([7])  # nothing runs on it
        await asyncio.sleep(0.005)
        *made, last = session.tokens[len(PROMPTS[0]) :]
        assert made == wanted[: len(made)] and last == 7

    for turns in (1, 1, 2, 2, 3, 3):
        with llm.session().append(PROMPTS[0]) as session:
            session.logits()
            asyncio.run(cancelled(session, turns))
    assert pages(llm) == 0


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("variant", ["attention", "window"])
def test_a_cancelled_append_is_all_or_nothing(variant: str, edited: bool, tmp_path: Path) -> None:
    """And it is over as soon as that is known, whenever it was cancelled."""
    sliding = (True, False) if variant == "window" else None
    model = tiny.Tiny("qwen2", layers=2, window=24, sliding=sliding, context=512)
    tiny.write(tmp_path / "tiny.gguf", model if sliding else tiny.Tiny(context=512))
    more = [3 + i % 200 for i in range(150)]

    async def cancelled(session: quire.Session, wait: float) -> None:
        task = asyncio.create_task(session.aappend(more))
        await asyncio.sleep(wait)
        task.cancel()
        await asyncio.wait([task])
        whole = [*before, *more] if not task.cancelled() else before
        assert session.position == len(whole) and session.tokens == whole

    with quire.load(tmp_path / "tiny.gguf", threads=1) as llm, llm.session() as session:
        session.append(PROMPTS[0])
        if edited:
            session.remove(2, 4)
        before, wanted = session.tokens, session.logits()
        llm.engine.scheduler.max_tokens = 16
        slowed(llm)
        for wait in (0.0, 0.0, 0.001, 0.01, 0.02, 0.03, 0.3):
            with session.fork() as one:
                asyncio.run(cancelled(one, wait))
                if one.tokens == before:
                    assert (one.logits() == wanted).all()
        llm.forget()
        llm.memory.audit()


@pytest.mark.host
def test_an_append_whose_event_loop_is_gone(llm: quire.LLM) -> None:
    """Nobody is there to wait for it: it is undone before anything else is done."""
    llm.engine.scheduler.max_tokens = 16
    slowed(llm, 0.01)
    with llm.session().append([1, 2, 3]) as session:
        events = asyncio.new_event_loop()
        append = session.aappend([7] * 200)
        task = events.create_task(append)
        events.run_until_complete(asyncio.sleep(0.05))
        append.close()
        assert session.tokens == [1, 2, 3] and session.append([4]).position == 4
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        events.close()
    assert pages(llm) == 0


def test_appending_what_cannot_be(llm: quire.LLM) -> None:
    async def use(session: quire.Session) -> None:
        with pytest.raises(quire.errors.ContextError):
            await session.aappend([5] * 600)
        with pytest.raises(RequestError, match="a prompt is a text"):
            await session.aappend(None)  # type: ignore[arg-type]
        first, second = await asyncio.gather(
            session.aappend([7] * 200), session.aappend([8] * 200), return_exceptions=True
        )
        done = [one for one in (first, second) if not isinstance(one, BaseException)]
        assert session.position == 200 * len(done) + 3 and done

    with llm.session().append([1, 2, 3]) as session:
        asyncio.run(use(session))
    with pytest.raises(RequestError, match="closed"):
        asyncio.run(session.aappend([1]))


def test_several_answers_are_cancelled_while_their_prompt_is_computed(llm: quire.LLM) -> None:
    prompt = [3 + i % 200 for i in range(400)]
    wanted = [one.token_ids for one in llm.generate(prompt, n=2, seed=3, temperature=1.0, **GO)]
    llm.forget()
    llm.engine.scheduler.max_tokens = 16
    widths = slowed(llm, 0.01)

    async def use() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.agenerate(prompt, n=2, **GO), 0.05)
        assert len(widths) < 20  # of 25
        made = await llm.agenerate(prompt, n=2, seed=3, temperature=1.0, **GO)
        assert [one.token_ids for one in made] == wanted

    asyncio.run(use())
    assert pages(llm) == 0 and not llm.engine._sequences


def test_timeouts(llm: quire.LLM) -> None:
    slowed(llm)

    async def use() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.agenerate([1] * 9, max_tokens=400, **GO), 0.05)
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.05):
                async for _ in llm.astream([2] * 9, max_tokens=400, **GO):
                    pass
        assert len((await llm.agenerate([3], max_tokens=5, **GO)).token_ids) == 5

    asyncio.run(use())
    assert pages(llm) == 0 and not llm.engine._sequences


@pytest.mark.parametrize("how", ["aclose", "drop", "break"])
def test_leaving_a_stream_gives_its_pages_back(llm: quire.LLM, how: str) -> None:
    slowed(llm)

    async def use() -> None:
        stream = llm.astream([1, 2], max_tokens=400, **GO)
        async for _ in stream:
            break
        if how == "aclose":
            await stream.aclose()
            assert [piece async for piece in stream] == []
            assert stream.completion.finish_reason in ("cancelled", "length")
        del stream
        gc.collect()
        assert len((await llm.agenerate([3], max_tokens=5, **GO)).token_ids) == 5

    asyncio.run(use())
    assert pages(llm) == 0 and not llm.engine._sequences


def test_who_drives_keeps_nothing_alive(llm: quire.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames may hold those that it drove for until somebody else comes."""
    held: list[Waiter] = []
    real = Seat.add_guest

    def add_guest(seat: Seat, guest: Waiter) -> None:
        held.append(guest)
        real(seat, guest)

    monkeypatch.setattr(Seat, "add_guest", add_guest)
    session = llm.session().append(PROMPTS[0])

    async def use() -> None:
        async for _ in session.astream(max_tokens=200, **GO):
            if held:
                break

    slowed(llm)
    asyncio.run(use())
    assert held and session.append([5]).tokens[-1] == 5


def test_a_slow_consumer_holds_nobody_up(llm: quire.LLM) -> None:
    wanted = llm.generate([5] * 3, max_tokens=30, **GO)
    llm.forget()

    async def use() -> None:
        slow = llm.astream([5] * 3, max_tokens=30, **GO)
        first = await anext(slow)
        quick = await asyncio.gather(*(llm.agenerate(p, max_tokens=40, **GO) for p in PROMPTS))
        assert [len(done.token_ids) for done in quick] == [40] * len(PROMPTS)
        before = llm.engine.runner.tokens_run
        assert first + "".join([piece async for piece in slow]) == wanted.text
        assert llm.engine.runner.tokens_run == before

    asyncio.run(use())
    assert pages(llm) == 0


def test_several_event_loops_and_threads(llm: quire.LLM) -> None:
    wanted = [llm.generate(p, max_tokens=15, **GO).token_ids for p in PROMPTS]
    wrong: list[int] = []

    async def use(i: int) -> None:
        for _ in range(3):
            if (await llm.agenerate(PROMPTS[i], max_tokens=15, **GO)).token_ids != wanted[i]:
                wrong.append(i)

    def plain(i: int) -> None:
        for _ in range(3):
            if llm.generate(PROMPTS[i], max_tokens=15, **GO).token_ids != wanted[i]:
                wrong.append(i)

    threads = [threading.Thread(target=lambda i=i: asyncio.run(use(i))) for i in range(4)]
    threads += [threading.Thread(target=plain, args=(i,)) for i in (4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and wrong == []
    assert pages(llm) == 0


def test_errors_reach_their_task_alone(llm: quire.LLM) -> None:
    async def use() -> list[Any]:
        return await asyncio.gather(
            llm.agenerate([1], max_tokens=5, **GO),
            llm.agenerate([1], logit_bias={9999: 1.0}),
            llm.agenerate([1] * 600),
            llm.agenerate([2], max_tokens=5, **GO),
            return_exceptions=True,
        )

    first, bias, long, last = asyncio.run(use())
    assert isinstance(bias, RequestError) and isinstance(long, RequestError)
    assert len(first.token_ids) == len(last.token_ids) == 5


def test_an_unexpected_error_ends_no_wait_in_silence(llm: quire.LLM) -> None:
    async def use() -> None:
        with pytest.raises(ZeroDivisionError):
            await llm.agenerate([1], max_tokens=5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.model, "run", lambda *_, **__: 1 // 0)
        asyncio.run(use())
    assert len(llm.generate([1], max_tokens=5, **GO).token_ids) == 5
    assert pages(llm) == 0


def test_closing_while_coroutines_wait(path: Path) -> None:
    llm = quire.load(path, threads=1)
    slowed(llm)

    async def use() -> list[Any]:
        tasks = [asyncio.create_task(llm.agenerate(p, max_tokens=400, **GO)) for p in PROMPTS]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(llm.close)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    ended = asyncio.run(use())
    assert all(isinstance(e, RequestError) and "closed" in str(e) for e in ended)


def test_the_loops_own_thread_goes_when_it_is_idle(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.seat._IDLE", 0.05)
    asyncio.run(llm.agenerate([1], max_tokens=2))
    for _ in range(100):
        if llm.loop.seat._thread is None:
            break
        threading.Event().wait(0.05)
    assert llm.loop.seat._thread is None
    assert len(asyncio.run(llm.agenerate([1], max_tokens=2, **GO)).token_ids) == 2


def test_whoever_comes_just_as_the_thread_finds_nothing_to_do_waits_all_the_same() -> None:
    class Late(Waiter):
        woken = False

        def wake(self) -> None:
            self.woken = True

    seat, steps = Seat(), cast(Any, None)
    done, late = Late(steps, lambda: True), Late(steps, lambda: False)
    seat._guests += [done, late]
    seat._news.ring()
    assert not seat._nothing_to_do()
    assert done.woken and not late.woken


def test_who_is_cancelled_is_told_of_no_failure(llm: quire.LLM) -> None:
    """Nobody waits for it any more: the event loop has nothing to complain of."""
    session, told = llm.session(), []
    begun, go_on = threading.Event(), threading.Event()

    def fail(*_: Any) -> None:
        begun.set()
        go_on.wait(10)
        raise RequestError("not now")

    session._appending = fail  # type: ignore[assignment,method-assign]

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
        task = asyncio.create_task(session.aappend([1, 2]))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not told
