"""The prefix index: never a wrong token, never a foreign one, and the longest match there is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from fake_kernel import (
    FakeOps,
    Single,
    append,
    entry,
    history,
    make_attention,
    make_device,
    make_layout,
    snapshot,
    tokens_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from quire.devices.budget import Budget
from quire.errors import RequestError
from quire.memory.groups.attention import AttentionGroup
from quire.memory.prefix import entries as entries_module
from quire.memory.prefix.entries import ROOT_BYTES, Entries, Entry, make_place
from quire.memory.prefix.index import PrefixIndex
from quire.memory.prefix.keys import Keys
from quire.memory.tokens import Tokens

Ids = tuple[int, ...]
STEP = 3


class Stepped(Single):
    """Goes back no further than the last multiple of STEP, as a state page and its log would."""

    refusals = 0

    def reaches(self, seq: int, n: int) -> bool:
        return n <= 0 or n >= (self.seq_pos_max(seq) + 1) // STEP * STEP

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        if not self.reaches(seq, p0):
            self.refusals += 1
            return False
        return super().seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        if p1 >= 0 and not self.reaches(src, p1):
            raise RequestError(f"sequence {src} has no state at {p1}")
        super().seq_cp(src, dst, p0, p1)


def make_stepped(page_tokens: int = 4, max_tokens: int | None = None) -> Stepped:
    layout, device = make_layout(page_tokens), make_device(Budget(1 << 20))
    return Stepped(AttentionGroup(layout, device, max_tokens=max_tokens, poison=True))


Make = Callable[..., Single]
KINDS: dict[str, Make] = {"attention": make_attention, "stepped": make_stepped}


def can_cut(kind: str, length: int, n: int) -> bool:
    """Whether a kind, holding so many tokens, can go back to the first n."""
    return n == length or kind == "attention" or n >= length // STEP * STEP


class Clock:
    """Time that passes when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def lcp(a: Ids, b: Ids) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def held(index: PrefixIndex) -> list[Ids]:
    """The tokens of every entry, in order."""
    places = [entry.place[ROOT_BYTES:] for entry in index._kept.entries]
    return [tuple(np.frombuffer(place, np.int32).tolist()) for place in places]


def empty(memory: Single) -> bool:
    memory.audit()
    return (memory.pool.used, memory.pool.committed, memory.pool.budget.used) == (0, 0, 0)


@pytest.fixture(params=sorted(KINDS))
def make(request: pytest.FixtureRequest) -> Make:
    return KINDS[request.param]


@pytest.fixture
def memory(make: Make) -> Single:
    return make()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(memory: Single, clock: Clock) -> PrefixIndex:
    return PrefixIndex(memory, 4, clock=clock)


def compute(index: PrefixIndex, *tokens: int, salt: str = "") -> int:
    """A new sequence of these tokens, from the index as far as it goes."""
    memory = index.memory
    assert isinstance(memory, Single)
    seq = memory.seq_new()
    n = index.adopt(seq, tokens, salt)
    assert tokens_of(memory, seq) == list(tokens[:n])
    if n < len(tokens):
        append(memory, seq, *tokens[n:])
    assert tokens_of(memory, seq) == list(tokens)
    return seq


def keep(index: PrefixIndex, *tokens: int, salt: str = "", **how: object) -> None:
    """Retains these tokens; the sequence that computed them ends."""
    seq = compute(index, *tokens, salt=salt)
    assert index.insert(seq, tokens, salt, **how)  # type: ignore[arg-type]
    index.memory.seq_free(seq)


def adopts(index: PrefixIndex, *tokens: int, salt: str = "") -> int:
    """How many tokens a new sequence would get; it ends at once."""
    seq = index.memory.seq_new()
    n = index.adopt(seq, tokens, salt)
    index.memory.audit()
    index.memory.seq_free(seq)
    return n


# -- finding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(1, 10))
@pytest.mark.parametrize("same", range(10))
def test_a_match_ends_at_any_token(kept: int, same: int) -> None:
    memory = make_attention()
    index = PrefixIndex(memory, 4)
    keep(index, *range(10, 10 + kept))
    prompt = (*range(10, 10 + same), *range(90, 95))
    seq = compute(index, *prompt)
    stats = index.stats()
    assert stats["tokens_saved"] == min(kept, same)
    assert stats["hits"] + sum(stats["misses"].values()) == 2
    memory.seq_free(seq)
    assert adopts(index, *range(10, 30)) == kept  # what it gave is still what it was
    index.close()
    assert empty(memory)


