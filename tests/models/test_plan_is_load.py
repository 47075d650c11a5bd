"""What `quire.plan` says fits, `quire.load` loads, in the bytes that were planned.

Alone on the host it loads more: pages are taken as they are used, so a context that was asked for
need not fit as long as a short one does.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.api import plan as planning
from quire.devices import host
from quire.errors import DoesNotFit, QuireError
from quire.placement.speed import Bandwidth
from tests.budgets import Peaks, peaks
from tests.model_folders import MODELS, TRAINED

__all__ = ["peaks"]
pytestmark = pytest.mark.host


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine is makes no difference here."""
    monkeypatch.setattr(planning, "measure", lambda ops, kind: Bandwidth(1.0, 2.0, 3.0))


def wish(rng: random.Random, name: str) -> dict[str, Any]:
    """Settings that somebody may pass, some of which make no sense."""
    found: dict[str, Any] = {"threads": rng.choice([1, 2])}
    some = {
        "n_ctx": rng.choice([24, 100, 400, 3000]), "n_parallel": rng.choice([2, 5, 40]),
        "kv_cache_tokens": rng.choice([64, 400, 3000]), "page_tokens": rng.choice([32, 64]),
        "type_k": rng.choice(["f32", "q8_0", "q4_0"]), "type_v": rng.choice(["f32", "q8_0"]),
        "swa_full": True, "kv_cache_demand_paged": False, "fit": False, "n_layer_exit": 2,
        "n_gpu_layers": rng.choice([0, 1, 99]), "main_gpu": 0,
        "kv_offload": False, "override_tensor": "ffn=cuda:0", "activations": "f32",
    }  # fmt: skip
    for key in rng.sample(sorted(some), rng.randint(0, 4)):
        found[key] = some[key]
    where = rng.choice(["here", "here", "here", "split", "reference"])
    if where == "split":
        found["device"] = "cpu:1"
    elif where == "reference" and name != "tiny-hybrid35":
        found |= {"device": "reference"}
    return found


def outcome(call: Any) -> tuple[str, Any]:
    """What a call gives or raises."""
    try:
        return "made", call()
    except QuireError as error:
        return type(error).__name__, str(error)


def loaded(path: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], int]:
    with quire.load(path, **settings) as llm:
        return llm.plan.as_dict(), llm.n_ctx


def least(settings: dict[str, Any]) -> dict[str, Any]:
    """The same for one sequence of whatever length fits."""
    return settings | {"n_ctx": None, "n_parallel": 1, "fit": True}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_planned_is_loaded(seed: int) -> None:
    rng = random.Random(seed)
    verdicts = set()
    for _ in range(12):
        name = rng.choice(TRAINED)
        settings = wish(rng, name)
        whole = (MODELS / name / "model.safetensors").stat().st_size
        settings["memory_budget"] = int(whole * rng.uniform(0.9, 2.5))
        planned = outcome(lambda: quire.plan(MODELS / name, **settings))  # noqa: B023
        found = outcome(lambda: loaded(MODELS / name, settings))  # noqa: B023
        verdicts.add(planned[0])
        if planned[0] == "made":
            assert found[0] == "made", (name, settings, found)
            said, n_ctx = found[1]
            wanted = planned[1].load
            assert n_ctx == wanted.n_ctx or (n_ctx > wanted.n_ctx and wanted.sequences > 1)
            if said["n_ctx"] == wanted.n_ctx:
                assert said["devices"] == planned[1].as_dict()["devices"], (name, settings)
        elif planned[0] != "DoesNotFit" or settings.get("device") == "cpu:1":  # not alone
            assert planned == found, (name, settings)
        elif settings.get("kv_cache_demand_paged", True):
            short = outcome(lambda: quire.plan(MODELS / name, **least(settings)))  # noqa: B023
            assert (found[0] == "made") is (short[0] == "made"), (name, settings, found)
        else:
            assert found[0] != "made", (name, settings)
    assert len(verdicts) > 1


