"""Many threads on one model: every text is the one computed alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.config import process_memory
from quire.errors import OutOfMemory, QuireError, RequestError
from tests import tiny
from tests.budgets import pages

N_PROMPTS = 12
LONGEST = 40
GO: dict[str, Any] = {"ignore_eos": True}


def prompt(i: int) -> list[int]:
    """Some begin the same."""
    rng = random.Random(i // 2)
    return [rng.randrange(250) for _ in range(10 + 5 * (i // 2))] + [i]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=512, layers=3))
    return made


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[int]]:
    """What follows each prompt, computed with nobody else there."""
    with quire.load(path) as llm:
        return [
            llm.generate(prompt(i), max_tokens=LONGEST, **GO).token_ids for i in range(N_PROMPTS)
        ]


@pytest.fixture
def llm(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[quire.LLM]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with quire.load(path, kv_cache_tokens=480, n_ctx=256, threads=1) as loaded:
        yield loaded


def run(*deeds: Callable[[], object], timeout: float = 60.0) -> None:
    """All at once, each in a thread of its own; the first error is raised here."""
    errors: list[BaseException] = []

    def doing(deed: Callable[[], object]) -> None:
        try:
            deed()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=doing, args=(deed,), daemon=True) for deed in deeds]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    if errors:
        raise errors[0]


class Client:
    """Somebody in a thread who does this and that, and knows what must come of it."""

    def __init__(self, llm: quire.LLM, alone: list[list[int]], seed: int, folder: Path) -> None:
        self.llm, self.alone = llm, alone
        self.rng = random.Random(seed)
        self.file = folder / f"{seed}.quire"
        self.deeds = [self.generate, self.batch, self.stream, self.leave_early, self.session]
        self.done = 0

    def act(self) -> None:
        """Refusals for want of memory are fine, wrong answers are not."""
        with suppress(OutOfMemory):
            self.rng.choice(self.deeds)()
            self.done += 1

    def some(self) -> tuple[list[int], list[int]]:
        i = self.rng.randrange(N_PROMPTS)
        return prompt(i), self.alone[i]

    def generate(self) -> None:
        start, wanted = self.some()
        n = self.rng.randint(1, LONGEST)
        assert self.llm.generate(start, max_tokens=n, **GO).token_ids == wanted[:n]

    def batch(self) -> None:
        several = [self.some() for _ in range(self.rng.randint(2, 4))]
        got = self.llm.generate([start for start, _ in several], max_tokens=6, **GO)
        assert [one.token_ids for one in got] == [wanted[:6] for _, wanted in several]

    def stream(self) -> None:
        start, wanted = self.some()
        stream = self.llm.stream(start, max_tokens=12, **GO)
        assert "".join(stream) == self.llm.decode(wanted[:12])
        assert stream.completion.token_ids == wanted[:12]

    def leave_early(self) -> None:
        start, wanted = self.some()
        stream = self.llm.stream(start, max_tokens=LONGEST, **GO)
        text = "".join(next(stream, "") for _ in range(self.rng.randint(0, 5)))
        assert self.llm.decode(wanted).startswith(text)
        if self.rng.random() < 0.5:
            stream.close()

    def session(self) -> None:
        start, wanted = self.some()
        with self.llm.session() as s:
            cut = self.rng.randint(1, len(start) - 1)
            assert s.append(start[:cut]).append(start[cut:]).tokens == start
            mark = s.checkpoint()
            n = self.rng.randint(1, 8)
            assert s.generate(max_tokens=n, **GO).token_ids == wanted[:n]
            with s.fork() as twin:
                assert twin.generate(max_tokens=4, **GO).token_ids == wanted[n : n + 4]
            s.rewind(-self.rng.randint(1, n))
            here = s.position - len(start)
            assert s.generate(max_tokens=5, **GO).token_ids == wanted[here : here + 5]
            if self.rng.random() < 0.4:
                s.save(self.file)
                with self.llm.open(self.file) as opened:
                    at = opened.position - len(start)
                    assert opened.generate(max_tokens=3, **GO).token_ids == wanted[at : at + 3]
            s.rewind(mark)
            assert s.generate(max_tokens=2, **GO).token_ids == wanted[:2]


def mixed(llm: quire.LLM, alone: list[list[int]], folder: Path, seconds: float) -> list[int]:
    """Sixteen clients for so long; memory in use at the end of each quarter."""
    held = []
    for quarter in range(4):
        end = time.monotonic() + seconds / 4
        clients = [Client(llm, alone, 100 * quarter + i, folder) for i in range(16)]

        def use(client: Client, end: float = end) -> None:
            while time.monotonic() < end:
                client.act()

        run(*(lambda c=c: use(c) for c in clients), timeout=seconds + 120)
        assert sum(client.done for client in clients) > 8
        assert pages(llm) == 0
        assert {tier["used"] for tier in llm.memory.as_dict()["tiers"].values()} == {0}
        held.append(process_memory())
    return held


def test_sixteen_threads_in_too_little_memory(
    llm: quire.LLM, alone: list[list[int]], tmp_path: Path
) -> None:
    mixed(llm, alone, tmp_path, 6.0)
    assert not llm.engine.scheduler.active and not llm.engine._sequences


@pytest.mark.slow
def test_sixteen_threads_for_a_minute(
    llm: quire.LLM, alone: list[list[int]], tmp_path: Path
) -> None:
    held = mixed(llm, alone, tmp_path, 60.0)
    assert held[-1] - held[0] < 16 << 20


@pytest.mark.host
def test_requests_of_all_threads_are_one_batch(llm: quire.LLM) -> None:
    alone = [llm.generate(prompt(i), max_tokens=30, **GO).token_ids for i in range(4)]
    llm.forget()
    widths: list[int] = []
    real = llm.engine.runner.forward

    def forward(plan: Any, lease: Any) -> Any:
        widths.append(len(plan.entries))
        time.sleep(0.002)
        return real(plan, lease)

    llm.engine.runner.forward = forward  # type: ignore[method-assign]
    barrier = threading.Barrier(4)

    def use(i: int) -> None:
        barrier.wait()
        assert llm.generate(prompt(i), max_tokens=30, **GO).token_ids == alone[i]

    run(*(lambda i=i: use(i) for i in range(4)))
    assert max(widths) == 4 and len(widths) < 100


def test_a_slow_reader_holds_nobody_up(llm: quire.LLM, alone: list[list[int]]) -> None:
    slow = llm.stream(prompt(0), max_tokens=20, **GO)
    next(slow)
    run(lambda: llm.generate(prompt(1), max_tokens=30, **GO))
    before = llm.engine.runner.tokens_run
    assert "".join(["", *slow]) and slow.completion.token_ids == alone[0][:20]
    assert llm.engine.runner.tokens_run == before  # it was all there


def test_conversations_are_not_mixed_up(llm: quire.LLM) -> None:
    """One process renders for all threads."""

    def render(i: int) -> None:
        for n in range(30):
            said = f"{i} said {n}"
            assert said in llm.chat_text([{"role": "user", "content": said}])

    run(*(lambda i=i: render(i) for i in range(6)))


def test_an_error_reaches_only_who_caused_it(llm: quire.LLM, alone: list[list[int]]) -> None:
    def wrong() -> None:
        for bad in ({"logit_bias": {9999: 1.0}}, {"constraint": quire.Regex("(")}):
            with pytest.raises(RequestError):
                llm.generate(prompt(0), max_tokens=3, **bad)
        with pytest.raises(RequestError):
            llm.generate([1] * 300, max_tokens=3)

    def right(i: int) -> None:
        for _ in range(5):
            assert llm.generate(prompt(i), max_tokens=9, **GO).token_ids == alone[i][:9]

    run(wrong, wrong, *(lambda i=i: right(i) for i in range(4)))
    assert pages(llm) == 0


def test_one_session_in_several_threads(llm: quire.LLM) -> None:
    """Whatever is not refused is done whole: tokens come in the pieces they were appended in."""
    with llm.session() as s:
        s.append([1])

        def append(i: int) -> None:
            for _ in range(5):
                with suppress(RequestError):
                    s.append([i] * 7)

        def look() -> None:
            for _ in range(20):
                assert len(s.tokens) % 7 == 1 or s.tokens

        run(*(lambda i=i: append(i) for i in range(2, 6)), look)
        tokens = s.tokens[1:]
        assert len(tokens) % 7 == 0 and len(tokens) > 0
        for at in range(0, len(tokens), 7):
            assert len(set(tokens[at : at + 7])) == 1
        last = s.logits()
        with llm.session() as again:
            assert (again.append(s.tokens).logits() == last).all()
    assert pages(llm) == 0


def test_only_the_first_text_in_a_session_begins_one(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else appends while a text is cut into tokens: it comes second."""
    real = llm.tokens_of

    def tokens_of(prompt: Any, behind: int = 0) -> list[int]:
        ids = real(prompt, behind)
        if not isinstance(prompt, str):
            return ids
        if prompt == "second" and not behind:
            s.append("first")
        return ids if behind else [256, *ids]  # the token that all texts begin with

    monkeypatch.setattr(llm, "tokens_of", tokens_of)
    with llm.session() as s:
        s.append("second")
        assert s.tokens == [256, *real("first"), *real("second")]
        assert s.append(iter([5, 6])).tokens[-2:] == [5, 6]  # type: ignore[arg-type]


