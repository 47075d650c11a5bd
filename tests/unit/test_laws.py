"""The laws of the architecture, read off the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire import errors

ROOT = Path(quire.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module a file imports, at its top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def package(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def reaches(modules: set[str], *targets: str) -> set[str]:
    return {m for m in modules for t in targets if m == t or m.startswith(f"{t}.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    modules = imports(path)
    where = package(path)
    if where == "ops":
        assert reaches(modules, "quire") <= reaches(modules, "quire.ops")
    if where == "memory":
        assert not reaches(modules, "quire.models", "quire.engine", "quire.llm")
    if where == "models":
        assert not reaches(modules, "quire.engine", "quire.llm")
    if where in ("ops", "memory", "models", "text", "weights", "engine", "speculate"):
        assert not reaches(modules, "quire.cli", "quire.server", "quire.llm", "quire.session")
    if where != "ops" or "cuda" not in path.parts:
        assert not reaches(modules, "torch", "triton")
    if path != ROOT / "config.py":
        assert not reaches(modules, "os.environ")
        assert "os.environ" not in path.read_text() and "getenv" not in path.read_text()


def test_import_is_light() -> None:
    code = "import sys, quire; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    heavy = {"torch", "transformers", "tokenizers", "rich", "click", "llguidance", "minijinja"}
    assert not loaded & heavy
    assert len(loaded) < 400


def test_all_is_what_there_is() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.QuireError)
        assert name in (errors.__doc__ or "")
