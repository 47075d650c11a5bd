"""Requests that are quickly written and would be much work: refused, or done as quickly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.server import asking
from tests.server.rig import Rig, serving

COMPLETE = "/v1/completions"
PLACES = 4


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with serving(tmp_path_factory.mktemp("sessions"), max_running=PLACES) as running:
        yield running


def test_a_schema_in_a_text_is_not_read_if_it_is_long(
    few: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body's values are counted before they are made, and a text is one of them."""
    few.complete("a", structured_outputs={"json": '{"type": "integer"}'})
    monkeypatch.setattr(asking, "json", None)
    for many in ("[],", '"a",'):
        schema = '{"a": [' + many * 100_000 + "1]}"
        error = few.refused(400, COMPLETE, prompt="a", structured_outputs={"json": schema})
        assert error["param"] == "structured_outputs" and "262,144" in error["message"]
