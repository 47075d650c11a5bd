"""The unit and the container file of the examples, as far as they can be tried without either."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from quire.cli import main

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
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


def test_both_start_a_server_that_keeps_sessions() -> None:
    (start,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    text = CONTAINER.read_text()
    entry, arguments = (
        json.loads(re.findall(rf"^{word} (\[.*\])$", text, re.MULTILINE)[0])
        for word in ("ENTRYPOINT", "CMD")
    )
    for command in (shlex.split(start), [*entry, *arguments]):
        assert options(command)["save_sessions"] == "turn"
