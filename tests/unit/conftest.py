"""A small dense model for tests that need no special one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from tests import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a model."""
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=512))
    return made


@pytest.fixture
def llm(path: Path) -> Iterator[quire.LLM]:
    """The model; whatever a test did with it, nothing is held at the end."""
    with quire.load(path) as loaded:
        yield loaded
        loaded.memory.audit()
        loaded.forget()
        assert loaded.memory.as_dict()["stats"]["attention"]["pages_used"] == 0
