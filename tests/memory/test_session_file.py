"""Saved state of every kind: the same after reading it, or refused and nothing changed."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from fake_kernel import entry, history, page_address
from fake_kinds import (
    KINDS,
    LOG_TOKENS,
    _entry,
    _start,
    append,
    check_saved,
    check_seq,
    empty,
    make_kind,
    snapshot,
    tables_of,
    tokens_at,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import BudgetError, OutOfMemory, PagesError, RequestError, SessionFileError
from quire.memory.groups.attention import AttentionGroup
from quire.memory.groups.layout import MAX_POSITION
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_table import StateTable
from quire.memory.groups.table import Table
from quire.memory.memory import Memory
from quire.memory.saved.check import VERSION
from quire.memory.saved.types import Extra, Found, StateFlags
from quire.memory.tiers.tiers import HostTier

HYBRID = "window, attention and recurrent"


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def written(memory: Memory, seq: int = -1, **more: Any) -> bytes:
    out = BytesIO()
    memory.state_write(out, seq, **more)
    return out.getvalue()


def read(memory: Memory, data: bytes, seq: int = -1, **more: Any) -> Any:
    return memory.state_read(BytesIO(data), seq, **more)


def everything(memory: Memory) -> object:
    """All that a refusal must leave as it is."""
    memory.audit()
    budget = memory.pools[0].budget
    names = list(memory.checkpoints.by_name)
    return snapshot(memory), memory.stats(), memory.seqs, names, budget.used


def family(memory: Memory) -> dict[int | str, list[tuple[int, int]]]:
    """A trunk, two branches, an empty sequence and two checkpoints, sharing what they can."""
    append(memory, 0, *range(100, 121))
    append(memory, 0, 121)
    memory.checkpoint_save(0, "early")
    memory.seq_cp(0, 3)
    append(memory, 0, 122, 123)
    append(memory, 3, 200)
    append(memory, 3, 201, 202, 203, keep=1)
    memory.checkpoint_save(3, "late")
    memory.seq_cp(3, 7)
    append(memory, 7, 300)
    assert memory.seq_new() == 1
    trunk = range(100, 122)
    return {
        0: tokens_at(*trunk, 122, 123),
        3: tokens_at(*trunk, 200, 201),
        7: tokens_at(*trunk, 200, 201, 300),
        1: [],
        "early": tokens_at(*trunk),
        "late": tokens_at(*trunk, 200, 201),
    }


def check_family(memory: Memory, expected: dict[int | str, list[tuple[int, int]]]) -> None:
    memory.audit()
    for label, tokens in expected.items():
        if isinstance(label, int):
            check_seq(memory, label, tokens)
        else:
            check_saved(memory, label, tokens)


# -- round trips ----------------------------------------------------------------------------------


def test_all_that_is_held_comes_back_and_stays_shared(kind: str) -> None:
    memory, other = make_kind(kind), make_kind(kind)
    expected = family(memory)
    was = everything(memory)
    data = written(memory)
    assert everything(memory) == was
    done = read(other, data)
    assert other.seqs == [0, 1, 3, 7] and sorted(done.seqs) == other.seqs
    assert done.checkpoints == {"early": "early", "late": "late"}
    check_family(other, expected)
    for mine, theirs in zip(memory.pools, other.pools, strict=True):
        assert mine.used == theirs.used
        assert sorted(mine.refs[mine.live_pages]) == sorted(theirs.refs[theirs.live_pages])
    assert written(other) == data
    other.clear(data=False)
    assert empty(other)


def test_going_on_after_reading_is_going_on_without(kind: str) -> None:
    memory, other = make_kind(kind), make_kind(kind)
    expected = family(memory)
    read(other, written(memory))
    for step in range(3 * LOG_TOKENS):
        for seq in (0, 3, 7):
            for one in (memory, other):
                append(one, seq, 1000 * seq + step)
            tokens = expected[seq]
            tokens.append((1000 * seq + step, len(tokens)))
        check_family(other, expected)
    for seq, name in ((0, "late"), (3, "early"), (9, "late")):
        for one in (memory, other):
            one.checkpoint_restore(seq, name)
            append(one, seq, 7000, 7001, keep=1)
        expected[seq] = [*expected[name], (7000, len(expected[name]))]
    check_family(other, expected)
    check_family(memory, expected)


def test_a_sequence_goes_under_another_id_with_its_checkpoints(kind: str) -> None:
    memory, other = make_kind(kind), make_kind(kind)
    expected = family(memory)
    append(other, 0, *range(50, 60))
    other.checkpoint_save(0, "early")
    data = written(memory, 3, checkpoints=["early"])
    done = read(other, data, 5)
    now = done.checkpoints["early"]
    assert done.seqs == (5,) and now != "early"
    check_family(other, {0: tokens_at(*range(50, 60)), 5: expected[3], now: expected["early"]})
    append(other, 5, 77)
    check_family(other, {5: [*expected[3], (77, len(expected[3]))], now: expected["early"]})
    # What only the others held is not in the file.
    held = sum(pool.used for pool in make_and_read(kind, data, 2).pools)
    assert held < sum(pool.used for pool in memory.pools)


def make_and_read(kind: str, data: bytes, seq: int) -> Memory:
    memory = make_kind(kind)
    read(memory, data, seq)
    return memory


def test_a_checkpoint_goes_through_bytes(kind: str) -> None:
    memory, other = make_kind(kind), make_kind(kind)
    expected = family(memory)
    data = memory.checkpoint_to_bytes("late", model="m")
    assert other.checkpoint_from_bytes(data, model="m") == "late"
    again = other.checkpoint_from_bytes(data, model="m")
    assert again != "late"
    assert other.checkpoint_from_bytes(data, "mine", model="m") == "mine"
    with pytest.raises(RequestError, match="mine"):
        other.checkpoint_from_bytes(data, "mine", model="m")
    check_family(other, {name: expected["late"] for name in ("late", again, "mine")})
    other.checkpoint_restore(4, again)
    append(other, 4, 9)
    check_family(other, {4: [*expected["late"], (9, len(expected["late"]))]})
    timings = (memory.checkpoints.timings, other.checkpoints.timings)
    assert (timings[0]["to_bytes"].count, timings[1]["from_bytes"].count) == (1, 3)
    with pytest.raises(RequestError, match="nobody"):
        memory.checkpoint_to_bytes("nobody")


def test_extra_comes_back(kind: str) -> None:
    memory, other = make_kind(kind), make_kind(kind)
    append(memory, 0, 1, 2, 3)
    arrays = {"ids": np.arange(5, dtype=np.int32), "x y": np.array([[0.1, -0.0]], np.float32)}
    data = written(memory, 0, extra=Extra({"a": [1, "✓", None]}, arrays))
    seen: list[Found] = []
    extra = read(other, data, 0, check=seen.append).extra
    assert extra.facts == {"a": [1, "✓", None]} and extra.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert extra.arrays[name].tobytes() == array.tobytes()
        assert (extra.arrays[name].dtype, extra.arrays[name].shape) == (array.dtype, array.shape)
    assert seen[0].ends == {0: 3}


@pytest.mark.parametrize("kind", ["attention", "window", "window and attention"])
def test_holes_moves_and_turns_come_back(kind: str) -> None:
    memory, other = make_kind(kind), make_kind(kind)
    append(memory, 0, *range(20))
    expected = [(t, t) for t in range(20)]
    assert memory.seq_rm(0, 15, 17)
    expected = [t for t in expected if not 15 <= t[1] < 17]
    memory.seq_add(0, 18, -1, 5)
    expected = [(t, p + 5 if p >= 18 else p) for t, p in expected]
    data = written(memory)
    read(other, data)
    check_family(other, {0: expected})
    assert written(other) == data
    with other.init_update() as update:
        update.apply()
    append(other, 0, 99)
    check_family(other, {0: [*expected, (99, expected[-1][1] + 1)]})


_steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "draft", "fork", "mark", "restore", "remove", "cut", "free"]),
        st.integers(0, 3),
        st.integers(0, 12),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), steps=_steps, seed=st.integers(0, 1000))
def test_any_history_comes_back(kind: str, steps: list[tuple[str, int, int]], seed: int) -> None:
    memory, other = make_kind(kind), make_kind(kind)
    token = 0
    for what, seq, n in steps:
        if what in ("append", "draft"):
            tokens = range(token, token + n + 1 if what == "append" else token + min(n, 4) + 1)
            append(memory, seq, *tokens, keep=None if what == "append" else len(tokens) // 2)
            token += 20
        elif seq not in memory.seqs:
            continue
        elif what == "fork":
            memory.seq_free(seq + 10)
            memory.seq_cp(seq, seq + 10)
        elif what == "mark":
            memory.checkpoint_save(seq)
        elif what == "restore" and memory.checkpoints.by_name:
            names = list(memory.checkpoints.by_name)
            memory.checkpoint_restore(seq, names[n % len(names)])
        elif what == "remove":
            memory.seq_rm(seq, n, n + 2)
        elif what == "cut":
            memory.seq_rm(seq, memory.seq_pos_max(seq) - n // 4, -1)
        elif what == "free":
            memory.seq_free(seq)
    data = written(memory)
    read(other, data)
    other.audit()
    assert other.seqs == memory.seqs and written(other) == data
    assert [pool.used for pool in other.pools] == [pool.used for pool in memory.pools]
    # Both go on alike, whoever has to copy which page.
    chosen = random.Random(seed)
    for seq in memory.seqs:
        tokens = [chosen.randrange(10**6) for _ in range(chosen.randrange(1, 9))]
        for one in (memory, other):
            append(one, seq, *tokens)
            one.audit()
        ends = {one.seq_pos_max(seq) for one in (memory, other)}
        assert len(ends) == 1
    assert contents(memory) == contents(other)


def contents(memory: Memory) -> object:
    """What every holder can see, whatever its pages are called."""
    out: list[object] = []
    for group in memory.groups:
        for label, table in sorted(tables_of(memory, group).items()):
            if isinstance(group, RecurrentGroup):
                assert isinstance(table, StateTable)
                state = page_address(group.states, table.state) if table.state >= 0 else 0
                log = page_address(group.logs, table.log) if table.log >= 0 else 0
                for row in range(len(group.layout.layers)):
                    entries = [
                        _entry(log, group.layout, row, i).tolist() for i in range(table.log_length)
                    ]
                    out.append((label, _start(state, group.layout, row), entries))
            else:
                assert isinstance(group, AttentionGroup) and isinstance(table, Table)
                out.append((label, history(group, table), table.next_position))
    return out


# -- partial --------------------------------------------------------------------------------------


def test_a_partial_state_goes_with_attention_that_is_there(kind: str) -> None:
    memory, partial = make_kind(kind), StateFlags.PARTIAL
    append(memory, 0, *range(20))
    append(memory, 0, 20)
    data = written(memory, 0, flags=partial)
    whole = written(memory, 0)
    assert len(data) < len(whole) or "full" not in KINDS[kind]
    memory.seq_cp(0, 4)
    append(memory, 4, 30)
    before = everything(memory)
    if "full" in KINDS[kind]:
        for seq in (4, 5):  # it ends elsewhere, or is not there
            with pytest.raises(RequestError, match="partial"):
                read(memory, data, seq, flags=partial)
    assert everything(memory) == before
    used = [pool.used for pool in memory.pools]
    read(memory, data, 0, flags=partial)
    check_family(memory, {0: tokens_at(*range(21)), 4: tokens_at(*range(21), 30)})
    append(memory, 0, 21, 22)
    check_family(memory, {0: tokens_at(*range(23)), 4: tokens_at(*range(21), 30)})
    for pool, before_used in zip(memory.pools, used, strict=True):
        if pool.name == "full":
            assert pool.used <= before_used + 1
    memory.checkpoint_save(0, "x")
    with pytest.raises(RequestError, match="partial"):
        written(memory, 0, flags=partial, checkpoints=["x"])
    with pytest.raises(SessionFileError, match="partial"):
        read(memory, data, 6)
    with pytest.raises(SessionFileError, match="whole"):
        read(memory, whole, 6, flags=partial)


# -- refusals -------------------------------------------------------------------------------------


def small(kind: str) -> tuple[bytes, Memory, Callable[[bytes], None]]:
    """A small file, a memory that holds something, and what must refuse a file without a trace."""
    source = make_kind(kind, page_tokens=1 if "recurrent" not in kind else 2)
    append(source, 0, 5, 6)
    source.checkpoint_save(0, "m")
    target = make_kind(kind, page_tokens=1 if "recurrent" not in kind else 2)
    append(target, 2, 8, 9, 10)
    target.checkpoint_save(2, "m")
    was = everything(target)

    def refused(data: bytes) -> None:
        with pytest.raises(SessionFileError, match=r"^story\.quire: "):
            read(target, data, source="story.quire", model="abc")
        assert target.seqs == [2]

    def refused_without_a_trace(data: bytes) -> None:
        refused(data)
        assert everything(target) == was

    data = written(source, model="abc")
    refused_without_a_trace(data[:-1])
    return data, target, refused_without_a_trace


def test_truncated_at_every_byte(kind: str) -> None:
    data, target, refused = small(kind)
    was = everything(target)
    for length in range(len(data)):
        with pytest.raises(SessionFileError):
            read(target, data[:length], model="abc")
    assert everything(target) == was
    refused(data + b"\0")
    read(target, data, model="abc")
    check_family(target, {0: tokens_at(5, 6), 2: tokens_at(8, 9, 10)})


def test_every_bit_of_the_header_flipped(kind: str) -> None:
    data, target, _ = small(kind)
    header = 8 + int.from_bytes(data[:8], "little")
    was = everything(target)
    for at in range(header):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(SessionFileError):
                read(target, bytes(bad), model="abc")
    assert everything(target) == was


def test_bits_of_the_data_flipped(kind: str) -> None:
    data, _, refused = small(kind)
    header = 8 + int.from_bytes(data[:8], "little")
    chosen = random.Random(1)
    places = {header, len(data) - 1, *(chosen.randrange(header, len(data)) for _ in range(60))}
    for at in places:
        bad = bytearray(data)
        bad[at] ^= 1 << chosen.randrange(8)
        refused(bytes(bad))


def forged(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header, whose checksum is right."""
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    change(header)
    header["__metadata__"]["checksum"] = "0" * 64
    return sealed(json.dumps(header, separators=(",", ":")).encode(), data[length:])


