"""Random use of two models with all that a street has, and more: small steps, files that travel.

Steps take a few tokens of a prompt at a time, so that whatever happens finds prompts half computed;
sessions go to another model in files and come back; several read one stream, and open one file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np

import quire
from quire import speculate
from quire.engine.pace import Pace
from quire.errors import QuireError
from tests.session_crowd import _joined, _started
from tests.session_street import CHANCES, SHAPES, Street
from tests.session_truth import GO, Past
from tests.session_world import MOST_SESSIONS, Shadow


def by_history(tokens: list[int], row: Any) -> None:
    """Likes one token and forbids another, by the last few that came."""
    found = blake2b(np.array(tokens[-6:], np.int32).tobytes(), digest_size=4).digest()
    row[int.from_bytes(found[:2], "little") % len(row)] += 2.5
    row[int.from_bytes(found[2:], "little") % len(row)] = -np.inf


def by_length(tokens: list[int], row: Any) -> Any:
    """Likes one token by how many there are, and does not like to repeat itself."""
    made = row.astype(np.float64)
    made[len(tokens) % len(row)] += 3
    made[tokens[-1]] -= 4
    return made


PROCESSORS: list[list[Callable[..., Any]]] = [[], [by_history], [by_length, by_history]]


class Market(Street):
    """A street on which more is going on at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.simple = [getattr(self, deed.__name__) for deed in self.door.deeds]
        self.deeds += 6 * [
            self.abroad, self.processed_by, self.pieces, self.readers, self.one_file,
        ]  # fmt: skip
        self.ways += self.other_ways()
        for llm in (self.llm, self.door.llm):
            llm.engine.scheduler.max_tokens = self.rng.choice([3, 7, 20, 50, 512])
            llm.engine.scheduler.pace = self.rng.choice([None, None, Pace(1e-4, 1e-3)])

    def other_ways(self) -> list[Any]:
        """To draft, with settings that are not the usual ones."""
        texts = [[5] * 50, [*range(10, 74)] * 3]
        known = speculate.NgramCache.build(texts, self.llm.model.n_vocab, 2)
        ways: list[Any] = [
            speculate.Ngram(max_n=4, min_n=2, most=30), speculate.Ngram(cache=known, most=5),
            speculate.Lookahead(window=7, ngram=4, pool=5),
            speculate.Lookahead(window=1, ngram=2, pool=1), speculate.EarlyExit(1, most=3),
            speculate.FirstOf("lookahead", "ngram"), speculate.FirstOf("ngram", "early-exit"),
        ]  # fmt: skip
        drafts = [way for way in self.ways if isinstance(way, quire.LLM)][:1]
        return ways + [speculate.DraftModel(draft, most=2) for draft in drafts]

    def act(self) -> None:
        """One deed; and sessions to do it with, which have been through something."""
        if len(self.shadows) < 4 and self.rng.random() < 0.5:
            self.do(self.open)
        if self.rng.random() < 0.35:
            self.do(self.rng.choice(self.simple))
        super().act()

    def do(self, deed: Callable[[], None]) -> None:
        """A deed, and a look at everything."""
        self.log.append(deed.__name__)
        deed()
        self.look()

    # -- files ------------------------------------------------------------------------------------

    def abroad(self) -> None:
        """A session goes on in a model that has room, at one of its marks at times, and returns."""
        resting, file = self.resting(60), self.file.with_suffix(".abroad")
        if not resting or len(self.shadows) >= MOST_SESSIONS:
            return
        shadow = resting[0]
        past, marks = shadow.past, dict(shadow.marks)
        done, _ = self.tried(lambda: shadow.session.save(file))
        if not done:
            return
        with self.truth.llm.open(file) as there:
            self.truth.check(past, there.logits())
            for name, kept in marks.items():
                if self.rng.random() < 0.5 and kept.past.tokens:
                    past = kept.past
                    self.truth.check(past, there.rewind(name).logits())
            wanted = self.truth.go_on(past, 6)
            assert there.generate(max_tokens=6, **GO).token_ids == wanted
            there.save(file)
        done, session = self.tried(lambda: self.llm.open(file))
        if done:
            self.opened(session, [past.add(wanted)], session.sequence.salt, marks)
            self.check_logits(self.shadows[-1])

    def one_file(self) -> None:
        """Opened several times at once: each is a session of its own."""
        resting, file = self.resting(60), self.file.with_suffix(".many")
        if not resting or len(self.shadows) + 2 > MOST_SESSIONS:
            return
        past, salt, marks = resting[0].past, resting[0].salt, dict(resting[0].marks)
        done, _ = self.tried(lambda: resting[0].session.save(file))
        if not done:
            return
        found: list[quire.Session] = []
        _joined(_started([lambda: found.append(self.llm.open(file)) for _ in range(3)]))
        for session in found[2:]:
            session.close()
        for session in found[:2]:
            self.opened(session, [past], salt, marks)
            tokens = self.tokens()[:7]
            done, _ = self.tried(lambda session=session, t=tokens: session.append(t))
            self.either(self.shadows[-1], done, past.add(tokens))
            self.look_at(self.shadows[-1])
            self.check_logits(self.shadows[-1])

    # -- answers ----------------------------------------------------------------------------------

    def processed_by(self) -> None:
        """Functions of the user's own that look at what came before, drafted or not."""
        resting = [s for s in self.resting(60) if not s.past.deeds]
        shadow = resting[0] if resting else None
        past = shadow.past if shadow else Past(tuple(self.tokens()))
        how: dict[str, Any] = {
            "logit_processors": self.rng.choice(PROCESSORS), "logprobs": self.rng.choice([None, 2]),
            "max_tokens": self.rng.choice([2, 9, 25]), **self.rng.choice(CHANCES),
            "constraint": self.rng.choice([None, None, *SHAPES]),
        }  # fmt: skip
        try:
            wanted = self.truth.llm.generate(past.tokens, cache_salt=self.truth._salt(), **how)
        except QuireError:  # they may forbid all that a grammar allows
            return
        self.answered(shadow, past, how, wanted)

    def pieces(self) -> None:
        """What streams say piece by piece, read in any order, is what is said as a whole."""
        how: dict[str, Any] = {
            "max_tokens": 12, "stop": self.rng.choice([None, "a", ["e ", "the", "\n"]]),
            "ignore_eos": self.rng.random() < 0.5, **self.rng.choice(CHANCES),
        }  # fmt: skip
        streams: list[tuple[quire.Stream, list[str], quire.Completion]] = []
        for prompt in [self.tokens() for _ in range(3)]:
            wanted = self.truth.llm.generate(prompt, cache_salt=self.truth._salt(), **how)
            self.saw("", [*prompt, *wanted.token_ids])
            way = self.rng.choice(self.ways)
            done, stream = self.tried(
                lambda way=way, prompt=prompt: self.llm.stream(prompt, speculate=way, **how)
            )
            if done:
                streams.append((stream, [], wanted))
        while streams:
            one = stream, said, wanted = self.rng.choice(streams)
            try:
                piece = next(stream, None)
            except QuireError:
                streams.remove(one)
                continue
            if piece is None:
                assert "".join(said) == wanted.text
                self.same(stream.completion, wanted)
                streams.remove(one)
            else:
                said.append(piece)

    def readers(self) -> None:
        """Two read one stream, in threads or in tasks, and may close it before its end."""
        resting = self.resting(60)
        if resting:
            shadow, awaits = resting[0], self.rng.random() < 0.5
            past, wanted = shadow.past, self.truth.go_on(shadow.past, 15)
            most, way = self.rng.choice([3, 99]), self.rng.choice(self.ways)
            how: dict[str, Any] = {"max_tokens": 15, "speculate": way, **GO}
            read = self.read_awaiting if awaits else self.read_in_threads
            self.came(shadow, past, wanted, done=False)
            made = read(shadow, most, how)
            assert made == wanted[: len(made)]
            self.look_at(shadow)

    def read_in_threads(self, shadow: Shadow, most: int, how: dict[str, Any]) -> list[int]:
        done, stream = self.tried(lambda: shadow.session.stream(**how))
        if not done:
            return []
        said: list[str] = []

        def read() -> None:
            for piece in stream:
                said.append(piece)
                if len(said) > most:
                    stream.close()

        _joined(_started([read, read]))
        stream.close()
        return list(stream._job.token_ids)

    def read_awaiting(self, shadow: Shadow, most: int, how: dict[str, Any]) -> list[int]:
        stream, said = shadow.session.astream(**how), list[str]()

        async def read() -> None:
            async for piece in stream:
                said.append(piece)
                if len(said) > most:
                    await stream.aclose()

        async def both() -> None:
            await asyncio.gather(read(), read(), return_exceptions=True)
            await stream.aclose()

        self.tried(lambda: asyncio.run(both()))
        return list(stream._job.token_ids) if stream._job else []
