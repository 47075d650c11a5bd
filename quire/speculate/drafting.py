"""One step's drafts: who drafts how far, within the room there is, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from time import perf_counter
from types import TracebackType
from typing import Self
from weakref import WeakSet

from quire.engine.preempt import MakeRoom
from quire.engine.scheduler import Branch, Entry, Plan
from quire.engine.sequence import Accepted, Sequence
from quire.memory.budget import Budget
from quire.memory.interface import Memory
from quire.speculate.interface import Draft, Drafter, Offer, Source, Wanted
from quire.speculate.odds import Choice, Costs, Odds, lengths

MOST_TOKENS = 64
"""Rows of a step that drafts may fill it up to."""


class Drafting:
    """Adds drafts to the steps of one engine, and learns from them."""

    def __init__(self, memory: Memory, budget: Budget, room: MakeRoom) -> None:
        self.memory = memory
        self._budget = budget
        self.room = room
        self.costs = Costs()
        self.sources: dict[object, Source] = {}
        self.in_use: WeakSet[Source] = WeakSet()
        self._elders: dict[object, Odds] = {}

    def round(self, plan: Plan) -> Round:
        """The drafts of one step, as a block: leaving it early undoes whatever was made."""
        return Round(self, plan)

    def odds(self, key: object, start: float, burst: int = 1) -> Odds:
        """Odds for a new generation, from what is known of those with the same key."""
        return Odds(start, burst, self._elders.setdefault(key, Odds(start)))

    def give_way(self) -> bool:
        """Frees memory that drafts could do without; False when there is none."""
        return any(source.give_way(self._budget) for source in self.in_use)


class Round:
    """One step with its drafts."""

    def __init__(self, drafting: Drafting, plan: Plan) -> None:
        self.plan = plan
        self._drafting = drafting
        self._memory = drafting.memory
        self._wanted: list[Wanted] = []
        self._sources: list[Source] = []
        self._times: list[float] = []

    def __enter__(self) -> Self:
        self.tick()
        drafters = [(e, d) for e in self.plan.entries for d in _drafters(e)]
        if drafters:
            try:
                self._draft(drafters)
            except BaseException:
                self._cancel()
                raise
        self.tick()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._cancel()

    def tick(self) -> None:
        """The next part of the round begins: draft, verify, rollback, and its end."""
        self._times.append(perf_counter())

    def _cancel(self) -> None:
        for source in self._sources:
            source.cancel()

    def _draft(self, drafters: Seq[tuple[Entry, Drafter]]) -> None:
        offers = [(e, o) for e, d in drafters for o in self._offers(e, d)]
        if not offers:
            return
        ending = sum(entry.ends for entry in self.plan.entries)
        choices = [
            Choice(
                o.odds, o.most, o.source.seconds_per_token, o.source.seconds_at_all, o.source,
                o.extra, o.seconds_once, e.sequence,
            )
            for e, o in offers
        ]  # fmt: skip
        n_tokens = self.plan.n_tokens
        chosen = lengths(choices, n_tokens, ending, self._drafting.costs)
        room = max(MOST_TOKENS - n_tokens, 0)
        wanted: list[Wanted] = []
        for (entry, offer), n in zip(offers, chosen, strict=True):
            n = min(n, room - offer.extra)
            if n > 0 and all(w.sequence is not entry.sequence for w in wanted):
                wanted.append(Wanted(entry.sequence, offer, n))
                room -= n + offer.extra
        self._propose(wanted)

    def _offers(self, entry: Entry, drafter: Drafter) -> list[Offer]:
        """What a drafter offers, within what memory can take back and the request may still get."""
        generation = entry.sequence.generation
        assert generation is not None
        room = self._memory.room_for_draft(entry.sequence.id) - entry.count
        most = min(generation.left - 1, room, MOST_TOKENS)
        offers = drafter.offers(entry.sequence, most) if most > 0 else []
        return [offer for offer in offers if not offer.odds.pauses()]

    def _propose(self, wanted: list[Wanted]) -> None:
        """Has the drafts made, and takes those that fit; nobody gives way for a draft."""
        if not wanted:
            return
        while not self._fits(wanted):
            if not self._drafting.room.evict_cached():
                return
        drafts: dict[Sequence, Draft] = {}
        exit_after = 0
        for source in dict.fromkeys(w.offer.source for w in wanted):
            if source.exit_after and exit_after:
                continue  # a step stops once on its way
            exit_after = exit_after or source.exit_after
            self._sources.append(source)
            self._drafting.in_use.add(source)
            asked = [w for w in wanted if w.offer.source is source]
            for one, draft in zip(asked, source.draft(asked), strict=True):
                drafts[one.sequence] = draft
                if draft.tokens or draft.branches:
                    self._wanted.append(one)
                else:
                    one.offer.odds.put_off()
        plan = self._with(drafts, exit_after)
        if self._memory.fits(plan.counts()):
            self.plan = plan
        else:
            self._go_without()

    def _go_without(self) -> None:
        """Drafts that were made took what the step itself needs, of a budget that both share."""
        self._cancel()
        for one in self._wanted:
            one.offer.odds.put_off()
        self._sources, self._wanted = [], []
        while not self._memory.fits(self.plan.counts()):
            if not (self._drafting.give_way() or self._drafting.room.evict_one()):
                return

    def _fits(self, wanted: list[Wanted]) -> bool:
        more = {w.sequence.id: w.n for w in wanted}
        return self._memory.fits([(seq, n + more.get(seq, 0)) for seq, n in self.plan.counts()])

    def _with(self, drafts: dict[Sequence, Draft], exit_after: int) -> Plan:
        """The plan with drafts; branches come only as far as there is room for them."""
        none = Draft()
        entries = tuple(
            replace(entry, draft=draft.tokens, exits=draft.exits)
            for entry in self.plan.entries
            for draft in (drafts.get(entry.sequence, none),)
        )
        branches: list[Branch] = []
        plan = Plan(entries, (), exit_after)
        for branch in (b for draft in drafts.values() for b in draft.branches):
            if self._memory.fits(Plan(entries, (*branches, branch)).counts()):
                branches.append(branch)
        return replace(plan, branches=tuple(branches))

    def kept(self, accepted: Seq[Accepted]) -> dict[int, int]:
        """How many new tokens each sequence and each fork keeps."""
        kept = {branch.seq: 0 for branch in self.plan.branches}
        for one in accepted:
            kept[one.sequence.id] = one.kept
            if one.branch is not None:
                kept[one.sequence.id], kept[one.branch] = 0, one.kept
        return kept

    def settle(self, accepted: Seq[Accepted]) -> None:
        """The step is committed: what was right is told to whoever drafted it."""
        for source in self._sources:
            source.settle(accepted)
        self.tick()
        start, drafted, verified, end = self._times
        inside = sum(source.seconds_inside for source in self._sources)
        if all(e.ends and e.count == 1 for e in self.plan.entries):
            self._drafting.costs.add(self.plan.n_tokens, verified - drafted - inside)
        asked = {w.sequence: w for w in self._wanted}
        drafts = {e.sequence: len(e.draft) for e in self.plan.entries}
        for one in accepted:
            wanted, stats = asked.get(one.sequence), one.sequence.speculation
            if wanted and stats:
                # Lookahead with an empty pool drafts nothing, which is as good as wrong.
                n = drafts[one.sequence] or wanted.n
                wanted.offer.odds.learn(n, min(one.agreed, n))
                stats.rounds += 1
                stats.drafted += one.drafted
                stats.accepted += one.agreed
                stats.draft_s += drafted - start + inside
                stats.verify_s += verified - drafted - inside
                stats.rollback_s += end - verified


def _drafters(entry: Entry) -> list[Drafter]:
    """The drafter of an entry that goes on token by token, if it has one."""
    generation = entry.sequence.generation
    if generation is None or not entry.sequence.generating or not entry.ends:
        return []
    return [generation.drafter] if generation.drafter else []
