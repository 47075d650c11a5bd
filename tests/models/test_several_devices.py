"""Models on several devices: the same laws, equal bits within a plan, and rounding across plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.errors import BudgetError, FileError, QuireError, SessionFileError
from quire.memory.groups.state_pools import StatePools
from quire.models.layers import GatedNetwork
from quire.models.loader import DOWN, EXPERTS, MIXER, OUTPUT, Kit, Part
from quire.models.streaming import LEAST, Streaming
from quire.ops.cpu import CpuOps
from quire.ops.passing import InPlace
from tests import random_hybrids, session_kinds, tiny
from tests.model_folders import RANDOM, TRAINED, model_folder
from tests.models.test_session_oracle import surroundings as surroundings  # a fixture
from tests.session_oracle import Oracle
from tests.session_truth import Truth

pytestmark = pytest.mark.host
IDS = [int(i) for i in np.random.default_rng(6).integers(3, 250, 40)]
ROOM: dict[str, Any] = {"threads": 1, "memory_budget": "256MiB"}
EXACT: dict[str, Any] = {"activations": "f32", **ROOM}
TWO = "cpu:1,cpu:2"


def attends(path: Path) -> dict[str, Any]:
    """K and V as floats, where there are any."""
    with quire.load(path, **ROOM) as llm:
        kinds = {group.kind for group in llm.model.groups}
    return {} if kinds == {"recurrent"} else {"type_k": "f32", "type_v": "f32"}


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_every_plan_computes_the_same_but_for_rounding(name: str, tmp_path: Path) -> None:
    """And a plan computes the same bits whatever comes together, and after a rewind."""
    path = model_folder(name, tmp_path)
    kv = attends(path)
    with quire.load(path, **EXACT, **kv) as whole:
        wanted, n = whole.logits(IDS), whole.model.n_layers
    scale = np.abs(wanted - wanted.mean(-1, keepdims=True)).max()
    for layers in sorted({0, 1, 2, n, n + 1}):
        for device in ("reference", TWO, "cpu:1,reference"):
            with quire.load(path, device=device, n_gpu_layers=layers, **EXACT, **kv) as llm:
                assert llm.plan.n_gpu_layers == layers
                found = llm.logits(IDS)
                assert np.abs(found - wanted).max() < 3e-5 * scale, (layers, device)
                with llm.session() as session:  # the same bits in other batches
                    for at, end in ((0, 23), (23, 24), (24, 40)):
                        session.append(IDS[at:end])
                    assert np.array_equal(session.logits(), found[-1]), (layers, device)
                    session.rewind(-7)
                    assert np.array_equal(session.logits(), found[-8]), (layers, device)
                llm.memory.audit()
            assert {d.budget.used for d in llm.devices} == {0}


class Resized(Oracle):
    """Now and then a device gets less room, or more."""

    def act(self) -> None:
        if self.rng.random() < 0.1:
            device = self.rng.choice(self.llm.devices)
            fixed = device.budget.breakdown.get("weights", 0)
            limit = fixed + int(self.rng.choice([2e4, 2e5, 6e5, 2e6]) * (0.5 + self.rng.random()))
            self.log.append(f"resize {device.name} {limit}")
            try:
                self.llm.resize({device.name: limit})
            except QuireError as error:
                self.note(error)
        super().act()


@pytest.mark.parametrize("device", ["cpu:1", TWO])
@pytest.mark.parametrize("kind", session_kinds.KINDS)
def test_sessions_hold_what_their_tokens_say(kind: str, device: str, tmp_path: Path) -> None:
    path = session_kinds.write(kind, tmp_path)
    split = {"device": device, "n_gpu_layers": 2, "n_ctx": session_kinds.N_CTX, **ROOM}
    split["memory_budget"] = "32MiB"
    if kind == "moe":
        split["override_tensor"] = [r"blk\.1\..*_exps=cpu"]
    with quire.load(path, **split) as roomy:
        assert len({device.name for device in roomy.devices}) > 1
        truth = Truth(roomy)
        for seed in range(2):
            rng = random.Random(seed)
            tokens = None if kind in ("hybrid", "recurrent") else rng.choice([112, 176, 400])
            llm = quire.load(path, kv_cache_tokens=tokens, **split)
            speed = rng.choice([0.0, 1e6])
            llm.engine.room._seconds_per_token = lambda speed=speed: speed
            Resized(llm, truth, seed, tmp_path).run(40)
            llm.close()
            assert {device.budget.used for device in llm.devices} == {0}


def test_where_things_are(tmp_path: Path) -> None:
    """Output first, then layers from the last backwards; memory is where its layer is."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny(layers=4, tied=False))
    with quire.load(tmp_path / "m.gguf", device=TWO, n_gpu_layers=4, **ROOM) as llm:
        plan = llm.plan
        assert plan.places[Part(OUTPUT)] == plan.places[Part(MIXER, 3)] == 1
        assert plan.device_of(Part(MIXER, 0)) == "cpu" and llm.device.name == "cpu:2"
        held = {group.name: group.layout.layers for group in llm.engine.memory.groups}
        assert held["attention on cpu"] == (0,)
        assert sorted(sum(held.values(), ())) == [0, 1, 2, 3]
        for one in plan.devices:
            device = next(d for d in llm.devices if d.name == one.device.name)
            assert device.budget.breakdown["weights"] == sum(one.weights.values())
        llm.generate(IDS, max_tokens=4, ignore_eos=True)
        found = llm.memory.as_dict()
        assert set(found["devices"]) == {"cpu", "cpu:1", "cpu:2"}
        assert sum(d["used_bytes"] for d in found["devices"].values()) == found["used_bytes"]
        assert str(llm.memory)


