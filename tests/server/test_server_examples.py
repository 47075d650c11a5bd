"""The examples that use a server run, and leave nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.rig import Rig

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    """What a program says, which must end well."""
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_sessions_by_curl(rig: Rig) -> None:
    said = run("sh", str(EXAMPLES / "sessions.sh"), rig.url)
    told = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert not [one for one in told if "error" in one]
    first, fork, rewound = [one for one in told if "root" in one]
    assert fork["parent"] == first["id"] == rewound["id"]
    assert fork["memory"]["pages_shared"] == fork["memory"]["pages"] > 0
    assert rewound["position"] == first["position"], "it is back at the mark"
    assert not rig.state.sessions.by_id


def test_an_agent_that_branches(rig: Rig) -> None:
    said = run(sys.executable, str(EXAMPLES / "branching_agent.py"), rig.url)
    assert "\n3." in said and "\n4." not in said and said.count("tokens") == 3
    assert not rig.state.sessions.by_id
    assert rig.pages() == 0