def filled(llm: quire.LLM, sequences: int, draft: quire.LLM | None = None) -> int:
    """So many sequences at once, to the end of their contexts; how often one gave way."""
    n = max(llm.n_ctx * 3 // 4, 1)
    prompts = [
        [int(t) for t in np.random.default_rng(i).integers(3, 250, n)] for i in range(sequences)
    ]
    made = llm.generate(prompts, max_tokens=llm.n_ctx - n, ignore_eos=True, speculate=draft)
    assert [len(one.token_ids) for one in made] == [llm.n_ctx - n] * sequences
    return sum(llm.memory.as_dict()["preemption"].values())


@pytest.mark.parametrize("name", TRAINED)
def test_what_fits_runs_in_what_was_planned(name: str, peaks: Peaks) -> None:
    """All sequences at once, and nobody gives way; only arrays make do with less."""
    rng = random.Random(name)
    for _ in range(3):
        n_ctx, sequences = rng.choice([(24, 9), (100, 5), (300, 2), (600, 1)])
        room: dict[str, Any] = {"n_ctx": n_ctx, "n_parallel": sequences, "threads": 2}
        planned = quire.plan(MODELS / name, devices=["cpu:8GiB"], **room).devices[0]
        short = planned.total - planned.compute
        for budget in (planned.total, short):
            with quire.load(MODELS / name, memory_budget=budget, swap_space=0, **room) as llm:
                gave_way = filled(llm, sequences)
                assert peaks[llm.budget] <= budget
                assert not gave_way or budget == short
        with pytest.raises(DoesNotFit):
            quire.plan(MODELS / name, memory_budget=short - 1, **room)


@pytest.mark.parametrize("name", TRAINED)
def test_planned_is_held_in_a_short_context(name: str, peaks: Peaks) -> None:
    """By a prompt that fills it, and by as many steps of one token."""
    n_ctx = 300
    with quire.load(MODELS / name, n_ctx=n_ctx, threads=2, memory_budget="512MiB") as llm:
        with llm.session() as session:
            session.append(np.random.default_rng(2).integers(3, 250, n_ctx).tolist())
        llm.forget()
        with llm.session() as session:
            session.append([7]).generate(max_tokens=n_ctx - 1, ignore_eos=True)
        held, planned = peaks[llm.budget], llm.plan.devices[0].total
    assert abs(planned - held) <= 0.01 * held


@pytest.mark.parametrize("tokens", [None, 300, 3000])
def test_pages_that_are_taken_at_the_start_are_planned(tokens: int | None) -> None:
    """For all sequences, or as many as were asked for."""
    room: dict[str, Any] = {"n_ctx": 200, "n_parallel": 3, "kv_cache_tokens": tokens}
    room |= {"kv_cache_demand_paged": False, "threads": 1, "memory_budget": "64MiB"}
    plan = quire.plan(MODELS / "tiny-dense", **room)
    with quire.load(MODELS / "tiny-dense", **room) as llm:
        assert llm.budget.breakdown["pages of attention"] == plan.devices[0].memory["attention"]
    told = "has pages for 1 sequence of 200 tokens at once, not for 3"
    assert any(told in note for note in plan.notes) is (tokens == 300)


def test_a_context_that_became_smaller_is_told() -> None:
    """In the same words by a plan and by who loads; one that was asked for is nobody's change."""
    room: dict[str, Any] = {"threads": 1, "memory_budget": "3500KiB"}
    with quire.load(MODELS / "tiny-dense", **room) as llm:
        told = f"n_ctx is {llm.n_ctx:,} and not the model's 2,048: more does not fit"
        assert llm.n_ctx < 2048 and llm.notes == (told,)
        llm.resize("64MiB")
        assert llm.n_ctx == 2048 and llm.notes == ()
    assert any("not the model's 2,048" in note for note in quire.plan(llm.path, **room).notes)
    with quire.load(MODELS / "tiny-dense", n_ctx=200, **room) as llm:
        assert llm.notes == ()


@pytest.mark.parametrize("seed", range(4))
def test_advice_can_be_taken(seed: int) -> None:
    """Whatever is said to fit is loaded."""
    rng = random.Random(seed)
    taken = set()
    for _ in range(8):
        name = rng.choice(TRAINED)
        whole = (MODELS / name / "model.safetensors").stat().st_size
        settings = {
            "n_ctx": rng.choice([None, 200, 4000]), "n_parallel": rng.choice([1, 8, 60]),
            "memory_budget": int(whole * rng.uniform(0.8, 2.0)), "threads": 1,
            "fit": rng.random() < 0.7,
        }  # fmt: skip
        try:
            quire.plan(MODELS / name, **settings)
        except DoesNotFit as error:
            assert error.advice and "what would fit: " in str(error)
            for changes in error.advice:
                taken |= changes.keys()
                quire.load(MODELS / name, **settings | changes).close()
    assert {"memory_budget", "n_ctx"} <= taken


def test_advice_on_gpus_can_be_taken() -> None:
    """Whatever was asked for by hand."""
    rng, taken = random.Random(3), set[str]()
    for _ in range(8):
        name = rng.choice(["tiny-moe", "tiny-hybrid", "tiny-dense"])
        settings: dict[str, Any] = {
            "n_ctx": rng.choice([None, 2000, 400_000]), "n_parallel": rng.choice([1, 30]),
            "n_gpu_layers": rng.choice(["auto", 3, 99]), "threads": 1,
            "devices": [f"cuda:{rng.randint(700, 900)}MiB", f"cpu:{rng.randint(4, 40)}MiB"],
        }  # fmt: skip
        if name == "tiny-moe" and rng.random() < 0.5:
            settings["n_cpu_moe"] = 2
        try:
            quire.plan(MODELS / name, **settings)
        except DoesNotFit as error:
            for changes in error.advice:
                taken |= changes.keys()
                assert quire.plan(MODELS / name, **settings | changes).fits
    assert {"n_ctx", "n_gpu_layers", "n_parallel"} <= taken


@pytest.mark.parametrize("named", [False, True])
def test_a_budget_that_is_short_on_gpus_is_told_what_would_do(named: bool) -> None:
    """For every device, or for the one that was named."""
    path, devices = MODELS / "tiny-dense", ["cuda:4GiB", "cpu:4GiB"]

    def ask(budget: Any, **more: Any) -> Any:
        return quire.plan(path, devices=devices, memory_budget=budget, threads=1, **more)

    more = {"n_gpu_layers": 99, "fit": False} if named else {"n_ctx": 2000}
    with pytest.raises(DoesNotFit, match=r"what would fit: memory_budget=.*MiB") as caught:
        ask({"cuda:0": "4MiB"} if named else "1MiB", **more)
    (enough,) = (way["memory_budget"] for way in caught.value.advice if "memory_budget" in way)
    assert set(enough) == {"cuda:0"} if named else isinstance(enough, str)
    assert ask(enough, **more).fits
    assert "close other programs" not in str(caught.value)


def test_no_budget_is_advised_that_the_machine_does_not_have() -> None:
    path, more = MODELS / "tiny-dense", {"n_ctx": 2000, "n_parallel": 9000, "threads": 1}
    for there, told in (("100GiB", "memory_budget='"), ("1GiB", "may have 1.0 MiB, of 1.00 GiB")):
        with pytest.raises(DoesNotFit) as caught:
            quire.plan(path, devices=[f"cpu:{there}"], memory_budget="1MiB", **more)
        assert told in str(caught.value)
        assert ("memory_budget" in str(caught.value.advice)) == (there == "100GiB")
    # Where a useful context is more than there is, what is enough for any is told.
    with pytest.raises(DoesNotFit, match=r"memory_budget='2\.1") as caught:
        quire.plan(path, devices=["cpu:3MiB"], memory_budget="1MiB", threads=1)
    assert quire.plan(path, devices=["cpu:3MiB"], threads=1, **caught.value.advice[0]).fits


def test_a_draft_model_has_the_room_that_was_planned(peaks: Peaks) -> None:
    path, room = MODELS / "tiny-dense", {"n_ctx": 400, "threads": 2}
    plan = quire.plan(path, devices=["cpu:8GiB"], draft=path, n_parallel=2, **room)
    budget = plan.devices[0].total
    with (
        quire.load(path, memory_budget=budget, n_parallel=2, **room) as llm,
        quire.load(path, beside=llm, threads=2) as draft,
    ):
        assert not filled(llm, 2, draft)
        assert peaks[llm.budget] <= budget


@pytest.mark.parametrize("granule", [64 << 10, 1 << 20])
@pytest.mark.parametrize("name", TRAINED)
def test_pages_of_large_granules_are_planned(
    name: str, granule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where states are as large as the pieces that its memory comes in.

    What stays of a session in the midst of others' cached prefixes, once those are gone.
    """
    monkeypatch.setattr(host, "_GRANULE", granule)
    monkeypatch.setattr(host.HostDevice, "granularity", granule)
    with quire.load(MODELS / name, n_ctx=512) as llm:
        for i in range(3):
            llm.generate([(7 * i + j) % 400 + 5 for j in range(300)], max_tokens=20)
        with llm.session() as session:
            session.append([(11 * j) % 400 + 5 for j in range(400)])
            session.generate(max_tokens=511 - 400, ignore_eos=True)
            llm.forget()
            held = {
                pool: of["bytes_committed"] for pool, of in llm.memory.as_dict()["stats"].items()
            }
            for group in llm.plan.model.groups:
                pools = [held.pop(pool) for pool in list(held) if pool.startswith(group.name)]
                planned = group.needed(len(group.layers), 512, 1, 0, granule)
                for size, wanted in zip(pools, planned, strict=True):
                    assert abs(size - wanted) <= granule, (group.name, size, wanted)
            assert not held
