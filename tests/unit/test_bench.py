"""`quire bench`: every figure that is promised, and comparisons with an earlier run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import quire
from quire.cli import main
from quire.cli.measure import Bench, Sizes
from tests.model_folders import MODELS

QUICK = ["--prompt", "40", "-n", "4", "--sequences", "3", "--repeat", "1"]


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", *words])


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid"])
def test_figures_and_comparison(name: str, tmp_path: Path) -> None:
    result = run("-m", str(MODELS / name), *QUICK, "--json")
    made = json.loads(result.stdout)
    figures = {one["name"]: one for one in made["figures"]}
    for wanted in (
        "load", "prefill 40", "decode 4", "decode, 3 sequences", "first token, new prompt",
        "first token, known prompt", "checkpoint", "fork", "rewind", "decode with n-gram drafts",
        "weights", "process",
    ):  # fmt: skip
        assert figures[wanted]["value"] > 0, wanted
    assert figures["prefill 40"]["unit"] == "tokens/s"

    for one in made["figures"]:  # as if everything had been half as good
        one["value"] *= 0.5 if one["more_is_better"] else 2
    (tmp_path / "before.json").write_text(json.dumps(made))
    shown = run("-m", str(MODELS / name), *QUICK, "--compare", str(tmp_path / "before.json"))
    lines = {line.split("│")[1].strip(): line for line in shown.stdout.splitlines() if "│" in line}
    assert "2.00×" in lines["weights"] and "tokens/s" in lines["prefill 40"]
    assert all("×" in lines[name] for name in ("load", "decode 4", "checkpoint"))


def test_prompts_are_really_computed() -> None:
    """A cached prefix would make prefill look faster than it is."""
    with quire.load(MODELS / "tiny-dense") as llm:
        bench = Bench(llm, Sizes(40, 4, 2, 2))
        list(bench.figures())
        saved = llm.memory.as_dict()["prefix"]["tokens_saved"]
        assert llm.engine.runner.tokens_run > 2 * (40 + 40)
        assert saved < 2 * 40 + 300  # the known prompts, and the text for drafts
        llm.memory.audit()


def test_what_cannot_be_measured_is_told(tmp_path: Path) -> None:
    model = str(MODELS / "tiny-dense")
    (tmp_path / "bad.json").write_text("{}")
    for words, told in (
        (["--prompt", "0"], "--prompt is 0"),
        (["--prompt", "9999"], "do not fit the context of 2048"),
        (["--compare", str(tmp_path / "none.json")], "none.json: cannot be read"),
        (["--compare", str(tmp_path / "bad.json")], "not what `quire bench --json` writes"),
    ):
        result = run("-m", model, *words)
        assert result.exit_code == 1 and told in result.stderr
