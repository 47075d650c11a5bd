"""The commands that ask a running server."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from quire.cli import main
from quire.cli.remote import Remote
from quire.cli.remote_conversation import RemoteConversation
from quire.errors import RequestError
from tests.server.rig import DENSE, Rig, serving, turns
from tests.terminal import Terminal


def run(*arguments: str, stdin: str | None = None) -> str:
    done = CliRunner().invoke(main, arguments, input=stdin)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_run(rig: Rig) -> None:
    wanted = rig.llm.chat(turns("Hello there"), max_tokens=8, temperature=0).text
    assert run("run", "--url", rig.url, "--temp", "0", "-n", "8", "Hello there") == wanted + "\n"
    assert (
        run("run", "--url", f"{rig.url}/v1", "--temp", "0", "-n", "8", stdin="Hello there")
        == wanted + "\n"
    )
    raw = run("run", "--url", rig.url, "--temp", "0", "-n", "4", "--raw", "It was")
    assert raw == rig.llm.generate("It was", max_tokens=4, temperature=0).text + "\n"
    told = json.loads(run("run", "--url", rig.url, "-n", "4", "--json", "Hello"))
    assert told["usage"]["completion_tokens"] <= 4
    assert told["text"] == told["choices"][0]["message"]["content"]


def test_run_is_greedy_and_tells_of_cuts_as_without_a_server(rig: Rig) -> None:
    asked = ("run", "-n", "8", "Hello there")
    there = CliRunner().invoke(main, [*asked, "--url", rig.url])
    here = CliRunner().invoke(main, [*asked, "-m", str(DENSE)])
    assert there.exit_code == here.exit_code == 0 and there.stdout == here.stdout
    assert there.stderr == here.stderr and "cut after 8 tokens" in there.stderr


FORMS = {
    "--regex": ("[ab]{2}", r"[ab]{2}"),
    "--json-schema": ('{"enum": ["yes", "no"]}', '"(yes|no)"'),
    "--grammar": ('root ::= "yes" | "no"', "yes|no"),
}


@pytest.mark.parametrize("flag", FORMS)
def test_forms_are_sent(rig: Rig, flag: str) -> None:
    form, wanted = FORMS[flag]
    assert re.fullmatch(wanted, run("run", "--url", rig.url, flag, form, "Hello").strip())
    if flag == "--regex":
        cut = CliRunner().invoke(main, ["run", "--url", rig.url, flag, "a{9}", "-n", "2", "Hello"])
        assert cut.exit_code == 1 and "cut after 2 tokens" in cut.stderr


@pytest.mark.parametrize(
    "flags", [("-t", "2"), ("--dry-multiplier", "0.8"), ("--speculate", "ngram"), ("--no-fit",)]
)
@pytest.mark.parametrize("command", [("run", "hi"), ("chat",)])
def test_what_no_server_would_hear_is_refused(
    rig: Rig, command: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    done = CliRunner().invoke(main, [*command, "--url", rig.url, *flags], input="hi\n")
    assert done.exit_code == 1 and "is not sent to a server" in done.stderr


def test_raw_text_has_no_system(rig: Rig) -> None:
    told = ["run", "--url", rig.url, "--raw", "--system", "Be brief.", "hi"]
    done = CliRunner().invoke(main, told)
    assert done.exit_code == 1 and "--system needs a chat template" in done.stderr


def test_a_schema_that_is_none_is_told(rig: Rig) -> None:
    done = CliRunner().invoke(main, ["run", "--url", rig.url, "--json-schema", "{", "hi"])
    assert done.exit_code == 1 and "--json-schema is not valid JSON" in done.stderr


def test_chat(rig: Rig) -> None:
    first = rig.llm.chat(turns("Hello there"), max_tokens=8, temperature=0).text
    second = rig.llm.chat(turns("Hello there", first, "More"), max_tokens=8, temperature=0).text
    talk = "Hello there\nMore\n/rewind\nMore\n/quit\n"
    assert (
        run("chat", "--url", rig.url, "--temp", "0", "-n", "8", stdin=talk)
        == f"{first}\n{second}\ntook back 1; 1 left\n{second}\n"
    )
    assert rig.http.get("/v1/sessions").json()["data"] == []


def test_a_chat_branches_in_sessions(rig: Rig) -> None:
    """What is taken back leaves the server at once; branches share what they have in common."""
    few = {"temperature": 0, "max_tokens": 8}
    with closing(RemoteConversation(Remote(rig.url), few, {})) as talk:
        first, second = "".join(talk.say("Hello there")), "".join(talk.say("More"))
        (one,) = rig.http.get("/v1/sessions").json()["data"]
        talk.rewind(1)
        assert rig.http.get(f"/v1/sessions/{one['id']}").json()["position"] < one["position"]
        assert "".join(talk.say("More")) == second and talk.exchanges == 2
        talk.fork("other")
        assert "".join(talk.say("And"))
        talk.switch("main")
        assert talk.exchanges == 2 and talk.memory().startswith(f"{one['position']:,} tokens in")
        talk.forget(1)
        assert talk.exchanges == 1 and talk.status().startswith("0 of ")
        talk.clear()
        assert "".join(talk.say("Hello there")) == first
        with pytest.raises(RequestError, match="there is a branch 'other'"):
            talk.fork("other")
        assert len(rig.http.get("/v1/sessions").json()["data"]) == 2
    assert rig.http.get("/v1/sessions").json()["data"] == []


def test_a_conversation_outlives_its_sessions(rig: Rig) -> None:
    """As a server that was started anew has none of them."""
    few = {"temperature": 0, "max_tokens": 8}
    with closing(RemoteConversation(Remote(rig.url), few, {})) as talk:
        first = "".join(talk.say("Hello there"))
        second = rig.llm.chat(turns("Hello there", first, "More"), **few).text
        for act in (lambda: None, lambda: talk.fork("other"), lambda: talk.save("kept")):
            for one in rig.http.get("/v1/sessions").json()["data"]:
                rig.http.delete(f"/v1/sessions/{one['id']}")
            act()
            assert "".join(talk.say("More")) == second
            talk.rewind(1)
    assert rig.http.get("/v1/sessions").json()["data"] == []


def test_an_interrupt_ends_an_answer_and_not_the_conversation(rig: Rig, tmp_path: Path) -> None:
    words = ["chat", "--url", rig.url, "--temp", "0", "-n", "-1", "--ignore-eos"]
    with Terminal(words, {"XDG_CACHE_HOME": str(tmp_path)}) as t:
        t.wait("tiny-dense at http://")
        t.wait("0 of 2,048 tokens")
        t.type("first\x1b\rsecond\r")  # two lines, one message
        t.more(200)
        t.type("\x03")
        t.wait("[interrupted]")
        t.type("/rewind\r")
        t.wait("took back 1; 0 left")
        assert t.leave() == 0
    assert rig.http.get("/v1/sessions").json()["data"] == []


def test_the_status_is_true_after_an_interrupt(rig: Rig) -> None:
    long = {"temperature": 0, "max_tokens": 500, "ignore_eos": True}
    with closing(RemoteConversation(Remote(rig.url), long, {})) as talk:
        answer = talk.say("Hello there")
        next(answer)
        answer.close()
        (one,) = rig.http.get("/v1/sessions").json()["data"]
        assert 0 < one["position"] < 500
        assert talk.status().startswith(f"{one['position']} of ")


def test_a_context_that_is_full_is_the_servers(rig: Rig) -> None:
    asked = ("run", "-n", "-1", "--ignore-eos", "Hello there", "--url", rig.url)
    assert "full; quire serve -c allows more" in CliRunner().invoke(main, asked).stderr
    whole = {"temperature": 0, "max_tokens": 4096, "ignore_eos": True}
    with closing(RemoteConversation(Remote(rig.url), whole, {})) as talk:
        "".join(talk.say("Hello there"))
        assert talk.full and "quire serve -c allows more" in (talk.cut() or "")


def test_a_conversation_waits_for_the_end_of_what_was_interrupted(rig: Rig) -> None:
    """The server hears of it a moment later: until then it refuses whatever is asked of it."""
    long = {"temperature": 0, "max_tokens": 500, "ignore_eos": True}
    for _ in range(5):
        with closing(RemoteConversation(Remote(rig.url), long, {})) as talk:
            for act in (lambda: None, lambda: talk.rewind(1), lambda: talk.save("kept")):
                act()
                answer = talk.say("Hello there")
                next(answer)
                answer.close()
        assert rig.http.get("/v1/sessions").json()["data"] == []


def test_a_chat_goes_on_where_something_was_refused(rig: Rig) -> None:
    first = rig.llm.chat(turns("Hello there"), max_tokens=8, temperature=0).text
    talk = f"/save a/b\n{'word ' * 3000}\nHello there\n"
    done = CliRunner().invoke(
        main, ["chat", "--url", rig.url, "--temp", "0", "-n", "8"], input=talk
    )
    assert "1 to 128 letters" in done.stderr and "maximum context length" in done.stderr
    assert done.exit_code == 0 and done.stdout.endswith(first + "\n")
    assert rig.http.get("/v1/sessions").json()["data"] == []


HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
PIECE = b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
BROKEN = {
    "no end": HEAD + b"\r\n" + PIECE,
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n99\r\n" + PIECE,
    "no events": HEAD + b"\r\n<html></html>",
    "half an object": HEAD + b'\r\n{"choices"',
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("command", [("run", "hi"), ("run", "--json", "hi"), ("chat",), ("ps",)])
def test_half_an_answer_is_an_error(answer: bytes, command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        done = CliRunner().invoke(main, [command[0], "--url", url, *command[1:]], input="hi\n")
    assert done.exit_code == 1 and "quire: " in done.output and url in done.output
    assert done.output.startswith("quire: ") or "\nquire: " in done.output, "a line of its own"


def test_ps(rig: Rig) -> None:
    rig.post("/v1/sessions", id="seen", prompt="It was")
    assert "seen" in run("ps", "--url", rig.url) and "tiny-dense" in run("ps", "--url", rig.url)
    assert "2,048" in run("ps", "--url", rig.url) and "KiB" in run("ps", "--url", rig.url)
    told = json.loads(run("ps", "--url", rig.url, "--json"))
    assert told["sessions"][0]["id"] == "seen"
    assert told["memory"]["tiny-dense"]["used_bytes"] > 0
    rig.http.delete("/v1/sessions/seen")


def test_ps_cuts_no_name(rig: Rig) -> None:
    """Not on a narrow terminal, nor in a file."""
    rig.post("/v1/sessions", id="s-0123456789abcdef", prompt="It was")
    rig.post("/v1/sessions/s-0123456789abcdef/checkpoint", name="before-the-fight")
    fork = rig.post("/v1/sessions/s-0123456789abcdef/fork", id="fork-of-it" * 9)
    told = run("ps", "--url", rig.url)
    assert "s-0123456789abcdef" in told and "before-the-fight" in told and fork["id"] in told
    with Terminal(["ps", "--url", rig.url], {"COLUMNS": "40"}) as t:
        assert t.ended() == 0
        assert "s-0123456789abcdef " in t.text and fork["id"] in t.text
    for id in ("s-0123456789abcdef", fork["id"]):
        rig.http.delete(f"/v1/sessions/{id}")


def test_a_client_sends_the_first_of_several_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, api_keys=("one", "a b", "ключ")) as server:
        monkeypatch.setenv("QUIRE_API_KEY", "one two")
        assert "no sessions" in run("ps", "--url", server.url)
        run("run", "--url", server.url, "-n", "4", "Hello there")
        run("chat", "--url", server.url, "-n", "4", stdin="Hello there\n")
        run("ps", "--url", server.url, "--api-key", "a b")  # what is written out is one key
        run("ps", "--url", server.url, "--api-key", "ключ")
        monkeypatch.setenv("QUIRE_API_KEY", " ")
        done = CliRunner().invoke(main, ["ps", "--url", server.url])
        assert done.exit_code == 1 and "a key is needed" in done.output
        done = CliRunner().invoke(main, ["ps", "--url", server.url, "--api-key", "two"])
        assert "this key is not the server's" in done.output and "--api-key" in done.output


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "nonsense:99999", "http://[::1"])
def test_no_server(url: str) -> None:
    done = CliRunner().invoke(main, ["run", "--url", url, "hi"])
    assert done.exit_code == 1 and "quire:" in done.output


def test_the_servers_own_words(rig: Rig) -> None:
    done = CliRunner().invoke(main, ["run", "--url", rig.url, "-m", "other", "hi"])
    assert done.exit_code == 1 and "there is no model 'other'" in done.output
