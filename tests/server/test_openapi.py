"""The description of the API, and what comes of random requests that follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.server.app import routes
from quire.server.page_routes import is_file
from tests.server.rig import Rig, serving


def test_every_route_is_described(rig: Rig) -> None:
    told = rig.http.get("/openapi.json").json()
    for route in routes():
        if route.path in ("/openapi.json", "/") or is_file(route.path):
            continue
        path = told["paths"][route.path.replace(":path}", "}")]
        for method in (route.methods or set()) - {"HEAD"}:
            operation = path[method.lower()]
            assert operation["summary"] and "4XX" in operation["responses"]
            if method in ("POST", "PATCH"):
                assert "requestBody" in operation, route.path
    for path, name in (("/v1/memory", "model"), ("/v1/sessions/{id}", "tokens")):
        assert told["paths"][path]["get"]["parameters"][-1]["name"] == name
    chat = told["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"] and "session_id" in chat["properties"]


def check_error(path: str, error: Any) -> None:
    """Each dialect refuses in its own form."""
    if path.startswith("/api/"):
        assert isinstance(error, str) and error
    elif path.startswith("/v1/messages"):
        assert error["type"] and error["message"]
    else:
        assert set(error) == {"message", "type", "code", "param"}


@pytest.mark.slow
def test_random_requests_are_answered_or_refused(tmp_path: Path) -> None:
    """Whatever comes, no route fails, and nothing is left of it."""
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    with serving(tmp_path, load={"n_ctx": 128}) as rig:
        schema = schemathesis.openapi.from_url(f"{rig.url}/openapi.json")
        seen: dict[int, int] = {}

        for operation in schema.get_all_operations():
            case_of = operation.ok().as_strategy()

            @hypothesis.given(case=case_of)
            @hypothesis.settings(
                max_examples=60, deadline=None, database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )  # fmt: skip
            def ask(case: Any) -> None:
                answer = case.call(timeout=30)
                seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
                assert answer.status_code < 500 or answer.status_code == 503, answer.text
                if answer.status_code >= 400:
                    check_error(case.path, answer.json()["error"])

            if operation.ok().path != "/v1/memory/events":  # it has no end
                ask()
        assert seen.get(200) and seen.get(400) and seen.get(404)
        for session in rig.http.get("/v1/sessions").json()["data"]:
            rig.http.delete(f"/v1/sessions/{session['id']}")
        # One of them may have said that the model goes soon: it stays to be looked at.
        rig.post("/api/generate", model="tiny-dense", keep_alive=-1)
        assert rig.pages() == 0
