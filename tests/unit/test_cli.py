"""The command line as a user types it, over a tiny random model."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import quire
from quire.cli import main
from quire.cli.conversation import Conversation
from tests import tiny
from tests.gguf_writer import write_gguf
from tests.model_folders import MODELS, model_folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(tied=False))
    return str(made)


def run(*words: str, input: str | None = None) -> Result:
    return CliRunner().invoke(main, list(words), input=input)


def test_run_streams_what_generate_gives(path: str) -> None:
    with quire.load(path) as llm:
        messages = [{"role": "user", "content": "hello"}]
        answer = llm.chat(messages, max_tokens=9, temperature=0).text
        raw = llm.generate("hello", max_tokens=9).text
    assert run("run", "hello", "-m", path, "-n", "9").stdout == answer + "\n"
    assert run("run", "hello", "-m", path, "-n", "9", "--raw").stdout == raw + "\n"
    assert run("run", "-m", path, "-n", "9", "--raw", input="hello").stdout == raw + "\n"


@pytest.mark.host
def test_run_json_is_one_object(path: str) -> None:
    result = run("run", "hello", "-m", path, "-n", "5", "--json", "-t", "1", "--temp", "0.5")
    made = json.loads(result.stdout)
    assert {"text", "token_ids", "timings", "memory"} <= set(made)
    assert len(made["token_ids"]) <= 5 and made["timings"]["load_s"] > 0
    assert "1 threads" in made["device"]


def test_run_constrained(path: str) -> None:
    result = run("run", "hello", "-m", path, "-n", "30", "--regex", "a|bb|ccc")
    assert result.stdout.strip() in ("a", "bb", "ccc")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "x", "-m", "no/such/file.gguf"], "no/such/file.gguf"),
        (["run", "x", "-m", "no-such-alias"], "no-such-alias"),
        (["run", "x", "-m", "weights.bin"], "weights.bin"),
        (["run", "x", "--temp", "-1"], "--temp must be a number"),
        (["run", "x", "-n", "0"], "-n must be a whole number"),
        (["show", "no/such/file.gguf"], "no/such/file.gguf"),
    ],
)
def test_mistakes_are_a_sentence_and_a_status(words: list[str], named: str) -> None:
    result = run(*words)
    assert result.exit_code == 1
    assert named in result.stderr and "Traceback" not in result.output
    assert result.stderr.startswith("quire: ") and len(result.stderr.splitlines()) == 1


def test_chat_answers_and_rewinds(path: str) -> None:
    lines = "hi\n/rewind\nhi\n/rewind 5\n/memory\n/nonsense\n/help\n/quit\nnever said\n"
    result = run("chat", "-m", path, "-n", "6", "--temp", "0", input=lines)
    assert result.exit_code == 0
    first, second = result.stdout.split("took back 1; 0 left\n")
    assert first and second.startswith(first)
    assert "5 cannot be taken back" in result.stderr and "there is no /nonsense" in result.stderr
    assert "weights" in result.stdout


def test_chat_branches_and_comes_back(path: str, tmp_path: Path) -> None:
    """What is said in one branch, or after a save, the other does not hear of."""
    file = str(tmp_path / "talk.quire")
    answers = []
    for between in (
        "", "/fork\nother\n/switch main\n", f"/save {file}\nother\n/load {file}\n",
        "/fork\nother\n/fork deeper\nmore\n/switch main\n",
    ):  # fmt: skip
        result = run("chat", "-m", path, "-n", "6", "--temp", "0", input=f"hi\n{between}again\n")
        told = {line for line in result.stderr.splitlines() if "cut after 6 tokens" not in line}
        assert result.exit_code == 0 and not told
        answers.append((result.stdout.splitlines()[0], result.stdout.splitlines()[-1]))
    assert len(set(answers)) == 1


def test_chat_says_what_it_cannot_do(path: str, tmp_path: Path) -> None:
    file = tmp_path / "none.quire"
    with quire.load(path) as llm, llm.session() as s:
        s.append("x").save(tmp_path / "other.quire")
    lines = f"/save\n/load {file}\n/load {tmp_path}/other.quire\n/switch x\n/fork main\nhi\n"
    result = run("chat", "-m", path, "-n", "6", "--temp", "0", input=lines)
    assert result.exit_code == 0 and result.stdout
    for told in ("/save needs", "no such file", "not saved by a conversation", "no branch 'x'"):
        assert told in result.stderr
    assert "a branch 'main' already" in result.stderr


def test_a_turn_computes_only_what_is_new(path: str) -> None:
    with quire.load(path) as llm:
        talk = Conversation(llm, quire.Sampling(max_tokens=5, ignore_eos=True))
        assert "".join(talk.say("hello there"))
        before, seen = llm.engine.runner.tokens_run, talk.branch.session.position
        assert "".join(talk.say("and again"))
        grown = talk.branch.session.position - seen
        assert llm.engine.runner.tokens_run - before == grown  # its last token waits for the next
        talk.close()


@pytest.mark.parametrize("byte", [0xE2, ord("a")])
def test_after_an_interrupt_the_model_sees_what_was_heard(path: str, byte: int) -> None:
    """0xE2 begins a character: when it comes again, the one before is shown, and it is not."""
    sampling = quire.Sampling(max_tokens=9, ignore_eos=True, logit_bias={byte: 100.0})
    with quire.load(path) as llm:
        talk = Conversation(llm, sampling)
        answer = talk.say("hello")
        heard = next(answer) + next(answer)
        answer.close()
        made = talk.branch.session.tokens
        assert heard == llm.decode([byte, byte])
        assert made[-2:] == [byte, byte] != made[-3:-1]  # and none that was not heard
        list(talk.say("go on"))
        assert talk.branch.messages[1]["content"] == heard
        shown = llm.chat_text(talk.branch.messages[:3])
        assert llm.decode(talk.branch.session.tokens).startswith(shown)
        assert talk.branch.session.tokens[: len(made)] == made  # nothing was computed again
        talk.close()


@pytest.mark.parametrize("where", ["chat_text", "encode", "append"])
def test_after_an_interrupt_before_an_answer_the_model_knows_what_was_said(
    path: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quire.load(path) as llm:
        talk = Conversation(llm, quire.Sampling(max_tokens=9, ignore_eos=True))
        list(talk.say("my name is Ann"))
        before = talk.branch.session.position

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(talk.branch.session if where == "append" else llm, where, interrupted)
            list(talk.say("who am I?"))
        assert talk.branch.session.position == before
        list(talk.say("who?"))
        shown = llm.chat_text(talk.branch.messages[:-1])
        assert llm.decode(talk.branch.session.tokens).startswith(shown)
        talk.close()


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-recurrent", "lfm2"])
def test_a_conversation_that_starts_anew_holds_nothing(name: str, tmp_path: Path) -> None:
    with quire.load(model_folder(name, tmp_path)) as llm:
        talk = Conversation(llm, quire.Sampling(max_tokens=5, ignore_eos=True))
        first = "".join(talk.say("hello there"))
        "".join(talk.say("and again"))
        talk.clear()
        assert talk.branch.session.position == talk.exchanges == 0
        assert "".join(talk.say("hello there")) == first
        "".join(talk.say("more"))
        talk.forget(1)
        assert talk.exchanges == 1 and talk.branch.messages[0]["content"] == "more"
        assert "".join(talk.say("and on"))
        talk.close()


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-recurrent", "lfm2"])
@pytest.mark.parametrize("system", [None, "Be kind."])
def test_what_is_taken_back_is_gone_at_once(name: str, system: str | None, tmp_path: Path) -> None:
    """From memory, from the status line and from a file that is saved then."""
    with quire.load(model_folder(name, tmp_path)) as llm:
        talk = Conversation(llm, quire.Sampling(max_tokens=5, ignore_eos=True), system)
        "".join(talk.say("hello there"))
        one = talk.branch.session.position
        second = "".join(talk.say("a secret"))
        talk.rewind(1)
        held = llm.decode(talk.branch.session.tokens)
        assert 0 < talk.branch.session.position < one + 8 and "secret" not in held
        talk.save(str(tmp_path / "talk.quire"))
        talk.load(str(tmp_path / "talk.quire"))
        assert "".join(talk.say("a secret")) == second
        talk.forget(1)
        assert "hello" not in llm.decode(talk.branch.session.tokens)
        assert "".join(talk.say("and on")) and talk.exchanges == 2
        talk.close()


def test_a_conversation_without_room_for_another_word_goes_back(path: str) -> None:
    with quire.load(path, n_ctx=128) as llm:
        talk = Conversation(llm, quire.Sampling(max_tokens=256, ignore_eos=True))
        "".join(talk.say("hello"))
        assert talk.branch.session.position == llm.n_ctx
        talk.rewind(1)
        assert talk.exchanges == 0 and "".join(talk.say("hello"))
        talk.close()


def test_show_tells_formats_and_kernels(path: str) -> None:
    facts = json.loads(run("show", path, "--json").stdout)
    assert facts["architecture"] == "llama" and "F32" in facts["formats"]
    assert any(isa in facts["kernels"] for isa in ("avx512-vnni", "avx2", "portable"))
    assert "blk.0.attn_q.weight" in run("show", path, "--tensors").stdout


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-window", "tiny-recurrent", "lfm2"])
@pytest.mark.host
def test_show_tells_the_memory_that_is_held(name: str, tmp_path: Path) -> None:
    """In the figures of a sequence that is there."""
    folder = model_folder(name, tmp_path)
    told = json.loads(run("show", str(folder), "--json").stdout)["memory"]
    with quire.load(folder) as llm, llm.session() as s:
        s.append(list(range(3, 70))).append([4])  # a state at 67 tokens, and a log of one
        llm.forget()
        stats = llm.memory.as_dict()["stats"]
        assert list(told) == [group.name for group in llm.model.groups]
        for group in llm.model.groups:
            facts = told[group.name]
            assert (facts["kind"], facts["layers"]) == (group.kind, len(group.layers))
            if group.kind == "recurrent":
                held = [stats[f"{group.name} {part}"]["bytes_held"] for part in ("state", "log")]
                assert [facts["state_bytes"], facts["log_bytes"]] == held
                assert facts["bytes_per_sequence"] == sum(held)
            else:
                assert facts["bytes_per_token"] == stats[group.name]["bytes_per_token"]
                assert facts.get("window") == group.window
    assert f": {facts['layers']} layers, " in run("show", str(folder)).stdout


@pytest.mark.host
def test_show_tells_what_a_gpu_would_hold_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its logs have what is derived of a token, too: no others are made there."""
    path = str(MODELS / "tiny-recurrent")
    told = [json.loads(run("show", path, "--json").stdout)]
    monkeypatch.setattr("quire.devices.cuda.gpu_count", lambda: 1)
    told.append(json.loads(run("show", path, "--json").stdout))
    host, gpu = (one["memory"]["recurrent"] for one in told)
    assert gpu["log_bytes"] > host["log_bytes"] and gpu["state_bytes"] == host["state_bytes"]
    assert "cuda" in told[1]["kernels"] and "cuda" not in told[0]["kernels"]


