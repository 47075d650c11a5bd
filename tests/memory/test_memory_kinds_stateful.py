"""Random operations on every kind of memory against a model that copies everything.

The model is a dictionary of lists, and for recurrent kinds the position of the state. After every
step each sequence and each checkpoint must read back from the pages what the model says, the
conservation laws must hold, and no slot that another holder can see may have changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import fake_kinds
import numpy as np
import pytest
from fake_kernel import Token, history
from fake_kinds import (
    KINDS,
    LOG_TOKENS,
    TAIL,
    Leaf,
    check_saved,
    check_seq,
    check_view,
    leaves,
    make_kind,
    pools,
    snapshot,
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

from quire.errors import OutOfMemory, PagesError, RequestError, SessionFileError, TierError
from quire.memory.interface import Memory, SeqTokens, Status
from quire.memory.pool import PagePool
from quire.memory.recurrent import RecurrentMemory
from quire.memory.table import Table
from quire.memory.tiers import HostTier, _OnHost

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
    plain: bool = True
    """Positions count up from 0: a window can tell exactly what it has lost."""

    @property
    def end(self) -> int:
        return max((p for _, p in self.tokens), default=-1) + 1

    def plus(self, new: list[int]) -> Past:
        """With tokens taken in by one step."""
        tokens = self.tokens + [(t, self.end + i) for i, t in enumerate(new)]
        state_at = self.state_at
        if len(new) > LOG_TOKENS:
            state_at = self.end + len(new) - TAIL
        elif self.end + len(new) - self.state_at > LOG_TOKENS:
            state_at = self.end
        return replace(self, tokens=tokens, state_at=state_at)

    def first(self, n: int) -> Past:
        """The start of a sequence that ends with the tokens of its last step."""
        return replace(self, tokens=self.tokens[:n])

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
    )
    def make(self, page_tokens: int, head_dim: int, state_bytes: int, room: int) -> None:
        self.memory: Memory = make_kind(self.kind, page_tokens, head_dim, state_bytes, room)
        self.recurrent = any(isinstance(leaf, RecurrentMemory) for leaf in leaves(self.memory))
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

    def past(self, seq: int) -> Past:
        return self.seqs.get(seq, Past())

    def has_tokens(self) -> bool:
        return any(past.tokens for past in self.seqs.values())

    def pick(self, which: int) -> int:
        full = sorted(s for s, past in self.seqs.items() if past.tokens)
        return full[which % len(full)]

    def settled(self) -> bool:
        """No positions wait to be rotated."""
        return all(
            table.pending is None
            for leaf in leaves(self.memory)
            for table in leaf._tables.values()
            if isinstance(table, Table)
        )

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = snapshot(self.memory)
        yield
        assert snapshot(self.memory) == before

    def lost(self, leaf: Leaf, seq: int) -> set[Token]:
        """What a window has let go of."""
        if window_of(leaf) is None or seq not in self.seqs:
            return set()
        assert not isinstance(leaf, RecurrentMemory)
        return set(self.seqs[seq].tokens) - set(history(leaf, leaf.table(seq)))

    def hidden(self, seq: int, after: list[tuple[Token, Token]]) -> bool:
        """Whether a sequence would see tokens that a window has let go of.

        `after` pairs each token as it was with what it would be.
        """
        end = max((p for _, (_, p) in after), default=-1) + 1
        for leaf in leaves(self.memory):
            window, lost = window_of(leaf), self.lost(leaf, seq)
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
            write(lease.ubatch)
            self.memory.audit()
            for row, (seq, _) in enumerate(entries):
                check_view(self.memory, lease.ubatch, row, after[seq].tokens)
            whole = [s for s, (n, _) in counts.items() if n > self.memory.room_for_draft(s)]
            if any(0 < kept[seq] < counts[seq][0] - TAIL for seq in whole):
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
            write(lease.ubatch)
            raise Boom
        # Slots nobody could see may have been written; everything else is as it was.
        assert snapshot(self.memory, bytes_too=False) == before

    @precondition(settled)
    @rule(counts=COUNTS, nth=st.integers(1, 5))
    def failure_while_reserving(self, counts: dict[int, tuple[int, int]], nth: int) -> None:
        """The n-th allocation, copy or fold fails."""
        calls = itertools.count(1)

        def failing(real: Any) -> Any:
            def fails(*args: Any) -> Any:
                if next(calls) == nth:
                    raise PagesError("injected")
                return real(*args)

            return fails

        with pytest.MonkeyPatch.context() as patch:
            for pool in pools(self.memory):
                for name in ("allocate", "allocate_one", "copy_page"):
                    patch.setattr(pool, name, failing(getattr(pool, name)))
            for leaf in leaves(self.memory):
                if isinstance(leaf, RecurrentMemory):
                    broken = replace(leaf._pools, fold=failing(fake_kinds.fold))
                    patch.setattr(leaf, "_pools", broken)
            with self.unchanged(), suppress(OutOfMemory):
                self.memory.reserve(self.new_entries(counts)).abort()

    @precondition(settled)
    @rule(counts=COUNTS, n_ubatch=st.integers(1, 8), stop_after=st.integers(0, 6))
    def batch(self, counts: dict[int, tuple[int, int]], n_ubatch: int, stop_after: int) -> None:
        before = snapshot(self.memory)
        with self.memory.init_batch(self.new_entries(counts), n_ubatch) as context:
            more = not context.status.is_fail and stop_after > 0
            while more:
                context.apply()
                self.memory.audit()
                write(context.ubatch)
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
            self.seqs[dst] = Past(part, state_at, source.plain and p0 <= 0)
        elif part:
            self.seqs[dst] = Past(target.tokens + part, plain=False)

    def asked(self, what: str, must: bool, may: bool, *args: int) -> bool:
        """Asks, then does it; a refusal must be due and change nothing."""
        check, do = getattr(self.memory, f"check_{what}"), getattr(self.memory, f"seq_{what}")
        try:
            with self.unchanged():
                check(*args)
        except RequestError:
            assert must or may
            with self.unchanged(), pytest.raises(RequestError):
                do(*args)
            return False
        assert not must
        do(*args)
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
                self.seqs[s] = Past()
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
        elif what == "keep" and seq in self.seqs:
            self.memory.seq_keep(seq)
            self.seqs = {s: past if s == seq else Past() for s, past in self.seqs.items()}
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

    @rule(optimize=st.booleans())
    def update(self, optimize: bool) -> None:
        before = snapshot(self.memory)
        with self.memory.init_update(optimize) as context:
            if context.status is Status.SUCCESS:
                context.apply()
                assert self.settled()
                return
            assert context.status is Status.FAILED_PREPARE or self.settled()
        assert snapshot(self.memory) == before

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
        committed = sum(pool.used * pool.page_bytes for pool in pools(self.memory))
        self.memory.park(seq, self.tier)
        assert self.tier.used == moves
        assert committed - moves == sum(p.used * p.page_bytes for p in pools(self.memory))
        past = self.seqs.pop(seq)
        assert self.memory.seq_pos_max(seq) == past.end - 1
        self.others_go_on(seq, counts)
        if fails:
            self.back_fails(seq)
        if leaves:
            self.memory.seq_free(seq)
        else:
            self.bring_back(seq, past)
        assert self.tier.used == 0

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

        def load(stored: _OnHost, pages: Any) -> None:
            if next(loads) == len(pools(self.memory)):
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
            self.seqs[seq] = Past()

    # -- checkpoints ----------------------------------------------------------------------------

    @precondition(lambda self: self.has_tokens() and len(self.saved) < 5)
    @rule(which=WHICH)
    def save(self, which: int) -> None:
        seq = self.pick(which)
        self.saved[self.memory.checkpoint_save(seq)] = self.seqs[seq].copy()

    @precondition(lambda self: self.saved)
    @rule(seq=SEQ, which=WHICH)
    def restore(self, seq: int, which: int) -> None:
        name = sorted(self.saved)[which % len(self.saved)]
        self.memory.checkpoint_restore(seq, name)
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
        file = BytesIO()
        self.memory.state_write(file)
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
        self.watched = {}  # pages have other numbers now

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def everything_is_remembered(self) -> None:
        self.memory.audit()
        assert self.memory.seqs == sorted(self.seqs)
        for seq, past in self.seqs.items():
            check_seq(self.memory, seq, past.tokens)
            assert self.memory.seq_pos_max(seq) == past.end - 1
            low = max(self.pos_min(leaf, seq) for leaf in leaves(self.memory))
            assert self.memory.seq_pos_min(seq) == low
        for name, past in self.saved.items():
            check_saved(self.memory, name, past.tokens)
        for leaf in leaves(self.memory):
            assert sorted(leaf.checkpoints.by_name) == sorted(self.saved)

    def pos_min(self, leaf: Leaf, seq: int) -> int:
        past = self.seqs[seq]
        if isinstance(leaf, RecurrentMemory):
            assert leaf.table(seq).position == past.state_at
            return max(past.state_at - 1, 0) if past.tokens else -1
        return min((p for _, p in history(leaf, leaf.table(seq))), default=-1)

    @invariant()
    def nothing_is_held_in_vain(self) -> None:
        budget = pools(self.memory)[0].budget
        assert sum(self.memory.memory_breakdown()["cpu"].values()) == budget.used <= budget.limit
        for leaf in leaves(self.memory):
            # What the folds of the next step are likely to want stays idle.
            likely = 1 + len(self.seqs) // LOG_TOKENS
            spare = likely if isinstance(leaf, RecurrentMemory) else 0
            tables: list[Any] = [*leaf._held_tables()]
            for pool in leaf.pools:
                held = {int(p) for t in tables for p in leaf._held_pages(pool, t)[0]}
                assert held == set(pool.live_pages.tolist())
                # At most two system pages per run of pages are rounding.
                runs = (np.diff(pool.live_pages) > 1).sum() + 1 + spare
                assert pool.committed <= (pool.used + spare) * pool.page_bytes + 8192 * runs
                assert pool.used or not pool.committed
            if (window := window_of(leaf)) is not None:
                for table in (leaf.table(seq) for seq, past in self.seqs.items() if past.plain):
                    assert isinstance(table, Table) and table.length <= self.widest(window, table)

    def widest(self, window: int, table: Table) -> int:
        """What a table may hold at most: a window, and what its first page holds beside it."""
        return window - 1 + 2 * table.page_tokens

    @invariant()
    def frozen_slots_never_change(self) -> None:
        """As long as one of a shared page's holders still has it, all saw the same bytes."""
        every = [(leaf, pool) for leaf in leaves(self.memory) for pool in leaf.pools]
        now: dict[tuple[int, int], set[str]] = {}
        for i, (leaf, pool) in enumerate(every):
            tables: dict[str, Any] = {f"sequence {s}": t for s, t in leaf._tables.items()}
            tables |= {f"checkpoint {n}": c.table for n, c in leaf.checkpoints.by_name.items()}
            for label, table in tables.items():
                for page in leaf._held_pages(pool, table)[0].tolist():
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
        assert fake_kinds.empty(self.memory)


def frozen_bytes(leaf: Leaf, pool: PagePool, page: int, slots: int) -> list[bytes]:
    """The bytes of a page's first slots: rows of K and V, a whole state, or log entries."""
    view = pool.view(page)
    if not isinstance(leaf, RecurrentMemory):
        row = leaf.layout.type_k.row_bytes(leaf.layout.spec.head_dim_k)
        starts = [start for pair in leaf.layout.offsets for start in pair]
        return [view[start : start + slots * row].tobytes() for start in starts]
    if pool is leaf.states:
        return [view.tobytes()] if slots else []
    size = slots * leaf.layout.log_stride
    return [view[start : start + size].tobytes() for _, start in leaf.layout.offsets]


def inside(token: Token, p0: int, p1: int) -> bool:
    """Whether a token's position lies in a range."""
    return token[1] >= p0 and (p1 < 0 or token[1] < p1)


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
