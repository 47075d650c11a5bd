"""Plans that fit, over random models and random sets of devices."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.placing import best_plan, wanted_of
from quire.config import LoadConfig
from quire.errors import DoesNotFit, RequestError
from quire.models.loader import DOWN, EMBEDDING, EXPERTS, MIXER, NETWORK, OUTPUT, Part
from quire.placement.cuda_arrays import TorchArena
from quire.placement.described import Described
from quire.placement.facts import GroupFacts, ModelFacts
from quire.placement.fit import fit
from quire.placement.plan import Load, Plan, lay_out
from quire.placement.room import next_gib
from quire.placement.wanted import Wanted

MB = 10**6
KINDS = ("cpu", "cuda")


def compute(kind: str, parts: frozenset[Part], n_ctx: int, sequences: int) -> int:
    """The largest array of any part here, and some for contexts and sequences."""
    grows = min(n_ctx, 512) * 500 + n_ctx * 8 + sequences * 20_000
    return max((3 * MB if p.kind == OUTPUT else 1 * MB for p in parts), default=0) + grows


def names_of(part: Part) -> tuple[str, ...]:
    """The matrices of a part."""
    layer = f"blk.{part.layer}."
    return {
        EMBEDDING: ("token_embd",), OUTPUT: ("output",), MIXER: (f"{layer}attn_q",),
        NETWORK: (f"{layer}ffn_up", f"{layer}ffn_down"), DOWN: (f"{layer}ffn_down_exps",),
        EXPERTS: (f"{layer}ffn_gate_exps", f"{layer}ffn_up_exps"),
    }[part.kind]  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    """Dense, windowed, recurrent and hybrid, with and without experts, tied and not."""
    n = draw(st.integers(1, 12))
    size = st.integers(1, 40 * MB)
    parts: dict[Part, int] = {Part(EMBEDDING): draw(size)}
    tied = draw(st.booleans())
    if not tied:
        parts[Part(OUTPUT)] = draw(size)
    experts = draw(st.booleans())
    for i in range(n):
        parts[Part(MIXER, i)] = draw(size)
        if draw(st.booleans()) or not experts:
            parts[Part(NETWORK, i)] = draw(size)
        if experts:
            parts[Part(EXPERTS, i)] = draw(size) * 4
            parts[Part(DOWN, i)] = draw(size) * 2
    kinds = [draw(st.sampled_from(["attention", "window", "recurrent"])) for _ in range(n)]
    groups = []
    for kind in sorted(set(kinds)):
        layers = frozenset(i for i in range(n) if kinds[i] == kind)
        if kind == "recurrent":
            groups.append(GroupFacts(kind, kind, layers, 1, 0, None, 2 * MB, MB // 9, 16))
        else:
            window = 700 if kind == "window" else None
            groups.append(GroupFacts(kind, kind, layers, 16, draw(st.integers(64, 9000)), window))
    # A GPU packs otherwise than a CPU.
    gpu = {part: size * 9 // 8 for part, size in parts.items()}
    train = draw(st.sampled_from([512, 4096, 32768, 131072]))
    names = {part: names_of(part) for part in parts}
    sizes = {"cpu": parts, "cuda": gpu}
    return ModelFacts("m.gguf", n, train, tied, tuple(groups), sizes, compute, 1.0, names)


@st.composite
def device_sets(draw: st.DrawFn) -> list[Described]:
    """Up to three GPUs, unequal, half used, integrated; and the host."""
    found = []
    for i in range(draw(st.integers(0, 3))):
        free = draw(st.integers(0, 1200 * MB))
        margin = min(draw(st.sampled_from([0, 20 * MB])), free)
        unified = draw(st.integers(0, 4)) == 0
        found.append(
            Described(f"cuda:{i}", "cuda", free, margin, unified, draw(st.integers(0, 9 * MB)))
        )
    return [*found, Described("cpu", "cpu", draw(st.integers(1, 3000 * MB)))]


@st.composite
def wishes(draw: st.DrawFn) -> Wanted:
    """What a user may fix, or leave open."""
    return Wanted(
        n_ctx=draw(st.none() | st.sampled_from([512, 4096, 20000])),
        sequences=draw(st.integers(1, 4)),
        checkpoints=draw(st.integers(0, 3)),
        n_gpu_layers=draw(st.none() | st.integers(0, 15)),
        kv_offload=draw(st.integers(0, 5)) > 0,
        streams=draw(st.integers(0, 3)) == 0,
        fit=draw(st.integers(0, 5)) > 0,
    )


@st.composite
def by_hand(draw: st.DrawFn, model: ModelFacts, gpus: int) -> Wanted:
    """With places that a user says too, as they can be said of these devices."""
    wanted = draw(wishes())
    if gpus and draw(st.booleans()):
        wanted = replace(wanted, main_gpu=draw(st.integers(0, gpus - 1)))
    if gpus > 1 and draw(st.booleans()):
        shares = st.lists(st.integers(1, 5), min_size=gpus, max_size=gpus)
        wanted = replace(wanted, tensor_split=tuple(draw(shares)))
    if model.has_experts and draw(st.booleans()):
        wanted = replace(wanted, n_cpu_moe=draw(st.integers(0, model.n_layers)))
    if draw(st.booleans()):
        layer = draw(st.integers(0, model.n_layers - 1))
        where = draw(st.sampled_from(["cpu", *(f"cuda:{i}" for i in range(gpus))]))
        wanted = replace(wanted, overrides=((rf"blk\.{layer}\.attn", where),))
    return wanted


def check_limits(plan: Plan) -> None:
    """No device over its limit, those that share the host's memory together with it."""
    for one in plan.devices:
        assert one.total <= one.device.limit, one.device.name
    shared = sum(one.total for one in plan.devices[:-1] if one.device.unified)
    assert shared + plan.devices[-1].total <= plan.devices[-1].device.limit or not shared


