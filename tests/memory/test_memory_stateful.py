"""Random operations on memory against a model that copies everything.

The model is a dictionary of lists. After every step each sequence and each checkpoint must read
back from the pages what the model says, the conservation laws must hold, and no slot that
another holder can see may have changed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from fake_kernel import Token, attend, history, make_attention, snapshot, write
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from quire.errors import OutOfMemory, PagesError, RequestError
from quire.memory.attention import AttentionMemory
from quire.memory.interface import SeqTokens, Status
from quire.memory.table import Table

SEQ = st.integers(0, 6)
COUNT = st.tuples(st.integers(1, 9), st.integers(0, 9))
"""How many tokens come, and how many of them are to be kept."""
COUNTS = st.dictionaries(SEQ, COUNT, min_size=1, max_size=3)
EDGE = st.integers(-1, 30)
WHICH = st.integers(0, 999)


class Boom(Exception):
    """Something that goes wrong inside a lease."""


class MemoryMachine(RuleBasedStateMachine):
    """One memory, one model, and everything that can be done to both."""

    @initialize(
        page_tokens=st.sampled_from([1, 2, 4, 16]),
        # Pages of less than, about and more than a page of the system, none of them a multiple.
        head_dim=st.sampled_from([2, 272, 1040]),
        n_pages=st.integers(4, 40),
        capped=st.booleans(),
    )
    def make(self, page_tokens: int, head_dim: int, n_pages: int, capped: bool) -> None:
        page_bytes = 16 * max(head_dim * page_tokens, 16)
        limit = 1 << 24 if capped else max(n_pages * page_bytes, 8192)
        cap = n_pages * page_tokens if capped else None
        self.memory: AttentionMemory = make_attention(page_tokens, head_dim, limit, cap)
        self.seqs: dict[int, list[Token]] = {}
        self.saved: dict[str, list[Token]] = {}
        self.ids = itertools.count(1)
        self.watched: dict[int, tuple[set[str], int, list[bytes]]] = {}

    # -- appending ------------------------------------------------------------------------------

    def new_entries(self, counts: dict[int, tuple[int, int]]) -> list[SeqTokens]:
        return [
            SeqTokens(seq, np.array([next(self.ids) for _ in range(n)], np.int32))
            for seq, (n, _) in counts.items()
        ]

    def extended(self, seq: int, tokens: list[int]) -> list[Token]:
        old = self.seqs.get(seq, [])
        start = max((p for _, p in old), default=-1) + 1
        return old + [(t, start + i) for i, t in enumerate(tokens)]

    def has_tokens(self) -> bool:
        return any(self.seqs.values())

    def pick(self, which: int) -> int:
        """A sequence that holds something."""
        full = sorted(s for s, tokens in self.seqs.items() if tokens)
        return full[which % len(full)]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = snapshot(self.memory)
        yield
        assert snapshot(self.memory) == before

    def no_turns(self) -> bool:
        return all(t.pending is None for t in self.memory._tables.values())

    @precondition(no_turns)
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
        with lease:
            write(lease.ubatch)
            self.memory.audit()
            for row, (seq, tokens) in enumerate(entries):
                seen = sorted(attend(lease.views["full"], row))
                assert seen == sorted(self.extended(seq, tokens.tolist()))
            kept = {seq: min(kept, n) for seq, (n, kept) in counts.items()}
            lease.commit(kept)
        for seq, tokens in entries:
            if kept[seq] or seq in self.seqs:
                self.seqs[seq] = self.extended(seq, tokens[: kept[seq]].tolist())

    @precondition(no_turns)
    @rule(counts=COUNTS)
    def exception_in_a_lease(self, counts: dict[int, tuple[int, int]]) -> None:
        entries = self.new_entries(counts)
        if not self.memory.fits([(e.seq, len(e.tokens)) for e in entries]):
            return
        before = snapshot(self.memory)
        with pytest.raises(Boom), self.memory.reserve(entries) as lease:
            write(lease.ubatch)
            raise Boom
        after = snapshot(self.memory)
        # Slots nobody could see may have been written; everything else is as it was.
        del before["bytes"], after["bytes"]
        assert after == before

    @precondition(no_turns)
    @rule(counts=COUNTS, nth=st.integers(1, 2), broken=st.sampled_from(["pages", "copies"]))
    def failure_while_reserving(
        self, counts: dict[int, tuple[int, int]], nth: int, broken: str
    ) -> None:
        calls = itertools.count(1)
        pool = self.memory.pool
        names = ["allocate", "allocate_one"] if broken == "pages" else ["copy_page"]
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                real = getattr(pool, name)

                def fails(*args: int, real: object = real) -> object:
                    if next(calls) == nth:
                        raise PagesError("injected")
                    return real(*args)  # type: ignore[operator]

                patch.setattr(pool, name, fails)
            with self.unchanged(), suppress(OutOfMemory):
                self.memory.reserve(self.new_entries(counts)).abort()

    @precondition(no_turns)
    @rule(counts=COUNTS, n_ubatch=st.integers(1, 8), stop_after=st.integers(0, 6))
    def batch(self, counts: dict[int, tuple[int, int]], n_ubatch: int, stop_after: int) -> None:
        entries = self.new_entries(counts)
        fits = self.memory.fits([(e.seq, len(e.tokens)) for e in entries])
        before = snapshot(self.memory)
        with self.memory.init_batch(entries, n_ubatch) as context:
            assert context.status is (Status.SUCCESS if fits else Status.FAILED_PREPARE)
            more = fits and stop_after > 0
            while more:
                context.apply()
                self.memory.audit()
                write(context.ubatch)
                assert len(context.ubatch.tokens) <= n_ubatch
                for row, seq in enumerate(context.ubatch.seqs):
                    mine = context.ubatch.tokens[context.ubatch.seq_rows == row]
                    self.seqs[seq] = self.extended(seq, mine.tolist())
                    seen = sorted(attend(context.ubatch.views["full"], row))
                    assert seen == sorted(self.seqs[seq])
                stop_after -= 1
                more = stop_after > 0 and context.next()
        if not fits:
            assert snapshot(self.memory) == before

    @precondition(no_turns)
    @rule()
    def decode(self) -> None:
        """One token more for everybody who has some."""
        self.append({seq: (1, 1) for seq, tokens in self.seqs.items() if tokens} or {0: (3, 3)})

    # -- sequences ------------------------------------------------------------------------------

    @precondition(has_tokens)
    @rule(which=WHICH, counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=2))
    def branch(self, which: int, counts: list[tuple[int, int]]) -> None:
        """A fork; then both may go on in the same step, and may be rejected."""
        src = self.pick(which)
        dst = next((seq for seq in range(7) if not self.seqs.get(seq)), -1)
        if dst < 0:
            self.remove((src + 1) % 7, -1, -1)  # room for the next time
            return
        self.memory.seq_cp(src, dst)
        self.seqs[dst] = list(self.seqs[src])
        growing = {s: c for s, c in zip([dst, src], counts, strict=False) if c[0]}
        if growing and self.no_turns():
            self.append(growing)

    @rule(src=SEQ, dst=SEQ, p0=EDGE, p1=EDGE)
    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        part = [t for t in self.seqs.get(src, []) if inside(t, p0, p1)]
        taken = {p for _, p in self.seqs.get(dst, [])}
        same = {token for token, _ in part} & {token for token, _ in self.seqs.get(dst, [])}
        refused = src not in self.seqs or 0 <= p1 < p0
        refused |= src != dst and any(p in taken for _, p in part)
        if same and src != dst and not refused:
            # The same token at two positions: refused while both are in one slot.
            with suppress(RequestError):
                self.memory.seq_cp(src, dst, p0, p1)
                self.seqs[dst] = self.seqs[dst] + part
            return
        if refused:
            with self.unchanged(), pytest.raises(RequestError):
                self.memory.seq_cp(src, dst, p0, p1)
            return
        self.memory.seq_cp(src, dst, p0, p1)
        if src != dst:
            self.seqs[dst] = self.seqs.get(dst, []) + part

    @precondition(has_tokens)
    @rule(which=WHICH, dst=SEQ, n=st.integers(1, 6))
    def copy_more(self, which: int, dst: int, n: int) -> None:
        """What comes after the end of a sequence; often both have the page already."""
        end = self.memory.seq_pos_max(dst) + 1
        self.copy(self.pick(which), dst, end, end + n)

    @precondition(has_tokens)
    @rule(which=WHICH, where=WHICH, n=st.integers(1, 5))
    def remove_some(self, which: int, where: int, n: int) -> None:
        """A few positions from anywhere, so that holes come up often."""
        seq = self.pick(which)
        p0 = self.seqs[seq][where % len(self.seqs[seq])][1]
        self.remove(seq, p0, p0 + n)

    def remove(self, seq: int, p0: int, p1: int) -> None:
        if 0 <= p1 < p0:
            with self.unchanged(), pytest.raises(RequestError):
                self.memory.seq_rm(seq, p0, p1)
            return
        assert self.memory.seq_rm(seq, p0, p1)
        for s in self.seqs:
            if seq in (-1, s):
                self.seqs[s] = [t for t in self.seqs[s] if not inside(t, p0, p1)]

    @precondition(has_tokens)
    @rule(which=WHICH, n=st.integers(1, 6))
    def rewind(self, which: int, n: int) -> None:
        seq = self.pick(which)
        self.remove(seq, max(self.memory.seq_pos_max(seq) + 1 - n, 0), -1)

    @rule(
        what=st.sampled_from(["free", "remove", "remove", "keep", "clear"]),
        seq=st.integers(-1, 6), p0=EDGE, p1=EDGE,
    )  # fmt: skip
    def destroy(self, what: str, seq: int, p0: int, p1: int) -> None:
        """Everything that may take a lot away, as one rule, so that it stays rare."""
        if what == "remove":
            self.remove(seq, p0, p1)
        elif what == "clear":
            self.memory.clear(data=False)
            self.seqs, self.saved = {}, {}
        elif what == "keep":
            self.keep(seq)
        elif seq >= 0:
            self.memory.seq_free(seq)
            self.seqs.pop(seq, None)

    def keep(self, seq: int) -> None:
        if seq not in self.seqs:
            with self.unchanged(), pytest.raises(RequestError):
                self.memory.seq_keep(seq)
            return
        self.memory.seq_keep(seq)
        self.seqs = {s: (tokens if s == seq else []) for s, tokens in self.seqs.items()}

    @rule(seq=SEQ, p0=EDGE, p1=EDGE, delta=st.integers(-3, 6))
    def add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        tokens = self.seqs.get(seq, [])
        moved = [(t, p + delta) if inside((t, p), p0, p1) else (t, p) for t, p in tokens]
        if seq not in self.seqs or 0 <= p1 < p0 or any(p < 0 for _, p in moved):
            with self.unchanged(), pytest.raises(RequestError):
                self.memory.seq_add(seq, p0, p1, delta)
            return
        self.memory.seq_add(seq, p0, p1, delta)
        self.seqs[seq] = moved

    @rule(seq=SEQ, p0=EDGE, divisor=st.integers(1, 3))
    def divide(self, seq: int, p0: int, divisor: int) -> None:
        if seq not in self.seqs:
            return
        self.memory.seq_div(seq, p0, -1, divisor)
        self.seqs[seq] = [
            (t, p // divisor) if inside((t, p), p0, -1) else (t, p) for t, p in self.seqs[seq]
        ]

    @rule(optimize=st.booleans())
    def update(self, optimize: bool) -> None:
        tables = list(self.memory._tables.values())
        holed = optimize and any((t.position_array() < 0).any() for t in tables)
        before = snapshot(self.memory)
        with self.memory.init_update(optimize) as context:
            if context.status is Status.FAILED_PREPARE:
                pass
            elif holed or not self.no_turns():
                assert context.status is Status.SUCCESS
                context.apply()
                assert self.no_turns()
                assert not optimize or all((t.position_array() >= 0).all() for t in tables)
                return
            else:
                assert context.status is Status.NO_UPDATE
        assert snapshot(self.memory) == before

    # -- checkpoints ----------------------------------------------------------------------------

    @precondition(lambda self: self.has_tokens() and len(self.saved) < 6)
    @rule(which=WHICH)
    def save(self, which: int) -> None:
        seq = self.pick(which)
        self.saved[self.memory.checkpoint_save(seq)] = list(self.seqs[seq])

    @precondition(lambda self: self.saved)
    @rule(seq=SEQ, which=WHICH)
    def restore(self, seq: int, which: int) -> None:
        name = sorted(self.saved)[which % len(self.saved)]
        self.memory.checkpoint_restore(seq, name)
        self.seqs[seq] = list(self.saved[name])

    @precondition(lambda self: self.saved)
    @rule(which=WHICH)
    def delete(self, which: int) -> None:
        name = sorted(self.saved)[which % len(self.saved)]
        self.memory.checkpoint_delete(name)
        del self.saved[name]

    # -- what must hold -------------------------------------------------------------------------

    def held(self) -> dict[str, Table]:
        tables = {f"sequence {s}": t for s, t in self.memory._tables.items()}
        by_name = self.memory.checkpoints.by_name
        return tables | {f"checkpoint {n}": c.table for n, c in by_name.items()}

    @invariant()
    def histories(self) -> None:
        self.memory.audit()
        assert sorted(self.memory._tables) == sorted(self.seqs)
        assert sorted(self.memory.checkpoints.by_name) == sorted(self.saved)
        for seq, tokens in self.seqs.items():
            assert sorted(history(self.memory, self.memory.table(seq))) == sorted(tokens)
            assert self.memory.seq_pos_max(seq) == max((p for _, p in tokens), default=-1)
            assert self.memory.seq_pos_min(seq) == min((p for _, p in tokens), default=-1)
        for name, tokens in self.saved.items():
            table = self.memory.checkpoints.get(name).table
            assert sorted(history(self.memory, table)) == sorted(tokens)

    @invariant()
    def nothing_is_held_in_vain(self) -> None:
        figures = self.memory.stats()["full"]
        assert figures["pages_used"] == len({p for t in self.held().values() for p in t.pages})
        pool = self.memory.pool
        assert sum(self.memory.memory_breakdown()["cpu"].values()) == pool.committed
        # At most two system pages per run of pages are rounding.
        runs = (np.diff(pool.live_pages) > 1).sum() + 1
        assert pool.committed <= pool.used * pool.page_bytes + 2 * 4096 * runs

    @invariant()
    def frozen_slots_never_change(self) -> None:
        """As long as one of a shared page's holders still has it, all saw the same bytes."""
        pool, layout = self.memory.pool, self.memory.layout
        row = layout.type_k.row_bytes(layout.spec.head_dim_k)
        holders: dict[int, set[str]] = {}
        for label, table in self.held().items():
            for page in table.pages.tolist():
                holders.setdefault(page, set()).add(label)

        def frozen_bytes(page: int, slots: int) -> list[bytes]:
            view = pool.view(page)
            return [view[k : k + slots * row].tobytes() for pair in layout.offsets for k in pair]

        for page, (labels, slots, content) in self.watched.items():
            if len(labels & holders.get(page, set())) >= 2:
                assert frozen_bytes(page, slots) == content, f"page {page} changed"
        self.watched = {
            page: (labels, int(pool.frozen[page]), frozen_bytes(page, int(pool.frozen[page])))
            for page, labels in holders.items()
            if len(labels) >= 2
        }

    def teardown(self) -> None:
        for seq in list(self.seqs):
            self.memory.seq_free(seq)
        for name in list(self.saved):
            self.memory.checkpoint_delete(name)
        self.memory.audit()
        assert (self.memory.pool.used, self.memory.pool.committed) == (0, 0)
        assert self.memory.pool.budget.used == 0


