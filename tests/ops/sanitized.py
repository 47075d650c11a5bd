"""A pytest plugin for `make sanitize`: the extension of build/sanitize instead of the usual one."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

_EXTENSION = "quire.ops._cpu"
(_FILE,) = (Path(__file__).parents[2] / "build" / "sanitize").glob("_cpu.*so")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return spec_from_file_location(fullname, _FILE) if fullname == _EXTENSION else None


assert _EXTENSION not in sys.modules
sys.meta_path.insert(0, _Finder())


def pytest_report_header() -> str:
    """Which file it is."""
    return f"sanitized extension: {_FILE}"
