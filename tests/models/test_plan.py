"""What is planned is what is held: on the host within 1%, for every model and every split."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import quire
from quire.cli import main
from quire.errors import DoesNotFit, FileError, RequestError
from quire.memory.build import attention_layout
from quire.models.loader import MIXER, OUTPUT, Part
from quire.ops import count_bytes
from quire.placement.kernels import Kernels, panel_tokens
from tests import tiny
from tests.budgets import Peaks, peaks
from tests.gguf_export import export
from tests.model_folders import MODELS, RANDOM, TRAINED, model_folder

__all__ = ["peaks"]
N_CTX = 640
PROMPT = [int(i) for i in np.random.default_rng(2).integers(3, 250, 512)]


def filled(path: Path, peaks: Peaks, **settings: Any) -> list[tuple[str, int, int]]:
    """One sequence up to the whole context: for each device what was planned and held."""
    settings = {"n_ctx": N_CTX, "threads": 2, "memory_budget": "512MiB", **settings}
    with quire.load(path, **settings) as llm:
        with llm.session() as session:
            session.append(PROMPT)
            session.generate(max_tokens=N_CTX - 512, ignore_eos=True)
        planned = {one.device.name: one.total for one in llm.plan.devices}
        return [(d.name, planned[d.name], peaks[d.budget]) for d in llm.devices]


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
@pytest.mark.host
def test_planned_is_held(name: str, peaks: Peaks, tmp_path: Path) -> None:
    ((_, planned, held),) = filled(model_folder(name, tmp_path), peaks)
    assert abs(planned - held) <= 0.01 * held


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid", "tiny-window", "mamba2", "tiny-moe"])
def test_planned_is_held_on_each_device(name: str, peaks: Peaks, tmp_path: Path) -> None:
    """For every number of layers beside the host."""
    path = model_folder(name, tmp_path)
    with quire.load(path) as llm:
        n = llm.model.n_layers
    for layers in range(1, n + 2):
        for where, planned, held in filled(path, peaks, device="cpu:1", n_gpu_layers=layers):
            assert abs(planned - held) <= 0.01 * held + 4096, (layers, where, planned, held)


def test_memory_is_predicted_by_the_layouts_that_make_it(tmp_path: Path) -> None:
    """The bytes of one layer, times layers, are those of a group with so many."""
    for name in TRAINED:
        with quire.load(model_folder(name, tmp_path), memory_budget="512MiB") as llm:
            for facts, spec in zip(llm.plan.model.groups, llm.model.groups, strict=True):
                if spec.kind == "recurrent":
                    continue
                for keep in range(1, len(spec.layers) + 1):
                    some = spec.only(lambda i, spec=spec, keep=keep: i in spec.layers[:keep])
                    layout = attention_layout(some, llm.settings)
                    assert layout.page_bytes == keep * facts.page_bytes


def test_a_header_is_enough(tmp_path: Path) -> None:
    """Of a file whose weights have not come yet; loading it is still refused."""
    whole = export(MODELS / "tiny-hybrid", tmp_path / "whole.gguf")
    data = whole.read_bytes()
    wanted = quire.plan(whole, devices=["cpu:8GiB"], threads=1)
    part = tmp_path / "part.gguf"
    part.write_bytes(data[: len(data) // 2])
    found = quire.plan(part, devices=["cpu:8GiB"], threads=1)
    assert [d.total for d in found.devices] == [d.total for d in wanted.devices]
    with pytest.raises(FileError, match="incomplete"):
        quire.load(part)
    part.write_bytes(data[:1000])
    with pytest.raises(FileError):
        quire.plan(part)


def test_described_devices(tmp_path: Path) -> None:
    t = tiny.Tiny(layers=4, tied=False)
    tiny.write(tmp_path / "m.gguf", t)
    path = tmp_path / "m.gguf"
    plan = quire.plan(path, devices=["cuda:24GiB", "cpu:64GiB"], n_parallel=3, checkpoints=2)
    assert plan.n_gpu_layers == 5 and plan.load.n_ctx == t.context and not plan.notes
    assert plan.outlook and plan.outlook.most_sequences > 100
    assert plan.outlook.tokens_per_second is None
    one = plan.devices[0]
    assert one.libraries > 0 and one.graphs > 0 and one.device.margin == 2**30
    some = quire.plan(path, devices=["cuda:24GiB", "cuda:24GiB", "cpu:64GiB"], n_gpu_layers=3)
    assert some.device_of(Part(OUTPUT)) == "cuda:1" and some.device_of(Part(MIXER, 1)) == "cpu"
    drafted = quire.plan(path, devices=["cuda:24GiB"], draft=path)
    assert drafted.devices[0].draft > 0
    text = str(plan)
    assert "cuda:0" in text and "one more GiB on cuda:0" in text and "largest context" in text
    with pytest.raises(DoesNotFit, match="what would fit"):
        quire.plan(path, devices=["cuda:700MiB", "cpu:1GiB"], n_gpu_layers=5, n_ctx=2**22)
    for wrong in (["cuda"], ["tpu:4GiB"], ["cuda:lots"], ["cpu:1GiB", "cpu:2GiB"], "cuda:4GiB"):
        with pytest.raises(RequestError):
            quire.plan(path, devices=wrong)
    with pytest.raises(RequestError, match="there is no n_gpus"):
        quire.plan(path, n_gpus=4)


def test_counts_for_penalties_are_planned_where_tokens_are_chosen(tmp_path: Path) -> None:
    """A word for each token of the vocabulary, and each sequence."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny(layers=2, context=16))
    path, few, many = tmp_path / "m.gguf", 100, 1100
    one, two = (
        quire.plan(path, devices=["cuda:24GiB", "cpu:8GiB"], n_parallel=n).devices[0].compute
        for n in (few, many)
    )
    n_vocab = len(tiny.vocabulary()["tokenizer.ggml.tokens"])
    assert two - one >= (many - few) * count_bytes(n_vocab)


