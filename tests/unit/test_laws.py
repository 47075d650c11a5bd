"""The laws of the architecture, read off the imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import quire
from quire import errors
from quire.engine.sequence import Sequence

ROOT = Path(quire.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@cache
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
        assert not reaches(modules, "quire.models", "quire.engine")
    if where == "models":
        assert not reaches(modules, "quire.engine")
    if where == "engine":
        assert not reaches(modules, "quire.speculate", "quire.text")
    if where in ("ops", "memory", "models", "text", "weights", "engine", "speculate"):
        assert not reaches(modules, "quire.cli", "quire.server", "quire.api")
    if where != "ops" or "cuda" not in path.parts:
        assert not reaches(modules, "torch", "triton")
    if path != ROOT / "config.py":
        assert not reaches(modules, "os.environ")
        assert "os.environ" not in path.read_text() and "getenv" not in path.read_text()


def home(module: str) -> str:
    """The package of a module of quire, or the module itself where it is in none."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0]


def package_graph() -> dict[str, set[str]]:
    """Which package imports from which, for the sake of types too."""
    known = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}
    graph: dict[str, set[str]] = {}
    for path in FILES:
        where = path.relative_to(ROOT).parts[0].removesuffix(".py")
        found = {home(m) for m in imports(path) if m.startswith("quire.")}
        graph.setdefault(where, set()).update((found & known) - {where})
    return graph


def test_packages_have_no_cycles() -> None:
    graph = package_graph()
    graph.pop("__init__")
    while free := {where for where, needs in graph.items() if not needs & graph.keys()}:
        for where in free:
            del graph[where]
    assert not graph, (
        f"these import each other: { {w: n & graph.keys() for w, n in graph.items()} }"
    )


@pytest.mark.parametrize(
    ("upper", "lower"),
    [
        ("api", "engine"), ("engine", "memory"), ("engine", "models"), ("speculate", "engine"),
        ("cli", "api"), ("models", "ops"), ("memory", "ops"), ("memory", "devices"),
        ("devices", "ops"),
    ],
)  # fmt: skip
def test_packages_look_down(upper: str, lower: str) -> None:
    """Whatever one reaches through others, the other never reaches it."""
    graph = package_graph()
    seen, todo = set(), [lower]
    while todo:
        for needed in graph.get(todo.pop(), set()) - seen:
            seen.add(needed)
            todo.append(needed)
    assert upper not in seen


SEQUENCE_FIELDS = set(vars(Sequence(0))) - {"id"}
CHANGES_TOKENS = {"append", "extend", "truncate", "remove"}


def changed_elsewhere(source: str) -> list[int]:
    """Lines that assign to a sequence's fields, or change its tokens, in place of itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    own = isinstance(part.value, ast.Name) and part.value.id == "self"
                    if part.attr in SEQUENCE_FIELDS and not own:
                        found.append(node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            holder = node.func.value
            if node.func.attr in CHANGES_TOKENS and isinstance(holder, ast.Attribute):
                own = isinstance(holder.value, ast.Name) and holder.value.id in ("self", "one")
                if holder.attr == "tokens" and not own:
                    found.append(node.lineno)
    return found


def test_a_sequence_has_one_writer() -> None:
    assert changed_elsewhere("sequence.computed += 1")
    assert changed_elsewhere("a.sequence.status, b = PARKED, 1")
    assert changed_elsewhere("sequence.tokens.append(5)")
    for path in FILES:
        if package(path) in ("engine", "speculate", "api", "cli") and path.name != "sequence.py":
            lines = changed_elsewhere(path.read_text())
            assert not lines or _of_others(path, lines) == [], f"{path}: lines {lines}"


def _of_others(path: Path, lines: list[int]) -> list[str]:
    """Those lines that are not about another class with a field of the same name."""
    text = path.read_text().splitlines()
    others = ("one.logits", "one.error", "job.error", "work.error", "twin._")
    return [text[n - 1] for n in lines if not text[n - 1].strip().startswith(others)]


def test_the_extension_does_without_streams() -> None:
    """Where it has a C++ library of its own linked in, a refusal that told numbers broke off."""
    sources = [*(Path(quire.__file__).parent / "ops" / "csrc").iterdir()]
    assert sources
    for path in sources:
        assert not re.search(r"#include <\w*stream>", path.read_text()), path


def test_import_is_light() -> None:
    code = "import sys; bare = {*sys.modules}; import quire; print(*sys.modules.keys() - bare)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    heavy = {"torch", "transformers", "tokenizers", "rich", "click", "llguidance", "minijinja"}
    assert not loaded & heavy
    assert len(loaded) < 420


def test_all_is_what_there_is() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.QuireError)
        assert name in (errors.__doc__ or "")