def test_a_prompt_that_is_known_whole_computes_nothing(index: PrefixIndex) -> None:
    keep(index, 1, 2, 3, 4, 5)
    assert adopts(index, 1, 2, 3, 4, 5) == 5
    assert adopts(index, 1, 2, 3, 4, 5, 6) == 5


def test_the_best_of_many_is_found_with_few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_attention(page_tokens=16, limit=1 << 26)
    index = PrefixIndex(memory, 16)
    rng = np.random.default_rng(1)
    base = rng.integers(0, 9, 40)
    for i in range(300):
        keep(index, *base[: i % 40].tolist(), 50 + i, *rng.integers(0, 9, 3).tolist())
    calls: list[int] = []
    real = entries_module.common

    def counted(a: bytes, b: bytes) -> int:
        calls.append(0)
        return real(a, b)

    monkeypatch.setattr(entries_module, "common", counted)
    for n in range(1, 40):
        calls.clear()
        assert adopts(index, *base[:n].tolist(), 49) == n
        assert len(calls) <= 2


def test_lists_and_arrays_are_the_same_tokens(index: PrefixIndex) -> None:
    keep(index, 5, 6, 7)
    for tokens in ([5, 6, 7], np.array([5, 6, 7], np.int32), np.array([5, 6, 7], np.int64)):
        seq = index.memory.seq_new()
        assert index.adopt(seq, tokens) == 3
        index.memory.seq_free(seq)


def test_adopting_moves_no_bytes_and_appending_copies_at_most_one_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = make_attention()
    index = PrefixIndex(memory, 4)
    keep(index, *range(10))
    used, copies = memory.pool.used, []
    real = FakeOps.copy_pages

    def counted(ops: FakeOps, base: int, size: int, sources: Any, targets: Any) -> None:
        copies.extend(sources.tolist())
        real(ops, base, size, sources, targets)

    monkeypatch.setattr(FakeOps, "copy_pages", counted)
    seq = memory.seq_new()
    assert index.adopt(seq, [*range(6), 77]) == 6
    assert memory.pool.used == used and not copies
    append(memory, seq, 77)
    assert memory.pool.used == used + 1 and len(copies) == 1


# -- salts ----------------------------------------------------------------------------------------


def test_different_salts_never_share(index: PrefixIndex) -> None:
    salts = ["", "a", "b", "ab", "a b", "\x00", "\ud800"]
    tokens = tuple(range(1, 10))
    for salt in salts:
        assert adopts(index, *tokens, salt=salt) == 0
        seq = compute(index, *tokens, salt=salt)
        index.insert(seq, tokens, salt)
        index.track(seq, Tokens(tokens), salt)
    stats = index.stats()
    assert stats["hits"] == 0 and stats["entries"] == len(salts)
    # The first salt found nothing at all; the others missed what only other salts have.
    assert stats["misses"] == {"new": 2, "salt": 2 * len(salts) - 2} | dict.fromkeys(
        ["evicted", "no state here", "short"], 0
    )
    assert [adopts(index, *tokens, salt=salt) for salt in salts] == [9] * len(salts)


def test_a_root_stands_for_model_layout_and_salt_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Keys(4, "m").root("s") != Keys(4, "m").root("s")  # each is seeded anew
    monkeypatch.setattr("os.urandom", lambda n: bytes(n))
    assert Keys(4, "m").root("s") == Keys(4, "m").root("s")
    different = [(4, "m", "s"), (8, "m", "s"), (4, "n", "s"), (4, "m", "t"), (4, "ms", "")]
    assert len({Keys(page, model).root(salt) for page, model, salt in different}) == 5


# -- sequences that run ---------------------------------------------------------------------------


def test_a_running_sequence_is_shared_as_far_as_it_is_computed(index: PrefixIndex) -> None:
    memory = index.memory
    prompt = tuple(range(20, 32))
    first, tokens = memory.seq_new(), Tokens(prompt)
    index.track(first, tokens)
    assert adopts(index, *prompt) == 0
    append(memory, first, *prompt[:6])
    assert adopts(index, *prompt) == 6
    append(memory, first, *prompt[6:])
    assert adopts(index, *prompt) == 12
    append(memory, first, 50)
    tokens.extend([50, 51])  # 51 was sampled and is not computed yet
    assert adopts(index, *prompt, 50, 51) == 13
    index.untrack(first)
    assert adopts(index, *prompt) == 0


def test_a_rewound_sequence_gives_what_it_has_now() -> None:
    memory = make_attention()
    index = PrefixIndex(memory, 4)
    seq, tokens = compute(index, 1, 2, 3, 4, 5, 6), Tokens([1, 2, 3, 4, 5, 6])
    index.track(seq, tokens)
    assert memory.seq_rm(seq, 3, -1)
    assert adopts(index, 1, 2, 3, 4) == 3  # before its tokens say so
    tokens.truncate(3)
    append(memory, seq, 9, 9)
    tokens.extend([9, 9])
    assert adopts(index, 1, 2, 3, 4) == 3
    assert adopts(index, 1, 2, 3, 9, 9) == 5


