"""The unit and the container file of the examples, as far as they can be tried without either."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest

from quire.cli import main
from tests.server.test_process import Process

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
UNIT, CONTAINER = DEPLOY / "quire.service", DEPLOY / "Containerfile"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/quire/bin/quire", sys.executable)
    (tmp_path / "quire.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "quire.service")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and "quire.service" not in told.stderr, told.stderr


def options(command: list[str]) -> dict[str, object]:
    """What `quire serve …` makes of its options."""
    program, verb, *rest = command
    assert program.endswith("quire") and isinstance(main, click.Group)
    whole = click.Context(main, **main.context_settings)  # a command keeps what it was first given
    found = main.get_command(whole, verb)
    assert found is not None
    return found.make_context(verb, rest, parent=whole).params


def instructions() -> str:
    """The container file, each instruction on a line of its own."""
    return CONTAINER.read_text().replace("\\\n", "")


def unit_command() -> list[str]:
    (start,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    return shlex.split(start)


def container_command() -> list[str]:
    """What runs where nothing is said behind the image's name."""
    entry, arguments = (
        json.loads(re.findall(rf"^{word} (\[.*\])$", instructions(), re.MULTILINE)[0])
        for word in ("ENTRYPOINT", "CMD")
    )
    return [*entry, *arguments]


def test_both_start_a_server_that_keeps_sessions() -> None:
    for command in (unit_command(), container_command()):
        assert options(command)["save_sessions"] == "turn"


def test_whoever_stops_them_waits_until_answers_have_come_to_their_end() -> None:
    (unit,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    (container,) = re.findall(r"^# .* --stop-timeout (\d+) ", CONTAINER.read_text(), re.MULTILINE)
    for command, seconds in ((unit_command(), unit), (container_command(), container)):
        drain = options(command)["drain"]
        assert isinstance(drain, float) and int(seconds) >= drain + 5  # to tell them, and to save


def test_the_container_runs_as_somebody_who_is_known_by_number_not_to_be_root() -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", CONTAINER.read_text(), re.MULTILINE)
    assert int(user) > 0 and f"useradd --uid {user} " in CONTAINER.read_text()


def test_the_container_is_built_from_sources_and_nothing_that_git_ignores() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split("\n")) - {""}
    kept_out = [one.rstrip("/") for one in (ROOT / ".gitignore").read_text().splitlines()]
    for name in (one for one in kept_out if not one.startswith("!")):
        assert any(fnmatch(name, one.removeprefix("**/")) for one in ignored), name
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "quire"):
        assert (ROOT / name).exists() and not any(fnmatch(name, one) for one in ignored)


@pytest.mark.parametrize(("keys", "known"), [("one two", True), ("other", False)])
def test_the_containers_health_check_asks_with_a_key(
    keys: str, known: bool, tmp_path: Path
) -> None:
    (check,) = re.findall(r"^HEALTHCHECK .*?CMD (python .*)$", instructions(), re.MULTILINE)
    with Process(tmp_path, "--api-key", "one", "--api-key", "two", key="two") as server:
        program, *rest = shlex.split(check.replace("8080", str(server.port)))
        told = subprocess.run(
            [sys.executable, *rest], env={**os.environ, "QUIRE_API_KEY": keys}, timeout=60
        )
    assert program == "python" and (told.returncode == 0) == known
