"""Random use of sessions and streams in too little memory, against a model with plenty of it."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.errors import QuireError, RequestError
from tests.model_folders import model_folder

GO: dict[str, Any] = {"ignore_eos": True}
N_VOCAB = 400


class User:
    """Somebody who does this and that, and checks what comes back."""

    def __init__(self, tight: quire.LLM, roomy: quire.LLM, seed: int, folder: Path) -> None:
        self.llm, self.roomy = tight, roomy
        self.rng = random.Random(seed)
        self.file = folder / "saved.quire"
        self.sessions: list[quire.Session] = []
        self.streams: list[tuple[quire.Stream, quire.Session | None]] = []
        self.deeds: list[Callable[[], None]] = [
            self.open, self.append, self.append, self.generate, self.generate, self.fork, self.mark,
            self.to_mark, self.back, self.close, self.stream, self.read, self.read, self.cancel,
            self.save, self.keep, self.logits, self.several, self.remove, self.forget,
        ]  # fmt: skip

    def act(self) -> None:
        """One random thing; refusals are fine, wrong answers are not."""
        with contextlib.suppress(QuireError):
            self.rng.choice(self.deeds)()
        self.llm.memory.audit()

    def tokens(self, most: int) -> list[int]:
        start = [self.rng.choice([5, 6])] * self.rng.choice([0, 20])
        return start + [self.rng.randrange(3, N_VOCAB) for _ in range(self.rng.randint(1, most))]

    def some(self) -> quire.Session:
        """A session that no stream runs on."""
        busy = {id(session) for _, session in self.streams}
        free = [s for s in self.sessions if id(s) not in busy]
        if not free:
            raise RequestError("there is none")
        return self.rng.choice(free)

    def check_next(self, before: list[int], token: int) -> None:
        expected = self.roomy.generate(before, max_tokens=1, **GO).token_ids
        assert [token] == expected, f"after {len(before)} tokens"

    def open(self) -> None:
        if len(self.sessions) < 5:
            self.sessions.append(self.llm.session())
            self.sessions[-1].append(self.tokens(60))

    def append(self) -> None:
        self.some().append(self.tokens(self.rng.choice([1, 3, 40])))

    def generate(self) -> None:
        session = self.some()
        before = session.tokens
        made = session.generate(max_tokens=self.rng.choice([1, 5, 20]), **GO).token_ids
        if not session._sequence.edited:
            self.check_next(before, made[0])

    def fork(self) -> None:
        if len(self.sessions) < 5:
            self.sessions.append(self.some().fork())

    def mark(self) -> None:
        session = self.some()
        if len(session.marks) > 1:
            session.drop(self.rng.choice([*session.marks.values()]))
        session.checkpoint()

    def to_mark(self) -> None:
        session = self.some()
        if session.marks:
            session.rewind(self.rng.choice([*session.marks.values()]))

    def back(self) -> None:
        session = self.some()
        session.rewind(-self.rng.randint(1, max(session.position, 1)))

    def close(self) -> None:
        session = self.some()
        self.sessions.remove(session)
        if self.rng.random() < 0.7:
            session.close()

    def stream(self) -> None:
        if len(self.streams) < 3 and self.rng.random() < 0.5:
            session = self.some()
            self.streams.append((session.stream(max_tokens=25, **GO), session))
        elif len(self.streams) < 3:
            self.streams.append((self.llm.stream(self.tokens(70), max_tokens=25, **GO), None))

    def read(self) -> None:
        for stream, session in self.rng.sample(self.streams, min(len(self.streams), 1)):
            try:
                for _ in range(self.rng.randint(1, 6)):
                    next(stream)
            except (StopIteration, QuireError):
                self.streams.remove((stream, session))
                raise RequestError("it is over") from None

    def cancel(self) -> None:
        if self.streams:
            stream, _ = self.streams.pop(self.rng.randrange(len(self.streams)))
            if self.rng.random() < 0.7:
                stream.close()

    def save(self) -> None:
        session = self.some()
        session.save(self.file)
        opened = self.llm.open(self.file)
        assert opened.tokens == session.tokens and opened.marks.keys() == session.marks.keys()
        if len(self.sessions) < 5:
            self.sessions.append(opened)

    def keep(self) -> None:
        self.some().keep(pin=self.rng.random() < 0.1, ttl_s=None)

    def logits(self) -> None:
        session = self.some()
        found = session.logits()
        if not session._sequence.edited:
            assert np.array_equal(found, self.roomy.logits(session.tokens)[-1])

    def several(self) -> None:
        prompts = [self.tokens(50) for _ in range(self.rng.randint(1, 4))]
        for prompt, made in zip(
            prompts, self.llm.generate(prompts, max_tokens=6, **GO), strict=True
        ):
            self.check_next(prompt, made.token_ids[0])

    def remove(self) -> None:
        session = self.some()
        start = self.rng.randrange(max(session.position - 1, 1))
        session.remove(start, self.rng.randint(start + 1, session.position))

    def forget(self) -> None:
        self.llm.forget()

    def leave(self) -> None:
        """Everything is closed, and nothing is held any more."""
        for stream, _ in self.streams:
            stream.close()
        for session in self.sessions:
            session.close()
        self.streams, self.sessions = [], []
        gc.collect()
        self.llm.forget()
        self.llm.memory.audit()
        found = self.llm.memory.as_dict()
        assert {group["pages_used"] for group in found["stats"].values()} == {0}
        assert {tier["used"] for tier in found["tiers"].values()} == {0}


def run(name: str, seeds: range, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    model = model_folder(name, folder)
    with quire.load(model, n_ctx=400) as roomy:
        weights = roomy.model.weight_bytes
        for seed in seeds:
            rng = random.Random(seed)
            room = {"kv_cache_tokens": rng.choice([160, 320, 480])}
            if name in ("tiny-recurrent", "tiny-hybrid"):
                room = {"memory_budget": weights + (rng.choice([6, 9, 14]) << 20)}
            swap = rng.choice(["1GiB", "1GiB", 0])
            with quire.load(model, n_ctx=400, swap_space=swap, **room) as tight:
                speed = rng.choice([0.0, 1e-3, 1e6])
                monkeypatch.setattr(tight.engine.room, "_seconds_per_token", lambda s=speed: s)
                user = User(tight, roomy, seed, folder)
                for _ in range(80):
                    user.act()
                user.leave()


HOST = pytest.mark.host  # states whose room is counted in bytes
MODELS = [
    "tiny-dense",
    "tiny-window",
    *(pytest.param(f"tiny-{n}", marks=HOST) for n in ("recurrent", "hybrid")),
]


@pytest.mark.parametrize("name", MODELS)
def test_random_use(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, range(2), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_long_random_use(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, range(2, 20), tmp_path, monkeypatch)