HALVES = [r"ffn_down_exps=cpu", r"ffn_(gate|up|gate_up)_exps=cpu"]


@pytest.mark.parametrize(
    "setting", [{"n_cpu_moe": 1}, *({"override_tensor": each} for each in ("exps=cpu", *HALVES))]
)
@pytest.mark.parametrize("kind", ["moe", "shared"])
def test_experts_on_the_host(kind: str, setting: dict[str, Any], tmp_path: Path) -> None:
    if kind == "moe":
        path = session_kinds.write("moe", tmp_path)
    else:
        config = random_hybrids.settings("Qwen3_5Moe")
        path = random_hybrids.write(tmp_path / "m", config, random_hybrids.tensors(config))
    with quire.load(path, **EXACT) as whole:
        wanted = whole.logits(IDS)
    split = {"device": "cpu:1", "n_gpu_layers": 99, **setting, **EXACT}
    with quire.load(path, **split) as llm:
        away = setting.get("override_tensor")
        assert llm.plan.device_of(Part(EXPERTS, 0)) == ("cpu:1" if away == HALVES[0] else "cpu")
        assert llm.plan.device_of(Part(DOWN, 0)) == ("cpu:1" if away == HALVES[1] else "cpu")
        assert llm.plan.device_of(Part(MIXER, 0)) == "cpu:1"
        found = llm.logits(IDS)
        assert np.abs(found - wanted).max() < 2e-3 * np.abs(wanted).max()
        tokens = llm.generate(IDS, max_tokens=12, ignore_eos=True).token_ids
        for way in ("ngram", "lookahead", "early-exit"):
            made = llm.generate(IDS, max_tokens=12, ignore_eos=True, speculate=way)
            assert made.token_ids == tokens


