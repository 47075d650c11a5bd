"""Standard input and output as shells connect them, and the flags that people type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import quire
from quire.cli import main
from quire.cli.flags import _FLAGS, _NOT_HERE, _SAME, in_flags
from tests import tiny
from tests.gguf_writer import write_split


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(tied=False))
    return str(made)


def run(*words: str, input: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(words), input=input)


FEW = ("-n", "4", "-t", "1", "--ignore-eos")


def shell(path: str, words: str, before: str = "", after: str = "", **env: str) -> Any:
    line = f'{before} "{sys.executable}" -m quire run {words} -m "{path}" {" ".join(FEW)} {after}'
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, timeout=60, env={**os.environ, **env}
    )


def answer(path: str, text: str) -> str:
    with quire.load(path, threads=1) as llm:
        return (
            llm.chat(
                [{"role": "user", "content": text}], max_tokens=4, ignore_eos=True, temperature=0
            ).text
            + "\n"
        )


def told(result: Result, *words: str) -> None:
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("quire: ") and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_input_comes_behind_the_prompt(path: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("some notes\n")
    words = ("-m", path, *FEW)
    joined = answer(path, "Sum up:\n\nsome text\n")
    assert run("run", "Sum up:", *words, input="some text\n").stdout == joined
    assert run("run", "-p", "Sum up:", *words, input="some text\n").stdout == joined
    assert run("run", "Sum up:", "-f", "-", *words, input="some text\n").stdout == joined
    assert run("run", "-f", str(file), *words).stdout == answer(path, "some notes\n")
    both = answer(path, "Sum up:\n\nsome notes\n\nsome text")
    assert run("run", "Sum up:", "-f", str(file), *words, input="some text").stdout == both
    assert run("run", "Sum up:", *words, input=" \n").stdout == answer(path, "Sum up:")


def test_nothing_is_made_of_nothing(path: str) -> None:
    told(run("run", "-m", path, input=""), "standard input is empty")
    told(run("run", "-m", path, input="\n \n"), "standard input is empty")
    told(run("run", "-", "-m", path, input=""), "standard input is empty")
    told(run("run", "", "-m", path, input=""), "the prompt is empty")
    told(run("run", "-f", "no/such.txt", "-m", path), "no/such.txt")
    told(run("run", "a", "-p", "b", "-m", path), "two prompts")
    told(run("run", "a", "-m", path, input=b"\xff\xfe"), "standard input is not UTF-8")
    told(run("run", os.fsdecode(b"a\xff"), "-m", path), "the prompt is not UTF-8")


def test_input_that_never_comes_is_not_waited_for(path: str) -> None:
    """A pipe that stays open, a closed one, none at all: the prompt alone is answered."""
    alone = answer(path, "hello").encode()
    for after in ("</dev/null", "<&-"):
        done = shell(path, "hello", after=after)
        assert (done.returncode, done.stdout) == (0, alone)
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "quire", "run", "hello", "-m", path, *FEW],
            stdin=read, capture_output=True, timeout=60,
        )  # fmt: skip
    finally:
        os.close(read)
        os.close(write)
    assert (done.returncode, done.stdout) == (0, alone)
    assert b"nothing came on standard input" in done.stderr
    late = shell(path, "'Sum up:'", before="(sleep 0.5; echo text) |")
    assert late.stdout == answer(path, "Sum up:\n\ntext\n").encode()


def test_output_that_fails_is_a_sentence(path: str) -> None:
    full = shell(path, "hello", after=">/dev/full")
    assert full.returncode == 1 and b"standard output: No space left" in full.stderr
    closed = shell(path, "hello", after="-n -1 | head -c 1; exit ${PIPESTATUS[0]}")
    assert closed.returncode == 141
    none = shell(path, "hello", after=">&-")
    assert none.returncode == 0
    plain = shell(path, "ä", PYTHONIOENCODING="ascii")
    assert plain.returncode == 0 and plain.stdout.isascii()
    for done in (full, closed, none, plain):
        assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr


def test_a_prompt_is_utf8_in_a_locale_that_is_not(path: str) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell(path, "ä", after="</dev/null", **ascii_only)
    assert done.returncode == 0 and b"cut after 4 tokens" in done.stderr


def test_a_talk_without_input_is_over(path: str) -> None:
    command = f'"{sys.executable}" -m quire chat -m "{path}" -t 1 <&-'
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_cut_answer_is_told(path: str) -> None:
    words = ("-m", path, "-t", "1", "--ignore-eos")
    cut = run("run", "hello", "-n", "3", *words)
    assert cut.exit_code == 0 and "cut after 3 tokens; -n allows more" in cut.stderr
    full = run("run", "hello", "-n", "-1", "-c", "64", *words)
    assert full.exit_code == 0 and "context is full; -c allows more" in full.stderr
    whole = run("run", "hello", "-m", path, "--regex", "a|b")
    assert whole.exit_code == 0 and whole.stderr == ""
    talk = run("chat", "-n", "3", *words, input="hello\n")
    assert talk.exit_code == 0 and "cut after 3 tokens" in talk.stderr


@pytest.mark.parametrize("kind", ["--json-schema", "--grammar"])
def test_what_had_to_fit_and_does_not_is_a_failure(path: str, kind: str, tmp_path: Path) -> None:
    long = {"--json-schema": '{"const": "abcdefgh"}', "--grammar": 'root ::= "\\"abcdefgh\\""'}
    words = ("run", "hello", "-m", path, "-t", "1", kind)
    cut = run(*words, long[kind], "-n", "4")
    assert cut.exit_code == 1 and cut.stdout == '"abc\n' and "cut after 4 tokens" in cut.stderr
    assert json.loads(run(*words, long[kind], "-n", "4", "--json").stdout)["text"] == '"abc'
    file = tmp_path / "rules"
    file.write_text(long[kind])
    words = (*words[:-1], {"--grammar": "--grammar-file"}.get(kind, kind))
    whole = run(*words, str(file), "-n", "40")
    assert whole.exit_code == 0 and whole.stdout == '"abcdefgh"\n'
    told(run(*words, "no/such/file"), "no/such/file: cannot be read")


def test_constraints_are_checked_before_a_model_is_loaded() -> None:
    told(run("run", "x", "-m", "none", "--grammar", "root ::= x"), "line 1: there is no rule 'x'")
    told(run("run", "x", "-m", "none", "--grammar", "a", "--regex", "a"), "exclude each other")


def test_flags_of_llama_cpp(path: str) -> None:
    words = ("-m", path, *FEW)
    plain = answer(path, "hello")
    assert run("run", "-p", "hello", "-s", "-1", "-c", "0", *words).stdout == plain
    assert run("run", "-p", "hello", "--seed", "-1", "-ctk", "f16", *words).stdout == plain
    with quire.load(path, threads=1) as llm:
        text = llm.generate("hello", max_tokens=4, presence_penalty=1.5, ignore_eos=True).text
    penalty = ("--presence-penalty", "1.5")
    assert run("run", "hello", "--raw", *penalty, *words).stdout == text + "\n"
    assert run("run", "hello", "-no-cnv", *penalty, *words).stdout == text + "\n"
    assert "-ctv" in run("run", "-h").stdout
    assert run("run", "-p", "-fa", *words).stdout == answer(path, "-fa")
    for flag in ("-fa", "--mlock", "-cnv", "--lora=x"):
        result = run("run", "hello", flag)
        assert result.exit_code == 2 and f"there is no {flag.partition('=')[0]}: " in result.stderr
    assert "goes in quotes" in run("run", "Why", "is", "the", "sky", "blue?").stderr
    assert "no such option" in run("run", "x", "--nonsense").stderr.lower()


def test_flags_for_sampling(path: str) -> None:
    flags = {
        "--temp": ("temperature", 0.9), "--typical": ("typical_p", 0.9),
        "--top-nsigma": ("top_n_sigma", 1.5), "--xtc-probability": ("xtc_probability", 0.5),
        "--xtc-threshold": ("xtc_threshold", 0.2), "--mirostat-ent": ("mirostat_tau", 4.0),
        "--mirostat-lr": ("mirostat_eta", 0.2), "--mirostat": ("mirostat", 2),
        "--dry-multiplier": ("dry_multiplier", 0.8), "--dry-base": ("dry_base", 1.5),
        "--dry-allowed-length": ("dry_allowed_length", 3), "--seed": ("seed", 5),
        "--dry-penalty-last-n": ("dry_penalty_last_n", 64),
    }  # fmt: skip
    words = [word for flag, (_, value) in flags.items() for word in (flag, str(value))]
    words += ["--dry-sequence-breaker", "x", "--logit-bias", "70+1.5", "-l", "71-2"]
    sampling = quire.Sampling(
        **dict(flags.values()), dry_sequence_breakers=("x",), logit_bias={70: 1.5, 71: -2.0},
        max_tokens=4, ignore_eos=True,
    )  # fmt: skip
    with quire.load(path, threads=1) as llm:
        text = llm.generate("hello", sampling).text
    made = run("run", "hello", "--raw", "-m", path, *FEW, *words)
    assert made.stdout == text + "\n" and made.exit_code == 0
    told(run("run", "hello", "-l", "x"), "--logit-bias is like 15043+1")
    told(run("run", "hello", "--mirostat", "1"), "--mirostat is 0 (off) or 2")


def test_a_conversation_is_sampled_as_its_model_wants(path: str) -> None:
    """One prompt, one answer: a conversation that is not greedy has several."""
    once = [run("run", "hello", "-m", path, *FEW).stdout for _ in range(2)]
    assert once[0] == once[1]
    talks = {run("chat", "-m", path, *FEW, input="hello\n").stdout for _ in range(4)}
    assert len(talks) > 1
    assert run("chat", "-m", path, *FEW, "--temp", "0", input="hello\n").stdout == once[0]


def test_flags_that_mean_nothing_are_not_ours() -> None:
    for name in ("run", "chat", "show"):
        command = main.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        ours = {flag for parameter in command.params for flag in parameter.opts}
        assert not ours & (_NOT_HERE.keys() | _SAME.keys())
        if name == "run":
            assert set(_FLAGS.values()) - {"-ngl", "--cache-salt", "--parallel"} <= ours


def test_errors_speak_of_flags(path: str) -> None:
    told(run("run", "x", "-m", path, "-ctk", "q8_0"), "-ctk q8_0 needs heads")
    told(run("run", "x" * 600, "-m", path), "512 fit", "a larger -c")
    told(run("run", "x", "-m", path, "--memory-budget", "1kB"), "--memory-budget")
    told(run("run", "x", "-s", "-5"), "--seed must be")
    assert "'--memory-budget': a size is" in run("run", "x", "--memory-budget", "lots").stderr
    assert in_flags("kv_cache_demand_paged=False takes") == "--no-kv-cache-demand-paged takes"
    assert in_flags("activations='f32' is for") == "--activations f32 is for"
    assert in_flags("threads must be; more threads") == "--threads must be; more threads"


def test_a_context_beyond_the_model_is_told(path: str) -> None:
    beyond = run("run", "hello", "-m", path, "-c", "600", "-n", "4")
    assert beyond.exit_code == 0 and "made for 512 tokens" in beyond.stderr
    assert "made for" not in run("run", "hello", "-m", path, "-c", "500", "-n", "4").stderr


def test_python_runs_the_package() -> None:
    command = [sys.executable, "-m", "quire", "--version"]
    assert quire.__version__ in subprocess.run(command, capture_output=True, text=True).stdout


def test_show_counts_all_parts(tmp_path: Path) -> None:
    parts = write_split(tmp_path, "m", 3, tiny.metadata(tiny.Tiny()), tiny.weights(tiny.Tiny()))
    told = json.loads(run("show", str(parts[0]), "--json").stdout)
    assert told["bytes"] == sum(part.stat().st_size for part in parts)


def test_show_is_readable(path: str) -> None:
    shown = run("show", path).stdout
    size = Path(path).stat().st_size
    assert f"({size / 1e3:.1f} kB)" in shown and "expert" not in shown
    assert "2 layers" in shown and "512 tokens" in shown
    assert json.loads(run("show", path, "--json").stdout)["bytes"] == size
