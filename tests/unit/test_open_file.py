"""A file of a model, whenever whoever has it is interrupted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from quire.errors import FileError
from quire.weights.open_file import OpenFile


def interrupted_at(file: OpenFile, line: int) -> bool:
    """Closes it, with an interrupt before a line of that; whether it has so many."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code is not OpenFile.close.__code__:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        file.close()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_it_is_closed_once_however_that_is_interrupted(tmp_path: Path) -> None:
    """Its number is somebody else's as soon as it is free."""
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    held = len(os.listdir("/dev/fd"))
    line = 1
    while interrupted_at(file := OpenFile(path, FileError, ".gguf"), line):
        with open(path, "rb") as another:
            del file
            assert another.read() == b"weights"
        line += 1
    with pytest.raises(FileError, match="was closed"):
        file.check_open()
    assert line > 2 and len(os.listdir("/dev/fd")) == held
