"""What README says that commands print is what they print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import quire
from quire.cli import main
from tests.documents import ROOT, blocks

_SAMPLED_WITH = "cpu avx512-vnni int8"  # other instructions round differently, and chance goes on


def samples() -> list[tuple[str, str]]:
    """Commands, and what comes out of them."""
    found = []
    for block in blocks(ROOT / "README.md", "console"):
        for part in re.split(r"^(?=\$ )|^(?=\S*quire )", block.text, flags=re.MULTILINE):
            command, _, output = part.removeprefix("$ ").partition("\n")
            name, _, words = command.partition(" ")
            if name.endswith("quire"):
                found.append((words, output))
    return found


def test_there_are_samples() -> None:
    assert len(samples()) >= 2


@pytest.mark.parametrize(("words", "output"), samples())
def test_samples_are_true(words: str, output: str, model_path: Path, llm: quire.LLM) -> None:
    result = CliRunner().invoke(main, [*shlex.split(words), "-m", str(model_path)])
    assert result.exit_code == 0, result.stderr
    if "--temp" not in words or llm.ops.arithmetic == _SAMPLED_WITH:
        assert result.stdout == output