def test_torch_holds_segments() -> None:
    """Never less than lives, the same again when the same comes again, and what is free is used."""
    rng = random.Random(4)
    arena, live = TorchArena(), dict[int, int]()
    for key in range(2000):
        if live and rng.random() < 0.5:
            gone = rng.choice(list(live))
            arena.give(gone)
            del live[gone]
        live[key] = int(10 ** rng.uniform(1, 6.5))
        arena.take(key, live[key])
        assert arena.held >= 4 * sum(live.values()) and arena.held % (2 << 20) == 0
    for key in live:
        arena.give(key)
    trace = tuple([(i, 1 << i) for i in range(24)] + [(i, 0) for i in range(24)])
    arena.run([trace])
    held = arena.held
    arena.run([trace])
    assert arena.held == held


def check_shape(plan: Plan) -> None:
    """Contiguous from the last layer backwards, output first, embedding on the host."""
    host, n = len(plan.devices) - 1, plan.model.n_layers
    on = [plan.places[part] for i in range(n) for part in plan.model.layer_parts[i][-1:]]
    body = [plan.places[plan.model.layer_parts[i][0]] for i in range(n)]
    if plan.n_gpu_layers and body.count(host) < n:
        first = next(i for i in range(n) if body[i] != host)
        assert host not in body[first:]
        assert (
            len(dict.fromkeys(body[first:]))
            == sum(a != b for a, b in zip(body[first:], body[first + 1 :], strict=False)) + 1
        )
        most = max(one.device.limit for one in plan.devices[:-1])
        assert plan.devices[plan.places[Part(OUTPUT)]].device.limit == most
    if plan.places[Part(EMBEDDING)] != host:
        assert host == 1 and set(plan.places.values()) == {0}
    assert len(on) == n


@settings(max_examples=70, deadline=None)
@given(models(), device_sets(), wishes())
def test_never_over_a_limit_and_nothing_more_would_fit(
    model: ModelFacts, devices: list[Described], wanted: Wanted
) -> None:
    try:
        plan = fit(model, devices, wanted)
    except DoesNotFit as error:
        check_refusal(error, model, devices, wanted)
        return
    check_limits(plan)
    if wanted.kv_offload:
        check_shape(plan)
    check_kept(plan, model, devices, wanted)
    check_most(plan, model, devices, wanted)


