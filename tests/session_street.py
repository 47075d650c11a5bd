"""Random use of two models on one budget: each has its own users, and takes from the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

import quire
from quire.api.perplexity import perplexity
from quire.errors import QuireError
from tests.session_crowd import Crowd, _joined, _refusable, _started
from tests.session_oracle import Oracle
from tests.session_truth import GO, Past, Truth
from tests.session_world import MOST_SESSIONS, Kept, Shadow

SHAPES: list[quire.Json | quire.Regex | quire.Grammar] = [
    quire.Json({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                "additionalProperties": False}),
    quire.Json({"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 2}),
    quire.Grammar('start: ("ab" | "cd")+ "!"'),
    quire.Regex("[0-9]{1,3}(,[0-9]{1,3}){2,5}"),
]  # fmt: skip
CHANCES: list[dict[str, Any]] = [
    {}, {"frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0.8, "seed": 5, "top_p": 0.9}, {"temperature": 1.2, "seed": 6, "mirostat": 2},
    {"temperature": 0.9, "seed": 7, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"dry_multiplier": 0.9, "dry_allowed_length": 1, "logit_bias": {9: 3.0, 40: -2.0}},
    {"temperature": 1.0, "seed": 8, "min_p": 0.02, "typical_p": 0.8, "top_n_sigma": 2.0},
]  # fmt: skip
"""Ways to choose, some of which remember what came before."""


class Street(Crowd):
    """A crowd with somebody next door: another model on the same budget."""

    def __init__(
        self, llm: quire.LLM, truth: Truth, seed: int, *args: Any,
        next_door: tuple[quire.LLM, Truth], **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(llm, truth, seed, *args, **kwargs)
        self.door = Oracle(*next_door, seed + 10_000, self.file.parent)
        self.deeds += 4 * [
            self.next_door, self.next_door, self.both, self.shaped, self.shaped_choices,
            self.family, self.squeeze, self.filed, self.measured, self.timed_out,
        ]  # fmt: skip

    def look(self) -> None:
        """At both."""
        super().look()
        for shadow in self.shadows:
            self.door.saw(shadow.salt, shadow.options[-1].tokens)
        self.door.look()

    def saw(self, salt: str, tokens: Iterable[int]) -> None:
        """Who drafts for a salt has its tokens too."""
        tokens = tuple(tokens)
        super().saw(salt, tokens)
        self.door.saw(salt, tokens)

    def end(self) -> None:
        """Of both: first of those that are drafted for."""
        super().end()
        self.door.end()

    def next_door(self) -> None:
        """Something there."""
        for _ in range(3):
            self.door.act()
        self.note(self.door.log[-3:])

    def both(self) -> None:
        """Something there, while threads have answers made here."""
        resting = self.resting(40)
        for shadow in resting:
            answer = self.truth.go_on(shadow.past, 8)
            self.door.saw(shadow.salt, [*shadow.past.tokens, *answer])
        asked = [self.thread_goes_on(shadow) for shadow in resting]
        found: list[Any] = [None] * len(asked)

        def run(i: int) -> None:
            found[i] = asked[i][0]()

        threads = _started([partial(run, i) for i in range(len(asked))])
        for _ in range(2):
            self.door.act()
        self.note(self.door.log[-2:])
        _joined(threads)
        for (_, check), result in zip(asked, found, strict=True):
            check(result)

    # -- answers of a shape -----------------------------------------------------------------------

    def shaped(self) -> None:
        """Answers that a grammar holds to, drafted or not, in a session or not."""
        past = Past(tuple(self.tokens()))
        resting = [s for s in self.resting(60) if not s.past.deeds]
        shadow = resting[0] if resting and self.rng.random() < 0.7 else None
        if shadow:
            past = shadow.past
        how: dict[str, Any] = {
            "constraint": self.rng.choice([None, *SHAPES]),
            "max_tokens": self.rng.choice([3, 12, 30]),
            "stop": self.rng.choice([None, None, "}", ["b!", "c"]]),
            "logprobs": self.rng.choice([None, 0, 3]), **self.rng.choice(CHANCES),
        }  # fmt: skip
        wanted = self.truth.llm.generate(past.tokens, cache_salt=self.truth._salt(), **how)
        made = self.answered(shadow, past, how, wanted)
        whole = made and made.finish_reason == "stop" and how["stop"] is None
        if made and whole and isinstance(how["constraint"], quire.Json):
            json.loads(made.text)

    def answered(
        self, shadow: Any, past: Past, how: dict[str, Any], wanted: quire.Completion
    ) -> quire.Completion | None:
        """The same as is wanted, drafted or not, in a session or not; None where it broke off."""
        way = self.rng.choice(self.ways)
        if shadow:
            done, made = self.tried(lambda: shadow.session.generate(speculate=way, **how))
            self.came(shadow, past, wanted.token_ids, done)
        else:
            self.saw("", [*past.tokens, *wanted.token_ids])
            done, made = self.tried(lambda: self.llm.generate(past.tokens, speculate=way, **how))
        if not done:
            return None
        self.same(made, wanted)
        return made

    def same(self, made: quire.Completion, wanted: quire.Completion) -> None:
        """All that an answer tells, apart from how it came about."""
        for name in ("token_ids", "text", "finish_reason", "logprobs"):
            assert getattr(made, name) == getattr(wanted, name), (name, made, wanted)

    def shaped_choices(self) -> None:
        """Several such answers, the best of more."""
        prompt = self.tokens()
        how: dict[str, Any] = {
            "constraint": self.rng.choice([None, *SHAPES]), "n": 2, "best_of": 3, "seed": 4,
            "temperature": 0.9, "max_tokens": 6, "stop": self.rng.choice([None, "a"]),
            "logprobs": self.rng.choice([None, 2]),
        }  # fmt: skip
        wanted = self.truth.llm.generate(prompt, cache_salt=self.truth._salt(), **how)
        for seed in range(4, 7):
            one = how | {"n": 1, "best_of": 1, "seed": seed}
            made = self.truth.llm.generate(prompt, cache_salt=self.truth._salt(), **one)
            self.saw("", [*prompt, *made[0].token_ids])
        way = self.rng.choice(self.ways)
        done, found = self.tried(lambda: self.llm.generate(prompt, speculate=way, **how))
        if done:
            for one, other in zip(found, wanted, strict=True):
                self.same(one, other)

    # -- families, budgets, files -----------------------------------------------------------------

    def family(self) -> None:
        """Forks of forks, each a little further; marks go in between, and then the parents."""
        resting = self.resting(40)
        if not resting or len(self.shadows) + 2 > MOST_SESSIONS:
            return
        parent = resting[0]
        line = [parent]
        for _ in range(4):
            parent = line[-1]
            done, mark = self.tried(parent.session.checkpoint)
            for name, one in parent.session.marks.items():
                if name not in parent.marks:
                    parent.marks[name] = Kept(one, parent.past, parent.salt, parent.shared)
            made, session = self.tried(parent.session.fork)
            if not made:
                break
            child = Shadow(
                session, list(parent.options), parent.salt, parent.shared, dict(parent.marks)
            )
            line.append(child)
            self.grow(child)
            if done and self.rng.random() < 0.6:
                (name,) = [name for name, one in parent.marks.items() if one.mark is mark]
                parent.session.drop(mark)
                self.gone.append(parent.marks.pop(name))
        kept = self.rng.sample(line[1:], min(2, len(line) - 1))
        for shadow in line[1:]:
            if shadow not in kept:
                shadow.session.close()
                self.gone += shadow.marks.values()
        self.shadows += kept
        for shadow in kept:
            self.check_logits(shadow)

    def grow(self, shadow: Shadow) -> None:
        """A few tokens more, chosen or given."""
        past = shadow.past
        if self.rng.random() < 0.5:
            tokens = self.tokens()[:6]
            done, _ = self.tried(lambda: shadow.session.append(tokens))
            self.either(shadow, done, past.add(tokens))
        else:
            wanted = self.truth.go_on(past, 3)
            done, _ = self.tried(lambda: shadow.session.generate(max_tokens=3, **GO))
            self.came(shadow, past, wanted, done)
        self.look_at(shadow)

    def squeeze(self) -> None:
        """As little as there can be, then much, while answers are made."""
        held = self.llm.budget.whole.used
        for limit in (self.weights + (held - self.weights) // 2, 2 * self.limit, self.limit):
            self.tried(partial(self.llm.resize, limit))
            self.look()
            if self.streams or self.running():
                self.read()
                self.look()

    def filed(self) -> None:
        """A file that some write and others open, all at once: what is opened is whole."""
        resting = self.resting(10)[:2]
        file = self.file.with_suffix(".shared")
        options = [shadow.past for shadow in resting]
        if len(resting) < 2 or len(self.shadows) >= MOST_SESSIONS or any(p.deeds for p in options):
            return
        found: list[quire.Session] = []

        def save(shadow: Shadow) -> None:
            for _ in range(3):
                _refusable(partial(shadow.session.save, file))

        def open_them() -> None:
            for _ in range(4):
                if file.exists():
                    _refusable(lambda: found.append(self.llm.open(file)))

        _joined(_started([*[partial(save, one) for one in resting], open_them]))
        for session in found:
            fitting = [s for s in resting if s.past.tokens == tuple(session.tokens)]
            assert fitting, session
            with session, suppress(QuireError):
                self.truth.check(fitting[0].past, session.logits())
        file.unlink(missing_ok=True)

    def measured(self) -> None:
        """Logits of a whole prompt and vectors, while others run."""
        prompt, texts = self.tokens(), [self.tokens()[:40] for _ in range(3)]
        wanted, vectors = self.truth.llm.logits(prompt), self.truth.llm.embed(texts, "mean")
        done, rows = self.tried(lambda: self.llm.logits(prompt))
        assert not done or np.array_equal(rows, wanted)
        if self.streams or self.running():
            self.read()
        done, found = self.tried(lambda: asyncio.run(self.llm.aembed(texts, "mean")))
        assert not done or np.array_equal(found, vectors)
        text = "".join(self.rng.choices("abcde ", k=200))
        wanted_figure = perplexity(self.truth.llm, text, 60).perplexity
        done, figure = self.tried(lambda: perplexity(self.llm, text, 60).perplexity)
        assert not done or figure == wanted_figure

    def timed_out(self) -> None:
        """A coroutine that has too little time, on a session that goes on afterwards."""
        resting = self.resting(40)
        if not resting:
            return
        shadow, wait = resting[0], self.rng.choice([0.0005, 0.002, 0.01])
        past, wanted = shadow.past, self.truth.go_on(shadow.past, 20)
        way = self.rng.choice(self.ways)

        async def ask() -> None:
            with suppress(asyncio.TimeoutError):
                async with asyncio.timeout(wait):
                    await shadow.session.agenerate(max_tokens=20, speculate=way, **GO)

        self.tried(lambda: asyncio.run(ask()))
        self.came(shadow, past, wanted, done=False)
        self.look_at(shadow)
        self.check_logits(shadow)