@pytest.mark.parametrize("when", ["step", "wait"])
def test_what_was_appended_stays_when_its_pages_go(
    llm: quire.LLM, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may need the room before who waits has looked, or has done anything about it."""
    real = getattr(llm.loop, when)
    with llm.session() as s:

        def late(*args: Any) -> None:
            real(*args)
            if not s.sequence.active:
                llm.engine.room.lose(s.sequence)

        with monkeypatch.context() as patch:
            patch.setattr(llm.loop, when, late)
            run(lambda: s.append(prompt(2)).append(prompt(3)), timeout=20)
        assert s.tokens == prompt(2) + prompt(3)
        with llm.session() as again:
            assert (s.logits() == again.append(s.tokens).logits()).all()


def test_closing_while_others_wait(path: Path) -> None:
    llm = quire.load(path, threads=1)
    real = llm.engine.runner.forward

    def forward(plan: Any, lease: Any) -> Any:
        time.sleep(0.005)
        return real(plan, lease)

    llm.engine.runner.forward = forward  # type: ignore[method-assign]
    told: list[str] = []

    def use(i: int) -> None:
        session = llm.session()
        try:
            if i % 3 == 0:
                llm.generate([i] * 5, max_tokens=400, **GO)
            elif i % 3 == 1:
                stream = llm.stream([i] * 5, max_tokens=400, **GO)
                list(stream)
                assert stream.completion.finish_reason == "cancelled"  # nobody waited just then
                told.append("this model is closed")
            else:
                session.append([i] * 5).generate(max_tokens=400, **GO)
        except QuireError as error:
            told.append(str(error))

    def close() -> None:
        time.sleep(0.15)
        llm.close()

    run(*(lambda i=i: use(i) for i in range(6)), close, close, timeout=20)
    assert len(told) == 6 and all("this model is closed" in text for text in told)
    with pytest.raises(RequestError, match="closed"):
        llm.generate([1])
    assert llm.budget.used == 0


def test_a_draft_model_that_others_use(path: Path, alone: list[list[int]]) -> None:
    """On a budget of its own, and beside the model it drafts for."""
    for beside in (False, True):
        with quire.load(path, threads=1) as llm:
            settings: dict[str, Any] = {"beside": llm} if beside else {}
            with quire.load(path, threads=1, **settings) as draft:

                def use(which: quire.LLM, i: int, drafts: Any) -> None:
                    for _ in range(4):
                        got = which.generate(prompt(i), max_tokens=20, speculate=drafts, **GO)
                        assert got.token_ids == alone[i][:20]

                run(
                    lambda: use(llm, 0, draft), lambda: use(llm, 1, draft),
                    lambda: use(draft, 2, None), lambda: use(draft, 3, "ngram"),
                    lambda: use(draft, 4, llm),
                )  # fmt: skip
                assert pages(llm) == pages(draft) == 0


def test_a_model_is_closed_while_its_own_thread_is_being_started(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = quire.load(path, threads=1)
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "quire":
            llm.loop.seat.dismiss()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    assert asyncio.run(llm.agenerate(prompt(1), max_tokens=3, **GO)).token_ids
    llm.close()


def test_what_goes_wrong_with_one_answer_takes_nothing_from_another(
    llm: quire.LLM, alone: list[list[int]]
) -> None:
    streams = [llm.stream(prompt(i), max_tokens=9, **GO) for i in (1, 2, 3)]

    def tell() -> None:
        streams[0]._job.told.clear()
        raise ValueError("told")

    streams[0]._job.told.append(tell)
    with pytest.raises(ValueError, match="told"):
        while True:
            llm.loop.seat.turn(llm.loop)
    for i, stream in enumerate(streams):
        assert "".join(stream) == llm.decode(alone[i + 1][:9])
        assert stream.completion.token_ids == alone[i + 1][:9]


def test_a_child_process_is_told(llm: quire.LLM, alone: list[list[int]]) -> None:
    """A fork has none of the threads: it says so at once, and the parent goes on."""
    session = llm.session().append(prompt(1))
    stream = llm.stream(prompt(2), max_tokens=9, **GO)
    next(stream)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        uses = [
            lambda: llm.generate([1]), lambda: session.append([1]), lambda: list(stream),
            llm.session, lambda: llm.memory.as_dict(), lambda: llm.logits([1]),
            lambda: quire.load(llm.path, beside=llm),
        ]  # fmt: skip
        for use in uses:
            try:
                use()
            except RequestError as error:
                said.append("another process" in str(error))
            except BaseException:
                said.append(False)
        session.close()
        stream.close()
        llm.close()
        os.write(tell, b"".join(b"y" if right else b"n" for right in said))
        os._exit(0)
    os.close(tell)
    end = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.01)
    assert os.read(told, 100) == b"yyyyyyy"
    os.close(told)
    assert "".join(stream) and stream.completion.token_ids == alone[2][:9]
    assert session.generate(max_tokens=5, **GO).token_ids == alone[1][:5]
    session.close()
    assert pages(llm) == 0
