"""Random operations on every kind of memory against a model that copies everything.

The model is a dictionary of lists, and for recurrent kinds the position of the state. After every
step each sequence and each checkpoint must read back from the pages what the model says, the
conservation laws must hold, and no slot that another holder can see may have changed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import fake_kinds
import numpy as np
import pytest
from fake_kernel import Token, history, page_bytes
from fake_kinds import (
    KINDS,
    LOG_TOKENS,
    TAIL,
    by_position,
    check_saved,
    check_seq,
    check_view,
    group_snapshot,
    kept_pages,
    make_kind,
    snapshot,
    table,
    tables_of,
    window_of,
    write,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.devices.device import GroupKernels
from quire.errors import OutOfMemory, PagesError, RequestError, SessionFileError, TierError
from quire.memory.batch import SeqTokens
from quire.memory.groups.attention import AttentionGroup
from quire.memory.groups.group import AnyGroup
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_table import StateTable
from quire.memory.groups.table import Table
from quire.memory.memory import Memory
from quire.memory.pages.pool import PagePool
from quire.memory.status import Status
from quire.memory.tiers.tiers import HostTier, _OnHost

N_SEQS = 5
SEQ = st.integers(0, N_SEQS - 1)
COUNT = st.tuples(st.integers(1, 9), st.integers(0, 9))
"""How many tokens come, and how many of them are to be kept."""
COUNTS = st.dictionaries(SEQ, COUNT, min_size=1, max_size=3)
EDGE = st.integers(-1, 24)
WHICH = st.integers(0, 999)


class Boom(Exception):
    """Something that goes wrong inside a lease."""


@dataclass
class Past:
    """What a sequence was told: its tokens, and how many of them a recurrent state has seen."""

    tokens: list[Token] = field(default_factory=list)
    state_at: int = 0
    was_at: int = 0
    """Where the state was before the last step, if that can be taken back to before the fold."""
    by_position: bool = False
    plain: bool = True
    """Positions count up from 0: a window can tell exactly what it has lost."""

    @property
    def end(self) -> int:
        return max((p for _, p in self.tokens), default=-1) + 1

    def plus(self, new: list[int]) -> Past:
        """With tokens taken in by one step."""
        tokens = self.tokens + [(t, self.end + i) for i, t in enumerate(new)]
        state_at = self.state_at
        if self.by_position:
            last = self.end + len(new) - 1
            state_at = max(last - last % LOG_TOKENS, state_at)
        elif len(new) > LOG_TOKENS:
            state_at = self.end + len(new) - TAIL
        elif self.end + len(new) - self.state_at > LOG_TOKENS:
            state_at = self.end
        was_at = state_at if len(new) > LOG_TOKENS else self.state_at
        return replace(self, tokens=tokens, state_at=state_at, was_at=was_at)

    def first(self, n: int) -> Past:
        """The start of a sequence that ends with the tokens of its last step."""
        at = self.was_at if n <= self.state_at else self.state_at
        return replace(self, tokens=self.tokens[:n], state_at=at, was_at=at)

    def copy(self) -> Past:
        return replace(self, tokens=list(self.tokens))


class KindMachine(RuleBasedStateMachine):
    """One memory, one model, and everything that can be done to both."""

    kind: str

    @initialize(
        page_tokens=st.sampled_from([1, 2, 4, 16]),
        head_dim=st.sampled_from([2, 68]),
        state_bytes=st.sampled_from([16, 4160]),
        room=st.sampled_from([24_576, 65_536, 1 << 20]),
        cap=st.sampled_from([None, None, 40]),
    )
    def make(
        self, page_tokens: int, head_dim: int, state_bytes: int, room: int, cap: int | None
    ) -> None:
        self.memory: Memory = make_kind(self.kind, page_tokens, head_dim, state_bytes, room, cap)
        self.recurrent = any(isinstance(group, RecurrentGroup) for group in self.memory.groups)
        self.tier = HostTier(1 << 16)
        self.seqs: dict[int, Past] = {}
        self.saved: dict[str, Past] = {}
        self.ids = itertools.count(1)
        self.watched: dict[tuple[int, int], tuple[set[str], int, list[bytes]]] = {}

    # -- helpers --------------------------------------------------------------------------------

    def new_entries(self, counts: dict[int, tuple[int, int]]) -> list[SeqTokens]:
        return [
            SeqTokens(seq, np.array([next(self.ids) for _ in range(n)], np.int32))
            for seq, (n, _) in counts.items()
        ]

    def none(self) -> Past:
        """Nothing was told yet."""
        return Past(by_position=by_position(self.kind))

    def past(self, seq: int) -> Past:
        return self.seqs.get(seq, self.none())

    def has_tokens(self) -> bool:
        return any(past.tokens for past in self.seqs.values())

    def pick(self, which: int) -> int:
        full = sorted(s for s, past in self.seqs.items() if past.tokens)
        return full[which % len(full)]

    def settled(self) -> bool:
        """No positions wait to be rotated."""
        return not any(self.waits(group) for group in self.memory.groups)

    def waits(self, group: AnyGroup, optimize: bool = False) -> bool:
        """A table of a group has positions to be rotated, or holes if these count."""
        at = self.memory.groups.index(group)
        tables = [tables[at] for tables in self.memory._tables.values()]
        return any(
            table.pending is not None or (optimize and bool((table.position_array() < 0).any()))
            for table in tables
            if isinstance(table, Table)
        )

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = snapshot(self.memory)
        yield
        assert snapshot(self.memory) == before

    def lost(self, group: AnyGroup, seq: int) -> set[Token]:
        """What a window has let go of."""
        if window_of(group) is None or seq not in self.seqs:
            return set()
        return set(self.seqs[seq].tokens) - set(self.history(group, seq))

    def history(self, group: AnyGroup, seq: int) -> list[Token]:
        """What a group with attention holds of a sequence."""
        found = table(self.memory, group, seq)
        assert isinstance(group, AttentionGroup) and isinstance(found, Table)
        return history(group, found)

    def hidden(self, seq: int, after: list[tuple[Token, Token]]) -> bool:
        """Whether a sequence would see tokens that a window has let go of.

        `after` pairs each token as it was with what it would be.
        """
        end = max((p for _, (_, p) in after), default=-1) + 1
        for group in self.memory.groups:
            window, lost = window_of(group), self.lost(group, seq)
            if any(old in lost and new[1] > end - (window or 0) for old, new in after):
                return True
        return False

    # -- appending ------------------------------------------------------------------------------

    @precondition(settled)
    @rule(counts=COUNTS)
    def append(self, counts: dict[int, tuple[int, int]]) -> None:
        entries = self.new_entries(counts)
        fits = self.memory.fits([(e.seq, len(e.tokens)) for e in entries])
        before = snapshot(self.memory)
        try:
            lease = self.memory.reserve(entries)
        except OutOfMemory:
            assert not fits and snapshot(self.memory) == before
            return
        assert fits
        after = {seq: self.past(seq).plus(tokens.tolist()) for seq, tokens in entries}
        kept = {seq: min(kept, n) for seq, (n, kept) in counts.items()}
        with lease:
            write(self.memory, lease.ubatch)
            self.memory.audit()
            for row, (seq, _) in enumerate(entries):
                check_view(self.memory, lease.ubatch, row, after[seq].tokens)
            whole = [s for s, (n, _) in counts.items() if n > self.memory.room_for_draft(s)]
            least = {seq: after[seq].state_at - self.past(seq).end for seq in whole}
            if any(0 < kept[seq] < least[seq] for seq in whole):
                before = snapshot(self.memory)
                with pytest.raises(RequestError, match="or more, or none"):
                    lease.commit(kept)
                assert snapshot(self.memory) == before
                kept |= {seq: counts[seq][0] for seq in whole}
            lease.commit(kept)
        for seq, (n, _) in counts.items():
            if kept[seq]:
                self.seqs[seq] = after[seq].first(len(after[seq].tokens) - n + kept[seq])

    @precondition(settled)
    @rule(counts=COUNTS)
    def exception_in_a_lease(self, counts: dict[int, tuple[int, int]]) -> None:
        entries = self.new_entries(counts)
        if not self.memory.fits([(e.seq, len(e.tokens)) for e in entries]):
            return
        before = snapshot(self.memory, bytes_too=False)
        with pytest.raises(Boom), self.memory.reserve(entries) as lease:
            write(self.memory, lease.ubatch)
            raise Boom
        # Slots nobody could see may have been written; everything else is as it was.
        assert snapshot(self.memory, bytes_too=False) == before

    @precondition(settled)
    @rule(counts=COUNTS, nth=st.integers(1, 5))
    def failure_while_reserving(self, counts: dict[int, tuple[int, int]], nth: int) -> None:
        """The n-th allocation fails, or the n-th copy or fold of a device."""
        calls = itertools.count(1)

        def failing(real: Any) -> Any:
            def fails(*args: Any) -> Any:
                if next(calls) == nth:
                    raise PagesError("injected")
                return real(*args)

            return fails

        with pytest.MonkeyPatch.context() as patch:
            for pool in self.memory.pools:
                for name in ("allocate", "allocate_one"):
                    patch.setattr(pool, name, failing(getattr(pool, name)))
            device = self.memory.devices[0]
            patch.setattr(device.ops, "copy_pages", failing(device.ops.copy_pages))
            for name, bound in device._groups.items():
                if bound.kernels.fold:
                    kernels = GroupKernels(fold=failing(bound.kernels.fold))
                    patch.setitem(device._groups, name, replace(bound, kernels=kernels))
            with (
                self.unchanged(),
                suppress(OutOfMemory),
                self.memory.reserve(self.new_entries(counts)) as lease,
            ):
                self.memory.run(lease.ubatch.work)

    @precondition(settled)
    @rule(counts=COUNTS, n_ubatch=st.integers(1, 8), stop_after=st.integers(0, 6))
    def batch(self, counts: dict[int, tuple[int, int]], n_ubatch: int, stop_after: int) -> None:
        before = snapshot(self.memory)
        fits = self.memory.fits([(seq, n) for seq, (n, _) in counts.items()])
        with self.memory.init_batch(self.new_entries(counts), n_ubatch) as context:
            # Folding part by part takes other pages than folding once.
            assert self.recurrent or fits is not context.status.is_fail
            more = not context.status.is_fail and stop_after > 0
            while more:
                context.apply()
                self.memory.audit()
                write(self.memory, context.ubatch)
                assert len(context.ubatch.tokens) <= n_ubatch
                for row, seq in enumerate(context.ubatch.seqs):
                    mine = context.ubatch.tokens[context.ubatch.seq_rows == row]
                    self.seqs[seq] = self.past(seq).plus(mine.tolist())
                    check_view(self.memory, context.ubatch, row, self.seqs[seq].tokens)
                stop_after -= 1
                more = stop_after > 0 and context.next()
        if context.status is Status.FAILED_PREPARE:
            assert snapshot(self.memory) == before

    @precondition(settled)
    @rule(n=st.integers(1, 3))
    def decode(self, n: int) -> None:
        """Some tokens more for everybody who has some."""
        for _ in range(n):
            full = {seq: (1, 1) for seq, past in self.seqs.items() if past.tokens}
            self.append(full or {0: (3, 3)})

    # -- sequences ------------------------------------------------------------------------------

    @precondition(has_tokens)
    @rule(which=WHICH, counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=2))
    def branch(self, which: int, counts: list[tuple[int, int]]) -> None:
        """A fork; then both may go on in the same step, and may be rejected."""
        src = self.pick(which)
        dst = next((seq for seq in range(N_SEQS) if not self.past(seq).tokens), N_SEQS)
        if dst == N_SEQS:
            dst = (src + 1) % N_SEQS
            self.remove(dst, -1, -1)
            self.frozen_slots_never_change()  # whoever has its name from now on holds other slots
        self.memory.seq_cp(src, dst)
        self.seqs[dst] = self.seqs[src].copy()
        growing = {s: c for s, c in zip([dst, src], counts, strict=False) if c[0]}
        if growing and self.settled():
            self.append(growing)

    @rule(src=SEQ, dst=SEQ, p0=EDGE, p1=EDGE)
    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.copy_part(src, dst, p0, p1)

    @precondition(has_tokens)
    @rule(which=WHICH, dst=SEQ, back=st.integers(0, LOG_TOKENS + 1))
    def copy_start(self, which: int, dst: int, back: int) -> None:
        """All but the last tokens: what drafts branch from."""
        src = self.pick(which)
        self.copy_part(src, dst, -1, max(self.past(src).end - back, 0))

    @precondition(has_tokens)
    @rule(which=WHICH, dst=SEQ, n=st.integers(1, 6))
    def copy_more(self, which: int, dst: int, n: int) -> None:
        """What comes after the end of a sequence; often both have the page already."""
        end = self.past(dst).end
        self.copy_part(self.pick(which), dst, end, end + n)

    def copy_part(self, src: int, dst: int, p0: int, p1: int) -> None:
        source, target = self.past(src), self.past(dst)
        part = [t for t in source.tokens if inside(t, p0, p1)]
        taken = {p for _, p in target.tokens}
        must = src not in self.seqs or 0 <= p1 < p0
        may = False
        if src != dst and not must:
            must |= any(p in taken for _, p in part)
            pairs = [(t, t) for t in part]
            known = [((-1, p), (t, p)) for t, p in target.tokens]
            must |= self.hidden(src, pairs + known) or self.hidden(dst, known + pairs)
            # Where tokens were moved, two sequences can have the same token in one slot, and a
            # window knows what it has lost only as a span.
            may = not (source.plain and target.plain)
            if self.recurrent and part:
                ends = source.end if p1 < 0 else min(p1, source.end)
                must |= bool(target.tokens) or p0 > 0 or ends < source.state_at
        done = self.asked("cp", must, may, src, dst, p0, p1)
        if not done or src == dst:
            return
        if not target.tokens:
            state_at = source.state_at if part else 0
            self.seqs[dst] = replace(
                self.none(), tokens=part, state_at=state_at, was_at=state_at,
                plain=source.plain and p0 <= 0,
            )  # fmt: skip
        elif part:
            self.seqs[dst] = replace(self.none(), tokens=target.tokens + part, plain=False)

    def asked(self, what: str, must: bool, may: bool, *args: int) -> bool:
        """Does it; a refusal must be due and change nothing."""
        before = snapshot(self.memory)
        try:
            getattr(self.memory, f"seq_{what}")(*args)
        except RequestError:
            assert must or may
            assert snapshot(self.memory) == before
            return False
        assert not must
        return True

    @precondition(has_tokens)
    @rule(which=WHICH, where=WHICH, n=st.integers(1, 5))
    def remove_some(self, which: int, where: int, n: int) -> None:
        """A few positions from anywhere, so that holes come up often."""
        seq = self.pick(which)
        p0 = self.seqs[seq].tokens[where % len(self.seqs[seq].tokens)][1]
        self.remove(seq, p0, p0 + n)

    def remove(self, seq: int, p0: int, p1: int) -> None:
        if 0 <= p1 < p0:
            for refused in (self.memory.can_rm, self.memory.seq_rm):
                with self.unchanged(), pytest.raises(RequestError):
                    refused(seq, p0, p1)
            return
        named = [s for s in self.seqs if seq in (-1, s)]
        must = any(not self.can_remove(s, p0, p1) for s in named)
        may = any(not self.seqs[s].plain for s in named)
        before = snapshot(self.memory)
        can = self.memory.can_rm(seq, p0, p1)
        assert snapshot(self.memory) == before
        assert self.memory.seq_rm(seq, p0, p1) == can
        if not can:
            assert (must or may) and snapshot(self.memory) == before
            return
        assert not must
        for s in named:
            rest = [t for t in self.seqs[s].tokens if not inside(t, p0, p1)]
            self.seqs[s].plain &= [p for _, p in rest] == list(range(len(rest)))
            if not rest:
                self.seqs[s] = self.none()
            self.seqs[s].tokens = rest

    def can_remove(self, seq: int, p0: int, p1: int) -> bool:
        past = self.seqs[seq]
        rest = [t for t in past.tokens if not inside(t, p0, p1)]
        if len(rest) == len(past.tokens) or not rest:
            return True
        if self.recurrent:
            tail = rest == past.tokens[: len(rest)]
            if not tail or len(rest) < past.state_at:
                return False
        return not self.hidden(seq, [(t, t) for t in rest])

    @precondition(has_tokens)
    @rule(which=WHICH, n=st.integers(1, 6))
    def rewind(self, which: int, n: int) -> None:
        seq = self.pick(which)
        self.remove(seq, max(self.memory.seq_pos_max(seq) + 1 - n, 0), -1)

    @rule(
        what=st.sampled_from(["free", "remove", "remove", "keep", "clear"]),
        seq=st.integers(-1, N_SEQS - 1), p0=EDGE, p1=EDGE,
    )  # fmt: skip
    def destroy(self, what: str, seq: int, p0: int, p1: int) -> None:
        """Everything that may take a lot away, as one rule, so that it stays rare."""
        if what == "remove":
            self.remove(seq, p0, p1)
        elif what == "clear" and seq == 0:
            self.memory.clear(data=False)
            self.seqs, self.saved = {}, {}
        elif what == "keep" and seq not in self.seqs:
            with self.unchanged(), pytest.raises(RequestError):
                self.memory.seq_keep(seq)
        elif what == "keep":
            self.memory.seq_keep(seq)
            self.seqs = {s: past if s == seq else self.none() for s, past in self.seqs.items()}
        elif what == "free" and seq >= 0:
            self.memory.seq_free(seq)
            self.seqs.pop(seq, None)

    @rule(seq=SEQ, p0=EDGE, p1=EDGE, delta=st.integers(-3, 6), divides=st.booleans())
    def shift(self, seq: int, p0: int, p1: int, delta: int, divides: bool) -> None:
        past = self.past(seq)
        divisor = max(delta, 1)

        def moved(token: Token) -> Token:
            if not inside(token, p0, p1):
                return token
            return token[0], token[1] // divisor if divides else token[1] + delta

        pairs = [(t, moved(t)) for t in past.tokens]
        must = seq not in self.seqs or 0 <= p1 < p0 or self.recurrent
        must |= any(p < 0 for _, (_, p) in pairs) or self.hidden(seq, pairs)
        amount = divisor if divides else delta
        what = "div" if divides else "add"
        if self.asked(what, must, not past.plain, seq, p0, p1, amount):
            tokens = [new for _, new in pairs]
            past.plain &= tokens == past.tokens
            past.tokens = tokens

    @precondition(lambda self: self.has_tokens() and not self.recurrent)
    @rule(which=WHICH, delta=st.integers(1, 6), optimize=st.booleans())
    def shift_all(self, which: int, delta: int, optimize: bool) -> None:
        """A whole sequence, which a window allows too, and at once: of shared pages, on copies."""
        self.shift(self.pick(which), -1, -1, delta, divides=False)
        self.update(optimize)

    @rule(optimize=st.booleans())
    def update(self, optimize: bool) -> None:
        before = snapshot(self.memory)
        idle = not any(self.waits(group, optimize) for group in self.memory.groups)
        with self.memory.init_update(optimize) as context:
            if context.status is Status.SUCCESS:
                assert not idle
                context.apply()
                assert not any(self.waits(group, optimize) for group in self.memory.groups)
                return
            assert context.status is (Status.NO_UPDATE if idle else Status.FAILED_PREPARE)
        assert snapshot(self.memory) == before

    @rule(optimize=st.booleans(), nth=st.integers(1, 4))
    def failure_while_updating(self, optimize: bool, nth: int) -> None:
        """The n-th move, copy or rotation fails: what comes before is done, the rest is pending.

        That everything is still remembered, the invariants say.
        """
        calls = itertools.count(1)
        device = self.memory.devices[0]

        def failing(real: Any) -> Any:
            def fails(*args: Any) -> Any:
                if next(calls) == nth:
                    raise Boom
                return real(*args)

            return fails

        groups = self.memory.groups
        before = snapshot(self.memory)
        held = [group_snapshot(self.memory, group, bytes_too=False) for group in groups]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device.ops, "copy_pages", failing(device.ops.copy_pages))
            for name, bound in device._groups.items():
                if bound.kernels.rotate and bound.kernels.move:
                    kernels = GroupKernels(
                        failing(bound.kernels.rotate), failing(bound.kernels.move)
                    )
                    patch.setitem(device._groups, name, replace(bound, kernels=kernels))
            with self.memory.init_update(optimize) as context:
                if context.status is not Status.SUCCESS:
                    assert snapshot(self.memory) == before
                    return
                try:
                    context.apply()
                except Boom:
                    assert context.status is Status.FAILED_COMPUTE
                    waiting = [self.waits(group, optimize) for group in groups]
                    now = [group_snapshot(self.memory, group, bytes_too=False) for group in groups]
                    failed = waiting.index(True)  # of this one, holes may be closed already
                    assert now[failed + 1 :] == held[failed + 1 :]

    # -- tiers ----------------------------------------------------------------------------------

    @precondition(lambda self: self.has_tokens() and self.settled())
    @rule(which=WHICH, counts=COUNTS, fails=st.booleans(), leaves=st.booleans())
    def park(
        self, which: int, counts: dict[int, tuple[int, int]], fails: bool, leaves: bool
    ) -> None:
        """A sequence makes room, others go on, and it comes back or is given up."""
        seq = self.pick(which)
        moves = self.memory.park_bytes(seq)
        if not self.tier.has(moves):
            with self.unchanged(), pytest.raises(TierError):
                self.memory.park(seq, self.tier)
            return
        committed = sum(pool.used * pool.page_bytes for pool in self.memory.pools)
        in_tier = self.tier.used
        self.memory.park(seq, self.tier)
        assert self.tier.used == in_tier + moves
        assert committed - moves == sum(p.used * p.page_bytes for p in self.memory.pools)
        past = self.seqs.pop(seq)
        assert self.memory.seq_pos_max(seq) == past.end - 1
        self.others_go_on(seq, counts)
        if fails:
            self.back_fails(seq)
        if leaves:
            self.memory.seq_free(seq)
        else:
            self.bring_back(seq, past)
        assert self.tier.used == in_tier

    @precondition(lambda self: self.has_tokens() and self.settled())
    @rule(
        which=WHICH, counts=COUNTS, stays=WHICH, others=st.booleans(), leaves=st.booleans()
    )  # fmt: skip
    def park_together(
        self, which: int, counts: dict[int, tuple[int, int]], stays: int, others: bool, leaves: bool
    ) -> None:
        """Some leave with all that they alone hold, which is in the tier once, and come back."""
        first = self.pick(which)
        members = [*self.seqs, *self.saved]
        members = [one for i, one in enumerate(members) if stays >> (i % 8) & 1 or one == first]
        leavers = self.memory.leavers(members)
        moves = self.memory.park_bytes(first, leavers)
        if not self.tier.has(moves):
            with self.unchanged(), pytest.raises(TierError):
                self.memory.park(first, self.tier, leavers)
            return
        used, in_tier = self.used_bytes(), self.tier.used
        self.watched = {}  # pages that are shared will have other numbers
        self.memory.park(first, self.tier, leavers)
        assert self.tier.used == in_tier + moves and self.used_bytes() == used - moves
        gone = {seq: self.seqs.pop(seq) for seq in [*self.seqs] if self.memory.is_parked(seq)}
        assert first in gone and gone.keys() <= {*members}
        if others:
            counts = {seq: n for seq, n in counts.items() if seq not in gone}
            self.others_go_on(first, counts)
        if leaves:
            del gone[first]
            self.memory.seq_free(first)
        for seq in sorted(gone, key=lambda seq: (seq * 7 + which) % 5):
            self.bring_back(seq, gone[seq])
            self.memory.audit()
        if not (in_tier or others or leaves):
            assert self.unpark_all()
            assert self.used_bytes() == used and self.tier.used == 0

    def used_bytes(self) -> int:
        return sum(pool.used * pool.page_bytes for pool in self.memory.pools)

    @precondition(lambda self: self.saved)
    @rule(which=WHICH, comes_back=st.booleans())
    def park_checkpoint(self, which: int, comes_back: bool) -> None:
        """What only a checkpoint holds goes to a tier; it comes back when it is wanted."""
        name = sorted(self.saved)[which % len(self.saved)]
        moves = self.memory.checkpoint_bytes(name)
        if not self.tier.has(moves):
            with self.unchanged(), pytest.raises(TierError):
                self.memory.checkpoint_park(name, self.tier)
            return
        before = self.tier.used
        self.memory.checkpoint_park(name, self.tier)
        assert self.memory.checkpoint_bytes(name) == 0
        assert self.tier.used in (before, before + moves)
        self.memory.audit()
        if comes_back:
            self.unpark_checkpoint(name)

    def unpark_checkpoint(self, name: str) -> bool:
        fits = self.memory.checkpoint_fits(name)
        before = snapshot(self.memory)
        if self.memory.checkpoints.get(name).parked:
            self.watched = {}  # it may have left together with others
        try:
            self.memory.checkpoint_unpark(name)
        except OutOfMemory:
            assert not fits and snapshot(self.memory) == before
            return False
        return True

    def unpark_all(self) -> bool:
        """Everything that is saved is here again, or nobody could read it."""
        return all([self.unpark_checkpoint(name) for name in sorted(self.saved)])

    def others_go_on(self, parked: int, counts: dict[int, tuple[int, int]]) -> None:
        self.memory.audit()
        with self.unchanged(), pytest.raises(RequestError, match="parked"):
            self.memory.reserve([SeqTokens(parked, np.ones(1, np.int32))])
        for seq, past in self.seqs.items():
            check_seq(self.memory, seq, past.tokens)
        others = {seq: count for seq, count in counts.items() if seq != parked}
        if others:
            self.append(others)
        self.memory.audit()

    def back_fails(self, seq: int) -> None:
        """The last page that is read back cannot be."""
        loads = itertools.count(1)
        real = _OnHost.load
        last = sum(len(part.away) for part in self.memory._parked[seq].parts)
        if last == 0:
            return  # it shares all its pages with others, and none was moved

        def load(stored: _OnHost, pages: Any) -> None:
            if next(loads) == last:
                raise TierError("injected")
            real(stored, pages)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_OnHost, "load", load)
            with self.unchanged(), suppress(OutOfMemory):
                self.memory.unpark(seq)
                raise AssertionError("a page was not read")

    def bring_back(self, seq: int, past: Past) -> None:
        fits = self.memory.fits([(seq, 1)])
        try:
            self.memory.unpark(seq)
            self.seqs[seq] = past
        except OutOfMemory:
            assert not fits
            assert self.memory.seq_rm(seq, -1, -1)
            self.seqs[seq] = self.none()

    # -- checkpoints ----------------------------------------------------------------------------

    @precondition(lambda self: self.has_tokens() and len(self.saved) < 5)
    @rule(which=WHICH, cached=st.booleans())
    def save(self, which: int, cached: bool) -> None:
        seq = self.pick(which)
        self.saved[self.memory.checkpoint_save(seq, cached=cached)] = self.seqs[seq].copy()

    @precondition(lambda self: self.saved)
    @rule(seq=SEQ, which=WHICH)
    def restore(self, seq: int, which: int) -> None:
        name = sorted(self.saved)[which % len(self.saved)]
        fits, before = self.memory.checkpoint_fits(name), snapshot(self.memory)
        if self.memory.checkpoints.get(name).parked:
            self.watched = {}
        try:
            self.memory.checkpoint_restore(seq, name)
        except OutOfMemory:
            assert not fits and snapshot(self.memory) == before
            return
        self.seqs[seq] = self.saved[name].copy()

    @precondition(lambda self: self.saved)
    @rule(which=WHICH)
    def delete(self, which: int) -> None:
        name = sorted(self.saved)[which % len(self.saved)]
        self.memory.checkpoint_delete(name)
        del self.saved[name]

    @precondition(lambda self: self.seqs or self.saved)
    @rule(which=WHICH)
    def through_a_file(self, which: int) -> None:
        if not self.unpark_all():
            return
        file = BytesIO()
        self.memory.state_write(file)
        mine = {name for name, one in self.memory.checkpoints.by_name.items() if not one.cached}
        damaged = bytearray(file.getvalue())
        damaged[-1 - which % 100] ^= 1 << which % 8
        refusals = (SessionFileError, RequestError, OutOfMemory)
        with self.unchanged(), pytest.raises(refusals):
            self.memory.state_read(BytesIO(damaged))
        self.memory.clear(data=False)
        with pytest.raises(SessionFileError):
            self.memory.state_read(BytesIO(damaged))
        assert fake_kinds.empty(self.memory)
        file.seek(0)
        self.memory.state_read(file)
        self.saved = {name: past for name, past in self.saved.items() if name in mine}
        self.watched = {}  # pages have other numbers now

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def everything_is_remembered(self) -> None:
        self.memory.audit()
        assert self.memory.seqs == sorted(self.seqs)
        for seq, past in self.seqs.items():
            check_seq(self.memory, seq, past.tokens)
            assert self.memory.seq_pos_max(seq) == past.end - 1
            low = max(self.pos_min(group, seq) for group in self.memory.groups)
            assert self.memory.seq_pos_min(seq) == low
        for name, past in self.saved.items():
            if self.memory.checkpoints.get(name).parked is None:
                check_saved(self.memory, name, past.tokens)
        assert sorted(self.memory.checkpoints.by_name) == sorted(self.saved)

    def pos_min(self, group: AnyGroup, seq: int) -> int:
        past = self.seqs[seq]
        if isinstance(group, RecurrentGroup):
            found = table(self.memory, group, seq)
            assert isinstance(found, StateTable) and found.position == past.state_at
            return max(past.state_at - 1, 0) if past.tokens else -1
        return min((p for _, p in self.history(group, seq)), default=-1)

    @invariant()
    def nothing_is_held_in_vain(self) -> None:
        for device in self.memory.devices:
            held = sum(self.memory.memory_breakdown()[device.name].values())
            assert held == device.budget.used <= device.budget.limit
        for group in self.memory.groups:
            # What the folds of the next step are likely to want stays idle.
            likely = 1 + len(self.seqs) // LOG_TOKENS
            spare = likely if isinstance(group, RecurrentGroup) else 0
            tables = tables_of(self.memory, group).values()
            for pool in group.pools:
                held = {int(p) for t in tables for p in group.held_pages(pool, t)[0]}
                held |= kept_pages(self.memory, pool)
                assert held == set(pool.live_pages.tolist())
                idle = spare + pool.spare  # which a GPU takes before they are needed
                # At most two granules per run of pages are rounding.
                runs = (np.diff(pool.live_pages) > 1).sum() + 1 + idle
                edges = 2 * pool.commitment.granularity * runs
                assert pool.committed <= (pool.used + idle) * pool.page_bytes + edges
                assert pool.used or not pool.committed
            if (window := window_of(group)) is not None:
                for seq in (seq for seq, past in self.seqs.items() if past.plain):
                    found = table(self.memory, group, seq)
                    assert isinstance(found, Table) and found.length <= self.widest(window, found)

    def widest(self, window: int, table: Table) -> int:
        """What a table may hold at most: a window, and what its first page holds beside it."""
        return window - 1 + 2 * table.page_tokens

    @invariant()
    def frozen_slots_never_change(self) -> None:
        """As long as one of a shared page's holders still has it, all saw the same bytes."""
        every = [(group, pool) for group in self.memory.groups for pool in group.pools]
        now: dict[tuple[int, int], set[str]] = {}
        for i, (group, pool) in enumerate(every):
            for label, held in tables_of(self.memory, group).items():
                for page in group.held_pages(pool, held)[0].tolist():
                    now.setdefault((i, page), set()).add(label)
        for (i, page), (labels, slots, content) in self.watched.items():
            if len(labels & now.get((i, page), set())) >= 2:
                assert frozen_bytes(*every[i], page, slots) == content, f"page {page} changed"
        self.watched = {}
        for (i, page), labels in now.items():
            if len(labels) >= 2:
                slots = int(every[i][1].frozen[page])
                content = frozen_bytes(*every[i], page, slots)
                self.watched[i, page] = (labels, slots, content)

    def teardown(self) -> None:
        for seq in list(self.seqs):
            self.memory.seq_free(seq)
        for name in list(self.saved):
            self.memory.checkpoint_delete(name)
        assert fake_kinds.empty(self.memory) and self.tier.used == 0


