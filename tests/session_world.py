"""Sessions on a tight model beside what they must hold, computed anew by a roomy one.

After every deed each session must hold exactly the tokens that it was given and made; some are
asked for their logits, which must be, bit for bit, what a roomy model computes anew from those
tokens alone. What is refused has changed nothing. At the end nothing is held any more.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import quire
from quire.engine.sequence import Mark
from tests.session_trouble import Trouble
from tests.session_truth import Past, Truth

MOST_SESSIONS = 6
MOST_STREAMS = 3
SALTS = ["", "", "a", "b"]
STARTS = [[5] * 40, [6] * 20 + [7] * 20, list(range(10, 74))]


@dataclass(eq=False)
class Kept:
    """A mark, and what must be there after going back to it."""

    mark: Mark
    past: Past
    salt: str
    shared: bool


@dataclass(eq=False)
class Shadow:
    """A session, and what it must hold."""

    session: quire.Session
    options: list[Past]
    """One of these; more than one only while it is not known how far something came."""
    salt: str = ""
    shared: bool = True
    marks: dict[str, Kept] = field(default_factory=dict)
    stream: quire.Stream | None = None

    @property
    def past(self) -> Past:
        """What it holds."""
        assert len(self.options) == 1
        return self.options[0]


class World:
    """One tight model, its sessions, and what they must hold."""

    def __init__(
        self, llm: quire.LLM, truth: Truth, seed: int, folder: Path, trouble: float = 0.15,
        draft: quire.LLM | None = None,
    ) -> None:  # fmt: skip
        self.llm, self.truth = llm, truth
        self.rng = random.Random(seed)
        self.file = folder / f"{seed}.quire"
        self.saved: tuple[Past, str, dict[str, Kept]] | None = None
        self.trouble = Trouble(llm, self.rng, trouble)
        self.shadows: list[Shadow] = []
        self.streams: list[tuple[quire.Stream, list[int], list[int], str]] = []
        self.gone: list[Kept] = []  # marks of sessions that were closed
        self.seen: dict[str, list[tuple[int, ...]]] = {salt: [] for salt in SALTS}
        self.log: list[str] = []
        self.raised = ""
        self.ways: list[Any] = [None, None, "ngram", "lookahead", "early-exit"]
        self.ways += [draft, draft] if draft else []
        self.deeds: list[Callable[[], None]] = []

    def run(self, n: int) -> None:
        """So many deeds, and the end."""
        try:
            for _ in range(n):
                self.act()
            self.end()
        except BaseException as error:
            error.add_note("after " + "; ".join(self.log[-25:]))
            raise

    def act(self) -> None:
        """One deed, and a look at everything."""
        deed = self.rng.choice(self.deeds)
        self.log.append(deed.__name__)
        deed()
        self.look()

    def note(self, what: object) -> None:
        """Something that tells more of the latest deed."""
        self.log[-1] += f" {what}"

    def tried(self, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether something came to its end, and what came of it."""
        result, self.raised = self.trouble.during(call)
        self.note(f"({self.raised[:70]})" if self.raised else "")
        return not self.raised, result

    # -- looking ----------------------------------------------------------------------------------

    def look(self) -> None:
        """The books balance, and everybody has the right tokens; one has the right logits."""
        self.llm.memory.audit()
        for shadow in self.shadows:
            self.look_at(shadow)
        idle = [s for s in self.shadows if s.stream is None and s.past.tokens]
        if idle and self.rng.random() < 0.3:
            self.check_logits(self.rng.choice(idle))

    def look_at(self, shadow: Shadow) -> None:
        """Which of its options a session took; its marks are what they were."""
        tokens = tuple(shadow.session.tokens)
        found = [past for past in shadow.options if past.tokens == tokens]
        assert found, f"{shadow.session} has {tokens}, and not {shadow.options}"
        if shadow.stream is None:
            shadow.options = found[:1]
            logits = shadow.session.sequence.logits
            if logits is not None and shadow.session.sequence.pending == 0:
                self.truth.check(found[0], logits)
        marks = shadow.session.marks
        assert shadow.marks.keys() == marks.keys()
        if shadow.shared and not found[0].deeds:
            self.saw(shadow.salt, tokens)

    def saw(self, salt: str, tokens: Iterable[int]) -> None:
        """Requests with this salt may find these tokens from now on."""
        if not self.seen[salt] or self.seen[salt][-1] != tuple(tokens):
            self.seen[salt].append(tuple(tokens))

    def check_cached(self, salt: str, prompt: list[int], cached: int) -> None:
        """Nobody is given what only others have computed."""
        assert cached <= max((common(prompt, one) for one in self.seen[salt]), default=0), salt

    def check_logits(self, shadow: Shadow) -> None:
        """Or it is refused, and nothing has changed."""
        self.log.append(f"look at {self.shadows.index(shadow)}")
        try:
            found = shadow.session.logits()
        except quire.errors.QuireError as error:
            self.note(error)
        else:
            self.truth.check(shadow.past, found)
        self.look_at(shadow)

    # -- what is chosen ---------------------------------------------------------------------------

    def tokens(self) -> list[int]:
        """New tokens; many begin alike."""
        rng = self.rng
        start = rng.choice(STARTS)[: rng.randint(16, 64)] if rng.random() < 0.4 else []
        return start + [rng.randrange(3, 250) for _ in range(rng.choice([1, 2, 5, 12, 30]))]

    def some(self, busy: bool = False) -> Shadow | None:
        """A session, with or without a stream that runs on it."""
        found = [s for s in self.shadows if busy or s.stream is None]
        return self.rng.choice(found) if found else None

    def add(self, session: quire.Session, like: Shadow) -> None:
        """One more session that must hold the same, with the same marks."""
        twin = Shadow(session, list(like.options), like.salt, like.shared, dict(like.marks))
        self.shadows.append(twin)

    # -- the end ----------------------------------------------------------------------------------

    def end(self) -> None:
        """Everything still is what it was; then it goes, and nothing is left."""
        for shadow in self.shadows:
            if shadow.stream is not None:
                shadow.stream.close()
                shadow.stream = None
        for stream, *_ in self.streams:
            stream.close()
        self.look()
        for shadow in self.shadows:
            if shadow.past.tokens:
                self.check_logits(shadow)
            for kept in shadow.marks.values():
                self.end_at(shadow, kept)
        for shadow in self.shadows:
            shadow.session.close()
        self.shadows, self.streams, self.gone, self.saved = [], [], [], None
        gc.collect()
        end = time.monotonic() + 5
        while self.llm.engine._sequences and time.monotonic() < end:
            time.sleep(0.05)  # who lets go while somebody computes is heard a little later
        self.llm.forget()
        self.llm.memory.audit()
        found = self.llm.memory.as_dict()
        assert {group["pages_used"] for group in found["stats"].values()} == {0}
        assert {tier["used"] for tier in found["tiers"].values()} == {0}
        assert not self.llm.engine._sequences, self.llm.engine._sequences

    def end_at(self, shadow: Shadow, kept: Kept) -> None:
        try:
            shadow.session.rewind(kept.mark)
        except quire.errors.OutOfMemory:
            return
        shadow.options = [kept.past]
        if kept.past.tokens:
            self.check_logits(shadow)


def common(a: Iterable[int], b: Iterable[int]) -> int:
    """How many first tokens two have in common."""
    one, two = np.array([*a]), np.array([*b])
    n = min(len(one), len(two))
    differ = np.flatnonzero(one[:n] != two[:n])
    return int(differ[0]) if len(differ) else n
