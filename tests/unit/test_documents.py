"""Every block of Python, and every command, that README and docs show runs as it is pasted.

A tiny model stands for those that are named, whatever they are called.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.weights import pull
from tests import tiny
from tests.documents import ROOT, blocks, documents

SCHEMA = """{"type": "object", "properties": {"name": {"const": "Ann"}}, "required": ["name"],
 "additionalProperties": false}"""
ELSEWHERE = ("make ", "pip ", "python", "cd ", "quire serve", "quire pull", "quire rm", "quire ps")
"""Commands that install, fetch, or run for ever."""
PATCH = """
import sys
from pathlib import Path
from quire.weights import pull
real = pull.resolve
pull.resolve = lambda name, *a, **k: real(name if Path(name).exists() else {path!r}, *a, **k)
from quire.cli import main
main(prog_name="quire")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(path, tiny.Tiny(tied=False, head_dim=32, width=128, context=1024))
    return path


@pytest.fixture
def here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, where every model's name means the tiny one."""
    real = pull.resolve
    monkeypatch.setattr(pull, "resolve", lambda name, *a, **k: real(str(model), *a, **k))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "person.json").write_text(SCHEMA)
    (tmp_path / "before.json").write_text('{"model": "m", "figures": []}')
    (tmp_path / "text.txt").write_text("It was a dark and stormy night. " * 40)
    yield tmp_path


def run_python(text: str, names: dict[str, Any]) -> None:
    """Runs a block; one may wait for something at its top, as in a notebook."""
    import asyncio

    code = compile(text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_python_blocks_run(path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """README's as they are, one after the other; those of docs begin with a model loaded."""
    names: dict[str, Any] = {}
    found = blocks(path, "python")
    if path.name != "README.md" and found:
        llm = quire.load("smollm2", memory_budget="1GiB")
        session = llm.session()
        session.append("hello there")
        names = {"quire": quire, "llm": llm, "s": session, "prompt": "hello", "text": "a b a b"}
    for block in found:
        run_python(block.text, names)


def commands() -> list[str]:
    """What one would type of the blocks for shells: no comments, no output."""
    lines: list[str] = []
    for path in documents():
        for block in blocks(path, "sh", "console", "bash"):
            for line in block.text.splitlines():
                typed = line.startswith("$ ") if block.language == "console" else True
                if typed:
                    bare = re.sub(r"\s+#.*", "", line.removeprefix("$ "))
                    lines += [part.strip() for part in bare.split(";")]
    lines = [line.replace(".venv/bin/", "") for line in lines]
    return [x for x in dict.fromkeys(lines) if "quire" in x and not x.startswith(ELSEWHERE)]


def test_there_are_blocks_to_test() -> None:
    assert len(blocks(ROOT / "README.md", "python")) >= 2 and len(commands()) >= 6


@pytest.mark.parametrize("command", commands())
def test_commands_run(command: str, model: Path, here: Path) -> None:
    """They end with status 0, over a tiny model that ends no answer: at most a few tokens."""
    shim = here / "bin" / "quire"
    shim.parent.mkdir()
    shim.write_text(f"#!{sys.executable}\n{PATCH.format(path=str(model))}")
    shim.chmod(0o755)
    (here / "model.gguf").write_bytes(model.read_bytes())
    subprocess.run(["git", "init", "-q", "."], check=True)
    (here / "a.txt").write_text("one\n")
    subprocess.run(["git", "add", "a.txt"], check=True)
    (here / "a.txt").write_text("two\n")
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