def inside(token: Token, p0: int, p1: int) -> bool:
    """Whether a token's position lies in a range."""
    return token[1] >= p0 and (p1 < 0 or token[1] < p1)


def random_step(machine: MemoryMachine, rng: random.Random) -> None:
    """One operation, chosen so that sharing, copying and rolling back come up all the time."""

    def counts(most: int) -> dict[int, tuple[int, int]]:
        some = rng.sample(range(7), rng.randint(1, 3))
        return {seq: (rng.randint(1, most), rng.randint(0, most)) for seq in some}

    def edges() -> tuple[int, int]:
        return (rng.randint(-1, 20), rng.randint(-1, 30))

    which, seq = rng.randrange(1000), rng.randrange(7)
    steps: list[tuple[int, bool, Callable[[], None]]] = [
        (6, machine.no_turns(), lambda: machine.append(counts(6))),
        (4, machine.no_turns(), machine.decode),
        (2, machine.no_turns(), lambda: machine.exception_in_a_lease(counts(6))),
        (
            3,
            machine.no_turns(),
            lambda: machine.failure_while_reserving(
                counts(6), rng.randint(1, 2), rng.choice(["pages", "copies"])
            ),
        ),
        (2, machine.no_turns(), lambda: machine.batch(counts(9), rng.randint(1, 8), which % 7)),
        (
            5,
            machine.has_tokens(),
            lambda: machine.branch(which, [(rng.randint(0, 5), rng.randint(0, 5))] * 2),
        ),
        (1, True, lambda: machine.copy(seq, which % 7, *edges())),
        (4, machine.has_tokens(), lambda: machine.copy_more(which, seq, rng.randint(1, 6))),
        (3, machine.has_tokens(), lambda: machine.rewind(which, rng.randint(1, 6))),
        (2, machine.has_tokens(), lambda: machine.remove_some(which, which, rng.randint(1, 5))),
        (2, True, lambda: machine.add(seq, *edges(), rng.randint(-3, 6))),
        (1, True, lambda: machine.divide(seq, rng.randint(-1, 20), rng.randint(1, 3))),
        (5, not machine.no_turns(), lambda: machine.update(rng.random() < 0.5)),
        (1, True, lambda: machine.update(True)),
        (4, machine.has_tokens() and len(machine.saved) < 6, lambda: machine.save(which)),
        (4, bool(machine.saved), lambda: machine.restore(seq, which)),
        (2, bool(machine.saved), lambda: machine.delete(which)),
        (1, True, lambda: machine.destroy("free", seq, -1, -1)),
        (1, which < 200, lambda: machine.destroy("keep", seq, -1, -1)),
    ]
    able = [(weight, step) for weight, possible, step in steps if possible]
    rng.choices([step for _, step in able], [weight for weight, _ in able])[0]()


@pytest.mark.parametrize(
    ("page_tokens", "head_dim", "n_pages", "capped"),
    [
        (4, 2, 40, True),
        (2, 272, 30, False),
        (16, 1040, 12, False),
        (1, 2, 60, True),
        (4, 272, 60, False),
    ],
)
def test_long_random_walks(page_tokens: int, head_dim: int, n_pages: int, capped: bool) -> None:
    rng = random.Random(page_tokens * 1000 + head_dim)
    machine = MemoryMachine()
    machine.make(page_tokens, head_dim, n_pages, capped)
    for _ in range(400):
        random_step(machine, rng)
        machine.histories()
        machine.nothing_is_held_in_vain()
        machine.frozen_slots_never_change()
    machine.teardown()


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
