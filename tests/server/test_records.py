"""What is told of requests: ids, the log, metrics; and the events that the page follows."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.server.rig import DENSE, HYBRID, Rig, serving, turns

SECRET = "a text that nobody else may read"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The log's lines as objects, once there is one for a path."""
    caplog.set_level(logging.INFO, "quire.requests")

    def of(path: str, wait_s: float = 5.0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + wait_s
        while True:
            all_lines = [
                json.loads(r.message) for r in caplog.records if r.name == "quire.requests"
            ]
            found = [line for line in all_lines if line["path"] == path]
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.01)

    return of


def test_ids_come_back_and_stand_in_the_log(rig: Rig, lines: Any) -> None:
    mine = rig.http.get("/version", headers={"x-request-id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    odd = rig.http.get("/livez", headers={"x-request-id": "no id: \t<b>"})
    assert odd.headers["x-request-id"].startswith("req-")
    assert lines("/version")[0]["id"] == "mine-1"
    refused = rig.http.get("/no/such/path", headers={"x-request-id": "mine-2"})
    assert refused.headers["x-request-id"] == "mine-2"
    assert lines("/no/such/path")[0]["status"] == 404


def test_what_clients_write_ends_no_line_of_the_log(
    rig: Rig, lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it command the terminal that the log is read in."""
    odd = "/no/\x0a\x1b[31m\x7f\x85\x9b31m\u2028\u2029\u202e\u2067"
    odd += "\u061c\u206a\ufeff\ufffa\U000e0041/\u00e9"
    rig.http.get(quote(odd))
    (line,) = lines(odd)
    assert line["status"] == 404
    written = next(r.message for r in caplog.records if r.name == "quire.requests")
    assert len(written.splitlines()) == 1 and "\u00e9" in written
    assert all(c.isprintable() for c in written), ascii(written)


def test_a_line_has_figures_and_no_text(rig: Rig, lines: Any) -> None:
    done = rig.post("/v1/completions", prompt=SECRET, max_tokens=5, temperature=0, ignore_eos=True)
    (line,) = lines("/v1/completions")
    assert line["prompt_tokens"] == done["usage"]["prompt_tokens"]
    assert line["tokens"] == 5 and line["finish"] == ["length"] and line["status"] == 200
    assert line["bytes"] == done["memory"]["bytes"] > 0
    details = done["usage"]["prompt_tokens_details"]
    assert line["cached_tokens"] == details["cached_tokens"]
    assert line["miss"] == details["cache_miss"]["reason"]
    assert 0 < line["first_token_ms"] <= line["ms"]
    assert SECRET not in json.dumps(line)


def test_text_is_logged_where_that_is_wanted(tmp_path: Path, lines: Any) -> None:
    with serving(tmp_path, log_text=True) as rig:
        done = rig.complete(SECRET)
        (line,) = lines("/v1/completions")
        assert SECRET in line["prompt"][0] and line["text"] == [done["choices"][0]["text"]]


def test_whoever_leaves_is_told_of(rig: Rig, lines: Any) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with rig.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    (line,) = lines("/v1/completions")
    assert line["finish"] == ["abort"] and 0 < line["tokens"] < 400


def metric(rig: Rig, name: str, **labels: str) -> float:
    """The value of a metric; 0 where it has none yet."""
    wanted = {"model_name": "tiny-dense", **labels}
    for line in rig.http.get("/metrics").text.splitlines():
        head, _, value = line.rpartition(" ")
        found, _, rest = head.partition("{")
        pairs = dict(pair.split("=", 1) for pair in rest.rstrip("}").split(",") if "=" in pair)
        if found == f"quire:{name}" and {k: v.strip('"') for k, v in pairs.items()} == wanted:
            return float(value)
    return 0.0


def test_metrics_add_up(rig: Rig) -> None:
    counted = (
        "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count",
        "prefix_cache_queries_total", "prefix_cache_hits_total",
    )  # fmt: skip
    before = {name: metric(rig, name) for name in counted}
    ended = metric(rig, "request_success_total", finished_reason="length")
    prompt = "Once upon a time there was a prompt of more than a page. " * 3
    usages = [rig.complete(prompt, most=7)["usage"] for _ in range(2)]
    rig.idle()
    gained = {name: metric(rig, name) - before[name] for name in counted}
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert gained == {
        "prompt_tokens_total": prompts, "generation_tokens_total": 14,
        "time_to_first_token_seconds_count": 2, "prefix_cache_queries_total": prompts,
        "prefix_cache_hits_total": hits,
    }  # fmt: skip
    assert hits > 0
    assert metric(rig, "request_success_total", finished_reason="length") == ended + 2
    assert metric(rig, "num_requests_running") == metric(rig, "num_requests_waiting") == 0
    assert 0 < metric(rig, "kv_cache_usage_perc") < 1
    assert metric(rig, "memory_budget_bytes") == rig.llm.budget.limit


def test_metrics_count_those_that_wait(tmp_path: Path) -> None:
    with serving(tmp_path, max_running=1) as rig, ThreadPoolExecutor(4) as clients:
        done = [clients.submit(rig.complete, f"Number {n}", 300) for n in range(4)]
        seen = set()
        while not all(one.done() for one in done):
            seen.add((metric(rig, "num_requests_running"), metric(rig, "num_requests_waiting")))
        assert max(running for running, _ in seen) == 1
        assert max(waiting for _, waiting in seen) >= 2
        for one in done:
            one.result()


# -- events ---------------------------------------------------------------------------------------


def listen(rig: Rig) -> Iterator[dict[str, Any]]:
    """What the page hears."""
    with rig.http.stream("GET", "/v1/memory/events") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def test_first_everything_then_what_changed(rig: Rig) -> None:
    heard = listen(rig)
    first = next(heard)
    known = {"time", "model", "models", "budget", "pools", "sessions", "prefix"}
    assert set(first) == known | {"requests", "counters"}
    assert sum(p["bytes"] for p in first["budget"]["parts"]) == first["budget"]["used_bytes"]
    quiet = next(heard)
    assert set(quiet) == {"time"} and quiet["time"] - first["time"] >= 0.9
    rig.post("/v1/sessions", id="heard", prompt="Once upon a time")
    change = next(heard)
    assert "sessions" in change and "model" not in change
    rig.http.delete("/v1/sessions/heard")
    heard.close()


def test_nobody_looks_when_nobody_listens(rig: Rig) -> None:
    heard = listen(rig)
    next(heard)
    heard.close()
    deadline = time.monotonic() + 3
    while rig.state.live.listeners or not rig.state.live.idle:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_pages_of_all_holders_are_those_in_use(tmp_path: Path) -> None:
    with serving(tmp_path, HYBRID) as rig:
        rig.post("/v1/sessions", id="story", prompt="Once upon a time there was a girl. " * 5)
        rig.post("/v1/sessions/story/checkpoint", name="here")
        rig.post("/v1/sessions/story/fork", id="other")
        rig.complete(" And", session_id="other", most=30)
        rig.complete("Something quite different, which stays in the cache", most=4)
        heard = listen(rig)
        state = next(heard)
        heard.close()
        stats = rig.http.get("/v1/memory").json()["stats"]
        for pool in state["pools"]:
            held: dict[int, set[str]] = {}
            for by in pool["held"]:
                runs = by["at"]
                pages = {
                    p for i in range(0, len(runs), 2) for p in range(runs[i], runs[i] + runs[i + 1])
                }
                assert len(pages) == by["pages"]
                for page in pages:
                    held.setdefault(page, set()).add(f"{by['kind']} {by['id']}")
            assert len(held) == pool["pages_used"] == stats[pool["name"]]["pages_used"]
            assert pool["pages_shared"] == stats[pool["name"]]["pages_shared"]
        names = {by["id"] for pool in state["pools"] for by in pool["held"]}
        assert {"story", "other", "story/here"} <= names


def test_listeners_do_not_keep_a_server_from_ending(tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        heard = listen(rig)
        next(heard)
        begun = time.monotonic()
        rig.state.stop_admitting()
        for _ in heard:
            pass
        assert time.monotonic() - begun < 2


# -- the page's files -----------------------------------------------------------------------------


def test_files_are_kept_by_browsers_and_let_nothing_else_in(tmp_path: Path) -> None:
    with serving(tmp_path, api_keys=("k",)) as rig:
        asking = rig.http.get("/", headers={"accept": "text/html"})
        assert asking.status_code == 401 and asking.headers["cache-control"] == "no-store"
        assert 'data-key="needed"' in asking.text, "a page that asks for the key"
        assert rig.http.get("/").json()["error"]["code"] == "invalid_api_key"
        rig.http.headers["authorization"] = "Bearer k"
        page = rig.http.get("/")
        assert page.status_code == 200 and page.headers["cache-control"] == "no-cache"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        tag = {"if-none-match": page.headers["etag"]}
        assert rig.http.get("/", headers=tag).status_code == 304
        script = page.text.partition('src="')[2].partition('"')[0]
        del rig.http.headers["authorization"]
        found = rig.http.get(script)
        assert "immutable" in found.headers["cache-control"]
        assert found.headers["content-type"].startswith("text/javascript")
        version = script.split("/")[2]
        for path in (f"/page/{version}/no.js", "/page/other/app.js", f"/page/{version}/../app.py"):
            assert rig.http.get(path).status_code in (401, 404)
        assert rig.http.get("/v1/memory/events").status_code == 401
        assert rig.http.get("/metrics").status_code == 401


def test_conversations_over_http_are_not_in_errors(rig: Rig) -> None:
    told = rig.http.post("/v1/messages", json={"messages": turns(SECRET), "max_tokens": -1})
    assert told.status_code == 400 and SECRET not in told.text


def test_several_models_are_shown_on_one_budget(tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID) as rig:
        heard = listen(rig)
        assert next(heard)["model"] is None, "none is loaded yet"
        heard.close()
        for name in ("tiny-dense", "tiny-hybrid"):
            rig.complete("Once upon a time there was a girl. " * 3, model=name)
            rig.post("/v1/sessions", id=name, model=name, prompt="Once")
        heard = listen(rig)
        state = next(heard)
        heard.close()
        budget = state["budget"]
        assert sum(part["bytes"] for part in budget["parts"]) == budget["used_bytes"]
        assert {pool["model"] for pool in state["pools"]} == {"tiny-dense", "tiny-hybrid"}
        assert {one["model"] for one in state["sessions"]} == {"tiny-dense", "tiny-hybrid"}
        assert state["models"] == ["tiny-dense", "tiny-hybrid"]
        assert state["prefix"]["entries"] >= 2
        done = threading.Event()

        def busy(name: str) -> None:
            while not done.is_set():
                rig.complete([7 + len(name)] * 100, 40, model=name, cache_salt=str(time.time()))

        threads = [threading.Thread(target=busy, args=(m,)) for m in state["models"]]
        for thread in threads:
            thread.start()
        heard = listen(rig)
        try:
            for _ in range(8):  # what each of them holds was not seen at the same moment
                budget = next(heard).get("budget", budget)
                assert sum(part["bytes"] for part in budget["parts"]) == budget["used_bytes"]
        finally:
            heard.close()
            done.set()
            for thread in threads:
                thread.join()
