"""The real model, fetched once; where it cannot be had these tests are skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import config
from quire.errors import FetchError
from quire.weights import pull

DATA = Path(__file__).parent.parent / "data" / "smollm2.json"


@pytest.fixture(scope="session")
def model_path() -> Path:
    try:
        return pull.resolve("smollm2", config.cache_folder())
    except FetchError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(DATA.read_text())
    return data


@pytest.fixture(scope="session")
def llm(model_path: Path) -> Iterator[quire.LLM]:
    with quire.load(model_path) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def exact(model_path: Path) -> Iterator[quire.LLM]:
    with quire.load(model_path, activations="f32", type_k="f32", type_v="f32") as loaded:
        yield loaded