def sealed(raw: bytes, rest: bytes) -> bytes:
    whole = len(raw).to_bytes(8, "little") + raw
    return whole.replace(b"0" * 64, blake2b(whole, digest_size=32).hexdigest().encode(), 1) + rest


def change_state(change: Callable[[Any], None]) -> Callable[[dict[str, Any]], None]:
    def applied(header: dict[str, Any]) -> None:
        state = json.loads(header["__metadata__"]["state"])
        change(state)
        header["__metadata__"]["state"] = json.dumps(state)

    return applied


def set_field(group: str, field: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(state: Any) -> None:
        table = state["sequences"][0]["tables"][group]
        assert field in table
        table[field] = value

    return change_state(change)


def set_meta(field: str, value: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update({field: value})


def drop(*path: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for step in path[:-1]:
            tree = tree[step]
        del tree[path[-1]]

    return change


def test_a_forged_header_needs_more_than_a_checksum() -> None:
    data, target, _ = small(HYBRID)
    assert read_ok(forged(data, lambda header: None))
    assert target.seqs == [2]


def read_ok(data: bytes) -> bool:
    memory = make_kind(HYBRID, page_tokens=2)
    read(memory, data, model="abc")
    check_family(memory, {0: tokens_at(5, 6), "m": tokens_at(5, 6)})
    return True


HUGE = 10**4000
NUMBERS = [-2, 1, 7, 2**31, 2**63, HUGE, True, None, "0", [], {}]


@pytest.mark.parametrize(
    "change",
    [
        *(set_field("full", "pages", [n]) for n in NUMBERS),
        *(set_field("full", "pages", n) for n in ([], [0, 0], "ab", None)),
        *(set_field("full", "length", n) for n in (-1, 0, 1, 3, HUGE, None)),
        *(set_field("full", "first", n) for n in (-1, 1, MAX_POSITION, HUGE, None, "a")),
        *(set_field("full", "positions", n) for n in ([0], [0, -1], [-1, -1], [0, 2**31], "ab")),
        *(set_field("full", "positions", n) for n in ([0, 1, 2], [0, HUGE], [-2, 1], {})),
        *(set_field("full", "pending", n) for n in ([1], [0, 2**40], "a", [5, 5])),
        *(set_field("full", "lost", n) for n in ([0, 1], [1, 0], [-1, 0], [0], None, [0, HUGE])),
        *(set_field("local", "lost", n) for n in ([0, 2], [0, HUGE])),
        *(set_field("delta", "state", n) for n in (0, 1, -2, HUGE, None)),
        *(set_field("delta", "log", n) for n in (-1, 1, HUGE, None)),
        *(set_field("delta", "log_length", n) for n in (0, 1, LOG_TOKENS + 1, -1, HUGE, None)),
        *(set_field("delta", "position", n) for n in (1, -1, 2**31, HUGE, None, True)),
    ],
)  # fmt: skip
def test_forged_tables_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    data, _, refused = small(HYBRID)
    refused(forged(data, change))


@pytest.mark.parametrize(
    "change",
    [
        *(change_state(lambda s, n=n: s["sequences"][0].update(seq=n))
          for n in (-1, 2**31 - 1, 2**40, HUGE, None, "0", True)),
        change_state(lambda s: s["sequences"].append(s["sequences"][0])),
        change_state(lambda s: s["checkpoints"].append(s["checkpoints"][0])),
        change_state(lambda s: s["checkpoints"][0].update(name=3)),
        change_state(lambda s: s["checkpoints"][0].update(seq=-3)),
        change_state(lambda s: s.update(more=1)),
        change_state(lambda s: s.update(sequences={})),
        change_state(lambda s: s["sequences"][0].update(more=1)),
        change_state(lambda s: s["sequences"][0].update(kept={"full": {}})),
        change_state(drop("sequences", 0, "tables", "full")),
        change_state(drop("sequences", 0, "tables", "full", "lost")),
        change_state(lambda s: s.update(sequences=[], checkpoints=[])),
        set_meta("state", "[" * 100_000),
        set_meta("state", "{"),
        set_meta("state", '{"sequences":[],"sequences":[],"checkpoints":[]}'),
        set_meta("state", "[1.5]"),
        set_meta("state", "NaN"),
        set_meta("extra", "3"),
        set_meta("layout", "{}"),
        set_meta("digests", "{}"),
        *(drop("__metadata__", key) for key in ("state", "extra", "layout", "digests", "model")),
        drop("pages full"),
        lambda header: header["pages full"].update(dtype="F64"),
        lambda header: header["pages full"].update(dtype=["U8"]),
        lambda header: header["pages full"].update(shape=[2**62, 2**62]),
        lambda header: header["pages full"].update(shape=[-1, -256]),
        lambda header: header["pages full"].update(data_offsets=[0]),
        lambda header: header["pages full"].update(data_offsets=[0, HUGE]),
        lambda header: header["pages full"].update(data_offsets="01"),
        lambda header: header.update({"pages full": 3}),
        lambda header: header["__metadata__"].update(more=3),
    ],
)  # fmt: skip
def test_forged_headers_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    data, _, refused = small(HYBRID)
    refused(forged(data, change))


def test_headers_that_are_too_large_or_double() -> None:
    data, _, refused = small("attention")
    for length in (0, 1, 95, len(data), 2**26 + 1, 2**40, 2**63, 2**64 - 1):
        refused(length.to_bytes(8, "little") + data[8:])
    end = 8 + int.from_bytes(data[:8], "little")
    start = b'{"__metadata__":{"checksum":"' + b"0" * 64
    raw = data[8 + len(start) : end].rstrip()
    refused(sealed(start + raw[:-1] + b',"__metadata__":{}}', data[end:]))
    refused(b"")
    refused(bytes(500))
    refused(random.Random(3).randbytes(5000))


def test_other_models_layouts_and_versions_are_named() -> None:
    def refusal(change: Callable[[dict[str, Any]], None]) -> str:
        with pytest.raises(SessionFileError) as error:
            read(make_kind(HYBRID, page_tokens=2), forged(data, change), model="abc")
        return str(error.value)

    def layout(group: str, field: str, value: object) -> Callable[[dict[str, Any]], None]:
        def change(header: dict[str, Any]) -> None:
            found = json.loads(header["__metadata__"]["layout"])
            assert field in found[group]
            found[group][field] = value
            header["__metadata__"]["layout"] = json.dumps(found)

        return change

    data, _, _ = small(HYBRID)
    assert "another model" in refusal(set_meta("model", "xyz"))
    for version in (VERSION - 1, VERSION + 1):
        assert f"version '{version}'" in refusal(set_meta("version", str(version)))
    assert "format" in refusal(set_meta("format", "pt"))
    assert "kind" in refusal(set_meta("kind", "sequence"))
    for group, field, value in (
        ("full", "type_k", "q8_0"), ("full", "type_v", "bf16"), ("full", "page_tokens", 32),
        ("full", "n_kv_heads", 2), ("full", "head_dim_k", 4), ("full", "layers", [0]),
        ("local", "window", 9), ("local", "kind", "attention"), ("delta", "state_bytes", 1),
        ("delta", "log_bytes", 1), ("delta", "log_tokens", 99),
        ("full", "bytes", "mixed-endian, plain"), ("delta", "bytes", "mixed-endian, plain"),
    ):  # fmt: skip
        message = refusal(layout(group, field, value))
        assert f"{field} of group {group!r} is {value}" in message and "here" in message


def test_a_file_of_another_kind_of_memory_is_refused(kind: str) -> None:
    memory = make_kind(kind)
    append(memory, 0, 1, 2, 3)
    data = written(memory)
    for other in [name for name, groups in KINDS.items() if groups != KINDS[kind]]:
        target = make_kind(other)
        with pytest.raises(SessionFileError, match="groups"):
            read(target, data)
        assert empty(target)


def test_the_order_of_bytes_and_the_layout_of_pages_are_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices that lay pages out differently cannot read each other's."""
    memory = make_kind(kind)
    append(memory, 0, 1, 2, 3)
    memory.checkpoint_save(0, "m")
    whole, one, saved = written(memory), written(memory, 0), memory.checkpoint_to_bytes("m")
    for data in (whole, one, saved):
        length = 8 + int.from_bytes(data[:8], "little")
        layout = json.loads(json.loads(data[8:length])["__metadata__"]["layout"])
        assert layout.keys() == set(KINDS[kind])
        for described in layout.values():
            assert described["bytes"] == f"{sys.byteorder}-endian, plain"
    other = make_kind(kind)
    monkeypatch.setattr(other.devices[0].ops, "page_layout", "tiles of 16", raising=False)
    name = KINDS[kind][0]
    match = rf"bytes of group '{name}' is {sys.byteorder}-endian, plain in the file and .*tiles of"
    for reads in (
        lambda: read(other, whole),
        lambda: read(other, one, 0),
        lambda: other.checkpoint_from_bytes(saved),
    ):
        with pytest.raises(SessionFileError, match=match):
            reads()
    assert empty(other)


def test_more_than_fits_is_refused_with_the_figures(kind: str) -> None:
    memory = make_kind(kind, limit=1 << 20)
    append(memory, 0, *range(40))
    for seq in range(1, 200 if "recurrent" in kind else 80):
        append(memory, seq, *range(12))
    data = written(memory)
    small_one = make_kind(kind, limit=1 << 13 if kind != HYBRID else 5 << 12)
    append(small_one, 999, 1, 2)
    was = everything(small_one)
    with pytest.raises(SessionFileError, match=r"in all|of a budget of"):
        read(small_one, data)
    assert everything(small_one) == was


def test_more_than_fits_now_is_refused_with_the_figures(kind: str) -> None:
    memory = make_kind(kind, limit=1 << 15)
    append(memory, 0, *range(9))
    data = written(memory)
    memory.clear(data=False)
    with suppress(OutOfMemory):
        for seq in itertools.count(100):
            append(memory, seq, 1)
    was = everything(memory)
    with pytest.raises((PagesError, BudgetError), match=r"needed.*free"):
        read(memory, data)
    assert everything(memory) == was


def test_what_is_there_is_not_overwritten(kind: str) -> None:
    memory = make_kind(kind)
    append(memory, 0, 1, 2, 3)
    one, whole = written(memory, 0), written(memory)
    was = everything(memory)
    for data, seq in ((one, 0), (whole, -1)):
        with pytest.raises(RequestError, match="sequence 0 holds"):
            read(memory, data, seq)
    with pytest.raises(RequestError, match="no sequence 5"):
        written(memory, 5)
    with pytest.raises(SessionFileError, match="kind"):
        read(memory, one)
    with pytest.raises(SessionFileError, match="kind"):
        read(memory, whole, 7)

    def dislike(found: Found) -> None:
        raise SessionFileError("no")

    with pytest.raises(SessionFileError, match="no"):
        read(memory, one, 7, check=dislike)
    assert everything(memory) == was
    with memory.reserve([entry(0, 4)]):
        for change in (lambda: read(memory, one, 7), lambda: written(memory)):
            with pytest.raises(RequestError, match="open"):
                change()


def test_a_parked_sequence_is_not_written_nor_read_over(kind: str) -> None:
    memory, partial = make_kind(kind), StateFlags.PARTIAL
    append(memory, 0, *range(20))
    append(memory, 1, 5)
    whole, part = written(memory, 0), written(memory, 0, flags=partial)
    memory.park(0, HostTier(1 << 20))
    for change in (
        lambda: written(memory),
        lambda: written(memory, 0),
        lambda: read(memory, whole, 0),
        lambda: read(memory, part, 0, flags=partial),
    ):
        with pytest.raises(RequestError, match="parked"):
            change()
    read(memory, whole, 2)
    memory.unpark(0)
    check_family(memory, {0: tokens_at(*range(20)), 1: tokens_at(5), 2: tokens_at(*range(20))})


def test_a_read_that_fails_half_way_leaves_no_trace(kind: str) -> None:
    memory, other = make_kind(kind), make_kind(kind)
    family(memory)
    data = written(memory)
    append(other, 20, *range(30))
    append(other, 20, 30)
    was = everything(other)

    class Breaks(BytesIO):
        left = 10**9

        def read(self, size: int | None = -1) -> bytes:
            self.left -= 1
            if self.left < 0:
                raise OSError("gone")
            return super().read(size)

    whole = Breaks(data)
    read(make_kind(kind), data)
    whole.left = 10**6
    make_kind(kind).state_read(whole)
    for left in range(10**6 - whole.left):
        broken = Breaks(data)
        broken.left = left
        with pytest.raises(OSError, match="gone"):
            other.state_read(broken)
        assert everything(other) == was