def test_saved_sessions_and_drafts(tmp_path: Path) -> None:
    """A file goes on with the same bits under the same plan."""
    path = session_kinds.write("hybrid", tmp_path)
    split = {"device": "cpu:1", **ROOM}
    file = tmp_path / "s.quire"
    with quire.load(path, n_gpu_layers=3, **split) as llm:
        session = llm.session()
        session.append(IDS)
        mark = session.checkpoint()
        tokens = session.generate(max_tokens=6, ignore_eos=True).token_ids
        session.rewind(mark)
        session.save(file)
        wanted = session.logits()
        with quire.load(path, beside=llm, threads=1) as draft:
            made = llm.generate(IDS, max_tokens=6, ignore_eos=True, speculate=draft)
            assert made.token_ids == tokens and made.speculation.drafted > 0
    with quire.load(path, n_gpu_layers=3, **split) as llm:
        session = llm.open(file)
        assert session.exact and np.array_equal(session.logits(), wanted)
        assert session.generate(max_tokens=6, ignore_eos=True).token_ids == tokens


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "recurrent"])
def test_a_session_goes_on_under_every_other_plan(kind: str, tmp_path: Path) -> None:
    """K, V and states are found layer by layer, whatever devices they were and are on."""
    path = session_kinds.write(kind, tmp_path)
    split: dict[str, Any] = {"device": TWO, "n_ctx": session_kinds.N_CTX, **ROOM}
    with quire.load(path, **ROOM) as llm:
        counts = range(llm.model.n_layers + 2)
    files, wanted = [], []
    for n in counts:
        with quire.load(path, n_gpu_layers=n, **split) as llm:
            session = llm.session()
            session.append(IDS[:33])
            mark = session.checkpoint("mark")
            session.append(IDS[33:])
            wanted.append((session.logits(), session.generate(max_tokens=9, ignore_eos=True)))
            session.rewind(mark)
            session.append(IDS[33:39])
            session.save(tmp_path / f"{n}.quire")
            files.append(tmp_path / f"{n}.quire")
    for n in counts:
        with quire.load(path, n_gpu_layers=n, **split) as llm:
            for file, (logits, made) in zip(files, wanted, strict=True):
                run = llm.engine.runner.tokens_run
                with llm.open(file, strict=True) as session:
                    assert session.exact and session.tokens == IDS[:39]
                    session.append(IDS[39:])
                    assert llm.engine.runner.tokens_run == run + 1  # nothing computed again
                    assert np.array_equal(session.logits(), logits), (file.name, n)
                    again = session.generate(max_tokens=9, ignore_eos=True)
                    assert again.token_ids == made.token_ids
                    session.rewind("mark")
                    assert session.append(IDS[33:]).position == 40
                    assert np.array_equal(session.logits(), logits)
                    llm.memory.audit()


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_states_of_several_positions_come_together(kind: str, tmp_path: Path) -> None:
    """A device that folds logs at positions leaves its states elsewhere than another one does."""
    path = session_kinds.write(kind, tmp_path)
    split: dict[str, Any] = {"device": "cpu:1", "n_ctx": session_kinds.N_CTX, **ROOM}
    with quire.load(path, **ROOM) as llm:
        counts, wanted = range(1, llm.model.n_layers + 2), llm.logits([*IDS, 7, 8])[-2:]
    with quire.load(path, n_gpu_layers=3, **split) as llm:
        mine = [g for g in llm.engine.memory.groups if g.kind == "recurrent"]
        last: Any = next(group for group in mine if group.device.name == "cpu:1")
        last._pools = StatePools(last.layout, last.states, last.logs, True)
        session = llm.session()
        for at, end in ((0, 19), (19, 20), (20, 39)):
            session.append(IDS[at:end])
        at = {g.name: llm.engine.memory.by_group(llm.engine.memory.tables(session.sequence.id))
              [g.name].position for g in mine}  # fmt: skip
        assert len(mine) == 2 and len(set(at.values())) == 2
        session.checkpoint("mark")
        session.append([IDS[39], 7])
        session.save(tmp_path / "s.quire")
    for n in counts:
        with (
            quire.load(path, n_gpu_layers=n, **split) as llm,
            llm.open(tmp_path / "s.quire", strict=True) as session,
        ):
            assert np.array_equal(session.logits(), wanted[0])
            assert np.array_equal(session.append([8]).logits(), wanted[1])
            session.rewind("mark")
            assert np.array_equal(session.append([IDS[39], 7, 8]).logits(), wanted[1])
            llm.memory.audit()


def test_a_session_of_other_devices_says_that_its_bits_differ(tmp_path: Path) -> None:
    path = session_kinds.write("hybrid", tmp_path)
    with quire.load(path, device="cpu:1", n_gpu_layers=2, **EXACT) as llm:
        llm.session().append(IDS).save(tmp_path / "s.quire")
        wanted = llm.logits([*IDS, 7])[-1]
    with quire.load(path, device="reference", n_gpu_layers=3, **EXACT) as llm:
        with pytest.raises(SessionFileError, match="other arithmetic"):
            llm.open(tmp_path / "s.quire", strict=True)
        with llm.open(tmp_path / "s.quire") as session:
            assert not session.exact
            found = session.append([7]).logits()
            assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()
            llm.memory.audit()


