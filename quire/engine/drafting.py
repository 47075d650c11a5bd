"""One step's drafts: who drafts how far, within the room there is, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from time import perf_counter
from weakref import WeakSet

from quire.devices.budget import Budget
from quire.engine.drafter import Draft, Drafter, DraftRequest, Offer, Source
from quire.engine.odds import Choice, Costs, Odds, lengths
from quire.engine.plan import Accepted, Branch, Entry, Plan, planned
from quire.engine.room import Rank, Room
from quire.engine.sequence import Sequence
from quire.memory.memory import Memory

MOST_TOKENS = 64
"""Rows of a step that drafts may fill it up to."""


class Drafting:
    """Adds drafts to the steps of one engine, and learns from them."""

    def __init__(self, memory: Memory, budget: Budget) -> None:
        self.memory = memory
        self._budget = budget
        self.costs = Costs()
        self.sources: dict[object, Source] = {}
        self.in_use: WeakSet[Source] = WeakSet()
        self._elders: dict[object, Odds] = {}

    def odds(self, key: object, start: float, burst: int = 1) -> Odds:
        """Odds for a new generation, from what is known of those with the same key."""
        return Odds(start, burst, self._elders.setdefault(key, Odds(start)))

    def give_way(self) -> bool:
        """Frees memory that drafts could do without; False when there is none."""
        return any(source.give_way(self._budget) for source in self.in_use)


class Round:
    """One step with its drafts: `draft`, then either `settle` or `cancel`."""

    def __init__(self, drafting: Drafting, plan: Plan, room: Room) -> None:
        self.plan = plan
        self._drafting = drafting
        self._memory = drafting.memory
        self._room = room
        self._requests: list[DraftRequest] = []
        self._sources: list[Source] = []
        self._times = [perf_counter()]

    def tick(self) -> None:
        """The next part of the round begins: verify, rollback, and its end."""
        self._times.append(perf_counter())

    def cancel(self) -> None:
        """Nothing of the drafts stays behind; it may come twice."""
        for source in self._sources:
            source.cancel()

    def draft(self) -> Plan:
        """Has drafts made, and returns the plan with them."""
        offers = [(e, o) for e, d in _drafters(self.plan) for o in self._offers(e, d)]
        if offers:
            try:
                self._propose(self._requested(offers))
            except BaseException:
                self.cancel()
                raise
        self.tick()
        return self.plan

    def _offers(self, entry: Entry, drafter: Drafter) -> list[Offer]:
        """What a drafter offers, within what memory can take back and the request may still get."""
        generation = entry.sequence.generation
        assert generation is not None
        room = self._memory.room_for_draft(entry.sequence.id) - entry.count
        most = min(generation.left - 1, room, MOST_TOKENS)
        offers = drafter.offers(entry.sequence, most) if most > 0 else []
        return [offer for offer in offers if not offer.odds.skip_this_step()]

    def _requested(self, offers: Seq[tuple[Entry, Offer]]) -> list[DraftRequest]:
        """Which offers are taken, and how far: so that the step gains most."""
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
        requests: list[DraftRequest] = []
        for (entry, offer), n in zip(offers, chosen, strict=True):
            n = min(n, room - offer.extra)
            if n > 0 and all(r.sequence is not entry.sequence for r in requests):
                requests.append(DraftRequest(entry.sequence, offer, n))
                room -= n + offer.extra
        return requests

    def _propose(self, requests: list[DraftRequest]) -> None:
        """Has the drafts made, and takes those that fit; nobody gives way for a draft."""
        if not requests or not self._room.make(lambda: self._fit(requests), None, Rank.CACHED):
            return
        drafts: dict[Sequence, Draft] = {}
        exit_after = 0
        for source in dict.fromkeys(r.offer.source for r in requests):
            if source.exit_after and exit_after:
                continue  # a step stops once on its way
            exit_after = exit_after or source.exit_after
            self._sources.append(source)
            self._drafting.in_use.add(source)
            asked = [r for r in requests if r.offer.source is source]
            for one, draft in zip(asked, source.draft(asked), strict=True):
                drafts[one.sequence] = draft
                if draft.tokens or draft.branches:
                    self._requests.append(one)
                else:
                    one.offer.odds.put_off()
        plan = self._with(drafts, exit_after)
        if self._memory.fits(plan.counts):
            self.plan = plan
        else:
            self._go_without()

    def _go_without(self) -> None:
        """Drafts that were made took what the step itself needs, of a budget that both share."""
        self.cancel()
        for one in self._requests:
            one.offer.odds.put_off()
        self._sources, self._requests = [], []
        self._room.make(lambda: self._memory.fits(self.plan.counts), None, Rank.ARRAYS)

    def _fit(self, requests: list[DraftRequest]) -> bool:
        more = {r.sequence.id: r.n for r in requests}
        return self._memory.fits([(seq, n + more.get(seq, 0)) for seq, n in self.plan.counts])

    def _with(self, drafts: dict[Sequence, Draft], exit_after: int) -> Plan:
        """The plan with drafts; branches come only as far as there is room for them."""
        none = Draft()
        entries = []
        for entry in self.plan.entries:
            draft = drafts.get(entry.sequence, none)
            entries.append(replace(entry, draft=draft.tokens, exits=draft.exits))
        branches: list[Branch] = []
        for branch in (b for draft in drafts.values() for b in draft.branches):
            if self._memory.fits(planned(entries, (*branches, branch)).counts):
                branches.append(branch)
        return planned(entries, tuple(branches), exit_after)

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
        try:
            for source in self._sources:
                source.settle(accepted)
        finally:
            self.cancel()
        self.tick()
        start, drafted, verified, end = self._times
        inside = sum(source.seconds_inside for source in self._sources)
        if all(e.ends and e.count == 1 for e in self.plan.entries):
            self._drafting.costs.add(self.plan.n_tokens, verified - drafted - inside)
        asked = {r.sequence: r for r in self._requests}
        drafts = {e.sequence: len(e.draft) for e in self.plan.entries}
        for one in accepted:
            request, stats = asked.get(one.sequence), one.sequence.speculation
            if request and stats:
                # Lookahead with an empty pool drafts nothing, which is as good as wrong.
                n = drafts[one.sequence] or request.n
                request.offer.odds.learn(n, min(one.agreed, n))
                stats.rounds += 1
                stats.drafted += one.drafted
                stats.accepted += one.agreed
                stats.draft_s += drafted - start + inside
                stats.verify_s += verified - drafted - inside
                stats.rollback_s += end - verified


def _drafters(plan: Plan) -> list[tuple[Entry, Drafter]]:
    """The entries that go on token by token and have somebody who drafts for them."""
    found = []
    for entry in plan.entries:
        generation = entry.sequence.generation
        drafter = generation.drafter if generation else None
        if drafter and entry.ends and entry.count == 1 and entry.sequence.computed:
            found.append((entry, drafter))
    return found