def frozen_bytes(group: AnyGroup, pool: PagePool, page: int, slots: int) -> list[bytes]:
    """The bytes of a page's first slots: rows of K and V, a whole state, or log entries."""
    view = page_bytes(pool, page)
    if isinstance(group, AttentionGroup):
        row = group.layout.type_k.row_bytes(group.layout.spec.head_dim_k)
        starts = [start for pair in group.layout.offsets for start in pair]
        return [view[start : start + slots * row].tobytes() for start in starts]
    assert isinstance(group, RecurrentGroup)
    if pool is group.states:
        return [view.tobytes()] if slots else []
    size = slots * group.layout.log_stride
    return [view[start : start + size].tobytes() for _, start in group.layout.offsets]


def inside(token: Token, p0: int, p1: int) -> bool:
    """Whether a token's position lies in a range."""
    return token[1] >= p0 and (p1 < 0 or token[1] < p1)


def random_step(machine: KindMachine, rng: random.Random) -> None:
    """One operation, chosen so that sharing, copying and rolling back come up all the time."""

    def counts(most: int) -> dict[int, tuple[int, int]]:
        some = rng.sample(range(N_SEQS), rng.randint(1, 3))
        return {seq: (rng.randint(1, most), rng.randint(0, most)) for seq in some}

    def number(most: int) -> int:
        return rng.randint(1, most)

    which, seq, other = rng.randrange(1000), rng.randrange(N_SEQS), rng.randrange(N_SEQS)
    edges, maybe = (rng.randint(-1, 20), rng.randint(-1, 30)), rng.random() < 0.5
    forks = [(rng.randint(0, 5), rng.randint(0, 5))] * 2
    settled, full, saved = machine.settled(), machine.has_tokens(), bool(machine.saved)
    steps: list[tuple[int, bool, Callable[[], None]]] = [
        (6, settled, lambda: machine.append(counts(6))),
        (4, settled, lambda: machine.decode(1)),
        (2, settled, lambda: machine.exception_in_a_lease(counts(6))),
        (3, settled, lambda: machine.failure_while_reserving(counts(6), number(5))),
        (2, settled, lambda: machine.batch(counts(9), number(8), which % 7)),
        (5, full, lambda: machine.branch(which, forks)),
        (1, True, lambda: machine.copy(seq, other, *edges)),
        (2, full, lambda: machine.copy_start(which, seq, number(6))),
        (3, full, lambda: machine.copy_more(which, seq, number(6))),
        (3, full, lambda: machine.rewind(which, number(6))),
        (2, full, lambda: machine.remove_some(which, which, number(5))),
        (2, True, lambda: machine.shift(seq, *edges, rng.randint(-3, 6), maybe)),
        (2, True, lambda: machine.shift(seq, -1, -1, number(6), False)),  # a window allows this
        (5, not settled, lambda: machine.update(maybe)),
        (1, True, lambda: machine.update(True)),
        (3, not settled, lambda: machine.failure_while_updating(maybe, number(4))),
        (2, full and settled, lambda: machine.park(which, counts(4), maybe, which < 200)),
        (
            2,
            full and settled,
            lambda: machine.park_together(
                which, counts(4), rng.choice([255, 255, which]), maybe, which < 200
            ),
        ),
        (4, full and len(machine.saved) < 5, lambda: machine.save(which, maybe)),
        (4, saved, lambda: machine.restore(seq, which)),
        (2, saved, lambda: machine.delete(which)),
        (1, saved, lambda: machine.through_a_file(which)),
        (1, True, lambda: machine.destroy("free", seq, -1, -1)),
        (1, which < 200, lambda: machine.destroy("keep", seq, -1, -1)),
    ]
    able = [(weight, step) for weight, possible, step in steps if possible]
    rng.choices([step for _, step in able], [weight for weight, _ in able])[0]()


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    ("page_tokens", "head_dim", "state_bytes", "room", "cap"),
    [
        (4, 2, 16, 1 << 24, 160),
        (2, 272, 4160, 300_000, None),
        # Pages of several of the system's, no multiple of them.
        pytest.param(16, 1040, 16, 3_200_000, None, marks=pytest.mark.slow),
        pytest.param(1, 2, 4160, 1 << 24, 60, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_long_random_walks(
    kind: str, page_tokens: int, head_dim: int, state_bytes: int, room: int, cap: int | None
) -> None:
    """Hypothesis keeps its runs short; these go on until memory is full and long after."""
    rng = random.Random(f"{kind} {page_tokens}")
    machine = type("Machine", (KindMachine,), {"kind": kind})()
    machine.make(page_tokens, head_dim, state_bytes, room, cap)
    for _ in range(200):
        random_step(machine, rng)
        machine.everything_is_remembered()
        machine.nothing_is_held_in_vain()
        machine.frozen_slots_never_change()
    machine.teardown()


def run(kind: str, examples: int, steps: int) -> None:
    machine = type("Machine", (KindMachine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_random_operations(kind: str) -> None:
    run(kind, examples=25, steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_many_random_operations(kind: str) -> None:
    run(kind, examples=300, steps=60)
