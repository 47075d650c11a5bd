"""`quire chat` and `quire run` as a person at a terminal has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.gguf_writer import write_gguf

if sys.platform == "win32":
    pytest.skip("terminals are of another kind there", allow_module_level=True)

from tests.terminal import Terminal


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(tied=False, context=16384))
    return str(made)


def chat(path: str, cache: Path, *words: str, **env: str) -> Terminal:
    env = {"XDG_CACHE_HOME": str(cache), **env}
    few = ("-n", "4", "-t", "1", "--temp", "0", "--ignore-eos")
    return Terminal(["chat", "-m", path, *few, *words], env)


def test_a_paste_is_one_message_whatever_its_length(path: str, tmp_path: Path) -> None:
    """A terminal's own line ends after 4,095 characters; this one does not, and has several."""
    text = "begin\nmiddle\n" + "x" * 5000 + " end"
    with chat(path, tmp_path) as t:
        t.wait("0 of 16,384 tokens")
        t.paste(text)
        t.wait(" end")
        t.type("\r")
        before = t.wait("tokens/s")  # the model has a token for each byte
        assert any(f"{n:,} of 16,384" in before for n in range(len(text) + 20, len(text) + 60))
        t.type("/rewind 2\r")
        t.wait("2 cannot be taken back: the conversation has 1 exchange")
        t.type("/quit\r")
        assert t.ended() == 0
    kept = (tmp_path / "quire" / "chat_history").read_text()
    assert "+middle\n+xxx" in kept and kept.count("xxx end") == 1


def test_ctrl_c_empties_the_line_and_history_comes_back(path: str, tmp_path: Path) -> None:
    with chat(path, tmp_path) as t:
        t.wait("0 of 16,384 tokens")
        t.type("first\x1b\rsecond\r")  # Alt-Enter
        t.wait("tokens/s")
        t.type("half typed")
        t.wait("half typed")
        t.type("\x03")
        t.type("\x03")  # an empty line: it says how to leave
        t.wait("Ctrl-D or /quit leaves")
        t.type("/rewind\r")
        t.wait("took back 1; 0 left")  # nothing was sent, nothing is lost
        t.type("/clear\r")
        t.wait("cleared; forgot 0 exchanges")
        t.wait("of 16,384 tokens")
        assert t.leave() == 0
    with chat(path, tmp_path) as t:
        t.wait("0 of 16,384 tokens")
        t.type("\x1b[A\x1b[A\x1b[A\r")  # /clear, /rewind, the message of two lines
        t.wait("first")
        t.wait("tokens/s")
        t.type("/bran\t")
        t.wait("/branches")
        t.type("\x03")
        assert t.leave() == 0
    kept = (tmp_path / "quire" / "chat_history").read_text()
    assert "half typed" not in kept and kept.count("+first\n+second") == 2
    assert (tmp_path / "quire" / "chat_history").stat().st_mode & 0o077 == 0


def test_a_full_context_is_no_dead_end(path: str, tmp_path: Path) -> None:
    with chat(path, tmp_path, "-c", "128") as t:
        t.wait("0 of 128 tokens")
        t.type("hello\r")
        t.wait("tokens/s")
        t.type("y" * 90 + "\r")
        t.wait("/forget drops the oldest")
        t.wait("yyy")  # it is there to be sent again
        t.type("\x03/forget\r")
        t.wait("forgot the first 1; 0 left")
        t.type("hello\r")
        t.wait("cut after 4 tokens")
        t.wait("of 128 tokens")
        assert t.leave() == 0


def test_ctrl_c_ends_an_answer_but_not_the_conversation(path: str, tmp_path: Path) -> None:
    with chat(path, tmp_path, "-n", "-1") as t:
        t.wait("0 of 16,384 tokens")
        t.type("hello\r")
        t.wait("> hello\n")
        t.more(300)  # of the answer
        t.type("\x03")
        t.wait("[interrupted]")
        t.type("/rewind\r")
        t.wait("took back 1; 0 left")
        t.wait("of 16,384 tokens")
        assert t.leave() == 0


def test_a_model_without_a_template_is_refused_at_once(tmp_path: Path) -> None:
    metadata = tiny.metadata(tiny.Tiny())
    del metadata["tokenizer.chat_template"]
    path = tmp_path / "base.gguf"
    write_gguf(path, metadata, tiny.weights(tiny.Tiny()))
    with chat(str(path), tmp_path) as t:
        t.wait("base.gguf has no chat template")
        assert t.ended() == 1


@pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_codes_where_none_are_wanted(path: str, plain: dict[str, str]) -> None:
    with Terminal(["run", "hello", "-m", path, "-n", "3"], plain) as t:
        assert t.ended() == 0
        assert "3 generated at" in t.raw and "\x1b" not in t.raw
    with Terminal(["run", "hello", "-m", path, "-n", "3"]) as t:
        assert t.ended() == 0
        assert "\x1b[2m" in t.raw


def test_what_a_model_writes_does_not_steer_the_terminal(path: str) -> None:
    """It is asked for an escape code and a bell, which a file or another program would get."""
    words = ["run", "hello", "-m", path, "--regex", "a\\x1b\\[31m\\x07b", "-n", "20"]
    with Terminal(words, {"NO_COLOR": "1"}) as t:
        t.wait("a[31mb")
        assert t.ended() == 0 and "\x1b" not in t.raw and "\x07" not in t.raw


def test_a_plain_terminal_can_chat(path: str, tmp_path: Path) -> None:
    with chat(path, tmp_path, TERM="dumb") as t:
        t.wait("> ")
        t.type("hello\r")
        t.wait("cut after 4 tokens")
        t.wait("> ")
        assert t.leave() == 0
        assert "\x1b" not in t.raw


def test_an_interrupt_ends_a_run_with_130(path: str) -> None:
    with Terminal(["run", "hello", "-m", path, "-n", "-1", "--ignore-eos"]) as t:
        t.more(100)
        t.type("\x03")
        assert t.ended() == 130
        assert "Traceback" not in t.text and "Aborted" not in t.text


FETCH = """
import sys, time
from pathlib import Path
from quire.weights import pull
def resolve(name, cache, progress=None):
    for done in range(0, 93, 31):
        progress(done * 10**6, 93 * 10**6)
        time.sleep(0.2)
    return Path(sys.argv[-1])
pull.resolve = resolve
from quire.cli import main
main(["run", "hello", "-n", "3", "-m", "smollm2"])
"""


def test_a_download_has_a_bar_whatever_its_size(path: str) -> None:
    with Terminal([path], program=("-c", FETCH)) as t:
        t.wait("fetching smollm2")
        assert t.ended() == 0
        assert "/93.0 MB" in t.text
    with Terminal([path], {"NO_COLOR": "1"}, program=("-c", FETCH)) as t:
        t.wait("fetching smollm2 …")
        assert t.ended() == 0 and "\x1b" not in t.raw
