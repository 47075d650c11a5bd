"""A session shares pages with its marks, and does so again after it made room for others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.engine.sequence import LOST, PARKED
from tests import session_kinds, tiny

GO: dict[str, Any] = {"ignore_eos": True}
STORY = list(range(10, 100))
KINDS = ["dense", "window", "hybrid"]


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield


def held(llm: quire.LLM) -> dict[str, int]:
    """Pages in use, cached ones apart."""
    llm.forget()
    llm.memory.audit()
    return {name: group["pages_used"] for name, group in llm.memory.as_dict()["stats"].items()}


def marked(llm: quire.LLM) -> quire.Session:
    """A session that takes 8 of 10 pages of attention, with two marks along its way."""
    session = llm.session().append(STORY)
    session.checkpoint("first")
    session.append([9] * 20).checkpoint("second")
    return session.append([7] * 5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_shared_is_shared_in_a_tier_and_when_it_is_back(kind: str, tmp_path: Path) -> None:
    path = session_kinds.write(kind, tmp_path)
    with quire.load(path, n_ctx=160, threads=1, kv_cache_tokens=160) as llm, marked(llm) as s:
        before, tokens, wanted = held(llm), s.tokens, s.logits()
        sizes = {pool.name: pool.page_bytes for pool in llm.engine.memory.pools}
        llm.generate([5] * 130, max_tokens=10, **GO)
        assert s.sequence.status is PARKED
        assert set(held(llm).values()) == {0}
        away = sum(tier["used"] for tier in llm.memory.as_dict()["tiers"].values())
        assert 0 < away <= sum(before[name] * sizes[name] for name in before)
        s.save(tmp_path / "s.quire")
        assert held(llm) == before
        with llm.open(tmp_path / "s.quire") as other:
            assert other.marks.keys() == s.marks.keys()
        assert np.array_equal(s.logits(), wanted) and s.tokens == tokens
        for name, length in (("first", 90), ("second", 110), ("first", 90)):
            rows = llm.logits(tokens[:length])
            assert np.array_equal(s.rewind(name).logits(), rows[-1])
        s.drop("first").drop("second").close()
        assert set(held(llm).values()) == {0}
        assert {tier["used"] for tier in llm.memory.as_dict()["tiers"].values()} == {0}


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_was_lost_goes_on_from_its_marks(kind: str, tmp_path: Path) -> None:
    """Without a tier its marks stay, and there is no room for their tokens twice."""
    path = session_kinds.write(kind, tmp_path)
    room: dict[str, Any] = {"kv_cache_tokens": 160, "swap_space": 0}
    with quire.load(path, n_ctx=160, threads=1, **room) as llm, marked(llm) as s:
        before, wanted = held(llm), s.logits()
        llm.generate([5] * 30, max_tokens=10, **GO)
        assert s.sequence.status is LOST
        assert np.array_equal(s.logits(), wanted)
        assert held(llm) == before
        with s.fork() as twin:
            assert np.array_equal(twin.logits(), wanted)


def test_a_copy_of_one_edited_token_is_whole(tmp_path: Path) -> None:
    """Memory holds nothing of it yet, which is not to be taken for a loss."""
    path = session_kinds.write("dense", tmp_path)
    with quire.load(path, n_ctx=160, threads=1) as llm, llm.session() as s:
        mark = s.append([8, 9]).remove(0, 1).checkpoint()
        with s.fork() as twin:
            assert np.array_equal(twin.logits(), llm.logits([9])[-1])
        assert s.append([5]).rewind(mark).tokens == [9]
        assert np.array_equal(s.logits(), llm.logits([9])[-1])


def test_forks_leave_and_return_as_a_family(tmp_path: Path) -> None:
    """Each went on by itself; what they have in common is there once, wherever it is."""
    path = session_kinds.write("dense", tmp_path)
    with quire.load(path, n_ctx=160, threads=1, kv_cache_tokens=160) as llm, marked(llm) as s:
        twins = [s.fork() for _ in range(3)]
        for i, twin in enumerate(twins):
            twin.rewind(-3).append([20 + i])
        before, wanted = held(llm), [twin.logits() for twin in twins]
        for _ in range(2):
            llm.generate([5] * 130, max_tokens=10, **GO)
            assert set(held(llm).values()) == {0}
            for twin, logits in zip(twins, wanted, strict=True):
                assert np.array_equal(twin.logits(), logits)
            s.logits()
            assert sum(held(llm).values()) <= sum(before.values()) + 1
        for i, twin in enumerate(twins):  # whoever may append now, none sees what others wrote
            twin.append([30 + i])
        for twin in twins:
            assert np.array_equal(twin.logits(), llm.logits(twin.tokens)[-1])
            twin.close()


def test_what_came_from_a_file_stays_apart_from_what_is_shared(tmp_path: Path) -> None:
    """A session that went back to another's mark takes nothing of its own file's marks."""
    path = session_kinds.write("recurrent", tmp_path)
    with quire.load(path, n_ctx=160, threads=1) as llm:
        with llm.session() as s:
            s.append(STORY[:40]).checkpoint("file")
            s.append([5]).save(tmp_path / "s.quire")
        llm.forget()
        with llm.open(tmp_path / "s.quire") as opened, llm.session() as own:
            mark = own.append(STORY[:40] + [6] * 60).checkpoint()
            opened.rewind(mark).rewind(-58)
            assert opened.sequence.shared
            memory = llm.engine.memory
            file = memory.held_by(opened.marks["file"].held)
            opened.logits()
            for (_, theirs, _), (_, ours, _) in zip(
                file, memory.holdings(memory.tables(opened.sequence.id)), strict=True
            ):
                assert not set(theirs.tolist()) & set(ours.tolist())


@pytest.mark.host
def test_prefixes_in_a_tier_give_way_to_marks(tmp_path: Path) -> None:
    """What fits alone finishes, as long as there is room on disk for marks of others."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    room: dict[str, Any] = {"kv_cache_tokens": 128, "n_ctx": 128, "swap_space": "24KB"}
    with quire.load(tmp_path / "m.gguf", threads=1, **room) as llm, llm.session() as s:
        llm.engine.room._seconds_per_token = lambda: 1e6
        llm.generate([20] * 64, max_tokens=1)
        wanted = s.append([7] * 64).logits()
        s.checkpoint("mark")
        assert len(llm.generate([9] * 100, max_tokens=8, **GO).token_ids) == 8
        assert np.array_equal(s.rewind("mark").logits(), wanted)
        llm.memory.audit()
