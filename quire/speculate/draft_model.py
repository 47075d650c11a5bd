"""A smaller model drafts: it keeps up with each sequence in a memory of its own.

What it drafts it computes token by token inside one lease, which stays open until the draft is
judged and then keeps what was right. So its rejected tokens go the way the target's do: a cursor
moves, whatever the kind of memory, and no token is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np

from quire.devices.budget import Budget
from quire.engine.constrain import Constrainer, Vocabulary
from quire.engine.draft_in_step import Line, draft_in_step
from quire.engine.drafter import Draft, Drafter, DraftRequest, Offer, Source, Speculator, Target
from quire.engine.loop import Loop
from quire.engine.odds import Odds, smooth
from quire.engine.plan import Accepted
from quire.engine.room import Rank
from quire.engine.sequence import LOST, PARKED, Sequence
from quire.errors import OutOfMemory, PagesError, RequestError
from quire.memory.batch import SeqTokens
from quire.memory.lease import Lease
from quire.speculate.common import check_whole

_START = 0.7  # how sure a draft is taken to be at first
_BEHIND = 4  # tokens that a draft may begin with; more are computed before it


@runtime_checkable
class Loaded(Protocol):
    """A loaded model, as `quire.load` gives it."""

    loop: Loop


@dataclass(frozen=True, eq=False)
class DraftModel(Speculator):
    """Drafts with another model of the same vocabulary."""

    llm: Loaded
    most: int = 8
    """Tokens of the longest draft."""

    def __post_init__(self) -> None:
        if not isinstance(self.llm, Loaded):
            raise RequestError(
                f"DraftModel takes a loaded model, not {self.llm!r:.80}; load it with quire.load"
            )
        check_whole("DraftModel's most", self.most)
        if self.most < 1:
            raise RequestError(f"DraftModel's most is {self.most}; a draft has at least 1 token")

    def start(self, target: Target, sequence: Sequence) -> Drafter:
        """A drafter with a sequence of its own in the other model's memory."""
        engine = self.llm.loop.engine
        engine.check_open()
        if engine.memory is target.memory:
            raise RequestError("a model cannot be its own draft model; use speculate='early-exit'")
        # It belongs to the draft model, so that the other keeps nothing of it alive.
        source = engine.sources.setdefault(Follower, Follower(self.llm.loop))
        assert isinstance(source, Follower)
        source.check_vocabulary(target.constrainer)
        return DraftModelDrafter(source, sequence, self.most)


def check_vocabulary(target: Vocabulary, draft: Vocabulary) -> None:
    """Raises RequestError where the two models do not mean the same by every token id."""
    if target.n_vocab != draft.n_vocab:
        raise RequestError(
            f"the draft model has {draft.n_vocab} tokens, the model {target.n_vocab}; they need "
            "the same vocabulary"
        )
    for id in range(target.n_vocab):
        ours, theirs = target.token_bytes(id), draft.token_bytes(id)
        if ours != theirs:
            raise RequestError(
                f"token {id} is {theirs!r} to the draft model and {ours!r} to the model; they need "
                "the same vocabulary"
            )


class DraftModelDrafter(Drafter):
    """Has a sequence that follows the target's; it is opened with the first draft."""

    def __init__(self, source: Follower, sequence: Sequence, most: int) -> None:
        self._source = source
        self._sequence = sequence
        self._most = most
        self._odds = Odds(_START, elder=source.elder)

    def offer(self, sequence: Sequence, most: int) -> Offer | None:
        """As far as the draft model's context goes."""
        most = min(most, self._most, self._source.room(sequence))
        if most <= 0:
            return None
        once = self._source.seconds_behind(sequence)
        return Offer(self._source, most, self._odds, seconds_once=once)

    def close(self) -> None:
        """The sequence goes; what it holds is kept as a cached prefix, like any."""
        self._source.leave(self._sequence)


@dataclass(frozen=True)
class Followed:
    """What follows one of a target's sequences."""

    own: Sequence
    odds: Odds