def test_show_tells_of_what_would_be_loaded(tmp_path: Path) -> None:
    facts = json.loads(run("show", str(MODELS / "tiny-moe"), "--json").stdout)
    options = ("--n-layer-exit", "2", "--moe-n-expert", "1", "--cache-type-k", "f32")
    less = json.loads(run("show", str(MODELS / "tiny-moe"), "--json", *options).stdout)
    assert less["layers"] == 2 and less["memory"]["attention"]["layers"] == 2
    assert facts["experts"]["count"] == less["experts"]["count"] > facts["experts"]["used"] > 1
    assert less["experts"]["used"] == 1
    per_layer = [x["memory"]["attention"]["bytes_per_token"] / x["layers"] for x in (facts, less)]
    assert per_layer[1] == per_layer[0] * 1.5  # K of twice the size, V as it was


def test_show_tells_what_a_window_takes_at_most() -> None:
    told = json.loads(run("show", str(MODELS / "tiny-window"), "--json").stdout)["memory"]["window"]
    pages = -(-(told["window"] + 16) // 16)
    assert told["bytes_per_sequence"] == pages * 16 * told["bytes_per_token"]


def test_what_files_say_cannot_harm_json_or_a_terminal(tmp_path: Path) -> None:
    odd = {"general.x": float("nan"), "general.y": "a\x1b[31mred\nnew", "general.z\x1b": 1}
    odd["llama.nextn_predict_layers"] = 1
    path = tmp_path / "odd.gguf"
    write_gguf(path, tiny.metadata(tiny.Tiny()) | odd, tiny.weights(tiny.Tiny()))
    text = run("show", str(path), "--json").stdout

    def never(name: str) -> None:
        raise AssertionError(name)

    facts = json.loads(text, parse_constant=never)
    assert facts["metadata"]["general.x"] == "nan" and facts["layers"] == 1
    shown = run("show", str(path)).stdout
    assert "\x1b" not in shown and "\\x1b[31mred" in shown


def test_show_tells_what_it_can_of_a_broken_model(tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("lfm2", tmp_path), tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 120}))
    told = json.loads(run("show", str(folder), "--json").stdout)
    assert told["layers"] == 5 and told["memory"].startswith("cannot be told: ")


def test_list_and_help_know_every_command() -> None:
    assert "smollm2" in run("list").stdout
    listed = run("--help").stdout
    for name in ("run", "chat", "show", "list", "pull"):
        assert name in listed
        assert run(name, "--help").exit_code == 0


def test_version() -> None:
    assert quire.__version__ in run("--version").stdout


def test_readme_commands_exist() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert readme.index("make demo") < readme.index("make test") < 2000


def test_the_command_line_page_is_what_the_commands_say() -> None:
    script = Path(__file__).parents[2] / "docs" / "make_cli.py"
    render = runpy.run_path(str(script))["render"]
    assert (script.parent / "cli.md").read_text() == render(), "run python docs/make_cli.py"
