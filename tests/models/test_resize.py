"""The budget changes while sessions are used: they hold what their tokens say all the same."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path

import pytest

import quire
from quire.devices import host
from quire.errors import BudgetError, ContextError, RequestError
from tests import session_kinds, tiny
from tests.models.test_session_oracle import surroundings as surroundings  # a fixture
from tests.session_oracle import Oracle
from tests.session_truth import Truth


def kept(llm: quire.LLM) -> tuple[object, ...]:
    """What a refused resize must not have cost: prefixes, pages, and who had to give way."""
    found = llm.memory.as_dict()
    pages = {name: group["pages_used"] for name, group in found["stats"].items()}
    return found["prefix"]["entries"], pages, found["preemption"], found["tiers"]


def least(error: BudgetError) -> int:
    """What a refusal says would do."""
    return int(str(error).rsplit(" ", 1)[1].replace(",", ""))


class Resized(Oracle):
    """Every so many deeds, the budget becomes another."""

    refused = 0

    def act(self) -> None:
        if self.rng.random() < 0.2:
            self.resize()
        super().act()

    def resize(self) -> None:
        """Anything from too little to plenty."""
        budget = self.llm.budget
        weights = budget.breakdown["weights"]
        limit = weights + int(self.rng.choice([1e3, 5e4, 3e5, 8e5, 2e6, 2e7]) * self.rng.random())
        before, held = budget.limit, kept(self.llm)
        self.log.append(f"resize {before:,} to {limit:,}")
        try:
            self.llm.resize(limit)
        except BudgetError as error:
            self.note(error)
            self.refused += 1
            assert budget.limit == before and kept(self.llm) == held
        else:
            assert budget.used <= budget.limit == limit
            assert self.llm.n_ctx == session_kinds.N_CTX  # which was asked for
        self.look()


@pytest.mark.parametrize("kind", session_kinds.KINDS)
@pytest.mark.host
def test_sessions_hold_what_their_tokens_say(kind: str, tmp_path: Path) -> None:
    path = session_kinds.write(kind, tmp_path)
    with quire.load(path, n_ctx=session_kinds.N_CTX, threads=1, memory_budget="64MiB") as roomy:
        truth, refused = Truth(roomy), 0
        for seed in range(3):
            speed = random.Random(seed).choice([0.0, 1e6])
            room = {"n_ctx": session_kinds.N_CTX, "threads": 1, "memory_budget": "32MiB"}
            with quire.load(path, **room) as llm:
                llm.engine.room._seconds_per_token = lambda speed=speed: speed
                world = Resized(llm, truth, seed, tmp_path)
                world.run(80)
                refused += world.refused
            assert llm.budget.used == 0
        assert refused > 0


@pytest.mark.host
def test_more_pages_than_at_first(tmp_path: Path) -> None:
    """A model that was loaded with little room gets more, and its context grows with it."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    with quire.load(tmp_path / "m.gguf") as roomy:
        weights = roomy.model.weight_bytes
        wanted = roomy.logits(list(range(3, 250)))
    page = 16 * 2 * 2 * 2 * 16 * 2  # tokens, layers, K and V, heads, dims, bytes
    with quire.load(tmp_path / "m.gguf", memory_budget=weights + 6 * page) as llm:
        assert llm.n_ctx == 6 * 16
        with pytest.raises(quire.errors.ContextError):
            llm.logits(list(range(3, 250)))
        llm.resize(weights + 2**22)
        assert llm.n_ctx == llm.model.n_ctx_train
        assert (llm.logits(list(range(3, 250))) == wanted).all()
        llm.memory.audit()
        llm.resize("1GiB")
        assert llm.memory.as_dict()["budget_bytes"] == 2**30