@dataclass(frozen=True)
class Followup:
    """One sequence's draft in the open lease."""

    own: Sequence
    pending: int
    """Tokens before the draft."""
    n: int
    """Tokens of the draft, of which the last is not computed."""


class Follower(Source):
    """Drafts for all sequences of a step in one batch of the draft model.

    Several models may have it draft, each in a thread of its own: whose step has the draft model's
    seat has all of this, and the others' go without.
    """

    def __init__(self, loop: Loop) -> None:
        self.elder = Odds(_START)
        self._loop = loop
        self._engine = loop.engine
        self._seated = False  # whether the draft model is ours until the step is over
        self._checked: WeakSet[Constrainer] = WeakSet()
        # Who drops a target without closing it must not find its sequences here.
        self._followed: WeakKeyDictionary[Sequence, Followed] = WeakKeyDictionary()
        self._opened: list[tuple[ref[Sequence], Sequence]] = []  # a target's, and what follows it
        self._seconds_per_read = 0.0
        self._lease: Lease | None = None
        self._parts: dict[Sequence, Followup] = {}

    def check_vocabulary(self, target: Constrainer) -> None:
        """Refuses to draft for a model with other tokens; each model is looked at once."""
        if target not in self._checked:
            check_vocabulary(target.vocabulary, self._engine.constrainer.vocabulary)
            self._checked.add(target)

    def room(self, sequence: Sequence) -> int:
        """How far a draft behind this sequence could go."""
        return 0 if self._engine.closed else self._engine.n_ctx - sequence.length

    def seconds_behind(self, sequence: Sequence) -> float:
        """What it takes to catch up with a sequence that was not followed for a while."""
        followed = self._followed.get(sequence)
        behind = sequence.length - (followed.own.computed if followed else 0)
        return behind * self._seconds_per_read if behind > _BEHIND else 0.0

    def leave(self, sequence: Sequence) -> None:
        """A target's sequence is no longer followed."""
        if self._followed.pop(sequence, None):
            self._loop.later(self.close_orphans)

    def close_orphans(self) -> None:
        """Ends those of its own sequences that follow nobody any more."""
        following: list[tuple[ref[Sequence], Sequence]] = []
        orphans: list[Sequence] = []
        for target, own in self._opened:
            if self._following(target, own):
                following.append((target, own))
            else:
                orphans.append(own)
        self._opened = following
        if not self._engine.closed:
            for own in orphans:
                self._engine.end(own)

    def _following(self, target: ref[Sequence], own: Sequence) -> Followed | None:
        """What is known of one that still follows; others leave while this is looked at."""
        sequence = target()
        followed = None if sequence is None else self._followed.get(sequence)
        return followed if followed and followed.own is own else None

    def draft(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """All of them, or none where the draft model has no room, or somebody else uses it."""
        if not self._loop.seat.take():
            return [Draft() for _ in requests]
        self._seated = True
        try:
            self.close_orphans()
            own = [self._caught_up(one) for one in requests]
            return self._drafts(requests, own)
        except OutOfMemory:
            self.cancel()
            return [Draft() for _ in requests]

    def _drafts(self, requests: Seq[DraftRequest], own: list[Sequence]) -> list[Draft]:
        """The drafts, in a lease that stays open."""
        start = perf_counter()
        engine = self._engine
        entries: list[SeqTokens] = []
        lines: list[Line] = []
        for one, mine in zip(requests, own, strict=True):
            n = min(one.n, engine.memory.room_for_draft(mine.id) - mine.pending + 1)
            tokens = [*mine.tokens.array(mine.computed), *[0] * (n - 1)]
            assert one.sequence.generation is not None
            lines.append(Line(len(lines), n - 1, one.sequence.generation))
            entries.append(SeqTokens(mine.id, np.array(tokens, np.int32)))
            self._parts[one.sequence] = Followup(mine, mine.pending, n)
        self._lease = self._reserved(entries)
        runner = engine.runner
        n_layers = runner.model.n_layers
        drafted = draft_in_step(runner, self._lease.ubatch, lines, n_layers, one_more=True)
        self.seconds_per_token = smooth(self.seconds_per_token, drafted.seconds_per_token)
        self.seconds_at_all = smooth(self.seconds_at_all, perf_counter() - start - drafted.seconds)
        return [Draft(tuple(draft)) for draft in drafted.drafts]

    def _caught_up(self, request: DraftRequest) -> Sequence:
        """The sequence that follows, with all of the target's tokens and few left to compute."""
        engine, sequence = self._engine, request.sequence
        if sequence not in self._followed:
            own = engine.new_sequence(sequence.salt)
            self._opened.append((ref(sequence), own))
            self._followed[sequence] = Followed(own, request.offer.odds)
            own.extend(sequence.tokens.array())
            engine.prefix.enter(own, ())
        own = self._followed[sequence].own
        self._bring_back(own)
        own.extend(sequence.tokens.array(own.length))
        while own.pending > _BEHIND:
            count = min(own.pending - 1, engine.scheduler.max_tokens)
            tokens = own.tokens.array(own.computed, own.computed + count)
            start = perf_counter()
            with self._reserved([SeqTokens(own.id, tokens)]) as lease:
                engine.runner.run(lease.ubatch)
                lease.commit({own.id: count})
            own.advance(count)
            now = (perf_counter() - start) / count
            self._seconds_per_read = smooth(self._seconds_per_read, now)
        return own

    def _bring_back(self, own: Sequence) -> None:
        """Back from a tier, where there is room: no request gives way to a draft."""
        engine = self._engine
        if own.status is PARKED:
            if not engine.room.make(lambda: engine.memory.fits([(own.id, 1)]), own, Rank.CACHED):
                raise PagesError("there is no room to go on with a draft")
            engine.room.bring_back(own)
        if own.status is LOST:
            engine.prefix.start_over(own)

    def _reserved(self, entries: list[SeqTokens]) -> Lease:
        """Room in the draft model's memory; what it has cached gives way."""
        memory = self._engine.memory
        counts = [(seq, len(tokens)) for seq, tokens in entries]
        self._engine.room.make(lambda: memory.fits(counts), None, Rank.CACHED)
        return memory.reserve(entries)

    def settle(self, accepted: Seq[Accepted]) -> None:
        """Keeps what was right; the last token of a draft was not computed yet."""
        if not self._loop.seat.mine or self._lease is None:
            return
        kept: dict[int, int] = {}
        followed: list[tuple[Followup, Accepted]] = []
        for one in accepted:
            part = self._parts.get(one.sequence)
            if part:
                kept[part.own.id] = part.pending + min(one.agreed, part.n - 1)
                followed.append((part, one))
        self._lease.commit(kept)
        for part, one in followed:
            part.own.extend(one.tokens)
            part.own.advance(kept[part.own.id])
        self.cancel()
        self._engine.compute.pay(self._engine.room)

    def cancel(self) -> None:
        """The lease ends; what was not kept is as if it had never been."""
        if not self._loop.seat.mine:
            return
        lease, self._lease = self._lease, None
        self._parts = {}
        try:
            if lease:
                lease.abort()
        finally:
            if self._seated:
                self._seated = False
                self._loop.seat.leave()

    def give_way(self, budget: Budget) -> bool:
        """Drops what is cached, then what follows the targets: it can be computed again."""
        if self._engine.closed or self._engine.budget.whole is not budget.whole:
            return False
        if not self._loop.seat.take():
            return False
        try:
            return self._engine.prefix.evict_one() or self._lose_one()
        finally:
            self._loop.seat.leave()

    def _lose_one(self) -> bool:
        for target, own in self._opened:
            followed = self._following(target, own)
            if followed and own.computed and own.status is not PARKED:
                followed.odds.put_off()  # or it would take the same room again at once
                self._engine.room.lose(own)
                return True
        return False
