"""One server for all tests that change nothing of its settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("msgspec")

from tests.server.rig import Rig, serving


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A server with a small dense model."""
    with serving(tmp_path_factory.mktemp("sessions")) as running:
        yield running