@pytest.mark.host
def test_what_goes_first(tmp_path: Path) -> None:
    """Cached prefixes, then sequences; what cannot go is refused with need and have."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    with quire.load(tmp_path / "m.gguf") as llm:
        weights = llm.model.weight_bytes
        llm.generate([9] * 100, max_tokens=4, ignore_eos=True)
        session = llm.session()
        session.append([7] * 64)
        wanted = session.logits()
        llm.engine.room.trim()  # nobody would miss that
        cached, used = llm.engine.memory.cached_bytes, llm.budget.used
        assert cached > 0
        llm.resize(used - 1)
        assert llm.engine.memory.cached_bytes < cached
        assert llm.memory.as_dict()["preemption"]["parked"] == 0
        pages = session.sequence.computed
        llm.engine.room._seconds_per_token = lambda: 1e6
        llm.resize(llm.budget.used - 1)
        assert llm.engine.memory.cached_bytes == 0
        found = llm.memory.as_dict()["preemption"]
        assert found["parked"] == 1 and session.sequence.status.value == "parked" and pages
        with pytest.raises(BudgetError, match=r"cannot become .* stay .* takes .* pass at least"):
            llm.resize(weights + 10)
        with pytest.raises(BudgetError, match=r"cannot become 10 bytes"):
            llm.resize(10)
        with pytest.raises(RequestError):
            llm.resize("little")
        with pytest.raises(BudgetError, match="more than"):
            llm.resize(2**60)
        llm.resize("1GiB")
        assert (session.logits() == wanted).all()


@pytest.mark.host
def test_idle_arrays_of_a_long_prompt_are_in_nobodys_way(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", tiny.Tiny(context=1024))
    with quire.load(tmp_path / "m.gguf", threads=1) as llm, llm.session() as session:
        weights, small = llm.model.weight_bytes, 200_000
        session.append([7] * 900)
        wanted = session.logits()
        assert llm.memory.as_dict()["compute_bytes"] > small
        llm.resize(weights + small)
        assert llm.budget.used <= weights + small and llm.n_ctx < 900
        with pytest.raises(ContextError, match=" 0 fit"):
            session.append("more")
        llm.memory.audit()
        llm.resize("1GiB")
        assert (session.logits() == wanted).all()


def test_from_any_thread_while_streams_run(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    prompts = [[i] * 40 for i in range(10, 18)]
    with quire.load(tmp_path / "m.gguf", threads=1) as llm:
        weights = llm.model.weight_bytes
        wanted = [c.token_ids for c in llm.generate(prompts, max_tokens=60, ignore_eos=True)]
        llm.forget()
        stop = threading.Event()

        def swing() -> None:
            rng = random.Random(1)
            while not stop.is_set():
                with contextlib.suppress(BudgetError):
                    llm.resize(weights + rng.choice([200_000, 400_000, 4_000_000]))

        thread = threading.Thread(target=swing)
        thread.start()
        try:
            for _ in range(3):
                found = llm.generate(prompts, max_tokens=60, ignore_eos=True)
                assert [c.token_ids for c in found] == wanted
        finally:
            stop.set()
            thread.join()
        llm.memory.audit()


def test_what_lies_idle_takes_nothing_from_a_context(tmp_path: Path) -> None:
    """A large step leaves what it computed in; a context that nobody fixed is no shorter for it."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    with quire.load(tmp_path / "m.gguf", threads=1) as llm:
        trained = llm.n_ctx
        llm.generate([[i] * 40 for i in range(10, 18)], max_tokens=1)
        held = llm.budget.breakdown
        assert held["compute"] > 300_000  # where all of the context takes less
        llm.resize(held["weights"] + held["compute"] + 10_000)
        assert llm.n_ctx == trained