@settings(max_examples=70, deadline=None)
@given(st.data(), models(), device_sets(), st.none() | models())
def test_what_is_said_by_hand_is_so(
    data: st.DataObject, model: ModelFacts, devices: list[Described], draft: ModelFacts | None
) -> None:
    """Places by name, by share and by number, with a draft model and without."""
    wanted = data.draw(by_hand(model, len(devices) - 1))
    try:
        plan = fit(model, devices, wanted, draft)
    except DoesNotFit as error:
        assert "needs" in str(error) and "has" in str(error)
        for changes in error.advice:
            assert tried(model, devices, advised(wanted, changes), draft), changes
        return
    check_limits(plan)
    check_places(plan, devices, wanted)
    check_kept(plan, model, devices, wanted)
    drafts = [one.draft for one in plan.devices]
    at = plan.places[Part(OUTPUT)]
    assert (drafts[at] > 0) is (draft is not None) and not any(drafts[:at] + drafts[at + 1 :])


def advised(wanted: Wanted, changes: dict[str, Any]) -> Wanted:
    """With the changes that are said to be enough."""
    names = {"n_parallel": "sequences"}
    values = {names.get(k, k): None if v == "auto" else v for k, v in changes.items()}
    return replace(wanted, **values)


def check_places(plan: Plan, devices: list[Described], wanted: Wanted) -> None:
    """Nothing is anywhere else than was said."""
    host, places, n = len(devices) - 1, plan.places, plan.model.n_layers
    named = {
        part: next(i for i, device in enumerate(devices) if device.name == name)
        for pattern, name in wanted.overrides
        for part in places
        if host and re.search(pattern, names_of(part)[0])
    }
    assert all(places[part] == at for part, at in named.items())
    rest = {part: at for part, at in places.items() if part not in named}
    on_gpu = {at for at in rest.values() if at != host}
    if not wanted.kv_offload:
        assert all(at == host for part, at in rest.items() if part.kind == MIXER)
    if wanted.main_gpu is not None and on_gpu:
        assert places[Part(OUTPUT)] == wanted.main_gpu
    if wanted.n_cpu_moe is not None and host:
        for part, at in rest.items():
            if part.kind in (EXPERTS, DOWN) and part.layer < wanted.n_cpu_moe:
                assert at == host
    shares, asked = wanted.tensor_split, wanted.n_gpu_layers
    if shares and host > 1 and wanted.kv_offload and not named and on_gpu:
        layers = [one.layers for one in plan.devices[:-1]]
        for share, count in zip(shares, layers, strict=True):
            assert abs(count - sum(layers) * share / sum(shares)) <= 1
    if asked is not None and host and wanted.kv_offload and not named:
        away = sum(places[Part(MIXER, i)] != host for i in range(n))
        assert away == max(min(asked, n + 1) - 1, 0)


def check_kept(plan: Plan, model: ModelFacts, devices: list[Described], wanted: Wanted) -> None:
    """What the user fixed is never changed, and what is changed is told."""
    assert plan.load.sequences == wanted.sequences
    assert plan.load.checkpoints == wanted.checkpoints
    if wanted.n_ctx:
        assert plan.load.n_ctx == wanted.n_ctx
    elif plan.load.n_ctx < model.n_ctx_train:
        assert any("n_ctx" in note for note in plan.notes)
    asked = wanted.n_gpu_layers
    if asked is not None and len(devices) > 1 and wanted.kv_offload and not wanted.overrides:
        assert plan.n_gpu_layers == min(asked, model.n_layers + 1)
    elif asked and len(devices) == 1:
        assert any("no GPU" in note for note in plan.notes)
    said = wanted.n_cpu_moe is not None or wanted.overrides
    if plan.n_cpu_moe and wanted.kv_offload and not said:
        assert any("experts" in note for note in plan.notes)
    if not wanted.fit:
        assert plan.load.n_ctx == (wanted.n_ctx or model.n_ctx_train)
        assert not any("n_ctx" in note or "n_gpu_layers is" in note for note in plan.notes)


def tried(
    model: ModelFacts, devices: list[Described], wanted: Wanted, draft: ModelFacts | None = None
) -> bool:
    try:
        fit(model, devices, wanted, draft)
    except DoesNotFit:
        return False
    return True