def test_a_sequence_does_not_share_from_itself(index: PrefixIndex) -> None:
    seq = index.memory.seq_new()
    index.track(seq, Tokens([1, 2, 3]))
    assert index.adopt(seq, [1, 2, 3]) == 0


# -- positions that memory cannot restore ---------------------------------------------------------


def test_what_is_refused_leaves_no_trace_and_the_next_best_is_taken() -> None:
    memory = make_stepped()
    index = PrefixIndex(memory, 4)
    keep(index, 1, 2, 3, 4)
    keep(index, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    seq = memory.seq_new()
    before = snapshot(memory)
    assert index.adopt(seq, [1, 2, 3, 4, 5, 6, 7, 8, 50]) == 4  # 8 match, the state is at 9
    assert index.matched == 8
    assert tokens_of(memory, seq) == [1, 2, 3, 4]
    memory.seq_rm(seq, -1, -1)
    assert snapshot(memory) == before
    assert index.stats()["tokens_refused"] == 4
    assert adopts(index, *range(1, 10), 50) == 9  # within the log
    assert index.adopt(seq, [1, 2, 60]) == 0
    assert snapshot(memory) == before
    assert index.stats()["misses"]["no state here"] == 1


def test_a_refusal_is_not_asked_for_twice() -> None:
    memory = make_stepped()
    index = PrefixIndex(memory, 4)
    keep(index, *range(1, 8))
    refusals = []
    for n in (3, 3, 2, 4, 1, 5):
        adopts(index, *range(1, n + 1), 99)
        refusals.append(memory.refusals)
    assert refusals == [1, 1, 1, 2, 2, 3]


def test_a_running_sequence_may_refuse_too() -> None:
    memory = make_stepped()
    index = PrefixIndex(memory, 4)
    seq = compute(index, *range(1, 9))
    index.track(seq, Tokens(range(1, 9)))
    assert adopts(index, 1, 2, 3, 4, 99) == 0
    assert adopts(index, 1, 2, 3, 4, 5, 6, 7, 99) == 7
    keep(index, 1, 2, 3, 88)
    assert adopts(index, 1, 2, 3, 4, 99) == 3  # refused at 4, taken at 3
    memory.audit()


# -- reasons --------------------------------------------------------------------------------------


def test_every_miss_has_a_reason(memory: Single) -> None:
    index = PrefixIndex(memory, 4, min_tokens=3)

    def reason(*tokens: int, salt: str = "") -> str:
        before = index.stats()["misses"]
        assert adopts(index, *tokens, salt=salt) == 0
        after = index.stats()["misses"]
        (changed,) = (why for why in after if after[why] != before[why])
        assert after[changed] == before[changed] + 1
        return changed

    assert reason(1, 2, 3, 4, 5, 6) == "new"
    keep(index, 1, 2, 3, 4, 5, 6)
    assert reason() == reason(1) == reason(8, 8) == "short"
    assert reason(1, 2, 50, 51, 52) == "short"
    assert reason(7, 7, 7, 7) == "new"
    assert reason(1, 2, 3, 4, 9, salt="x") == "salt"
    assert reason(1, 2, 3, 9, 9, salt="x") == "new"
    index.min_tokens = 6  # more than a page
    assert reason(1, 2, 3, 4, 5, 9) == "short"
    index.min_tokens = 3
    assert index.evict_one()
    assert reason(1, 2, 3, 4, 9) == "evicted"
    assert reason(1, 2, 3, 4, 9, salt="x") == "new"
    keep(index, 1, 2, 3, 4, 5, 6)
    assert adopts(index, 1, 2, 3, 4, 5, 6) == 6
    index.forget()
    assert reason(1, 2, 3, 4, 9) == "new"


def test_what_is_remembered_of_evicted_prompts_is_bounded(
    index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.memory.prefix.kept._REMEMBERED", 2)
    for first in (1, 2, 1, 3):
        keep(index, first, 0, 0, 0)
        index.evict_one()
    misses = {}
    for first in (1, 2, 3):
        before = index.stats()["misses"]["evicted"]
        adopts(index, first, 0, 0, 0)
        misses[first] = index.stats()["misses"]["evicted"] - before
    assert misses == {1: 1, 2: 0, 3: 1}  # 2 was evicted longest ago


# -- retaining ------------------------------------------------------------------------------------


def test_a_place_is_not_held_twice(index: PrefixIndex) -> None:
    memory = index.memory
    assert isinstance(memory, Single)
    keep(index, 1, 2, 3, 4, 5)
    used = memory.pool.used
    other = memory.seq_new()
    append(memory, other, 1, 2, 3, 4, 5)
    assert index.insert(other, [1, 2, 3, 4, 5])
    memory.seq_free(other)
    assert memory.pool.used == used and index.stats()["entries"] == 1
    assert len(memory.checkpoints.by_name) == 1


def test_a_place_within_another_costs_nothing_and_bytes_are_told() -> None:
    memory = make_attention()
    index = PrefixIndex(memory, 4)
    page = memory.pool.page_bytes
    seq = compute(index, *range(8))
    index.insert(seq, range(8))
    append(memory, seq, *range(8, 12))
    index.insert(seq, range(12))
    assert memory.pool.used == 3 and index.stats()["bytes_only_here"] == 0
    memory.seq_free(seq)
    assert memory.pool.used == 3 and index.stats()["bytes_only_here"] == 3 * page
    assert index.evict_one() and held(index) == [tuple(range(8))]
    assert memory.pool.used == 2 and index.stats()["bytes_only_here"] == 2 * page


def test_what_is_said_must_be_what_is_held(index: PrefixIndex) -> None:
    seq = compute(index, 1, 2, 3)
    empty_one = index.memory.seq_new()
    for wrong in ([1, 2], [1, 2, 3, 4], []):
        with pytest.raises(RequestError, match="holds 3 tokens"):
            index.insert(seq, wrong)
    with pytest.raises(RequestError, match="at least one"):
        index.insert(empty_one, [])
    with pytest.raises(RequestError, match="only an empty one"):
        index.adopt(seq, [1, 2, 3])
    with pytest.raises(RequestError, match="start at 0"):
        index.adopt(empty_one, [1, -1])
    for how in ({"ttl_s": 5.0}, {"pin": True, "ttl_s": 0.0}, {"pin": True, "ttl_s": -1.0}):
        with pytest.raises(RequestError, match="ttl_s"):
            index.insert(seq, [1, 2, 3], **how)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="min_tokens"):
        PrefixIndex(index.memory, 4, min_tokens=0)
    assert index.stats()["entries"] == 0


def test_nothing_changes_while_a_lease_is_open(index: PrefixIndex) -> None:
    memory = index.memory
    keep(index, 1, 2, 3)
    seq, other = compute(index, 7, 8), memory.seq_new()
    with memory.reserve([entry(seq, 9)]):
        for call in (
            lambda: index.adopt(other, [1, 2, 3]),
            lambda: index.insert(seq, [7, 8, 9]),
            index.evict_one,
            index.forget,
        ):
            with pytest.raises(RequestError, match="open lease"):
                call()
    assert held(index) == [(1, 2, 3)] and adopts(index, 1, 2, 3) == 3


def test_the_index_itself_is_bounded(memory: Single, clock: Clock) -> None:
    index = PrefixIndex(memory, 4, max_bytes=3 * (ROOT_BYTES + 4 * 4), clock=clock)
    for first in (1, 2, 3):
        keep(index, first, 0, 0, 0)
    assert adopts(index, 1, 0, 0, 0) == 4
    keep(index, 4, 0, 0, 0)  # 2 was not used for longest
    assert held(index) == [(1, 0, 0, 0), (3, 0, 0, 0), (4, 0, 0, 0)]
    for first in (1, 3, 4):
        keep(index, first, 0, 0, 0, pin=True, ttl_s=10)
    seq = compute(index, 5, 0, 0, 0)
    assert not index.insert(seq, [5, 0, 0, 0])  # all are pinned
    clock.now += 10
    assert index.insert(seq, [5, 0, 0, 0])
    big = compute(index, *range(50))
    assert not index.insert(big, range(50)) and len(held(index)) == 3
    stats = index.stats()
    assert stats["bytes_index"] == 3 * (ROOT_BYTES + 4 * 4) and stats["evictions"] == 2


# -- letting go -----------------------------------------------------------------------------------


def test_least_recently_used_goes_first(index: PrefixIndex) -> None:
    for first in (1, 2, 3):
        keep(index, first, 0, 0, 0)
    adopts(index, 1, 0, 0)
    keep(index, 2, 0, 0, 0)
    gone = []
    while index.evict_one():
        left = [tokens[0] for tokens in held(index)]
        gone += [first for first in (1, 2, 3) if first not in [*left, *gone]]
        index.memory.audit()
    assert gone == [3, 1, 2] and index.stats()["evictions"] == 3


def test_what_is_cheap_to_compute_for_its_bytes_goes_before_what_is_dear(
    index: PrefixIndex,
) -> None:
    keep(index, 1, 2, 3, 4, 5, 6, 7, 8)  # 4 tokens a page, but older
    keep(index, 9)  # 1 token a page
    assert index.evict_one() and held(index) == [(1, 2, 3, 4, 5, 6, 7, 8)]
    for _ in range(5):
        keep(index, 9)
    assert index.evict_one() and held(index) == [(9,)]  # too old even for a dear one


def test_what_frees_nothing_goes_last(index: PrefixIndex) -> None:
    running = compute(index, 1, 2, 3, 4, 5)
    index.insert(running, [1, 2, 3, 4, 5])
    keep(index, 7, 7, 7, 7)
    assert index.evict_one() and held(index) == [(1, 2, 3, 4, 5)]
    assert index.evict_one() and held(index) == []
    assert tokens_of(index.memory, running) == [1, 2, 3, 4, 5]  # type: ignore[arg-type]


def test_what_only_an_entry_holds_is_known_after_others_went(index: PrefixIndex) -> None:
    seq = compute(index, 1, 2, 3, 4)
    index.insert(seq, [1, 2, 3, 4])
    append(index.memory, seq, 5, 6, 7, 8)  # type: ignore[arg-type]
    index.insert(seq, [1, 2, 3, 4, 5, 6, 7, 8])
    index.memory.seq_free(seq)
    keep(index, 9, 9, 9, 9)
    assert index.evict_one() and held(index) == [(1, 2, 3, 4), (9, 9, 9, 9)]
    assert index.evict_one() and held(index) == [(9, 9, 9, 9)]


def test_the_least_recently_used_are_weighed_by_the_bytes_that_go() -> None:
    """So many are looked at; whoever was used after them is safe, however little it is worth."""
    memory = make_attention(page_tokens=64, limit=1 << 22)
    index = PrefixIndex(memory, 64)
    dear = [(first, *[0] * 63) for first in range(100, 116)]  # a page for 64 tokens
    for tokens in (*dear, (1,), (2,)):
        keep(index, *tokens)
    seq, used = memory.seq_new(), memory.pool.used
    assert index.evict_one() and held(index) == [(1,), (2,), *dear[1:]]  # 1 was the seventeenth
    assert index.adopt(seq, [1]) == 1  # now it would free nothing
    adopts(index, 2)
    assert index.evict_one() and held(index) == [(1,), (2,), *dear[2:]]
    memory.seq_free(seq)
    assert index.evict_one() and held(index) == [(2,), *dear[2:]]  # a page for one token
    assert index.evict_one() and held(index) == dear[2:]
    assert memory.pool.used == used - 4


def test_what_the_index_keeps_alive_is_counted_exactly(index: PrefixIndex) -> None:
    memory = index.memory
    assert isinstance(memory, Single)
    page = memory.pool.page_bytes
    seq = compute(index, *range(10))
    index.insert(seq, range(10))
    assert index.held_bytes == 0 and memory.stats()["full"]["pages_cached"] == 3
    append(memory, seq, 10, 11)
    index.insert(seq, range(12))
    name = memory.checkpoint_save(seq)  # not the index's
    memory.seq_free(seq)
    assert index.held_bytes == 0
    memory.checkpoint_delete(name)
    assert index.held_bytes == 3 * page
    assert memory.memory_breakdown()["cpu"]["full: cached prefixes"] == 3 * page
    other = memory.seq_new()
    assert index.adopt(other, range(10)) == 10
    assert index.held_bytes == 0
    append(memory, other, 50)  # the last page is copied
    assert index.held_bytes == page
    memory.audit()
    index.close()
    assert memory.stats()["full"]["pages_cached"] == 0
    memory.seq_free(other)
    assert empty(memory)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_within_a_longer_one_is_dear_where_memory_cannot_cut_back(kind: str) -> None:
    index = PrefixIndex(memory := KINDS[kind](), 4)
    other, inner, outer = (7,) * 6, (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 9)
    for tokens in (other, inner, outer):  # each in pages of its own, as states are
        append(memory, seq := memory.seq_new(), *tokens)
        index.insert(seq, tokens)
        memory.seq_free(seq)
    adopts(index, 1, 99)  # refused by one of the two kinds
    for tokens in (other, inner, outer):
        adopts(index, *tokens)
    assert index.evict_one()
    # The outer one can stand in for the inner one, or is only one token more than it.
    assert held(index) == [outer if kind == "attention" else inner, other]


def test_pins_hold_until_their_time_is_over(index: PrefixIndex, clock: Clock) -> None:
    keep(index, 1, 1, pin=True)
    keep(index, 2, 2, pin=True, ttl_s=10)
    keep(index, 3, 3)
    assert index.stats()["pinned"] == 2
    assert index.evict_one() and not index.evict_one()
    clock.now += 9.5
    keep(index, 2, 2, pin=True, ttl_s=2)  # until 11.5; a shorter pin shortens nothing
    keep(index, 1, 1, pin=True, ttl_s=1)
    clock.now += 1.5
    assert not index.evict_one() and index.stats()["pinned"] == 2
    clock.now += 0.5
    assert index.stats()["pinned"] == 1
    assert adopts(index, 2, 2) == 2  # over, but still there
    assert index.evict_one() and held(index) == [(1, 1)] and not index.evict_one()
    index.forget()
    assert held(index) == [] and empty(index.memory)  # type: ignore[arg-type]


def test_eviction_makes_room(make: Make) -> None:
    memory = make(max_tokens=16)
    index = PrefixIndex(memory, 4)
    for first in range(4):
        keep(index, first, 0, 0, 0)
    seq = memory.seq_new()
    assert not memory.fits([(seq, 8)])
    while not memory.fits([(seq, 8)]):
        assert index.evict_one()
    assert held(index) == [(2, 0, 0, 0), (3, 0, 0, 0)]
    append(memory, seq, *range(8))


def test_a_salt_can_be_forgotten(index: PrefixIndex) -> None:
    for salt in ("a", "b", "c"):
        for tokens in ((1, 2), (1, 2, 3), (9,)):
            keep(index, *tokens, salt=salt, pin=True)
    index.forget("b")
    assert [adopts(index, 1, 2, 3, salt=salt) for salt in "abc"] == [3, 0, 3]
    assert index.stats()["entries"] == 6
    index.close()
    assert empty(index.memory)  # type: ignore[arg-type]


def test_close_gives_everything_back(index: PrefixIndex) -> None:
    seq = compute(index, 1, 2, 3)
    index.insert(seq, [1, 2, 3], pin=True)
    index.track(seq, Tokens([1, 2, 3]))
    index.close()
    assert adopts(index, 1, 2, 3) == 0 and index.stats()["live"] == 0
    index.memory.seq_free(seq)
    assert empty(index.memory)  # type: ignore[arg-type]


# -- the order of places, against all pairs -------------------------------------------------------

ROOTS = (b"\x00" * 16, b"\xff" * 16)
ENDS = st.lists(st.sampled_from([0, 255, 2**31 - 1]), max_size=3)
PLACE = st.builds(
    # A common trunk, so that many have something in common.
    lambda root, cut, end: make_place(root, [7, 0, 7, 255][:cut] + end or [0]),
    st.sampled_from(ROOTS), st.integers(0, 4), ENDS,
)  # fmt: skip


def pair_common(a: bytes, b: bytes) -> int:
    if a[:16] != b[:16]:
        return 0
    words = [tuple(np.frombuffer(x[16:], np.int32).tolist()) for x in (a, b)]
    return lcp(words[0], words[1])


@settings(max_examples=300, deadline=None)
@given(st.lists(PLACE, max_size=16, unique=True), st.data())
def test_order_finds_what_comparing_all_pairs_finds(
    known: list[bytes], data: st.DataObject
) -> None:
    places = Entries()
    entries = {place: Entry(str(i), place) for i, place in enumerate(known)}
    for added in entries.values():
        places.add(added)
    for place in data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []:
        places.remove(entries.pop(place))
    asked, least = data.draw(PLACE), data.draw(st.integers(1, 3))

    found = list(places.matches(asked, least))
    wanted = {p: pair_common(p, asked) for p in entries}
    assert {e.place: n for n, e in found} == {p: n for p, n in wanted.items() if n >= least}
    assert len({id(e) for _, e in found}) == len(found)
    assert [n for n, _ in found] == sorted((n for n, _ in found), reverse=True)
    for n in {n for n, _ in found}:
        level = [e.length for m, e in found if m == n]
        assert level[0] == n or n not in level  # whoever ends there comes first
    for root in ROOTS:
        assert {e.place for e in places.under(root)} == {p for p in entries if p[:16] == root}
    assert (places.find(asked) is entries.get(asked)) or asked not in entries

    for cuts_back in (True, False):
        for one in places:
            cost = places.cost(one, cuts_back)
            others = {p: pair_common(p, one.place) for p in entries if p != one.place}
            ends_within = [n for p, n in others.items() if n == (len(p) - 16) // 4]
            best = max(others.values() if cuts_back else ends_within, default=0)
            assert cost == one.length - best


# -- everything at once, against brute force ------------------------------------------------------

SALT = st.sampled_from(["", "", "", "x"])
FEW = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
WHICH = st.integers(0, 99)


class Running:
    """What the model knows of a sequence."""

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.tokens: Ids = ()
        """What is computed."""
        self.live: Tokens | None = None
        """What the index was told to look at, if it was."""


class PrefixMachine(RuleBasedStateMachine):
    """An index over a small memory, and lists that are compared with each other."""

    kind = "attention"

    @initialize(page_tokens=st.sampled_from([1, 2, 4, 16]), n_pages=st.integers(6, 40))
    def start(self, page_tokens: int, n_pages: int) -> None:
        self.memory = KINDS[self.kind](page_tokens, max_tokens=max(n_pages * page_tokens, 20))
        self.clock = Clock()
        self.index = PrefixIndex(self.memory, page_tokens, clock=self.clock)
        self.runs: dict[int, Running] = {}
        self.kept: dict[tuple[str, Ids], float] = {}
        self.adopted = self.hits = 0
        self.prompts: list[Ids] = [()]

    def pick(self, which: int) -> int:
        return sorted(self.runs)[which % len(self.runs)]

    def longest(self, tokens: Ids, salt: str) -> int:
        """The most that anybody can give, by looking at everybody."""
        sources = [t for s, t in self.kept if s == salt]
        sources += [r.tokens for r in self.runs.values() if r.live is not None and r.salt == salt]
        common = [(lcp(source, tokens), len(source)) for source in sources]
        return max((n for n, length in common if can_cut(self.kind, length, n)), default=0)

    def room(self, seq: int, count: int) -> bool:
        while not self.memory.fits([(seq, count)]):
            if not self.evict_one():
                return False
        return True

    @rule(which=WHICH, cut=st.integers(0, 14), end=FEW, salt=SALT, announce=st.booleans())
    def request(self, which: int, cut: int, end: Ids, salt: str, announce: bool) -> None:
        """A prompt that begins as an earlier one did."""
        if len(self.runs) == 6:
            self.finish(which)
        tokens = (self.prompts[which % len(self.prompts)][:cut] + end)[:16]
        self.prompts.append(tokens)
        seq = self.memory.seq_new()
        run = self.runs[seq] = Running(salt)
        if announce:
            run.live = Tokens(tokens)
            self.index.track(seq, run.live, salt)
        wanted = self.longest(tokens, salt)
        n = self.index.adopt(seq, tokens, salt)
        assert n == wanted
        self.adopted += n
        self.hits += n > 0
        run.tokens = tokens[:n]
        if n < len(tokens) and self.room(seq, len(tokens) - n):
            append(self.memory, seq, *tokens[n:])
            run.tokens = tokens
        if run.live is not None:
            run.live.truncate(len(run.tokens))

    @precondition(lambda self: self.runs)
    @rule(which=WHICH, tokens=FEW, known=st.booleans())
    def grow(self, which: int, tokens: Ids, known: bool) -> None:
        seq = self.pick(which)
        run = self.runs[seq]
        if not self.room(seq, len(tokens)):
            return
        if known and run.live is not None:  # before they are computed
            run.live.extend(tokens)
        append(self.memory, seq, *tokens)
        if not known and run.live is not None:
            run.live.extend(tokens)
        run.tokens += tokens

    @precondition(lambda self: self.runs)
    @rule(which=WHICH, to=st.integers(0, 12))
    def rewind(self, which: int, to: int) -> None:
        run = self.runs[seq := self.pick(which)]
        to = min(to, len(run.tokens))
        if self.memory.seq_rm(seq, to, -1):
            run.tokens = run.tokens[:to]
            if run.live is not None:
                run.live.truncate(to)

    @precondition(lambda self: self.runs)
    @rule(which=WHICH)
    def track(self, which: int) -> None:
        run = self.runs[seq := self.pick(which)]
        run.live = Tokens(run.tokens)
        self.index.track(seq, run.live, run.salt)

    @precondition(lambda self: self.runs)
    @rule(which=WHICH, pin=st.booleans(), ttl=st.sampled_from([None, 1.0, 5.0]))
    def insert(self, which: int, pin: bool, ttl: float | None) -> None:
        if (run := self.runs[seq := self.pick(which)]).tokens:
            assert self.index.insert(seq, run.tokens, run.salt, pin, ttl if pin else None)
            until = float("-inf")
            if pin:
                until = float("inf") if ttl is None else self.clock.now + ttl
            key = (run.salt, run.tokens)
            self.kept[key] = max(self.kept.get(key, until), until)

    @precondition(lambda self: self.runs)
    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        seq = self.pick(which)
        self.index.untrack(seq)
        self.memory.seq_free(seq)
        del self.runs[seq]

    @rule()
    def evict(self) -> None:
        self.evict_one()

    def evict_one(self) -> bool:
        loose = {key for key, until in self.kept.items() if until <= self.clock.now}
        assert self.index.evict_one() == bool(loose)
        there = set(self.places())
        gone = [key for key in self.kept if key not in there]
        assert len(gone) == bool(loose) and loose.issuperset(gone)
        for key in gone:
            del self.kept[key]
        return bool(gone)

    @rule(seconds=st.sampled_from([0.5, 4.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(salt=st.sampled_from(["", "x", "y", "z"]))
    def forget(self, salt: str) -> None:
        self.index.forget(salt)
        self.kept = {key: until for key, until in self.kept.items() if key[0] != salt}

    def places(self) -> Iterator[tuple[str, Ids]]:
        salts = {self.index._keys.root(salt): salt for salt in ("", "x")}
        for found, tokens in zip(self.index._kept.entries, held(self.index), strict=True):
            yield salts[found.place[:ROOT_BYTES]], tokens

    @invariant()
    def everything_reads_back(self) -> None:
        self.memory.audit()
        for seq, run in self.runs.items():
            assert tokens_of(self.memory, seq) == list(run.tokens)
        places = list(self.places())
        assert sorted(places) == sorted(self.kept)
        saved = self.memory.checkpoints.by_name
        assert len(saved) == len(places)
        for found, (_, tokens) in zip(self.index._kept.entries, places, strict=True):
            read = history(self.memory.group, self.memory.saved_table(found.name))
            assert read == [(token, i) for i, token in enumerate(tokens)]

    @invariant()
    def figures_agree(self) -> None:
        stats = self.index.stats()
        assert (stats["hits"], stats["tokens_saved"]) == (self.hits, self.adopted)
        assert stats["entries"] == len(self.kept)
        assert stats["pinned"] == sum(until > self.clock.now for until in self.kept.values())
        kept = {p for name in self.index.names for p in self.memory.saved_table(name).pages}
        running = {p for seq in self.runs for p in self.memory.table(seq).pages}
        assert stats["bytes_only_here"] == len(kept - running) * self.memory.pool.page_bytes
        assert self.memory.stats()["full"]["pages_cached"] == len(kept)
        assert stats["bytes_index"] == sum(ROOT_BYTES + 4 * len(t) for _, t in self.kept)
        assert stats["misses"]["no state here"] == 0 or self.kind != "attention"

    def teardown(self) -> None:
        for seq in list(self.runs):
            self.memory.seq_free(seq)
        self.index.close()
        assert empty(self.memory)
        self.memory.close()


class SteppedMachine(PrefixMachine):
    """The same over a memory that refuses."""

    kind = "stepped"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("machine", [PrefixMachine, SteppedMachine])
def test_long_random_runs(machine: type[PrefixMachine], seed: int) -> None:
    """Hypothesis keeps its runs short; these go on until memory is full and long after."""
    pick = random.Random(seed)
    run = machine()
    page_tokens = [1, 2, 4, 16][seed]
    run.start(page_tokens, pick.randint(80, 160) // page_tokens + 6)

    def few() -> Ids:
        return tuple(pick.choices(range(3), k=pick.randint(1, 4)))

    def number() -> int:
        return pick.randrange(100)

    for _ in range(400):
        name = pick.choices(
            ["request", "grow", "insert", "rewind", "track", "finish", "evict", "wait", "forget"],
            [10, 5, 8, 3, 2, 3, 2, 2, 0.2],
        )[0]  # fmt: skip
        if name == "request":
            salt = pick.choice(["", "", "x"])
            run.request(number(), pick.randrange(15), few(), salt, pick.random() < 0.5)
        elif name == "evict":
            run.evict()
        elif name == "wait":
            run.wait(1.0)
        elif name == "forget":
            run.forget(pick.choice(["", "x"]))
        elif run.runs:
            arguments = {
                "grow": (few(), pick.random() < 0.5),
                "insert": (pick.random() < 0.2, pick.choice([1.0, 5.0])),
                "rewind": (pick.randrange(12),),
            }
            getattr(run, name)(number(), *arguments.get(name, ()))
        run.everything_reads_back()
        run.figures_agree()
    stats = run.index.stats()
    assert stats["hits"] > 15 and stats["evictions"] > 10  # it was a run worth its time
    run.teardown()


_SETTINGS = settings(
    max_examples=50, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = _SETTINGS
TestSteppedMachine = SteppedMachine.TestCase
TestSteppedMachine.settings = _SETTINGS