def test_two_models_on_one_budget(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    with quire.load(tmp_path / "m.gguf", memory_budget="256MiB") as llm:
        with quire.load(tmp_path / "m.gguf", beside=llm) as draft:
            draft.resize("128MiB")
            assert llm.budget.limit == draft.budget.limit == 128 * 2**20
            llm.resize("192MiB")
            assert llm.budget.limit == draft.budget.limit == 192 * 2**20
            made = llm.generate([5, 6, 7], max_tokens=8, speculate=draft, ignore_eos=True)
        assert made.token_ids == llm.generate([5, 6, 7], max_tokens=8, ignore_eos=True).token_ids


@pytest.mark.host
@pytest.mark.parametrize("granule", [4 << 10, 128 << 10])
def test_whoever_shares_a_budget_follows_it(
    granule: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts that nobody fixed, and pools, whichever of the models was told."""
    monkeypatch.setattr(host, "_GRANULE", granule)
    monkeypatch.setattr(host.HostDevice, "granularity", granule)
    tiny.write(tmp_path / "m.gguf", tiny.Tiny(context=2048))
    with quire.load(tmp_path / "m.gguf") as roomy:
        weights = roomy.model.weight_bytes
        page = 16 * roomy.memory.stats["attention"]["bytes_per_token"]
    small = 3 * weights + 20 * page + (1 << 16) + granule
    with (
        quire.load(tmp_path / "m.gguf", threads=1, memory_budget=small) as llm,
        quire.load(tmp_path / "m.gguf", threads=1, beside=llm, n_ctx=64) as fixed,
        quire.load(tmp_path / "m.gguf", threads=1, beside=llm) as other,
    ):
        assert other.n_ctx < 2048
        llm.resize("64MiB")
        assert other.n_ctx == llm.n_ctx == 2048 and fixed.n_ctx == 64
        assert len(other.generate([5] * 2000, max_tokens=9, ignore_eos=True).token_ids) == 9
        other.forget()
        llm.resize(small)
        assert other.n_ctx < 2048 > llm.n_ctx
        with pytest.raises(ContextError):
            other.generate([5] * 2000, max_tokens=9)
        other.resize("64MiB")
        assert other.n_ctx == llm.n_ctx == 2048
        other.close()
        llm.resize("32MiB")


def test_a_refusal_costs_nobody_anything(tmp_path: Path) -> None:
    """It is decided before anything gives way, here or in another model on the same budget."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    with (
        quire.load(tmp_path / "m.gguf", threads=1) as llm,
        quire.load(tmp_path / "m.gguf", threads=1, beside=llm) as other,
        other.session() as resting, other.session() as marked,
    ):  # fmt: skip
        weights = llm.model.weight_bytes + other.model.weight_bytes
        for one in (llm, other):
            one.generate([9] * 100, max_tokens=4, ignore_eos=True)
        resting.append([7] * 64)
        marked.append([8] * 64)
        marked.checkpoint()
        before, limit = (kept(llm), kept(other)), llm.budget.limit
        with pytest.raises(BudgetError, match="pass at least") as refused:
            llm.resize(weights + 10)
        assert (kept(llm), kept(other)) == before and llm.budget.limit == limit
        enough = least(refused.value)
        with pytest.raises(BudgetError, match="pass at least"):
            llm.resize(enough - 1)
        assert (kept(llm), kept(other)) == before
        llm.resize(enough)
        assert llm.budget.whole.used <= enough


@pytest.mark.host
@pytest.mark.parametrize("kind", session_kinds.KINDS)
@pytest.mark.parametrize("granule", [4 << 10, 64 << 10, 1 << 20])
def test_the_least_that_a_refusal_tells_is_enough(
    granule: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory comes in large pieces too, as on a GPU: each pool takes whole ones."""
    monkeypatch.setattr(host, "_GRANULE", granule)
    monkeypatch.setattr(host.HostDevice, "granularity", granule)
    with quire.load(session_kinds.write(kind, tmp_path), threads=1) as llm:
        llm.generate([9] * 100, max_tokens=4, ignore_eos=True)
        with pytest.raises(BudgetError, match="pass at least") as refused:
            llm.resize(llm.model.weight_bytes + 10)
        for more in (0, granule // 2, 3 * granule // 2):
            llm.resize(least(refused.value) + more)
            with llm.session() as s:  # up to the end of the context that there is room for now
                s.append([9] * 4)
                for _ in range(min(llm.n_ctx, 512) // 16 - 1):
                    s.append([9] * 16)
                assert len(s.generate(max_tokens=9, ignore_eos=True).token_ids) == 9


@pytest.mark.host
@pytest.mark.parametrize("whose", ["its own", "another's"])
@pytest.mark.parametrize("prefixes", [0, 3])
@pytest.mark.parametrize("edited", [False, True])
def test_a_tier_that_is_too_small_is_known_before(
    whose: str, prefixes: int, edited: bool, tmp_path: Path
) -> None:
    """It takes one session or its mark, and not all three; prefixes give way to one in it."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    tier = {"swap_space": "24KB", "threads": 1}
    with (
        quire.load(tmp_path / "m.gguf", **tier) as llm,
        quire.load(tmp_path / "m.gguf", beside=llm, **tier) as other,
        contextlib.ExitStack() as opened,
    ):
        holder = llm if whose == "its own" else other
        holder.engine.room._seconds_per_token = lambda: 1e6
        for i in range(1 if prefixes else 3):
            session = opened.enter_context(holder.session()).append([7 + i] * 64)
            _ = session.remove(4, 6) if edited else session.checkpoint()
        for i in range(prefixes):
            holder.generate([20 + i] * 64, max_tokens=1)
        before = kept(llm), kept(other)
        with pytest.raises(BudgetError, match="pass at least") as refused:
            llm.resize(llm.model.weight_bytes)
        enough = least(refused.value)
        with pytest.raises(BudgetError, match="pass at least"):
            llm.resize(enough - 1)
        assert (kept(llm), kept(other)) == before
        llm.resize(enough)
        for one in (llm, other):
            one.memory.audit()


@pytest.mark.host  # 50 kB are not what a GPU gives
def test_what_a_refusal_tells_is_no_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = session_kinds.write("dense", tmp_path)
    with quire.load(path, n_ctx=500, threads=1) as llm:
        llm.resize(llm.budget.used + 50_000)
        for device in llm.engine.runner.devices:
            monkeypatch.setattr(device, "capacity", llm.budget.limit + 1)
        with llm.session() as session:
            session.append([7] * 10)
            monkeypatch.setattr(session.sequence, "length", 499)  # of a prompt on its way
            monkeypatch.setattr(llm.engine.scheduler, "active", [session.sequence])
            with pytest.raises(BudgetError, match="would do, and cpu has"):
                llm.resize(1000)
            monkeypatch.undo()