def check_most(plan: Plan, model: ModelFacts, devices: list[Described], wanted: Wanted) -> None:
    """No larger context, no more layers, no fewer experts on the host."""
    if not wanted.fit:
        return
    n, moved = plan.n_gpu_layers, plan.n_cpu_moe
    fixed = replace(wanted, n_gpu_layers=n, n_cpu_moe=moved if moved else None)
    host = len(devices) - 1
    halves = any(
        plan.places[p] == host and plan.places[p._replace(kind=EXPERTS)] != host
        for p in plan.places
        if p.kind == DOWN
    )
    narrow = plan.load.n_ctx < model.n_ctx_train and wanted.n_ctx is None
    if wanted.kv_offload and narrow and not halves:
        wider = min(plan.load.n_ctx + 16, model.n_ctx_train)
        if model.has_experts:  # with these experts moved, and no others
            fixed = replace(fixed, n_cpu_moe=moved, fit=False)
        assert not tried(model, devices, replace(fixed, n_ctx=wider))
    least = plan.load.n_ctx if wanted.n_ctx else min(wanted.floor, model.n_ctx_train)
    if wanted.kv_offload and wanted.n_gpu_layers is None and n <= model.n_layers and devices[1:]:
        more = replace(wanted, n_gpu_layers=n + 1, n_ctx=least)
        assert not tried(model, devices, more)
        if model.has_experts:  # dense parts leave the GPUs only after all experts have
            assert all(plan.places[p] == host for p in plan.places if p.kind in (EXPERTS, DOWN))
    if moved and wanted.kv_offload:
        fewer = replace(wanted, n_gpu_layers=n, n_cpu_moe=moved - 1, n_ctx=least, fit=False)
        if n == model.n_layers + 1:
            assert not tried(model, devices, fewer)


def check_refusal(
    error: DoesNotFit, model: ModelFacts, devices: list[Described], wanted: Wanted
) -> None:
    """Need and have are said, and what is said to fit does."""
    assert "needs" in str(error) and "has" in str(error)
    for changes in error.advice:
        assert tried(model, devices, advised(wanted, changes)), changes
    if error.nearest is not None:
        check_limits(error.nearest)
    else:
        least = replace(wanted, n_ctx=16, sequences=1, checkpoints=0, n_gpu_layers=None, fit=True)
        assert not tried(model, devices, least)


@settings(max_examples=40, deadline=None)
@given(models(), st.integers(0, 4))
def test_bytes_on_a_gpu_grow_with_every_layer(model: ModelFacts, seqs: int) -> None:
    """And the host's shrink: the output goes first, then layers from the last backwards."""
    roomy = [Described("cuda:0", "cuda", 10**12), Described("cpu", "cpu", 10**12)]
    gpu, cpu = [], []
    for n in range(model.n_layers + 2):
        plan = fit(model, roomy, Wanted(n_gpu_layers=n, sequences=seqs or 1, fit=False))
        assert plan.n_gpu_layers == n
        gpu.append(plan.devices[0].total)
        cpu.append(plan.devices[1].total)
        assert plan.splits <= 2
    assert gpu == sorted(gpu) and len(set(gpu)) == len(gpu)
    assert cpu == sorted(cpu, reverse=True)


@settings(max_examples=40, deadline=None)
@given(models(), st.lists(st.integers(1, 9), min_size=2, max_size=3))
def test_several_gpus_are_filled_in_proportion(model: ModelFacts, sizes: list[int]) -> None:
    """None is more than two layers fuller than another, by the share of what it has."""
    devices = [Described(f"cuda:{i}", "cuda", s * 10**9) for i, s in enumerate(sizes)]
    devices.append(Described("cpu", "cpu", 10**12))
    plan = fit(model, devices, Wanted(n_ctx=512, n_gpu_layers=model.n_layers + 1))
    used = [one.total / one.device.limit for one in plan.devices[:-1]]
    layer = max(
        sum(model.weights("cuda", p) for p in model.layer_parts[i]) for i in range(model.n_layers)
    )
    ends = model.weights("cuda", Part(OUTPUT)) + 64 * MB * len(model.groups) + 4 * MB
    slack = (2 * layer + ends + 50 * MB) / (min(sizes) * 10**9)
    assert max(used) - min(used) < slack + 0.02


