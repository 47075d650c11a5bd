"""Running only a part of a model is running the model that has only that part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import quire
from quire.cli import main
from quire.errors import BudgetError, RequestError
from tests import tiny
from tests.models.test_golden import MODELS

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 256, 60)]
DENSE = tiny.Tiny(layers=4, seed=20)
MOE = tiny.Tiny(arch="qwen3moe", layers=3, experts=6, used=4, ffn=48, seed=21)
RAW = replace(MOE, normalize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def write(folder: Path, t: tiny.Tiny) -> Path:
    path = folder / f"{abs(hash(t))}.gguf"
    tiny.write(path, t)
    return path


@pytest.mark.parametrize(
    ("whole", "settings", "part"),
    [
        (DENSE, {"n_layer_exit": 1}, replace(DENSE, layers=1)),
        (DENSE, {"n_layer_exit": 3}, replace(DENSE, layers=3)),
        (DENSE, {"n_layer_exit": 4}, DENSE),
        (MOE, {"moe_n_expert": 1}, replace(MOE, used=1)),
        (MOE, {"moe_n_expert": 4}, MOE),
        (RAW, {"moe_n_expert": 3}, replace(RAW, used=3)),
        (MOE, {"moe_n_expert": 2, "n_layer_exit": 2}, replace(MOE, used=2, layers=2)),
    ],
)
def test_a_part_is_the_model_made_so(
    folder: Path, whole: tiny.Tiny, settings: dict[str, Any], part: tiny.Tiny
) -> None:
    with (
        quire.load(write(folder, part)) as small,
        quire.load(write(folder, whole), **settings) as llm,
    ):
        assert np.array_equal(llm.logits(IDS), small.logits(IDS))
        assert llm.model.groups == small.model.groups
        timings = [each.generate(IDS, max_tokens=2).timings for each in (llm, small)]
        assert {(t.layers, t.experts) for t in timings} == {(part.layers, part.used)}
        assert llm.memory.as_dict()["breakdown"] == small.memory.as_dict()["breakdown"]


@pytest.mark.host
def test_what_does_not_run_takes_no_budget(folder: Path) -> None:
    """Weights that fit only because the last layers are left out."""
    path = write(folder, DENSE)
    with quire.load(path, n_layer_exit=1) as llm:
        need = llm.model.weight_bytes
    room = need + 300_000
    with pytest.raises(BudgetError):
        quire.load(path, memory_budget=room)
    with quire.load(path, memory_budget=room, n_layer_exit=1) as llm:
        assert llm.logits(IDS).shape == (len(IDS), tiny.N_VOCAB)


@pytest.mark.parametrize(
    ("t", "settings", "named"),
    [
        (DENSE, {"n_layer_exit": 5}, "has 4 layers; pass 1 to 4"),
        (DENSE, {"moe_n_expert": 1}, "has no experts"),
        (MOE, {"moe_n_expert": 5}, "made to use 4; pass 1 to 4"),
        (MOE, {"moe_n_expert": 0}, "moe_n_expert"),
        (MOE, {"n_layer_exit": 0}, "n_layer_exit"),
    ],
)
def test_what_is_not_there_is_refused(
    folder: Path, t: tiny.Tiny, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        quire.load(write(folder, t), **settings)


def test_the_command_line_says_what_ran(folder: Path) -> None:
    path = str(write(folder, MOE))

    def run(*words: str) -> Any:
        return json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)

    whole = run("run", "x", "-m", path, "-n", "2")["timings"]
    assert (whole["layers"], whole["experts"]) == (3, 4)
    cut = ("--moe-n-expert", "2", "--n-layer-exit", "1")
    part = run("run", "x", "-m", path, "-n", "2", *cut)["timings"]
    assert (part["layers"], part["experts"]) == (1, 2)
    shown = run("show", path)
    assert shown["layers"] == 3 and shown["experts"] == {"count": 6, "used": 4}


@pytest.mark.parametrize("name", sorted(p.name for p in MODELS.iterdir() if p.is_dir()))
def test_every_kind_of_model_can_stop_early(name: str) -> None:
    with quire.load(MODELS / name, n_layer_exit=2) as llm:
        assert sorted(i for group in llm.model.groups for i in group.layers) == [0, 1]
        assert np.isfinite(llm.logits(IDS)).all()
        assert llm.generate(IDS, max_tokens=3, ignore_eos=True).timings.layers == 2
