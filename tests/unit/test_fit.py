"""Plans that fit, over random models and random sets of devices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.models.loader import DOWN, EMBEDDING, EXPERTS, MIXER, NETWORK, OUTPUT, Part
from quire.placement.cuda_arrays import TorchArena
from quire.placement.described import Described
from quire.placement.facts import GroupFacts, ModelFacts
from quire.placement.fit import fit
from quire.placement.plan import Load, Plan, lay_out
from quire.placement.wanted import DoesNotFit, Wanted

MB = 10**6
KINDS = ("cpu", "cuda")


def compute(kind: str, parts: frozenset[Part]) -> int:
    """The largest array of any part here."""
    return max((3 * MB if p.kind == OUTPUT else 1 * MB for p in parts), default=0)


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
    return ModelFacts("m.gguf", n, train, tied, tuple(groups), {"cpu": parts, "cuda": gpu}, compute)


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
    )


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
    arena.run(trace)
    held = arena.held
    arena.run(trace)
    assert arena.held == held


def check_shape(plan: Plan) -> None:
    """Contiguous from the last layer backwards, output first, embedding on the host."""
    host, n = len(plan.devices) - 1, plan.model.n_layers
    on = [plan.places[part] for i in range(n) for part in plan.model.layer_parts(i)[-1:]]
    body = [plan.places[plan.model.layer_parts(i)[0]] for i in range(n)]
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


@settings(max_examples=120, deadline=None)
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


def check_kept(plan: Plan, model: ModelFacts, devices: list[Described], wanted: Wanted) -> None:
    """What the user fixed is never changed, and what is changed is told."""
    assert plan.load.sequences == wanted.sequences
    assert plan.load.checkpoints == wanted.checkpoints
    if wanted.n_ctx:
        assert plan.load.n_ctx == wanted.n_ctx
    elif plan.load.n_ctx < model.n_ctx_train:
        assert any("n_ctx" in note for note in plan.notes)
    asked = wanted.n_gpu_layers
    if asked is not None and len(devices) > 1 and wanted.kv_offload:
        assert plan.n_gpu_layers == min(asked, model.n_layers + 1)
    elif asked and len(devices) == 1:
        assert any("no GPU" in note for note in plan.notes)
    if plan.n_cpu_moe and wanted.kv_offload:
        assert any("experts" in note for note in plan.notes)


def tried(model: ModelFacts, devices: list[Described], wanted: Wanted) -> bool:
    try:
        fit(model, devices, wanted)
    except DoesNotFit:
        return False
    return True


def check_most(plan: Plan, model: ModelFacts, devices: list[Described], wanted: Wanted) -> None:
    """No larger context, no more layers, no fewer experts on the host."""
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
    if error.nearest is not None:
        check_limits(error.nearest)
        load = error.nearest.load
        assert f"n_ctx={load.n_ctx}" in str(error)
    else:
        least = replace(wanted, n_ctx=16, sequences=1, checkpoints=0, n_gpu_layers=0)
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
        sum(model.weights("cuda", p) for p in model.layer_parts(i)) for i in range(model.n_layers)
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
    return ModelFacts("m", n, 32768, False, (group,), sizes, lambda kind, here: 0, 1.0, names)


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
