"""Flags as people type them who come from other programs, and what a plan looks like."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quire.api import plan as planning
from quire.cli import main
from quire.cli.flags import in_flags
from quire.convert import FORMATS
from quire.placement.speed import Bandwidth
from tests import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(layers=4, tied=False))
    return str(made)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine is makes no difference here."""
    monkeypatch.setattr(planning, "measure", lambda ops, kind: Bandwidth(1e9, 2e9, 3e9))


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


FEW = ("-n", "2", "-t", "1", "--ignore-eos")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls"], "did you mean quire list?"),
        (["plna"], "did you mean quire plan?"),
        (["Why is the sky blue?"], 'quire run "'),
        (["run", "smollm2", "hello"], "-m smollm2"),
        (["run", "x", "--temprature", "1"], "--temp"),
        (["run", "x", "-nlg", "1"], "did you mean -ngl?"),
        (["quantize", "a", "b", "q9"], "q4_k_m"),
        (["run", "x", "-ctk", "q9"], "q8_0"),
        (["serve", "-np", "0"], "--max-running"),
        (["run", "x", "--max-tokens", "many"], "--n-predict"),
        (["serve", "--alias", "mine"], "names of their files"),
        (["serve", "--n-parallel", "0"], "--max-running"),
        (["serve", "--gpu-memory-utilization", "0.9"], "--memory-budget"),
    ],
)
def test_a_typo_gets_a_suggestion(words: list[str], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2 and said in result.stderr, result.stderr


def test_a_model_that_is_nearly_known() -> None:
    for typed, meant in (("smolm2", "smollm2"), ("qwen3:4b", "qwen3-4b"), ("Qwen3-4B", "qwen3-4b")):
        result = run("pull", typed)
        assert result.exit_code == 1 and f"did you mean {meant}?" in result.stderr


@pytest.mark.host
def test_on_and_off(path: str) -> None:
    """As llama.cpp has them, as switches, and behind an equals sign."""
    assert run("run", "hi", "-m", path, *FEW, "--fit", "on").exit_code == 0
    less = ("plan", path, "--memory-budget", "700KiB", "-t", "1", "--json")
    for words in (["--fit", "on"], ["-fit", "on"], ["--fit"], ["--fit=on"], []):
        found = run(*less, *words)
        assert found.exit_code == 0 and json.loads(found.stdout)["n_ctx"] < 512, found.output
    for words in (["--fit", "off"], ["-fit", "off"], ["--no-fit"], ["--fit=off"]):
        found = run(*less, *words)
        assert found.exit_code == 1 and "does not fit" in found.stderr, found.output


def test_other_spellings(path: str) -> None:
    plain = json.loads(run("plan", path, "--json", "--parallel", "3", "-c", "64").stdout)
    for words in (
        ["-m", path, "-np", "3", "-c=64"], [f"--model={path}", "--parallel=3", "--ctx-size=64"],
    ):  # fmt: skip
        found = json.loads(run("plan", "--json", *words).stdout)
        assert found["sequences"] == 3 and found["n_ctx"] == plain["n_ctx"] == 64
    assert run("run", "a=b", "-m", path, *FEW, "-ctk", "F16", "--gpu-layers", "0").exit_code == 0
    assert run("show", "-m", path, "--json").exit_code == 0


def test_quantize_takes_a_format_in_any_case(path: str, tmp_path: Path) -> None:
    for i, words in enumerate((["q8_0"], ["Q8_0"], ["--format", "Q8_0"])):
        made = run("quantize", path, str(tmp_path / f"{i}.gguf"), *words, "-t", "1")
        assert made.exit_code == 0, made.output
    one, *others = ((tmp_path / f"{i}.gguf").read_bytes() for i in range(3))
    assert all(one == other for other in others)
    told = run("quantize", "--help").stdout
    assert all(re.search(rf"\b{name}\b", told) for name in FORMATS)
    both = run("quantize", path, str(tmp_path / "x.gguf"), "q8_0", "--format", "q4_0")
    assert both.exit_code == 1 and "two formats" in both.stderr


@pytest.mark.host
def test_a_refusal_speaks_of_flags_and_can_be_heeded(path: str) -> None:
    """What would fit is typed as it is told."""
    tight = ("--memory-budget", "1MiB", "-t", "1")
    refused = run("plan", path, "-c", "512", "--parallel", "40", *tight)
    assert refused.exit_code == 1 and "cpu needs" in refused.stderr
    told = refused.stderr.partition("what would fit: ")[2].split(", or ")
    ways = [dict(re.findall(r"(--[a-z-]+|-c) ([\w.]+)", one)) for one in told]
    assert {flag for way in ways for flag in way} == {"--memory-budget", "-c", "--parallel"}
    for way in ways:
        words = {"-c": "512", "--parallel": "40", "--memory-budget": "1MiB"} | way
        taken = run("plan", path, "-t", "1", *(word for pair in words.items() for word in pair))
        assert taken.exit_code == 0, (way, taken.stderr)
    assert "_" not in refused.stderr.partition("does not fit")[2]
    assert in_flags("without n_cpu_moe, or n_gpu_layers=3") == "without --n-cpu-moe, or -ngl 3"
    assert in_flags("kv_offload=False: none") == "--no-kv-offload: none"


@pytest.mark.host
def test_a_plan_fits_a_terminal(path: str) -> None:
    """80 columns, and columns that are straight."""
    devices = ["--device", "cuda:2GiB,cuda:3GiB", "--device", "cpu:4GiB"]
    shown = run("plan", path, *devices, "-ngl", "99", "--tensor-split", "1,1", "-np", "1")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0] == "tiny.gguf: 1 sequence of 512 tokens, fits"
    assert max(map(len, lines)) <= 80
    table = [line for line in lines if line[:1] in "┏┃┡│├└"]
    assert len({len(line) for line in table}) == 1 and len(table) > 8
    bars = [line for line in lines if re.match(r"(cpu|cuda:\d) +\[", line)]
    assert len(bars) == 3 and len({line.index("]") for line in bars}) == 1
    noted = run("plan", path, "-ngl", "3", "--tensor-split", "1,2", "--memory-budget", "1MiB")
    assert "note: -ngl: no GPU is used" in noted.stdout and "n_gpu" not in noted.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no/such.gguf"], "no/such.gguf"),
        (["EMPTY"], "the file is empty"),
        (["CUT"], "CUT"),
        (["FOLDER"], "config.json"),
        (["--device", "gpu:24GB"], "such as cuda:24GiB"),
        (["--device", "cuda:lots"], "such as cuda:24GiB"),
        (["--device", "cuda:99"], "--device cuda:24GiB describes one that is not here"),
        (["--device", "cuda:2GiB,cuda:0:1GiB"], "described twice"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(
    words: list[str], said: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").touch()
    Path("CUT").write_bytes(Path(path).read_bytes()[:900])
    Path("FOLDER").mkdir()
    result = run("plan", *words) if words[0] != "--device" else run("plan", path, *words)
    assert result.exit_code == 1 and said in result.stderr
    assert result.stderr.startswith("quire: ") and len(result.stderr.splitlines()) == 1


def test_an_interrupt_ends_without_a_word(path: str) -> None:
    words = ["run", "hello", "-m", path, "-n", "-1", "--ignore-eos", "-c", "100000"]
    child = subprocess.Popen(
        [sys.executable, "-m", "quire", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's & ignores it
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.read(1)
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=30)
    assert child.returncode == 130 and b"Traceback" not in told
