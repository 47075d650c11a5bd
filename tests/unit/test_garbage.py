"""What ends by itself, in the middle of a step at times: garbage, and the process."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import quire
from quire.engine.guest import Guest
from quire.engine.loop import Loop
from quire.errors import RequestError
from tests import tiny

GO: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
PROMPT = [3, 4] * 9


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=256))
    return made


@pytest.fixture
def llm(path: Path) -> Iterator[quire.LLM]:
    gc.disable()  # it comes where a test says so, and then soon
    gc.collect()
    gc.freeze()
    with quire.load(path, threads=1) as loaded:
        yield loaded
    gc.unfreeze()
    gc.enable()


class Holder:
    """Something in a circle of references, with a session that it closes when it goes."""

    def __init__(self, session: quire.Session) -> None:
        self.session, self.self = session, self

    def __del__(self) -> None:
        self.session.close()


def abandon_session(llm: quire.LLM, _: str | None) -> None:
    Holder(llm.session().append([5, 6, 7] * 9))


def abandon_stream(llm: quire.LLM, speculate: str | None) -> None:
    """A generator in the middle of a stream, which it closes when it goes."""

    def pieces() -> Iterator[str]:
        go: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "speculate": speculate}
        with llm.session().append([7, 8] * 9) as session, session.stream(**go) as stream:
            yield from stream

    circle: list[Any] = [pieces()]
    circle.append(circle)
    next(circle[0])


def collecting(owner: Any, name: str, late: bool, patch: pytest.MonkeyPatch) -> None:
    """Garbage is collected before or after each call of something."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not late:
            gc.collect()
        made = real(*args, **kwargs)
        if late:
            gc.collect()
        return made

    patch.setattr(owner, name, call)


PLACES: dict[str, Callable[[quire.LLM], Any]] = {
    "launch": lambda llm: llm.engine.runner,
    "reserve": lambda llm: llm.engine.memory,
    "finish": lambda llm: llm.engine,
    "plan": lambda llm: llm.engine.scheduler,
    "Thread": lambda _: threading,
}