def test_the_command(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", tiny.Tiny(layers=4))
    words = ["plan", str(tmp_path / "m.gguf"), "--device", "cuda:2GiB", "--device", "cpu:4GiB"]
    shown = CliRunner().invoke(main, [*words, "-c", "256", "--parallel", "2", "-ngl", "3"])
    assert shown.exit_code == 0, shown.output
    assert "2 sequences of 256 tokens, fits" in " ".join(shown.output.split())
    found = json.loads(CliRunner().invoke(main, [*words, "-ngl", "3", "--json"]).stdout)
    assert found["n_gpu_layers"] == 3 and found["splits"] == 1 and found["fits"]
    assert {"longest_context", "most_sequences", "next_gib"} <= found.keys()
    here = json.loads(CliRunner().invoke(main, [*words[:2], "--json"]).stdout)
    low, middle, high = here["tokens_per_second"]
    assert 0 < low <= middle <= high
    wrong = CliRunner().invoke(main, [*words, "--cpu-moe"])
    assert wrong.exit_code == 1 and "no experts" in wrong.stderr
    ran = CliRunner().invoke(
        main, ["run", "hi", "-m", words[1], "-ngl", "99", "--device", "cpu", "-n", "2"]
    )
    assert ran.exit_code == 0 and ran.stderr.count("no GPU") == 1


@pytest.mark.parametrize(
    ("header", "isas"),
    [("dot_vnni", ["avx512-vnni", "avx-vnni"]), ("dot_int16", ["avx2", "portable"]),
     ("dot_neon", ["neon-dotprod", "i8mm"])],
)  # fmt: skip
def test_activations_are_counted_as_kernels_keep_them(header: str, isas: list[str]) -> None:
    """Also of instruction sets that this machine does not have."""
    text = (Path(__file__).parents[2] / "quire" / "ops" / "csrc" / f"{header}.h").read_text()
    found = re.search(r"static constexpr int bytes = 32 \+ (\d) \* 4;", text)
    assert found
    for isa in isas:
        assert Kernels.of(isa, 1, False).record == 32 + 4 * int(found[1])


@pytest.mark.parametrize("rows", [576, 40_000])
def test_more_tokens_take_no_less_room(rows: int) -> None:
    """Whoever looks for the most that fits halves intervals; and all threads have room for all."""
    for threads, token_bytes in itertools.product((1, 2, 3, 8, 64), (936, 6656, 60_000)):
        room = [panel_tokens(n, threads, token_bytes, rows) for n in range(1, 2000)]
        assert room == sorted(room)
        most = max(room[-1], 4)
        assert all(threads * r >= n or r == most for n, r in enumerate(room, 1))


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-window", "tiny-recurrent"])
def test_a_plan_keeps_to_kv_cache_tokens(name: str) -> None:
    """As loading does; a context that was asked for stays what it is."""
    path, tokens = MODELS / name, 100
    plan = quire.plan(path, kv_cache_tokens=tokens, devices=["cpu:1GiB"]).as_dict()
    with quire.load(path, kv_cache_tokens=tokens, memory_budget="1GiB", threads=1) as llm:
        assert plan["n_ctx"] == plan["longest_context"] == llm.n_ctx
    asked = quire.plan(path, kv_cache_tokens=tokens, n_ctx=40, n_parallel=3, devices=["cpu:1GiB"])
    grows = any(g.kind == "attention" for g in asked.model.groups)
    assert asked.load.n_ctx == 40 and asked.outlook is not None
    assert (asked.outlook.most_sequences == 7 // 3) is grows  # pages of 16
    roomy = asked.with_load(replace(asked.load, sequences=99)).devices[0].memory
    assert roomy.get("attention", 0) == grows * 7 * asked.model.groups[0].page_bytes * len(
        asked.model.groups[0].layers
    )


def test_a_plan_keeps_to_a_budget_on_described_devices(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny.write(path, tiny.Tiny())
    limits = []
    for budget in ("64MiB", {"cpu": "64MiB"}, "8GiB", None):
        plan = quire.plan(path, devices=["cpu:1GiB"], memory_budget=budget)
        limits.append(plan.as_dict()["devices"][0]["limit_bytes"])
    small, named, large, none = limits
    assert small == named == 64 << 20 and large == none <= 1 << 30
    told = CliRunner().invoke(
        main, ["plan", str(path), "--memory-budget", "64MiB", "--json", "-c", "0"]
    )
    assert json.loads(told.output)["devices"][0]["limit_bytes"] == 64 << 20
