"""Random use of sessions in too little memory, with trouble, against what their tokens say."""

from __future__ import annotations

import gc
from typing import Any

import quire
from tests.session_truth import GO, Past
from tests.session_world import MOST_SESSIONS, MOST_STREAMS, SALTS, Kept, Shadow, World


class Oracle(World):
    """Does everything that can be done with sessions; each deed says what must come of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deeds = [
            self.open, self.append, self.append, self.append, self.generate, self.generate,
            self.generate, self.sample, self.fork, self.mark, self.mark, self.to_mark,
            self.to_mark, self.back, self.back, self.remove, self.remove, self.stream,
            self.stream, self.batch, self.batch, self.read, self.read, self.leave, self.close,
            self.drop, self.keep, self.save, self.reopen, self.logits, self.logits, self.forget,
            self.collect, self.turn,
        ]  # fmt: skip

    def open(self) -> None:
        """A new session."""
        if len(self.shadows) < MOST_SESSIONS:
            salt = self.rng.choice(SALTS)
            done, session = self.tried(lambda: self.llm.session(salt))
            if done:
                self.shadows.append(Shadow(session, [Past()], salt))
                self.append(self.shadows[-1])

    def append(self, shadow: Shadow | None = None) -> None:
        """Tokens at the end; or none of them."""
        shadow = shadow or self.some()
        if shadow:
            tokens, past = self.tokens(), shadow.past
            self.note(len(tokens))
            done, _ = self.tried(lambda: shadow.session.append(tokens))
            interrupted = self.raised == "KeyboardInterrupt"
            shadow.options = [past.add(tokens)] * (done or interrupted) + [past] * (not done)

    def generate(self) -> None:
        """Tokens that follow; where it breaks off, those that came."""
        shadow = self.some()
        if shadow is None or not shadow.past.tokens:
            return
        n, past = self.rng.choice([1, 3, 8, 20]), shadow.past
        most = self.llm.n_ctx - len(past.tokens)
        way = self.rng.choice(self.ways)
        wanted = self.truth.go_on(past, min(n, most)) if most > 0 else []
        stop, wanted = self.stop_in(wanted)
        self.note((self.shadows.index(shadow), n, way, stop))
        done, made = self.tried(
            lambda: shadow.session.generate(max_tokens=n, speculate=way, stop=stop, **GO)
        )
        shadow.options = [past.add(wanted[:i]) for i in range(len(wanted) + 1)]
        if done:
            assert made.token_ids == wanted
            shadow.options = shadow.options[-1:]

    def sample(self) -> None:
        """Tokens by chance, which are the same wherever and with whomever they are drawn."""
        shadow = self.some()
        if shadow is None or not shadow.past.tokens or shadow.past.deeds:
            return
        past, way = shadow.past, self.rng.choice(self.ways)
        n = min(6, self.llm.n_ctx - len(past.tokens))
        chance: dict[str, Any] = {"temperature": 0.9, "seed": self.rng.randrange(9), "top_k": 40}
        wanted = self.truth.sample(past, n, chance) if n > 0 else []
        done, made = self.tried(
            lambda: shadow.session.generate(max_tokens=n or 1, speculate=way, **chance, **GO)
        )
        shadow.options = [past.add(wanted[:i]) for i in range(len(wanted) + 1)]
        if done:
            assert made.token_ids == wanted
            shadow.options = shadow.options[-1:]

    def stop_in(self, wanted: list[int]) -> tuple[list[str], list[int]]:
        """A stop string that will come, at times, and the tokens that come until then."""
        if len(wanted) < 3 or self.rng.random() < 0.5:
            return [], wanted
        at = self.rng.randrange(1, len(wanted))
        text = self.llm.decode(wanted[at : at + self.rng.randint(1, 3)])
        if not text.isprintable() or not text.strip() or "\ufffd" in text:
            return [], wanted
        for i in range(len(wanted)):
            if text in self.llm.decode(wanted[: i + 1]):
                return [text], wanted[: i + 1]
        return [text], wanted

    def fork(self) -> None:
        """A second one of the same."""
        shadow = self.some()
        if shadow and len(self.shadows) < MOST_SESSIONS:
            done, twin = self.tried(shadow.session.fork)
            if done:
                self.add(twin, shadow)
                self.shadows[-1].marks.update(shadow.marks)

    def mark(self) -> None:
        """A mark, in place of an old one at times."""
        shadow = self.some()
        if shadow is None:
            return
        if len(shadow.marks) > 2:
            self.drop(shadow)
        self.tried(shadow.session.checkpoint)
        for name, mark in shadow.session.marks.items():
            if name not in shadow.marks:
                assert mark.tokens == shadow.past.tokens
                shadow.marks[name] = Kept(mark, shadow.past, shadow.salt, shadow.shared)

    def drop(self, shadow: Shadow | None = None) -> None:
        """Gives a mark up."""
        shadow = shadow or self.some()
        if shadow and shadow.marks:
            kept = self.rng.choice([*shadow.marks.values()])
            self.tried(lambda: shadow.session.drop(kept.mark))
            if kept.mark.name not in shadow.session.marks:
                del shadow.marks[kept.mark.name]
                self.gone.append(kept)

    def to_mark(self) -> None:
        """Back to a mark: one's own, somebody else's, or one that is gone."""
        shadow, rng = self.some(), self.rng
        if shadow is None:
            return
        others = [kept for other in self.shadows for kept in other.marks.values()]
        own = [*shadow.marks.values()]
        gone = [kept for kept in self.gone if kept not in others]  # forks may still have it
        marks = own if own and rng.random() < 0.7 else others + gone[-2:]
        if not marks:
            return
        kept = rng.choice(marks)
        if kept in gone:
            gc.collect()  # a fork that an error left behind has it until it is found
        done, _ = self.tried(lambda: shadow.session.rewind(kept.mark))
        assert not (done and kept in gone)
        if done or tuple(shadow.session.tokens) != shadow.past.tokens:
            shadow.options, shadow.salt, shadow.shared = [kept.past], kept.salt, kept.shared

    def back(self) -> None:
        """Back by a number of tokens."""
        shadow = self.some()
        if shadow and (n := len(shadow.past.tokens)):
            by = self.rng.choice([1, 2, 9, 25, n])
            self.note(by)
            done, _ = self.tried(lambda: shadow.session.rewind(-by))
            self.either(shadow, done, shadow.past.back(max(n - by, 0)))

    def remove(self) -> None:
        """Takes tokens out, at the start, in the middle or at the end."""
        shadow, rng = self.some(), self.rng
        if shadow and (n := len(shadow.past.tokens)) > 1:
            start = rng.choice([0, rng.randrange(n), rng.randrange(n)])
            stop = rng.choice([rng.randint(start + 1, n), rng.randint(start + 1, n), n])
            self.note((start, stop))
            done, _ = self.tried(lambda: shadow.session.remove(start, stop))
            self.either(shadow, done, shadow.past.cut(start, stop))

    def either(self, shadow: Shadow, done: bool, after: Past) -> None:
        """Something was done, or nothing was."""
        interrupted = self.raised == "KeyboardInterrupt"
        before = shadow.past
        shadow.options = [after] * (done or interrupted) + [before] * (not done)

    def keep(self) -> None:
        """A place for others, pinned at times."""
        if shadow := self.some():
            pin = self.rng.random() < 0.4
            ttl = self.rng.choice([None, 0.05, 10.0]) if pin else None
            self.tried(lambda: shadow.session.keep(pin, ttl))

    def stream(self) -> None:
        """A stream that is read later, on a session or on its own."""
        if len(self.streams) + sum(s.stream is not None for s in self.shadows) >= MOST_STREAMS:
            return
        shadow, way = self.some(), self.rng.choice(self.ways)
        if shadow and shadow.past.tokens and self.rng.random() < 0.6:
            past, most = shadow.past, self.llm.n_ctx - len(shadow.past.tokens)
            wanted = self.truth.go_on(past, min(12, most)) if most > 0 else []
            shadow.options = [past.add(wanted[:i]) for i in range(len(wanted) + 1)]
            _, shadow.stream = self.tried(
                lambda: shadow.session.stream(max_tokens=12, speculate=way, **GO)
            )
            return
        prompt, salt = self.tokens(), self.rng.choice(SALTS)
        wanted = self.truth.go_on(Past(tuple(prompt)), 12)
        done, stream = self.tried(
            lambda: self.llm.stream(prompt, max_tokens=12, speculate=way, cache_salt=salt, **GO)
        )
        if done:
            self.streams.append((stream, prompt, wanted, salt))
            self.check_cached(salt, prompt, stream.completion.cached_tokens)
            self.saw(salt, prompt + wanted)

    def read(self) -> None:
        """Some pieces of a stream."""
        busy = [s for s in self.shadows if s.stream is not None]
        if busy and self.rng.random() < 0.5:
            shadow = self.rng.choice(busy)
            assert shadow.stream is not None
            if not self.read_on(shadow.stream):
                shadow.stream = None
        elif self.streams:
            stream, _, wanted, _ = one = self.rng.choice(self.streams)
            if not self.read_on(stream):
                self.streams.remove(one)
            made = stream._job.token_ids
            assert made == wanted[: len(made)]

    def read_on(self, stream: quire.Stream) -> bool:
        """Whether it goes on."""
        n = self.rng.randint(1, 6)
        done, pieces = self.tried(lambda: [next(stream, None) for _ in range(n)])
        ended = not done or None in pieces
        if ended:
            stream.close()
            if stream._job.error is None and stream._job.finish_reason != "cancelled":
                assert len(stream._job.token_ids) == stream._job.request.sampling.max_tokens or (
                    stream._job.prompt_tokens + len(stream._job.token_ids) == self.llm.n_ctx
                )
        return not ended

    def leave(self) -> None:
        """Closes a stream, or lets go of it."""
        busy = [s for s in self.shadows if s.stream is not None]
        if busy and self.rng.random() < 0.5:
            shadow = self.rng.choice(busy)
            assert shadow.stream is not None
            if self.rng.random() < 0.6:
                self.tried(shadow.stream.close)
            shadow.stream = None
        elif self.streams:
            stream, *_ = self.streams.pop(self.rng.randrange(len(self.streams)))
            if self.rng.random() < 0.6:
                self.tried(stream.close)

    def batch(self) -> None:
        """Several prompts at once, beside what runs."""
        salt, n = self.rng.choice(SALTS), self.rng.choice([1, 4, 10])
        prompts = [self.tokens() for _ in range(self.rng.randint(1, 4))]
        way = self.rng.choice(self.ways)
        wanted = [self.truth.go_on(Past(tuple(p)), n) for p in prompts]
        before = len(self.seen[salt])
        for prompt, made in zip(prompts, wanted, strict=True):
            self.saw(salt, prompt + made)
        done, found = self.tried(
            lambda: self.llm.generate(prompts, max_tokens=n, speculate=way, cache_salt=salt, **GO)
        )
        if done:
            assert [one.token_ids for one in found] == wanted
            if len(prompts) == 1:
                del self.seen[salt][before:]
                self.check_cached(salt, prompts[0], found[0].cached_tokens)
                self.saw(salt, prompts[0] + wanted[0])

    def save(self) -> None:
        """Writes a session to a file; the old one stays if that fails."""
        if shadow := self.some():
            before = self.saved
            self.saved = (shadow.past, shadow.salt, dict(shadow.marks))
            done, _ = self.tried(lambda: shadow.session.save(self.file))
            if not done:
                interrupted = self.raised == "KeyboardInterrupt"
                self.saved = None if interrupted else before

    def reopen(self) -> None:
        """A session from a file."""
        saved = self.saved
        if saved is None or len(self.shadows) >= MOST_SESSIONS:
            return
        share = self.rng.random() < 0.4
        done, session = self.tried(lambda: self.llm.open(self.file, share=share))
        if done:
            assert session.exact
            past, salt, marks = saved
            self.shadows.append(Shadow(session, [past], salt, share))
            assert session.marks.keys() == marks.keys()
            for name, mark in session.marks.items():
                kept = marks[name]
                assert mark.tokens == kept.past.tokens
                self.shadows[-1].marks[name] = Kept(mark, kept.past, kept.salt, share)

    def logits(self) -> None:
        """Logits of a session, or of tokens that nobody has."""
        shadow = self.some()
        if shadow and shadow.past.tokens and self.rng.random() < 0.7:
            done, found = self.tried(shadow.session.logits)
            past = shadow.past
        else:
            past = Past(tuple(self.tokens()))
            done, rows = self.tried(lambda: self.llm.logits(past.tokens))
            found = rows[-1] if done else None
        if done:
            self.truth.check(past, found)

    def forget(self) -> None:
        """Drops cached prefixes."""
        salt = self.rng.choice([None, *SALTS])
        self.tried(lambda: self.llm.forget(salt))

    def collect(self) -> None:
        """Garbage goes."""
        gc.collect()

    def turn(self) -> None:
        """Somebody else drives for a while."""
        self.tried(lambda: self.llm.loop.seat.turn(self.llm.loop))

    def close(self) -> None:
        """A session ends, or is let go of."""
        if len(self.shadows) > 2 and (shadow := self.some(busy=True)):
            self.shadows.remove(shadow)
            self.gone += shadow.marks.values()
            if self.rng.random() < 0.6:
                self.tried(shadow.session.close)
            del shadow
            gc.collect()  # errors that it raised may hold it
