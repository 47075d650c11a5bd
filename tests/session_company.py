"""Random use of sessions by several at once: threads, tasks that are cancelled, and what runs."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

import quire
from quire.errors import QuireError
from tests.session_oracle import Oracle
from tests.session_truth import GO, Past
from tests.session_world import MOST_SESSIONS, SALTS, Kept, Shadow

Asked = tuple[Callable[[], Any], Callable[[Any], None]]
"""What somebody does, and what must have come of it; that is given None where it was refused."""


class Company(Oracle):
    """An oracle with company."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limit, self.weights = self.llm.budget.limit, self.llm.budget.used
        self.deeds += 2 * [
            self.fork_running, self.mark_running, self.save_running, self.vectors, self.resize,
            self.choices, self.constrained, self.tasks, self.threads, self.threads,
        ]  # fmt: skip

    # -- sessions that a stream runs on -----------------------------------------------------------

    def running(self) -> Shadow | None:
        """A session with a stream."""
        found = [s for s in self.shadows if s.stream is not None]
        return self.rng.choice(found) if found else None

    def fork_running(self) -> None:
        """The fork rests, wherever its source was."""
        if (shadow := self.running()) and len(self.shadows) < MOST_SESSIONS:
            done, twin = self.tried(shadow.session.fork)
            if done:
                self.add(twin, shadow)

    def mark_running(self) -> None:
        """A mark in the middle of an answer."""
        if shadow := self.running():
            self.tried(shadow.session.checkpoint)
            for name, mark in shadow.session.marks.items():
                if name not in shadow.marks:
                    (past,) = [p for p in shadow.options if p.tokens == mark.tokens]
                    shadow.marks[name] = Kept(mark, past, shadow.salt, shadow.shared)

    def save_running(self) -> None:
        """A file of it, which is opened at once."""
        if (shadow := self.running()) and len(self.shadows) < MOST_SESSIONS:
            marks, file = dict(shadow.marks), self.file.with_suffix(".running")
            done, session = self.tried(lambda: (shadow.session.save(file), self.llm.open(file))[1])
            if done:
                self.opened(session, shadow.options, shadow.salt, marks)

    def opened(
        self, session: quire.Session, options: list[Past], salt: str, marks: dict[str, Kept]
    ) -> None:
        """A session from a file, with the marks that were saved."""
        found = [past for past in options if past.tokens == tuple(session.tokens)]
        assert found and session.marks.keys() == marks.keys()
        self.shadows.append(Shadow(session, found, salt, False))
        for name, mark in session.marks.items():
            self.shadows[-1].marks[name] = Kept(mark, marks[name].past, marks[name].salt, False)

    # -- beside sessions --------------------------------------------------------------------------

    def vectors(self) -> None:
        """Texts as vectors."""
        texts, pooling = [self.tokens() for _ in range(2)], self.rng.choice(["last", "mean"])
        done, found = self.tried(lambda: self.llm.embed(texts, pooling))
        if done:
            assert np.array_equal(found, self.truth.llm.embed(texts, pooling))

    def resize(self) -> None:
        """Another budget, or the same where that cannot be."""
        wanted, before = self.another_budget(), self.llm.budget.limit
        done, _ = self.tried(lambda: self.llm.resize(wanted))
        assert self.llm.budget.limit in ((wanted,) if done else (wanted, before))
        if not done:
            self.tried(lambda: self.llm.resize(self.limit))

    def another_budget(self) -> int:
        """More or less than there was at first."""
        share = self.rng.choice([0.6, 0.8, 1, 1.3])
        return self.weights + int((self.limit - self.weights) * share)

    def choices(self) -> None:
        """Several answers to a prompt."""
        prompt, salt, seed = self.tokens(), self.rng.choice(SALTS), self.rng.randrange(9)
        chance: dict[str, Any] = {"temperature": 0.9, "top_k": 40}
        wanted = [
            self.truth.sample(Past(tuple(prompt)), 5, {**chance, "seed": seed + i})
            for i in range(3)
        ]
        for one in wanted:
            self.saw(salt, prompt + one)
        how = {**chance, **GO, "speculate": self.rng.choice(self.ways), "cache_salt": salt}
        done, found = self.tried(
            lambda: self.llm.generate(prompt, n=3, max_tokens=5, seed=seed, **how)
        )
        assert not done or [one.token_ids for one in found] == wanted

    def constrained(self) -> None:
        """Answers that must fit a pattern, with penalties and stops, drafted or not."""
        shadow = self.some()
        if shadow is None or not shadow.past.tokens or shadow.past.deeds:
            return
        past, most = shadow.past, min(12, self.llm.n_ctx - len(shadow.past.tokens))
        how: dict[str, Any] = {
            "constraint": quire.Regex(self.rng.choice(["[a-f0-9 ]{4,30}x", "(ab|cd|e)+f?"])),
            "stop": self.rng.choice([None, "a", ["ee", "d"]]), "max_tokens": max(most, 1),
            "repetition_penalty": self.rng.choice([1.0, 1.4]), "logprobs": 2,
            **self.rng.choice([{}, {"temperature": 0.9, "seed": 3}]),
        }  # fmt: skip
        if most < 1:
            return
        wanted = self.truth.llm.generate(past.tokens, cache_salt=self.truth._salt(), **how)
        way = self.rng.choice(self.ways)
        done, found = self.tried(lambda: shadow.session.generate(speculate=way, **how))
        self.came(shadow, past, wanted.token_ids, done)
        if done:
            assert found.text == wanted.text and found.finish_reason == wanted.finish_reason
            assert found.token_ids == wanted.token_ids and found.logprobs == wanted.logprobs

    def came(self, shadow: Shadow, past: Past, wanted: list[int], done: bool) -> None:
        """Tokens behind a past: all of them, or those that came until it broke off."""
        shadow.options = [past.add(wanted[:i]) for i in range(len(wanted) + 1)]
        if done:
            shadow.options = shadow.options[-1:]

    # -- several at once --------------------------------------------------------------------------

    def resting(self, room: int) -> list[Shadow]:
        """Some sessions that nothing runs on, with room for more tokens."""
        most = self.llm.n_ctx - room
        found = [s for s in self.shadows if s.stream is None and 0 < len(s.past.tokens) < most]
        return self.rng.sample(found, min(len(found), 3))

    def tasks(self) -> None:
        """Coroutines, some of which are cancelled; their sessions are at rest at once."""
        asked: list[tuple[Shadow, Past, list[int], Coroutine[Any, Any, Any], float | None]] = []
        appended: list[Shadow] = []
        for shadow in self.resting(40):
            wait = self.rng.choice([None, None, 0, 0, 0.001, 0.01])
            if self.rng.random() < 0.3:
                tokens = self.tokens()[:30]
                appended.append(shadow)
                more = shadow.session.aappend(tokens)
                asked.append((shadow, shadow.past, tokens, more, wait))
                continue
            go = {"max_tokens": 8, "speculate": self.rng.choice(self.ways), **GO}
            streams = self.rng.random() < 0.5
            one: Any = _all_of(shadow.session.astream(**go)) if streams else None
            one = one or shadow.session.agenerate(**go)
            asked.append((shadow, shadow.past, self.truth.go_on(shadow.past, 8), one, wait))
        found = asyncio.run(_gathered([(one, wait) for *_, one, wait in asked]))
        self.note([type(one).__name__ for one in found])
        for (shadow, past, wanted, *_), result in zip(asked, found, strict=True):
            if shadow in appended:
                assert isinstance(result, (quire.Session, QuireError, asyncio.CancelledError))
                shadow.options = [past.add(wanted) if result is shadow.session else past]
                assert shadow.session.position == len(shadow.past.tokens)
                continue
            assert isinstance(result, (quire.Completion, QuireError, asyncio.CancelledError))
            done = isinstance(result, quire.Completion)
            assert not isinstance(result, quire.Completion) or result.token_ids == wanted
            self.came(shadow, past, wanted, done)

    def threads(self) -> None:
        """Threads, each with something of its own to do."""
        ways = [self.thread_goes_on, self.thread_goes_on, self.thread_appends, self.thread_rewinds,
                self.thread_looks, self.thread_saves]  # fmt: skip
        asked = [self.rng.choice(ways)(shadow) for shadow in self.resting(40)]
        prompt, budget = self.tokens(), self.another_budget()
        self.saw("", [*prompt, *self.truth.go_on(Past(tuple(prompt)), 8)])
        asked += self.rng.sample([self.thread_asks(prompt), self.thread_reads(prompt)], 1)
        if self.rng.random() < 0.3:
            asked.append((lambda: self.llm.resize(budget), lambda _: None))
        found: list[Any] = [None] * len(asked)

        def run(i: int) -> None:
            try:
                found[i] = asked[i][0]()
            except QuireError as error:
                assert "open lease" not in str(error), error

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), f"it hangs; {stacks()}"
        for (_, check), result in zip(asked, found, strict=True):
            check(result)

    def thread_goes_on(self, shadow: Shadow) -> Asked:
        past, wanted = shadow.past, self.truth.go_on(shadow.past, 8)
        how = {"max_tokens": 8, "speculate": self.rng.choice(self.ways), **GO}
        awaits = self.rng.random() < 0.3  # in an event loop of its own, or not

        def check(made: quire.Completion | None) -> None:
            assert made is None or made.token_ids == wanted
            self.came(shadow, past, wanted, made is not None)

        if awaits:
            return lambda: asyncio.run(shadow.session.agenerate(**how)), check
        return lambda: shadow.session.generate(**how), check

    def thread_appends(self, shadow: Shadow) -> Asked:
        past, tokens = shadow.past, self.tokens()[:30]

        def check(done: object) -> None:
            shadow.options = [past if done is None else past.add(tokens)]

        return lambda: shadow.session.append(tokens), check

    def thread_rewinds(self, shadow: Shadow) -> Asked:
        past, n = shadow.past, len(shadow.past.tokens)
        by = self.rng.randint(1, n)

        def check(done: object) -> None:
            shadow.options = [past if done is None else past.back(n - by)]

        return lambda: shadow.session.rewind(-by), check

    def thread_looks(self, shadow: Shadow) -> Asked:
        past = shadow.past
        return (
            shadow.session.logits,
            lambda found: None if found is None else self.truth.check(past, found),
        )

    def thread_saves(self, shadow: Shadow) -> Asked:
        past, marks = shadow.past, dict(shadow.marks)
        file = self.file.with_suffix(f".{self.shadows.index(shadow)}")

        def check(session: quire.Session | None) -> None:
            if session is not None:
                self.opened(session, [past], shadow.salt, marks)

        return lambda: (shadow.session.save(file), self.llm.open(file))[1], check

    def thread_asks(self, prompt: list[int]) -> Asked:
        wanted = self.truth.go_on(Past(tuple(prompt)), 8)

        def check(made: quire.Completion | None) -> None:
            assert made is None or made.token_ids == wanted

        return lambda: self.llm.generate(prompt, max_tokens=8, **GO), check

    def thread_reads(self, prompt: list[int]) -> Asked:
        wanted = self.truth.llm.logits(prompt)

        def check(found: Any) -> None:
            assert found is None or np.array_equal(found, wanted)

        return lambda: self.llm.logits(prompt), check


def stacks() -> str:
    """Where every thread is: what hangs once may not do so again."""
    frames = sys._current_frames()
    return "\n".join("".join(traceback.format_stack(frame)) for frame in frames.values())


async def _all_of(stream: quire.AsyncStream) -> quire.Completion:
    async for _ in stream:
        pass
    return stream.completion


async def _gathered(asked: list[tuple[Coroutine[Any, Any, Any], float | None]]) -> list[Any]:
    """What came of each, some of which are cancelled after so many seconds."""
    tasks = [asyncio.create_task(one) for one, _ in asked]
    for task, (_, wait) in zip(tasks, asked, strict=True):
        if wait is not None:
            await asyncio.sleep(wait)
            task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
