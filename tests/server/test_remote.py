"""The commands that ask a running server."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from quire.cli import main
from tests.server.rig import Rig, turns


def run(*arguments: str, stdin: str | None = None) -> str:
    done = CliRunner().invoke(main, arguments, input=stdin)
    assert done.exit_code == 0, done.output
    return done.output


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
    assert run("run", "--url", rig.url, "--regex", "[ab]{2}", "Hello").strip("ab") == "\n"


def test_chat(rig: Rig) -> None:
    first = rig.llm.chat(turns("Hello there"), max_tokens=8, temperature=0).text
    second = rig.llm.chat(turns("Hello there", first, "More"), max_tokens=8, temperature=0).text
    talk = "Hello there\nMore\n/rewind\nMore\n/quit\n"
    assert (
        run("chat", "--url", rig.url, "--temp", "0", "-n", "8", stdin=talk)
        == f"{first}\n{second}\n{second}\n"
    )
    assert rig.http.get("/v1/sessions").json()["data"] == []


def test_ps(rig: Rig) -> None:
    rig.post("/v1/sessions", id="seen", prompt="It was")
    assert "seen" in run("ps", "--url", rig.url) and "tiny-dense" in run("ps", "--url", rig.url)
    told = json.loads(run("ps", "--url", rig.url, "--json"))
    assert told["sessions"][0]["id"] == "seen"
    assert told["memory"]["tiny-dense"]["used_bytes"] > 0
    rig.http.delete("/v1/sessions/seen")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "nonsense:99999"])
def test_no_server(url: str) -> None:
    done = CliRunner().invoke(main, ["run", "--url", url, "hi"])
    assert done.exit_code == 1 and "quire:" in done.output


def test_the_servers_own_words(rig: Rig) -> None:
    done = CliRunner().invoke(main, ["run", "--url", rig.url, "-m", "other", "hi"])
    assert done.exit_code == 1 and "there is no model 'other'" in done.output
