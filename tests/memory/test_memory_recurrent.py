"""Recurrent memory: state, log and fold, and a real recurrence that must come out bit for bit."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable
from io import BytesIO
from time import perf_counter_ns
from typing import Any

import fake_kinds
import numpy as np
import pytest
from fake_kernel import FakeOps, entry, make_device, page_address, page_bytes
from fake_kinds import append, check_seq, check_view, empty, snapshot, tokens_at, write
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.devices.device import Fold, GroupKernels
from quire.errors import BudgetError, ModelError, RequestError
from quire.memory.batch import MicroBatch
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout
from quire.memory.groups.state_table import StateTable
from quire.memory.groups.views import StateView
from quire.memory.memory import Memory
from quire.memory.pages.demand import fit_together
from quire.memory.pages.pool import PagePool

LOG = 4
Float = NDArray[np.float32]


class Recurrent(Memory):
    """A memory of one recurrent group, whose things are reached without naming the group."""

    def __init__(self, spec: RecurrentSpec, limit: int, fold: Fold, poison: bool) -> None:
        device, kernels = make_device(Budget(limit)), GroupKernels(fold=fold)
        group = RecurrentGroup(StateLayout(spec), device, kernels, poison)
        super().__init__([group])
        self.layout, self.states, self.logs = group.layout, group.states, group.logs

    def table(self, seq: int) -> StateTable:
        table = self.tables(seq)[0]
        assert isinstance(table, StateTable)
        return table


def make(
    log_tokens: int = LOG, state_bytes: int = 16, limit: int = 1 << 20,
    fold: Fold = fake_kinds.fold, poison: bool = True,
) -> Recurrent:  # fmt: skip
    spec = RecurrentSpec("delta", (1, 3), state_bytes, 12, log_tokens)
    return Recurrent(spec, limit, fold, poison)


@pytest.fixture
def folds() -> list[int]:
    """The number of entries of every fold."""
    return []


@pytest.fixture
def memory(folds: list[int]) -> Recurrent:
    def counted(states: int, logs: int, layout: StateLayout, *rows: NDArray[np.int32]) -> None:
        folds.extend(rows[2].tolist())
        fake_kinds.fold(states, logs, layout, *rows)

    return make(fold=counted)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every copy of a page that is made."""
    made: list[tuple[int, int]] = []
    real = FakeOps.copy_pages

    def counted(ops: FakeOps, base: int, size: int, sources: Any, targets: Any) -> None:
        made.extend(zip(sources.tolist(), targets.tolist(), strict=True))
        real(ops, base, size, sources, targets)

    monkeypatch.setattr(FakeOps, "copy_pages", counted)
    return made


def rows(view: object) -> list[tuple[int, ...]]:
    """state_in, state_out, log_in, log_length, log_out, tail of each sequence."""
    assert isinstance(view, StateView)
    parts = (view.state_in, view.state_out, view.log_in, view.log_length, view.log_out, view.tail)
    assert all(part.dtype == np.int32 and part.flags.c_contiguous for part in parts)
    return list(zip(*(part.tolist() for part in parts), strict=True))


# -- append, fold, scan ---------------------------------------------------------------------------