def dense(n: int = 8, layer: int = 10 * MB, experts: int = 0) -> ModelFacts:
    parts = {Part(EMBEDDING): 5 * MB, Part(OUTPUT): 5 * MB}
    for i in range(n):
        parts |= {Part(MIXER, i): layer // 2, Part(NETWORK, i): layer // 2}
        if experts:
            parts |= {Part(EXPERTS, i): experts * 3 // 4, Part(DOWN, i): experts // 4}
    group = GroupFacts("attention", "attention", frozenset(range(n)), 16, 16 * 1000)
    names = {p: (f"blk.{p.layer}.ffn_gate_exps", f"blk.{p.layer}.ffn_up_exps") for p in parts
             if p.kind == EXPERTS}  # fmt: skip
    names |= {p: (f"blk.{p.layer}.ffn_down_exps",) for p in parts if p.kind == DOWN}  # type: ignore[misc]
    sizes = {"cpu": parts, "cuda": parts}
    return ModelFacts("m", n, 32768, False, (group,), sizes, lambda *_: 0, 1.0, names)


def test_the_order_of_giving_up() -> None:
    """Whole, then less context, then experts to the host, then fewer layers."""
    model, host = dense(experts=40 * MB), Described("cpu", "cpu", 10**11)
    whole = 5 * MB + 8 * 50 * MB + 8 * 16000 * 2048
    seen = []
    for free in range(whole + 64 * MB, 0, -4 * MB):
        plan = fit(model, [Described("cuda:0", "cuda", free), host], Wanted())
        away = [p for p, at in plan.places.items() if p.kind in (EXPERTS, DOWN) and at == 1]
        seen.append((plan.n_gpu_layers, -plan.n_cpu_moe, plan.load.n_ctx, len(away)))
    layers, experts, contexts, matrices = zip(*seen, strict=True)
    assert list(matrices) == sorted(matrices) and set(matrices) == set(range(17))  # one by one
    assert list(layers) == sorted(layers, reverse=True) and layers[0] == 9 and layers[-1] == 0
    assert contexts[0] == 32768
    shrunk = next(i for i, c in enumerate(contexts) if c < 32768)
    moved = next(i for i, e in enumerate(experts) if e)
    fewer = next(i for i, n in enumerate(layers) if n < 9)
    assert 0 < shrunk < moved < fewer
    assert set(layers[:fewer]) == {9} and min(experts[:fewer]) == -8


def test_shares_names_and_the_host() -> None:
    model = dense(experts=MB)
    gpus = [Described(f"cuda:{i}", "cuda", 10**11) for i in range(2)]
    devices = [*gpus, Described("cpu", "cpu", 10**11)]
    split = fit(model, devices, Wanted(tensor_split=(3, 1)))
    assert [one.layers for one in split.devices] == [6, 2, 0]
    main = fit(model, devices, Wanted(tensor_split=(1, 3), main_gpu=0))
    assert main.places[Part(OUTPUT)] == 0 and main.devices[0].layers == 2
    away = fit(model, devices, Wanted(overrides=((r"blk\.[0-3]\..*_exps", "CPU"),)))
    assert [away.device_of(Part(EXPERTS, i)) for i in (0, 3)] == ["cpu", "cpu"]
    assert away.device_of(Part(EXPERTS, 4)) != "cpu"
    moe = fit(model, devices, Wanted(n_cpu_moe=3))
    assert moe.n_cpu_moe == 3 and moe.n_gpu_layers == 9
    kv = fit(model, devices, Wanted(kv_offload=False))
    assert not kv.devices[0].memory and kv.devices[2].memory and kv.devices[2].layers == 8
    for wrong, said in [
        (Wanted(overrides=(("up_exps", "cpu"),)), "name both"),
        (Wanted(overrides=(("nothing", "cpu"),)), "matches no matrix"),
        (Wanted(overrides=(("exps", "tpu"),)), "there are cuda:0"),
        (Wanted(tensor_split=(1,)), "2 GPUs"),
        (Wanted(main_gpu=2), "from 0 on"),
    ]:
        with pytest.raises(RequestError, match=said):
            fit(model, devices, wrong)
    with pytest.raises(RequestError, match="no experts"):
        fit(dense(), devices, Wanted(n_cpu_moe=3))


def test_one_gpu_where_one_is_enough_and_nothing_else_is_said() -> None:
    model = dense(experts=MB)
    devices = [Described("cuda:0", "cuda", 10**10), Described("cuda:1", "cuda", 10**11)]
    devices.append(Described("cpu", "cpu", 10**11))
    alone = best_plan(model, devices, LoadConfig())
    assert {alone.device_of(part) for part in alone.places} == {"cuda:1"}
    main = best_plan(model, devices, LoadConfig(main_gpu=0))
    assert {main.device_of(part) for part in main.places} == {"cuda:0"}
    away = best_plan(model, devices, LoadConfig(override_tensor="exps=cuda:0"))
    assert away.device_of(Part(EXPERTS, 3)) == "cuda:0" and away.device_of(Part(OUTPUT)) == "cuda:1"
    one = fit(model, devices[1:], Wanted(tensor_split=(3, 1)))
    assert "one GPU" in one.notes[0] and {at for at in one.places.values()} == {0}


def test_the_embedding_is_with_the_experts_that_left_the_gpu() -> None:
    """Whoever needs tokens of the host anyway can look them up there."""
    model = dense(experts=40 * MB)
    devices = [Described("cuda:0", "cuda", 10**10), Described("cpu", "cpu", 10**11)]
    whole, some = (fit(model, devices, Wanted(n_cpu_moe=n)) for n in (0, 1))
    assert whole.device_of(Part(EMBEDDING)) == "cuda:0"
    assert some.device_of(Part(EMBEDDING)) == "cpu"


def test_places_by_name_are_not_taken_for_layers() -> None:
    """With several GPUs, which are filled evenly, layers that were asked for stay so many."""
    model = dense(experts=MB)
    devices = [Described(f"cuda:{i}", "cuda", 10**11) for i in range(2)]
    devices.append(Described("cpu", "cpu", 10**11))
    overrides = ((r"blk\.0\..*_exps", "cuda:0"), (r"blk\.7\..*_exps", "cpu"))
    plan = fit(model, devices, Wanted(n_gpu_layers=4, overrides=overrides))
    assert [plan.places[Part(MIXER, i)] == 2 for i in range(8)] == [True] * 5 + [False] * 3
    assert not any("experts" in note for note in plan.notes)


def test_what_more_memory_buys_on_the_host_alone() -> None:
    """A context below the floor that GPUs have grows too."""
    group = GroupFacts("attention", "attention", frozenset(range(8)), 16, 16 * 10**6)
    model, devices = replace(dense(), groups=(group,)), [Described("cpu", "cpu", 10**9)]
    wanted = wanted_of(LoadConfig(), devices)
    plan = fit(model, devices, wanted)
    assert 16 <= plan.load.n_ctx < 128
    assert next_gib(plan, model, devices, wanted)["cpu"] == "128 more tokens of context"


def test_an_integrated_gpu_shares_the_hosts_memory() -> None:
    model = dense()
    need = lay_out(model, [Described("cpu", "cpu", 1)], dict.fromkeys(model.parts["cpu"], 0),
                   Load(512)).devices[0].total  # fmt: skip
    devices = [
        Described("cuda:0", "cuda", 10**10, unified=True), Described("cpu", "cpu", need + 40 * MB),
    ]  # fmt: skip
    plan = fit(model, devices, Wanted(n_ctx=512))
    assert sum(one.total for one in plan.devices) <= need + 40 * MB


def test_a_draft_model_is_part_of_the_plan() -> None:
    model, small = dense(), dense(2, MB)
    devices = [Described("cuda:0", "cuda", 10**10), Described("cpu", "cpu", 10**10)]
    alone, both = (fit(model, devices, Wanted(n_ctx=2048), draft) for draft in (None, small))
    extra = both.devices[0].total - alone.devices[0].total
    assert extra == both.devices[0].draft > 2 * MB + 10 * MB
    tight = [replace(devices[0], free=alone.devices[0].total + 1), devices[1]]
    assert fit(model, tight, Wanted(n_ctx=2048)).n_gpu_layers == 9
    assert fit(model, tight, Wanted(n_ctx=2048), small).n_gpu_layers < 9