@pytest.mark.parametrize("kind", ["dense", "moe", "hybrid", "shared"])
def test_weights_pass_through_for_long_prompts(kind: str, tmp_path: Path) -> None:
    """Networks of the host run elsewhere where that is faster; here that changes no bit."""
    if kind == "shared":
        config = random_hybrids.settings("Qwen3_5Moe")
        path = random_hybrids.write(tmp_path / "m", config, random_hybrids.tensors(config))
    else:
        path = session_kinds.write(kind, tmp_path)
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 250, 140)]
    split: dict[str, Any] = {"device": "cpu:1", "n_ctx": session_kinds.N_CTX, **ROOM}
    with quire.load(path, **split, n_gpu_layers=2) as llm:
        wanted, name = llm.logits(ids), llm.device.name
        assert llm._streaming is None
    for gpu_s, host_s in ((1e-9, 1.0), (1.0, 1e-9)):
        with quire.load(path, exact_batches=False, **split, n_gpu_layers=2) as llm:
            planned = next(d.streaming for d in llm.plan.devices if d.device.name == name)
            breakdown = llm.device.budget.breakdown
            assert planned > 0 and breakdown["weights that pass through"] == planned
            found = llm._streaming
            assert found is not None
            found.measured = lambda *_, **__: None  # type: ignore[method-assign]
            found.gpu_s, found.host_s, sent = gpu_s, host_s, []
            take = found.take
            found.take = lambda at, take=take, sent=sent: (sent.append(at), take(at))[1]  # type: ignore[method-assign]
            assert np.array_equal(llm.logits(ids), wanted)
            assert sent == (list(range(len(found._networks))) if gpu_s < host_s else [])
            sent.clear()
            assert np.array_equal(llm.logits(ids[:20]), wanted[:20]) and not sent
            llm.memory.audit()
        assert {d.budget.used for d in llm.devices} == {0}


class Watched(InPlace):
    """A passage that notes which rooms are filled and used."""

    def __init__(self, ops: Any) -> None:
        super().__init__(ops)
        self.filled: list[int] = []
        self.used: list[int] = []
        self.using = -1
        self.closed = False

    def fill(self, room: int, make: Any) -> Any:
        assert not self.closed and room != self.using, "what is used is overwritten"
        self.filled.append(room)
        made = make()
        assert room != self.using, "it was used before it was there"
        return made

    @contextmanager
    def use(self, room: int) -> Iterator[None]:
        assert self.using < 0 and room in self.filled
        self.using = room
        self.used.append(room)
        yield
        self.using = -1

    def close(self) -> None:
        assert self.using < 0
        self.closed = True


def test_one_room_is_filled_while_the_other_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer after layer, chunk after chunk: what comes next is on its way, the first too."""
    made: list[Watched] = []
    monkeypatch.setattr(
        CpuOps, "passage", lambda self, size: made.append(Watched(self)) or made[-1]
    )  # fmt: skip
    path = tmp_path / "m.gguf"
    tiny.write(path, tiny.Tiny(layers=5, tied=False))
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 250, 210)]
    split: dict[str, Any] = {"device": "cpu:1", "n_gpu_layers": 3, **ROOM}
    with quire.load(path, **split) as llm:
        wanted = llm.generate(ids, max_tokens=4, ignore_eos=True).token_ids
    with quire.load(path, exact_batches=False, **split) as llm:
        found = llm._streaming
        assert found is not None and len(found._networks) == 3 and len(made) == 1
        found.measured = lambda *_, **__: None  # type: ignore[method-assign]
        found.host_s, found.gpu_s = 1.0, 1e-9
        llm.engine.scheduler.max_tokens = 70
        assert llm.generate(ids, max_tokens=4, ignore_eos=True).token_ids == wanted
        llm.memory.audit()
    assert made[0].used == [1, 0, 1, 0, 1, 0, 1, 0, 1] and made[0].closed
    assert made[0].filled == [1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert {d.budget.used for d in llm.devices} == {0}


def test_a_network_that_a_prompt_skips_is_not_sent_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks behind the last layer while a prompt goes on; the first is needed next."""
    path = session_kinds.write("moe", tmp_path)
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 250, 150)]
    split: dict[str, Any] = {"device": "cpu:1", "n_cpu_moe": 2, **ROOM, "exact_batches": False}
    with quire.load(path, n_ctx=160, **split) as llm:
        found = llm._streaming
        assert found is not None and len(found._networks) == llm.model.n_layers == 2
        found.measured = lambda *_, **__: None  # type: ignore[method-assign]
        found.host_s, found.gpu_s, sent = 1.0, 1e-9, []
        send = found._send
        monkeypatch.setattr(found, "_send", lambda at: (sent.append(at), send(at))[1])
        llm.engine.scheduler.max_tokens = 70
        for _ in range(2):
            llm.generate(ids, max_tokens=1, ignore_eos=True)
            llm.forget()
        assert sent == [0, 1, 0, 0, 0, 0]
        assert len(llm.logits(ids[:70])) == 70  # here somebody does
        assert sent[6:] == [0, 1, 0]