def test_the_view_says_what_to_read_and_where_to_write(memory: Recurrent) -> None:
    def step(n: int) -> tuple[int, ...]:
        with memory.reserve([entry(0, *range(n))]) as lease:
            write(memory, lease.ubatch)
            lease.commit({0: n})
        return rows(lease.views["delta"])[0]

    assert step(1) == (-1, -1, -1, 0, 0, 0)  # from nothing into a new log
    assert step(2) == (-1, -1, 0, 1, 0, 0)  # behind what it holds
    assert step(1) == (-1, -1, 0, 3, 0, 0)  # and full
    assert step(1) == (0, -1, -1, 0, 1, 0)  # folded: state 0, and a new log
    assert step(2) == (0, -1, 1, 1, 1, 0)
    assert step(3) == (1, -1, -1, 0, 0, 0)  # does not fit: folded before it is full
    assert step(9) == (1, 0, 0, 3, 1, LOG // 2)  # more than a log: a new state, the end in a log
    assert step(1) == (0, -1, 1, LOG // 2, 1, 0)
    assert memory.table(0).next_position == 20 and memory.seq_pos_min(0) == 16
    view = memory.init_full().ubatch.views["delta"]
    assert rows(view) == [(0, 1, 0, LOG, -1, 0)]


def test_decoding_writes_a_state_once_per_log(
    memory: Recurrent, folds: list[int], copies: list[tuple[int, int]]
) -> None:
    for token in range(10 * LOG + 1):
        append(memory, 0, token)
    assert folds == [LOG] * 10 and not copies
    assert (memory.states.used, memory.logs.used) == (1, 1)
    check_seq(memory, 0, tokens_at(*range(10 * LOG + 1)))


def test_a_draft_is_kept_in_part_without_copy_or_replay(
    memory: Recurrent, folds: list[int], copies: list[tuple[int, int]]
) -> None:
    append(memory, 0, *range(100, 109))  # scanned
    append(memory, 0, 1)
    page = memory.table(0).log
    name = memory.checkpoint_save(0)
    for kept in (0, 1):
        n = LOG - memory.table(0).log_length
        append(memory, 0, *range(10, 10 + n), keep=kept)
    assert not folds and not copies and memory.table(0).log == page
    check_seq(memory, 0, tokens_at(*range(100, 109), 1, 10))
    memory.checkpoint_restore(0, name)
    check_seq(memory, 0, tokens_at(*range(100, 109), 1))


def test_nothing_is_folded_before_it_is_kept(memory: Recurrent, folds: list[int]) -> None:
    """A full log of drafts is not folded by the next draft, because it was not all kept."""
    with memory.reserve([entry(0, *range(LOG))]) as lease:
        write(memory, lease.ubatch)
        lease.commit({0: 2})
    with memory.reserve([entry(0, 70, 71, 72)]) as lease:
        write(memory, lease.ubatch)
        check_view(memory, lease.ubatch, 0, tokens_at(0, 1, 70, 71, 72))
        lease.commit({0: 3})
    assert folds == [2]
    with memory.reserve([entry(0, *range(80, 82))]) as lease:
        memory.run(lease.ubatch.work)  # folded for a step that was given up
    assert folds == [2, 3] and memory.table(0).log_length == 3
    assert memory.seq_rm(0, 2, -1)  # so what the fold would have made final can be taken back
    append(memory, 0, 5)
    check_seq(memory, 0, tokens_at(0, 1, 5))


def test_a_fold_changes_neither_state_nor_log(memory: Recurrent) -> None:
    append(memory, 0, *range(9))
    append(memory, 0, *range(9, 9 + LOG))
    memory.seq_cp(0, 1)
    table = memory.table(0)
    pages = (table.state, table.log)
    pools = (memory.states, memory.logs)
    before = [page_bytes(pool, page).tobytes() for pool, page in zip(pools, pages, strict=True)]
    append(memory, 0, 50)
    assert memory.table(0).state != pages[0] and memory.table(0).log != pages[1]
    after = [page_bytes(pool, page).tobytes() for pool, page in zip(pools, pages, strict=True)]
    assert before == after
    check_seq(memory, 1, tokens_at(*range(9 + LOG)))


def test_a_fork_copies_the_log_when_it_appends_and_the_state_never(
    memory: Recurrent, copies: list[tuple[int, int]]
) -> None:
    append(memory, 0, *range(9))
    memory.seq_cp(0, 1)
    assert not copies and (memory.states.used, memory.logs.used) == (1, 1)
    append(memory, 0, 11)  # in place
    assert not copies
    append(memory, 1, 21)
    assert len(copies) == 1 and (memory.states.used, memory.logs.used) == (1, 2)
    append(memory, 1, 22)
    assert len(copies) == 1
    check_seq(memory, 0, tokens_at(*range(9), 11))
    check_seq(memory, 1, tokens_at(*range(9), 21, 22))
    memory.seq_rm(0, 8, -1)
    memory.seq_cp(0, 2)
    memory.seq_free(2)
    append(memory, 0, 31)  # alone again: in place
    assert len(copies) == 1
    check_seq(memory, 0, tokens_at(*range(8), 31))


def test_only_what_the_log_covers_can_be_taken_back(memory: Recurrent) -> None:
    append(memory, 0, *range(6))
    append(memory, 0, 6, 7, 8)
    was = snapshot(memory)
    for p0, p1 in [(5, -1), (1, -1), (0, 3), (-1, 8), (6, 7), (7, 8)]:
        assert not memory.can_rm(0, p0, p1) and not memory.seq_rm(0, p0, p1)
        assert snapshot(memory) == was
    for p0, p1 in [(9, -1), (20, 30), (4, 4), (0, 0)]:
        assert memory.seq_rm(0, p0, p1)  # nothing is there to remove
        assert snapshot(memory) == was
    assert memory.seq_rm(0, 8, -1) and memory.seq_rm(0, 7, 99)
    check_seq(memory, 0, tokens_at(*range(7)))
    assert memory.seq_rm(0, 6, -1) and memory.logs.used == 0
    check_seq(memory, 0, tokens_at(*range(6)))
    append(memory, 1, 1)
    assert not memory.seq_rm(-1, 1, -1)  # one of them cannot
    assert memory.seq_rm(-1, 0, -1) and memory.seq_pos_max(1) == -1
    memory.seq_free(0)
    memory.seq_free(1)
    assert empty(memory)


def test_a_start_is_shared_where_the_log_covers_its_end(memory: Recurrent) -> None:
    append(memory, 0, *range(6))
    append(memory, 0, 6, 7)
    for p0, p1 in [(-1, 3), (1, -1), (6, 8), (1, 2)]:
        with pytest.raises(RequestError, match=r"cannot be taken out of a state.*copy from 0"):
            memory.seq_cp(0, 1, p0, p1)
    assert memory.seqs == [0]
    for dst, p1 in [(1, 6), (2, 7), (3, 8), (4, 99), (5, 0)]:
        memory.seq_cp(0, dst, 0, p1)
        check_seq(memory, dst, tokens_at(*range(min(p1, 8))))
    assert (memory.states.used, memory.logs.used) == (1, 1)
    with pytest.raises(RequestError, match="cannot be joined"):
        memory.seq_cp(0, 1)
    memory.seq_cp(0, 1, 20, 30)  # nothing of it is there
    check_seq(memory, 1, tokens_at(*range(6)))


@pytest.mark.parametrize("n_ubatch", [1, 3, LOG, LOG + 1, 9])
@pytest.mark.parametrize("shared", [False, True])
def test_a_long_prompt_takes_two_states_however_many_micro_batches(
    n_ubatch: int, shared: bool
) -> None:
    memory = make()
    append(memory, 0, *range(9))
    append(memory, 0, 9)
    if shared:
        memory.checkpoint_save(0)
    most = 0
    with memory.init_batch([entry(0, *range(100, 150))], n_ubatch) as context:
        while True:
            context.apply()
            write(memory, context.ubatch)
            memory.audit()
            most = max(most, memory.states.used, memory.logs.used)
            if not context.next():
                break
    assert most <= 2 + shared
    check_seq(memory, 0, tokens_at(*range(10), *range(100, 150)))


def test_states_kept_for_later_go_when_the_budget_is_short() -> None:
    size = 1 << 16
    memory = make(state_bytes=size // 2, limit=3 * size + 3 * 4096)
    append(memory, 0, *range(9))
    append(memory, 1, *range(9))
    append(memory, 2, 1)  # two states are used, and there is room for a third
    memory.seq_rm(1, 0, -1)
    assert (memory.states.used, memory.states.committed) == (1, 2 * size)
    other = PagePool("other", size, 4, memory.devices[0])
    assert fit_together([(other, 2)]) and not fit_together([(other, 3)])
    other.allocate(2)
    assert memory.states.committed == size
    memory.audit()


# -- declaring ------------------------------------------------------------------------------------


def test_pages_hold_layer_after_layer() -> None:
    layout = StateLayout(RecurrentSpec("d", (0, 2, 5), 100, 70, 16))
    assert layout.state_page_bytes == 3 * 128 and layout.log_page_bytes == 3 * 16 * 128
    assert layout.log_stride == 128
    assert layout.offsets == ((0, 0), (128, 2048), (256, 4096))
    assert layout.by_layer == dict(zip((0, 2, 5), layout.offsets, strict=True))
    some = StateLayout(layout.spec.only(lambda layer: layer > 1))
    assert some.layers == (2, 5) and some.by_layer == {2: (0, 0), 5: (128, 2048)}
    assert some.state_page_bytes * 3 == layout.state_page_bytes * 2
    with pytest.raises(ModelError, match="no layer"):
        layout.spec.only(lambda layer: layer > 9)


@pytest.mark.parametrize(
    "wrong",
    [{"layers": ()}, {"layers": (1, 1)}, {"state_bytes": 0}, {"log_bytes": 0}, {"log_tokens": 0}],
)
def test_groups_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"name": "odd", "layers": (0,), "state_bytes": 8, "log_bytes": 8}
    with pytest.raises(ModelError, match="odd"):
        RecurrentSpec(**(fields | wrong))  # type: ignore[arg-type]


def test_a_budget_too_small_for_one_state_is_said_at_once() -> None:
    with pytest.raises(BudgetError, match="raise memory_budget"):
        make(state_bytes=1 << 20, limit=1 << 20)


# -- a real recurrence ----------------------------------------------------------------------------

DIM = 8
"""Keys and values of one head."""


def raw_inputs(token: int, layer: int) -> Float:
    """k, v, decay and rate of a token: what goes into the log."""
    rng = np.random.default_rng((token, layer))
    k = rng.standard_normal(DIM).astype(np.float32)
    k /= np.sqrt((k * k).sum())
    v = rng.standard_normal(DIM).astype(np.float32)
    gates = rng.uniform([0.9, 0.1], [1.0, 0.9]).astype(np.float32)
    return np.concatenate([k, v, gates])


def gated_delta(state: Float, raw: Float) -> Float:
    """S ← αS + β(v − αSk)kᵀ, in float32."""
    k, v, alpha, beta = raw[:DIM], raw[DIM : 2 * DIM], raw[-2], raw[-1]
    decayed = alpha * state
    result: Float = decayed + np.outer(beta * (v - decayed @ k), k)
    assert result.dtype == np.float32
    return result


def floats(address: int, n: int) -> Float:
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(address))


def state_at(page: int, layout: StateLayout, row: int) -> Float:
    if page == 0:
        return np.zeros((DIM, DIM), np.float32)
    return floats(page + layout.offsets[row][0], DIM * DIM).reshape(DIM, DIM)


def entry_at(log: int, layout: StateLayout, row: int, index: int) -> Float:
    return floats(log + layout.offsets[row][1] + index * layout.log_stride, 2 * DIM + 2)


def replay(state: Float, log: int, n: int, layout: StateLayout, row: int) -> Float:
    for index in range(n):
        state = gated_delta(state, entry_at(log, layout, row, index))
    return state


def fold_gated(
    states: int, logs: int, layout: StateLayout, state_in: NDArray[np.int32],
    log: NDArray[np.int32], n_entries: NDArray[np.int32], state_out: NDArray[np.int32],
) -> None:  # fmt: skip
    for start, entries, n, out in zip(
        state_in.tolist(), log.tolist(), n_entries.tolist(), state_out.tolist(), strict=True
    ):
        source = states + start * layout.state_page_bytes if start >= 0 else 0
        target = states + out * layout.state_page_bytes
        raw = logs + entries * layout.log_page_bytes
        for row in range(len(layout.layers)):
            state = replay(state_at(source, layout, row), raw, n, layout, row)
            state_at(target, layout, row)[:] = state


def run_gated(memory: Recurrent, ubatch: MicroBatch) -> None:
    """Appends raw inputs to logs, and scans where the view asks for it."""
    memory.run(ubatch.work)
    states, logs = memory.states.bytes.base, memory.logs.bytes.base
    view = ubatch.views["delta"]
    assert isinstance(view, StateView)
    layout = view.layout

    def page(address: int, size: int, pages: NDArray[np.int32], row: int) -> int:
        return address + int(pages[row]) * size if pages[row] >= 0 else 0

    for row, at in itertools.product(range(len(ubatch.seqs)), range(len(layout.layers))):
        tokens = ubatch.tokens[ubatch.seq_rows == row].tolist()
        log_in = page(logs, view.log_page_bytes, view.log_in, row)
        log_out = page(logs, view.log_page_bytes, view.log_out, row)
        state_in = page(states, view.state_page_bytes, view.state_in, row)
        state_out = page(states, view.state_page_bytes, view.state_out, row)
        length = int(view.log_length[row])
        raws = [raw_inputs(token, layout.layers[at]) for token in tokens]
        if state_out:
            state = replay(state_at(state_in, layout, at), log_in, length, layout, at)
            tail = int(view.tail[row])
            for raw in raws[: len(raws) - tail]:
                state = gated_delta(state, raw)
            state_at(state_out, layout, at)[:] = state
            for i, raw in enumerate(raws[len(raws) - tail :]):
                entry_at(log_out, layout, at, i)[:] = raw
        else:
            for i, raw in enumerate(raws):
                entry_at(log_out, layout, at, length + i)[:] = raw


def current(memory: Recurrent, seq: int) -> list[bytes]:
    """The state of a sequence after all its tokens, layer by layer, bit for bit."""
    table = memory.table(seq)
    state = page_address(memory.states, table.state) if table.state >= 0 else 0
    log = page_address(memory.logs, table.log) if table.log >= 0 else 0
    return [
        replay(state_at(state, memory.layout, row), log, table.log_length, memory.layout, row)
        .copy()
        .tobytes()
        for row in range(len(memory.layers))
    ]


class Plain:
    """The plain recurrence: the state after every token of a sequence, kept in full."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        zero = np.zeros((DIM, DIM), np.float32)
        self.layers = layers
        self.states: list[list[Float]] = [[zero for _ in layers]]

    def add(self, token: int) -> None:
        inputs = [raw_inputs(token, layer) for layer in self.layers]
        last = self.states[-1]
        self.states.append([gated_delta(s, raw) for s, raw in zip(last, inputs, strict=True)])

    def copy(self) -> Plain:
        twin = Plain(self.layers)
        twin.states = list(self.states)
        return twin

    def bits(self) -> list[bytes]:
        return [state.tobytes() for state in self.states[-1]]


def test_5000_tokens_with_drafts_forks_and_folds_are_the_plain_recurrence_bit_for_bit() -> None:
    spec = RecurrentSpec("delta", (0, 4), DIM * DIM * 4, (2 * DIM + 2) * 4)
    memory = Recurrent(spec, 1 << 22, fold_gated, poison=True)
    rng = random.Random(5)
    plain = {0: Plain(spec.layers)}
    saved: dict[str, Plain] = {}
    ids = itertools.count()

    def step(seq: int, n: int, kept: int) -> None:
        tokens = [next(ids) for _ in range(n)]
        with memory.reserve([entry(seq, *tokens)]) as lease:
            run_gated(memory, lease.ubatch)
            lease.commit({seq: kept})
        for token in tokens[:kept]:
            plain[seq].add(token)

    step(0, 40, 40)
    while len(plain[0].states) <= 5000:
        draft = rng.choice((1, 1, 2, 4, 8))
        step(0, draft, rng.randint(1, draft))
        what = rng.random()
        if what < 0.02:
            memory.seq_cp(0, 1)
            plain[1] = plain[0].copy()
            for _ in range(rng.randint(1, 9)):
                step(1, 3, rng.randint(0, 3))
            assert current(memory, 1) == plain[1].bits()
            if rng.random() < 0.5:  # the fork goes on as the sequence itself
                memory.seq_free(0)
                memory.seq_cp(1, 0)
                plain[0] = plain[1]
            memory.seq_free(1)
        elif what < 0.03:
            saved[memory.checkpoint_save(0, f"at {len(saved)}")] = plain[0].copy()
        elif what < 0.035 and saved:
            name = rng.choice(sorted(saved))
            if len(plain[0].states) - len(saved[name].states) < 100:
                memory.checkpoint_restore(0, name)
                plain[0] = saved[name].copy()
        elif what < 0.05:
            step(0, 20, rng.choice((0, 12, 17, 20)))  # a scan in between
        if what > 0.9:
            assert current(memory, 0) == plain[0].bits()
            memory.audit()
    assert current(memory, 0) == plain[0].bits()
    assert np.isfinite(plain[0].states[-1][0]).all()


# -- checkpoints of large states ------------------------------------------------------------------


def best_us(operation: Callable[[], object]) -> float:
    """The time an operation takes when nothing else gets in its way."""
    times = []
    for _ in range(200):
        start = perf_counter_ns()
        operation()
        times.append(perf_counter_ns() - start)
    return sorted(times)[20] / 1000


@pytest.mark.parametrize("mib", [1, 20, 200])
def test_checkpoints_take_microseconds_whatever_the_size(
    mib: int, copies: list[tuple[int, int]]
) -> None:
    memory = make(16, state_bytes=mib << 19, limit=6 * (mib << 20), poison=False)
    append(memory, 0, *range(30))
    append(memory, 0, 30)
    names = (f"mark {i}" for i in itertools.count())
    save = best_us(lambda: memory.checkpoint_save(0, next(names)))
    name = memory.checkpoint_save(0, "here")
    restore = best_us(lambda: memory.checkpoint_restore(0, name))
    for saved in list(memory.checkpoints.by_name):
        if saved != name:
            memory.checkpoint_delete(saved)
    times: list[int] = []
    for _ in range(20):
        append(memory, 0, *range(40))  # scanned: a new state
        start = perf_counter_ns()
        memory.checkpoint_restore(0, name)  # lets go of a state that nobody else holds
        times.append(perf_counter_ns() - start)
    dropping = sorted(times)[2] / 1000
    assert not copies and memory.states.used == 1
    assert max(save, restore, dropping) < 20, (save, restore, dropping)


# -- states of any position, where logs are folded by position ------------------------------------


@pytest.mark.parametrize("held", range(1, 3 * LOG + 2))
@pytest.mark.parametrize("shared", [False, True])
def test_logs_of_other_devices_go_on(held: int, shared: bool) -> None:
    """A log that was kept by what fits is read, and then folded by position; drafts included."""
    source = fake_kinds.make_kind("recurrent")
    for token in range(held):
        append(source, 0, token)
        if token % 3 == 0:
            append(source, 0, 900, 901, keep=0)
    file = BytesIO()
    source.state_write(file)
    for n, kept in itertools.product(range(1, 2 * LOG + 2), range(LOG + 2)):
        file.seek(0)
        memory = fake_kinds.make_kind("recurrent, by position")
        memory.state_read(file)
        if shared:
            memory.checkpoint_save(0)
        expected = [*range(held)]
        for _ in range(3):
            keep = min(kept, n) if n <= LOG else n
            drafts = range(200, 200 + n)
            assert memory.fits([(0, n)])
            with memory.reserve([entry(0, *drafts)]) as lease:
                write(memory, lease.ubatch)
                check_view(memory, lease.ubatch, 0, tokens_at(*expected, *drafts))
                memory.audit()
                lease.commit({0: keep})
            expected += drafts[:keep]
            check_seq(memory, 0, tokens_at(*expected))
            memory.audit()
