"""One server for all tests that change nothing of its settings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.browser import Tab
    from tests.server.rig import Rig

if not all(map(find_spec, ("starlette", "uvicorn", "msgspec", "httpx"))):
    collect_ignore_glob = ["test_*.py"]  # the extra `serve` is not installed


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A server with a small dense model."""
    from tests.server.rig import serving

    with serving(tmp_path_factory.mktemp("sessions")) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser for the tests of the page."""
    from tests.server.browser import browser

    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def one_server(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A server of a model with attention and states."""
    from tests.server.rig import HYBRID, serving

    folder = tmp_path_factory.mktemp("saved")
    with serving(folder, HYBRID, load={"memory_budget": "64MiB", "n_ctx": 512}) as running:
        yield running


@pytest.fixture
def server(one_server: Rig) -> Iterator[Rig]:
    """The same, with nothing in it."""
    from tests.server.browser import sessions

    yield one_server
    for id in sessions(one_server):
        one_server.http.delete(f"/v1/sessions/{id}")


@pytest.fixture
def tab(chromium: Any, server: Rig) -> Iterator[Tab]:
    """The page of that server."""
    from tests.server.browser import Tab

    made = Tab(chromium, server.url).live()
    yield made
    made.close()