def test_a_file_that_cannot_be_read_again_stays_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise FileError("it was cut")

    path = session_kinds.write("dense", tmp_path)
    split: dict[str, Any] = {"device": "cpu:1", "n_gpu_layers": 2, **ROOM, "exact_batches": False}
    with quire.load(path, **split) as llm:
        monkeypatch.setattr(GatedNetwork, "again", cut)
        first = llm.logits(IDS * 3)
        assert np.array_equal(llm.logits(IDS * 3), first)
        found = llm._streaming
        assert found is not None and not found.runs and not found.worth(10**6)


def test_the_faster_way_is_found_by_measuring() -> None:
    none: Any = None
    streaming = Streaming(Kit(none, none, "f16", "f16"), none, InPlace(none), lambda: None)
    assert not streaming.worth(512)  # nothing is known
    streaming.measured(512, 0.512, on_gpu=False)
    assert streaming.worth(512) and not streaming.worth(LEAST - 1)  # to be tried
    streaming.measured(512, 60.0, on_gpu=True)  # it compiled
    streaming.measured(512, 0.3, on_gpu=True)
    assert streaming.worth(512) and not streaming.worth(256)
    streaming.measured(512, 3.0, on_gpu=True)
    assert not streaming.worth(512)
    for _ in range(100):
        streaming.measured(512, 0.512, on_gpu=False)
    assert streaming.worth(512)  # tried again after a while
    streaming.measured(512, 2.0, on_gpu=True)
    assert not streaming.worth(512)  # in vain
    streaming.measured(512, 0.2, on_gpu=True)
    assert streaming.worth(512)
    streaming.close()


def test_layers_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    with quire.load(tmp_path / "m.gguf", n_gpu_layers=99, device="cpu", **ROOM) as llm:
        assert llm.plan.notes == ("n_gpu_layers: no GPU is used, so all layers are on the CPU",)
        assert llm.device.name == "cpu"


def test_idle_arrays_of_any_device_are_in_nobodys_way(tmp_path: Path) -> None:
    """Also where another one than that with the output gets less room."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny(context=1024))
    with quire.load(tmp_path / "m.gguf", device="cpu:1", n_gpu_layers=2, **ROOM) as llm:
        llm.logits([7] * 500)
        host = next(device for device in llm.devices if device is not llm.device)
        held = host.budget.breakdown["compute"]
        with pytest.raises(BudgetError, match="pass at least"):
            llm.resize({host.name: host.budget.breakdown["weights"]})
        assert host.budget.breakdown.get("compute", 0) < held


def test_a_device_with_weights_alone_refuses_before_others_give_way(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    with quire.load(tmp_path / "m.gguf", device="cpu:1", n_gpu_layers=1, **ROOM) as llm:
        llm.generate([7] * 64, max_tokens=2, ignore_eos=True)
        assert llm.device not in llm.engine.memory.devices
        cached, weights = llm.engine.memory.cached_bytes, llm.device.budget.breakdown["weights"]
        with pytest.raises(BudgetError, match="pass at least"):
            llm.resize({llm.device.name: weights - 1})
        assert llm.engine.memory.cached_bytes == cached > 0
