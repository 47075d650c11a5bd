"""Which kernels there are, which of them were launched, and which were not.

As a plugin it writes down what tests launch, one name to a line:

    python -m pytest -p tests.cuda.launches --launches FILE tests/cuda/…

As a script it reads such files, and fails if one of the package's kernels is in none of them:

    python -m tests.cuda.launches FILE …

Nothing of this is in the package: the two ways by which kernels are launched are wrapped.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

NATIVE = re.compile(r"__global__\s[^;{]*?(\w+)\(const\s")
HOST_ONLY = frozenset({"product.py join", "rows.py prepare"})
"""Launched where kernels are interpreted; on a GPU rows.cu does what they do."""


def native_kernels() -> set[str]:
    """Every `__global__` of the sources."""
    from quire.ops.cuda.nvrtc import SOURCES

    return {
        f"{path.name} {name}"
        for path in SOURCES.rglob("*.cu")
        for name in NATIVE.findall(path.read_text())
    }


def _calls(path: str) -> Iterator[tuple[ast.expr, bool]]:
    """What a file calls, and whether that is a launch: `kernel[grid](…)`."""
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.Call):
            launch = isinstance(node.func, ast.Subscript)
            yield (node.func.value if isinstance(node.func, ast.Subscript) else node.func), launch


def _named(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.py {kernel.fn.__name__}"


def triton_kernels() -> tuple[set[str], set[str]]:
    """Those that the package launches, and those that no other kernel calls: the same."""
    from triton.runtime.jit import KernelInterface

    import quire.ops.cuda as package

    launched, made, called = set(), set(), set()
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        names = vars(module)
        kernels = [each for each in names.values() if isinstance(each, KernelInterface)]
        made |= {_named(each) for each in kernels if each.fn.__module__ == found.name}
        for what, launch in _calls(str(module.__file__)):
            name, _, member = ast.unparse(what).partition(".")
            kernel = getattr(names.get(name), member, None) if member else names.get(name)
            if isinstance(kernel, KernelInterface):
                (launched if launch else called).add(_named(kernel))
    return launched, made - called


def wanted() -> set[str]:
    """What has to be launched on a GPU."""
    return (native_kernels() | triton_kernels()[0]) - HOST_ONLY


@contextmanager
def recording(run: bool = True) -> Iterator[set[str]]:
    """The kernels that are launched meanwhile; if not `run`, that is all that happens."""
    from triton.runtime.jit import KernelInterface

    from quire.ops.cuda.nvrtc import Kernel, Native

    found: set[str] = set()
    names: dict[Kernel, str] = {}
    of, launch, chosen = Native.kernel, Kernel.launch, KernelInterface.__getitem__

    def named(self: Native, files: tuple[str, ...], name: str, *how: Any, **more: Any) -> Kernel:
        kernel = of(self, files, name, *how, **more)
        names[kernel] = f"{files[-1]}.cu {name}"
        return kernel

    def launched(self: Kernel, *given: Any, **more: Any) -> None:
        found.add(names[self])
        launch(self, *given, **more)

    def ready(self: Any, grid: Any) -> Any:
        real = chosen(self, grid) if run else lambda *_, **__: None

        def triton_launched(*given: Any, **more: Any) -> Any:
            found.add(_named(self))
            return real(*given, **more)

        return triton_launched

    with (
        mock.patch.object(Native, "kernel", named),
        mock.patch.object(Kernel, "launch", launched),
        mock.patch.object(KernelInterface, "__getitem__", ready),
    ):
        yield found


# ---- the plugin -------------------------------------------------------------------------------

_RECORD = pytest.StashKey[tuple[ExitStack, set[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where names are written."""
    parser.addoption("--launches", type=Path, required=True, help="write what is launched here")


def pytest_configure(config: pytest.Config) -> None:
    """From here on: conftest has said by now whether kernels are interpreted."""
    stack = ExitStack()
    config.stash[_RECORD] = stack, stack.enter_context(recording())


def pytest_unconfigure(config: pytest.Config) -> None:
    """To the end."""
    stack, found = config.stash[_RECORD]
    stack.close()
    config.getoption("--launches").write_text("".join(f"{name}\n" for name in sorted(found)))


# ---- the script -------------------------------------------------------------------------------


def main() -> None:
    """Holds what was launched against what there is."""
    launched = {line for name in sys.argv[1:] for line in Path(name).read_text().splitlines()}
    every = wanted()
    missing, others = sorted(every - launched), sorted(launched & HOST_ONLY)
    print(f"kernels: {len(every & launched)} of {len(every)} launched")
    told = ", ".join(sorted(every & launched))
    print(textwrap.fill(told, 110, initial_indent="  ", subsequent_indent="  "))
    if missing or others:
        raise SystemExit(f"kernels MISSING: {missing}; on a GPU after all: {others}")


if __name__ == "__main__":
    main()