@pytest.mark.filterwarnings("error")  # of what is raised where garbage is collected
@pytest.mark.parametrize("abandon", [abandon_session, abandon_stream])
@pytest.mark.parametrize("speculate", [None, "ngram"])
@pytest.mark.parametrize("name", PLACES)
def test_garbage_may_close_things_anywhere(
    name: str, speculate: str | None, abandon: Callable[..., None], llm: quire.LLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    wanted = llm.generate(PROMPT, **GO).token_ids
    for late in (False, True):
        abandon(llm, speculate)
        with monkeypatch.context() as patch:
            collecting(PLACES[name](llm), name, late, patch)
            with llm.session().append(PROMPT) as session:
                made = asyncio.run(session.fork().agenerate(speculate=speculate, **GO))
                assert made.token_ids == wanted
                assert session.generate(speculate=speculate, **GO).token_ids == wanted
        gc.collect()
        llm.forget()
        llm.memory.audit()
        assert llm.memory.as_dict()["stats"]["attention"]["pages_used"] == 0
        assert not llm.engine._sequences
    if name == "Thread":
        llm.loop.seat.dismiss()  # the next test begins with none


@pytest.mark.parametrize("speculate", [None, "ngram", "lookahead"])
def test_a_processor_cannot_use_its_model(llm: quire.LLM, speculate: str | None) -> None:
    """Not the way that waits for itself, nor any other; to others it does no harm."""
    other = llm.session().append([1, 2, 3])
    uses: list[Callable[[], object]] = [
        lambda: llm.generate([5], max_tokens=1), lambda: llm.embed([5]), lambda: other.append([4]),
        lambda: other.tokens, lambda: llm.logits([5]), lambda: list(llm.stream([5], max_tokens=1)),
    ]  # fmt: skip
    wanted = [one.token_ids for one in llm.generate([PROMPT, [9, 8]], **GO)]
    for use in uses:

        def processor(_: object, __: object, use: Callable[[], object] = use) -> None:
            use()

        beside = llm.stream([9, 8], **GO)
        with pytest.raises(RequestError, match="in the middle of a step"):
            llm.generate(PROMPT, logit_processors=[processor], speculate=speculate, **GO)
        list(beside)
        assert beside.completion.token_ids == wanted[1]
        assert llm.generate(PROMPT, speculate=speculate, **GO).token_ids == wanted[0]
        llm.memory.audit()


def test_a_processor_may_use_another_model(llm: quire.LLM, path: Path) -> None:
    with quire.load(path, threads=1) as guide:

        def weigh(tokens: Any, logits: np.ndarray) -> np.ndarray:
            return logits + guide.logits(tokens)[-1]

        made = llm.generate(PROMPT, logit_processors=[weigh], **GO).token_ids
        assert made == llm.generate(PROMPT, **GO).token_ids  # twice the same


def test_a_processor_may_close_what_it_is_called_for(path: Path) -> None:
    """Session and model end before the next step."""
    with quire.load(path, threads=1) as llm:
        with llm.session().append(PROMPT) as session:
            made = session.generate(logit_processors=[lambda *_: session.close()], **GO)
            assert made.finish_reason == "cancelled"
        with pytest.raises(RequestError, match="closed"):
            llm.generate(PROMPT, logit_processors=[lambda *_: llm.close()], **GO)
        llm.close()
        assert llm.budget.used == 0


LEAVES = {
    "a stream of coroutines": """
        async def use():
            async for _ in llm.astream([1, 2], max_tokens=200):
                return

        asyncio.run(use())
    """,
    "a daemon that generates": """
        def use():
            while True:
                llm.generate([1, 2], max_tokens=30)

        threading.Thread(target=use, daemon=True).start()
        time.sleep(0.1)
        atexit.register(lambda: session.append([4]).generate(max_tokens=2))
        session = llm.session().append([1, 2, 3])
    """,
}


@pytest.mark.parametrize("leaves", LEAVES)
def test_the_process_ends_whatever_is_under_way(leaves: str, path: Path) -> None:
    """Nobody computes then: a thread that is ended within a kernel takes the process with it."""
    program = f"""
import asyncio, atexit, quire, sys, threading, time
llm = quire.load(sys.argv[1], threads=2)
{dedent(LEAVES[leaves])}
"""
    run = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("way", ["generate", "append", "rewind"])
def test_what_goes_as_something_else_begins_does_not_end_that(llm: quire.LLM, way: str) -> None:
    """Garbage is collected between what is let go of before a request and the request itself."""
    session = llm.session().append(PROMPT)
    stream = session.stream(**GO)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    real, before = Loop.check_idle, session.tokens

    def check_idle(loop: Loop, sequence: Any) -> None:
        gc.collect()
        real(loop, sequence)

    uses: dict[str, Callable[[], Any]] = {
        "generate": lambda: session.generate(**GO), "append": lambda: session.append([5, 6, 7]),
        "rewind": lambda: session.rewind(-1).generate(**GO),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "check_idle", check_idle)
        thread = threading.Thread(target=uses[way], daemon=True)
        thread.start()
        thread.join(20)
    assert not thread.is_alive(), "it waits for ever"
    assert len(session.tokens) > len(before) - (way == "rewind")
    assert session.sequence.generation is None and not llm.engine.scheduler.active
    llm.memory.audit()


@pytest.mark.host
@pytest.mark.parametrize("on_session", [False, True])
def test_what_was_chosen_for_who_is_gone_is_nobody_elses(llm: quire.LLM, on_session: bool) -> None:
    """A step breaks off behind a token for a stream that nobody holds when the next one comes."""
    session = llm.session().append(PROMPT)
    wanted = llm.generate([5, 6, 7], **GO).token_ids

    def broken() -> None:
        raise MemoryError

    stream = session.stream(**GO) if on_session else llm.stream(PROMPT, **GO)
    next(stream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "_pay", broken)
        with pytest.raises(MemoryError):
            llm.loop.seat.turn(llm.loop)
    assert [output.sequence for output in llm.engine._outputs] == [stream._job.sequence.id]
    del stream
    if on_session:
        came, made = session.tokens, session.generate(**GO)
        assert session.tokens == came + made.token_ids and len(made.token_ids) == GO["max_tokens"]
    else:
        assert llm.generate([5, 6, 7], **GO).token_ids == wanted


def test_who_drives_does_not_hold_who_met_an_error(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that drives for coroutines lives on; what they let go of ends all the same."""
    monkeypatch.setattr("quire.engine.seat._IDLE", 60.0)

    def launch(*_: object) -> None:
        raise ValueError("a fault")

    async def ask() -> None:
        session = llm.session().append(PROMPT)
        monkeypatch.setattr(llm.engine.runner, "launch", launch)
        await session.agenerate(**GO)

    with pytest.raises(ValueError, match="a fault"):
        asyncio.run(ask())
    gc.collect()
    llm.forget()
    assert not llm.engine._sequences


def test_who_drives_does_not_hold_who_is_done(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for others; what a coroutine waited for is nobody's meanwhile."""
    monkeypatch.setattr("quire.engine.seat._IDLE", 60.0)
    asyncio.run(llm.agenerate(PROMPT, **GO))
    until = time.monotonic() + 20
    while held := [one for one in gc.get_objects() if isinstance(one, Guest)]:
        assert time.monotonic() < until
        del held
        gc.collect()
        time.sleep(0.01)  # it may not have come to wait yet
