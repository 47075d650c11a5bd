"""Random use of sessions in a crowd: threads do everything at once, and one of them is troubled."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

import quire
from quire.errors import QuireError
from tests.session_company import Asked, Company, stacks
from tests.session_trouble import Injected
from tests.session_truth import GO, Past
from tests.session_world import MOST_SESSIONS, Kept, Shadow

Started = tuple[threading.Thread, list[BaseException]]
"""A thread, and what went wrong in it."""


class Crowd(Company):
    """Company in which every thread does something else, with sessions of its own or not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deeds += 6 * [self.crowd, self.crowd, self.together, self.processed]

    def crowd(self) -> None:
        """Threads that do all there is, while an interrupt or a failure troubles this one."""
        ways = [
            self.thread_goes_on, self.thread_appends, self.thread_rewinds, self.thread_looks,
            self.thread_saves, self.thread_forks, self.thread_marks, self.thread_returns,
            self.thread_removes, self.thread_keeps, self.thread_closes, self.thread_leaves,
        ]  # fmt: skip
        resting = self.resting(40)
        mine = resting.pop() if len(resting) > 1 else None
        asked = [self.rng.choice(ways)(shadow) for shadow in resting]
        asked += self.rng.sample([self.thread_embeds(), self.thread_chooses()], 1)
        asked.append((self.llm.forget, lambda _: None))
        found: list[Any] = [None] * len(asked)

        def run(i: int) -> None:
            found[i] = asked[i][0]()

        threads = _started([partial(run, i) for i in range(len(asked))])
        if mine is not None:
            self.troubled(mine)
        _joined(threads)
        for (_, check), result in zip(asked, found, strict=True):
            check(result)

    def troubled(self, shadow: Shadow) -> None:
        """What this thread does meanwhile."""
        past, tokens = shadow.past, self.tokens()[:30]
        if self.rng.random() < 0.5:
            done, _ = self.tried(lambda: shadow.session.append(tokens))
            self.either(shadow, done, past.add(tokens))
        else:
            wanted = self.truth.go_on(past, 8)
            done, _ = self.tried(lambda: shadow.session.generate(max_tokens=8, **GO))
            self.came(shadow, past, wanted, done)

    def together(self) -> None:
        """Threads on one session: one after the other, or refused."""
        found = [s for s in self.resting(90) if not s.past.deeds]
        if not found:
            return
        session = found[0].session
        some = [self.tokens()[:12] for _ in range(3)]
        ways: list[Callable[[], object]] = [
            lambda: session.append(some[0]), lambda: asyncio.run(session.aappend(some[1])),
            lambda: session.generate(max_tokens=4, **GO), lambda: session.rewind(-2),
            lambda: asyncio.run(session.agenerate(max_tokens=3, **GO)), session.logits,
            lambda: session.fork().append(some[2]).close(),
            lambda: list(session.stream(max_tokens=3, **GO)),
        ]  # fmt: skip

        def run(seed: float) -> None:
            rng = random.Random(seed)
            for _ in range(3):
                _refusable(rng.choice(ways))

        seeds = [self.rng.random() for _ in range(3)]
        _joined(_started([partial(run, seed) for seed in seeds]))
        found[0].options = [Past(tuple(session.tokens))]

    def processed(self) -> None:
        """A function of the user's own that raises something in the middle."""
        resting = self.resting(10)
        if not resting:
            return
        shadow, nth = resting[0], self.rng.randint(1, 6)
        past, wanted, calls = shadow.past, self.truth.go_on(shadow.past, 8), 0
        error = self.rng.choice([ValueError, KeyboardInterrupt, QuireError])

        def process(_: list[int], row: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise error("mine")
            return row

        how = {"speculate": self.rng.choice(self.ways), "logit_processors": [process], **GO}
        with suppress(QuireError, KeyboardInterrupt):
            shadow.session.generate(max_tokens=8, **how)
        self.came(shadow, past, wanted, done=False)

    # -- what threads do --------------------------------------------------------------------------

    def thread_forks(self, shadow: Shadow) -> Asked:
        """A fork of a fork, whose source is gone."""
        past = shadow.past

        def fork() -> quire.Session:
            with shadow.session.fork() as first:
                return first.fork()

        def check(twin: quire.Session | None) -> None:
            if twin is not None and len(self.shadows) < MOST_SESSIONS:
                same = Shadow(twin, [past], shadow.salt, shadow.shared, dict(shadow.marks))
                self.shadows.append(same)

        return fork, check

    def thread_marks(self, shadow: Shadow) -> Asked:
        past = shadow.past

        def check(_: object) -> None:
            for name, mark in shadow.session.marks.items():
                shadow.marks.setdefault(name, Kept(mark, past, shadow.salt, shadow.shared))

        return shadow.session.checkpoint, check

    def thread_returns(self, shadow: Shadow) -> Asked:
        if not shadow.marks:
            return self.thread_marks(shadow)
        past, kept = shadow.past, self.rng.choice([*shadow.marks.values()])

        def check(done: object) -> None:
            shadow.options = [kept.past if done else past]
            if done:
                shadow.salt, shadow.shared = kept.salt, kept.shared

        return lambda: shadow.session.rewind(kept.mark), check

    def thread_removes(self, shadow: Shadow) -> Asked:
        past, n = shadow.past, len(shadow.past.tokens)
        start = self.rng.randrange(n)
        stop = self.rng.randint(start + 1, n)

        def check(done: object) -> None:
            shadow.options = [past.cut(start, stop) if done else past]

        return lambda: shadow.session.remove(start, stop), check

    def thread_keeps(self, shadow: Shadow) -> Asked:
        return lambda: shadow.session.keep(True, 0.05), lambda _: None

    def thread_closes(self, shadow: Shadow) -> Asked:
        def check(_: object) -> None:
            shadow.session.close()
            self.shadows.remove(shadow)
            self.gone += shadow.marks.values()

        return shadow.session.close, check

    def thread_leaves(self, shadow: Shadow) -> Asked:
        """A stream that is not read to its end, and at times not closed either."""
        past, wanted = shadow.past, self.truth.go_on(shadow.past, 12)
        how = {"max_tokens": 12, "speculate": self.rng.choice(self.ways), **GO}
        n, awaits = self.rng.randint(1, 4), self.rng.random() < 0.5

        async def leave() -> None:
            pieces = shadow.session.astream(**how)
            for _ in range(n):
                await anext(pieces, None)

        def left() -> None:
            with shadow.session.stream(**how) as pieces:
                for _ in range(n):
                    next(pieces, None)

        def check(_: object) -> None:
            self.came(shadow, past, wanted, done=False)

        return (lambda: asyncio.run(leave())) if awaits else left, check

    def thread_embeds(self) -> Asked:
        texts = [self.tokens() for _ in range(2)]
        wanted = self.truth.llm.embed(texts)

        def check(found: Any) -> None:
            assert found is None or np.array_equal(found, wanted)

        return lambda: self.llm.embed(texts), check

    def thread_chooses(self) -> Asked:
        """Several answers, in an event loop or not."""
        prompt, chance = self.tokens(), {"temperature": 0.9, "top_k": 40}
        wanted = [
            self.truth.sample(Past(tuple(prompt)), 5, {**chance, "seed": i}) for i in range(3)
        ]
        how: dict[str, Any] = {"n": 3, "max_tokens": 5, "seed": 0, **chance, **GO}
        for one in wanted:
            self.saw("", prompt + one)

        def check(found: list[quire.Completion] | None) -> None:
            assert found is None or [one.token_ids for one in found] == wanted

        if self.rng.random() < 0.5:
            return lambda: asyncio.run(self.llm.agenerate(prompt, **how)), check
        return lambda: self.llm.generate(prompt, **how), check


def _refusable(do: Callable[[], object]) -> None:
    try:
        do()
    except (QuireError, Injected) as error:
        assert "open lease" not in str(error), error


def _started(
    deeds: list[Callable[[], object]],
) -> list[tuple[threading.Thread, list[BaseException]]]:
    """Threads under way, and what went wrong in each."""
    made: list[tuple[threading.Thread, list[BaseException]]] = []
    for deed in deeds:
        wrong: list[BaseException] = []

        def run(deed: Callable[[], object] = deed, wrong: list[BaseException] = wrong) -> None:
            try:
                _refusable(deed)
            except BaseException as error:
                wrong.append(error)

        made.append((threading.Thread(target=run), wrong))
    for thread, _ in made:
        thread.start()
    return made


def _joined(threads: list[Started]) -> None:
    for thread, _ in threads:
        thread.join(120)
        assert not thread.is_alive(), f"it hangs; {stacks()}"
    for _, wrong in threads:
        if wrong:
            raise wrong[0]
