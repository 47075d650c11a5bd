"""One server for all tests that change nothing of its settings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.rig import Rig

if not all(map(find_spec, ("starlette", "uvicorn", "msgspec", "httpx"))):
    collect_ignore_glob = ["test_*.py"]  # the extra `serve` is not installed


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A server with a small dense model."""
    from tests.server.rig import serving

    with serving(tmp_path_factory.mktemp("sessions")) as running:
        yield running
