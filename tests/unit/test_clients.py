"""Sessions and streams of several clients, interleaved at random, against recomputing them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

import quire
from quire.errors import OutOfMemory, RequestError
from tests import tiny

GO: dict[str, Any] = {"ignore_eos": True}
TOKENS = st.one_of(
    st.lists(st.integers(3, 200), min_size=1, max_size=12),
    st.integers(3, 5).map(lambda t: [t] * 40),  # what several have in common
)


class Reading:
    """A stream that is read now and then; what it will say was computed elsewhere."""

    def __init__(self, stream: quire.Stream, wanted: list[int], decode: Callable[..., str]) -> None:
        self.stream = stream
        self.wanted = wanted
        self.text = ""
        self.decode = decode

    def read(self, pieces: int) -> bool:
        """Whether it goes on."""
        for _ in range(pieces):
            piece = next(self.stream, None)
            if piece is None:
                done = self.stream.completion
                whole = done.finish_reason != "cancelled"  # or its session was closed
                assert done.token_ids == self.wanted[: None if whole else len(done.token_ids)]
                assert self.text == done.text
                return False
            self.text += piece
            assert self.decode(self.wanted).startswith(self.text.rstrip("\ufffd"))
        return True


class Clients(RuleBasedStateMachine):
    """Everybody on one tight model; a roomy one says what must come of it."""

    path: Path
    roomy: quire.LLM
    sessions = Bundle("sessions")
    streams = Bundle("streams")

    @initialize(tokens=st.sampled_from([128, 240, 480]), swap=st.sampled_from([0, "1GiB"]))
    def load(self, tokens: int, swap: int | str) -> None:
        self.held: dict[int, Any] = {}  # bundles have numbers, so that what is dropped is gone
        self.llm = quire.load(
            self.path, kv_cache_tokens=tokens, swap_space=swap, n_ctx=256, threads=1
        )

    def add(self, handle: Any) -> int:
        self.held[number := max(self.held, default=0) + 1] = handle
        return number

    def go_on(self, session: quire.Session, n: int) -> list[int]:
        """What must follow a session's tokens."""
        tokens: list[int] = self.roomy.generate(session.tokens, max_tokens=n, **GO).token_ids
        return tokens

    @rule(target=sessions, tokens=TOKENS)
    def open(self, tokens: list[int]) -> Any:
        session = self.llm.session()
        try:
            return self.add(session.append(tokens))
        except OutOfMemory:
            session.close()
            return multiple()

    @rule(number=sessions, tokens=TOKENS)
    def append(self, number: int, tokens: list[int]) -> None:
        session: quire.Session = self.held[number]
        before = session.tokens
        try:
            session.append(tokens)
        except (OutOfMemory, RequestError):
            assert session.tokens == before or len(session.tokens) > len(before)
        else:
            assert session.tokens == before + tokens

    @rule(number=sessions, n=st.integers(1, 6))
    def generate(self, number: int, n: int) -> None:
        session: quire.Session = self.held[number]
        if not session.position:
            return
        wanted = self.go_on(session, n)
        with contextlib.suppress(OutOfMemory, RequestError):
            assert session.generate(max_tokens=n, **GO).token_ids == wanted

    @rule(target=sessions, session=sessions)
    def fork(self, session: int) -> Any:
        try:
            return self.add(self.held[session].fork())
        except OutOfMemory:
            return multiple()

    @rule(number=sessions, n=st.integers(1, 30))
    def rewind(self, number: int, n: int) -> None:
        session: quire.Session = self.held[number]
        before = session.tokens
        try:
            session.rewind(-n)
        except (OutOfMemory, RequestError):
            return
        assert session.tokens == before[:-n]

    @rule(number=sessions, back=st.booleans())
    def mark(self, number: int, back: bool) -> None:
        session: quire.Session = self.held[number]
        try:
            mark = session.checkpoint()
            if back:
                session.append([7, 8, 9]).rewind(mark)
                assert session.tokens == list(mark.tokens)
            session.drop(mark)
        except (OutOfMemory, RequestError):
            for left in session.marks.values():
                session.drop(left)

    @rule(number=sessions)
    def logits(self, number: int) -> None:
        session: quire.Session = self.held[number]
        if not session.position:
            return
        try:
            found = session.logits()
        except (OutOfMemory, RequestError):
            return
        assert np.array_equal(found, self.roomy.logits(session.tokens)[-1])

    @rule(session=consumes(sessions), drop=st.booleans())
    def close(self, session: int, drop: bool) -> None:
        handle = self.held.pop(session)
        if not drop:
            handle.close()

    @rule(target=streams, tokens=TOKENS)
    def stream(self, tokens: list[int]) -> int:
        wanted = self.roomy.generate(tokens, max_tokens=10, **GO).token_ids
        stream = self.llm.stream(tokens, max_tokens=10, **GO)
        return self.add(Reading(stream, wanted, self.llm.decode))

    @rule(target=streams, number=sessions)
    def stream_on_session(self, number: int) -> Any:
        session: quire.Session = self.held[number]
        if not session.position:
            return multiple()
        wanted = self.go_on(session, 10)
        try:
            stream = session.stream(max_tokens=10, **GO)
        except (OutOfMemory, RequestError):
            return multiple()
        return self.add(Reading(stream, wanted, self.llm.decode))

    @rule(target=streams, reading=consumes(streams), n=st.integers(1, 4))
    def read(self, reading: int, n: int) -> Any:
        try:
            if self.held[reading].read(n):
                return reading
        except OutOfMemory:
            pass
        del self.held[reading]
        return multiple()

    @rule(reading=consumes(streams), drop=st.booleans())
    def leave(self, reading: int, drop: bool) -> None:
        handle = self.held.pop(reading)
        if not drop:
            handle.stream.close()

    @rule(prompts=st.lists(TOKENS, min_size=1, max_size=3))
    def batch(self, prompts: list[list[int]]) -> None:
        wanted = [self.roomy.generate(p, max_tokens=4, **GO).token_ids for p in prompts]
        try:
            got = self.llm.generate(prompts, max_tokens=4, **GO)
        except OutOfMemory:
            return
        assert [one.token_ids for one in got] == wanted

    @rule(n=st.integers(1, 3))
    def turn(self, n: int) -> None:
        """Somebody else drives for a while."""
        for _ in range(n):
            self.llm.loop.seat.turn(self.llm.loop)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "llm"):
            self.llm.memory.audit()

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        while self.held:
            _, handle = self.held.popitem()
            (handle.stream if isinstance(handle, Reading) else handle).close()
            del handle  # a stream keeps the session that it reads of
        gc.collect()
        self.llm.forget()
        self.llm.memory.audit()
        used = {g["pages_used"] for g in self.llm.memory.as_dict()["stats"].values()}
        assert used == {0} and not self.llm.engine._sequences
        self.llm.close()


def run(path: Path, monkeypatch: pytest.MonkeyPatch, examples: int, steps: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(path.parent))
    tiny.write(path, tiny.Tiny(context=512))
    with quire.load(path, threads=1) as roomy:
        Clients.path, Clients.roomy = path, roomy
        chosen = settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        try:
            run_state_machine_as_test(Clients, settings=chosen)
        finally:
            del Clients.roomy


def test_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "tiny.gguf", monkeypatch, 15, 40)


@pytest.mark.slow
def test_many_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "tiny.gguf", monkeypatch, 200, 60)
