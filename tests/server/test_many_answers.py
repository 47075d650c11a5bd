"""One request for many answers: it takes no more places than there are, and gives them back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.server.run import Run
from quire.text.detokenize import StopStrings
from tests.server.rig import Rig, serving

PROMPTS = [[300 + i, 301] for i in range(9)]
PLACES = 4


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with serving(tmp_path_factory.mktemp("sessions"), max_running=PLACES) as running:
        yield running


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many answers were made at a time, whenever some began."""
    seen: list[int] = []
    begin = Run._begin

    async def counted(run: Run, begins: Any) -> None:
        seen.append(len(begins) + sum(not job.done for job in run.jobs))
        await begin(run, begins)

    monkeypatch.setattr(Run, "_begin", counted)
    return seen


def test_answers_wait_for_places(few: Rig, most: list[int]) -> None:
    alone = [few.complete(prompt)["choices"][0]["text"] for prompt in PROMPTS]
    most.clear()
    made = few.complete(PROMPTS, n=2)
    assert [one["text"] for one in made["choices"]] == [text for text in alone for _ in range(2)]
    assert [one["index"] for one in made["choices"]] == list(range(18))
    assert made["usage"]["completion_tokens"] == 18 * 12
    assert max(most) <= PLACES and len(most) > 3


def test_a_stream_has_all_of_them(few: Rig, most: list[int]) -> None:
    whole = few.complete(PROMPTS)["choices"]
    body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    texts, ends = [""] * len(PROMPTS), 0
    for event in few.events("/v1/completions", **body)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            ends += choice["finish_reason"] is not None
    assert texts == [one["text"] for one in whole] and ends == len(PROMPTS)
    assert max(most) <= PLACES


def test_who_leaves_in_the_middle_leaves_nothing(few: Rig) -> None:
    body = {"prompt": PROMPTS * 9, "max_tokens": 400, "ignore_eos": True}
    with pytest.raises(httpx.TimeoutException):
        few.http.post("/v1/completions", json=body, timeout=0.2)
    few.idle()
    with few.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for _, line in zip(range(90), answer.iter_lines(), strict=False):
            assert line == "" or line.startswith("data: ")
    few.idle()
    assert few.pages() == 0 and not few.state.runs


def test_a_reader_who_does_not_read_keeps_no_places(few: Rig) -> None:
    body = {"prompt": PROMPTS * 3, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with few.http.stream("POST", "/v1/completions", json=body):
        deadline = time.monotonic() + 20
        while few.state.admission.running:
            assert time.monotonic() < deadline, "it waits for its reader"
            time.sleep(0.02)


def test_many_answers_keep_nobody_waiting(few: Rig) -> None:
    """They begin though somebody else runs, and whoever comes later is not behind all of them."""
    long = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    many = {"prompt": PROMPTS * 40, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with few.http.stream("POST", "/v1/completions", json=long) as other:
        reads = other.iter_lines()
        next(reads)
        with few.http.stream("POST", "/v1/completions", json=many) as answer:
            lines = answer.iter_lines()
            next(lines)
            few.complete("b", 2)
            (run,) = [run for run in few.state.runs if run.choices > 1]
            assert len(run.jobs) < run.choices / 2
    few.idle()


def test_one_that_fails_ends_all(few: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, calls = Run._begin, 0

    async def fails(run: Run, begins: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("no more")
        await begin(run, begins)

    monkeypatch.setattr(Run, "_begin", fails)
    answer = few.http.post("/v1/completions", json={"prompt": PROMPTS, "max_tokens": 4})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert few.pages() == 0


def test_stop_strings_are_read_once_for_all(few: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be long: what finds them takes a moment, and memory."""
    made: list[Any] = []
    link = StopStrings._link
    monkeypatch.setattr(StopStrings, "_link", lambda self: made.append(self) or link(self))
    alone = few.complete(PROMPTS[0])["choices"][0]["text"]
    made.clear()
    for choice in few.complete([PROMPTS[0]] * 3, n=2, stop=[alone[5:8], "never"])["choices"]:
        assert choice["text"] == alone[:5] and choice["finish_reason"] == "stop"
    assert len(made) == 1
    stops = [f"{i:03}" * 11 for i in range(256)]
    few.complete("a", 1, stop=stops[:248])
    assert few.refused(400, "/v1/completions", prompt="a", stop=stops)["param"] == "stop"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template"])
def test_more_messages_than_tokens(few: Rig, path: str) -> None:
    """They are refused before they are counted; what is not answered may have far more."""
    most = few.llm.n_ctx if path.endswith("completions") else 1 << 18
    error = few.refused(400, path, messages=[{"role": "user", "content": "a"}] * (most + 1))
    assert error["code"] == "context_length_exceeded" and str(most) in error["message"]


def test_too_many(few: Rig) -> None:
    body = {"prompt": [[5]] * 17, "n": 128, "max_tokens": 1}
    assert few.refused(400, "/v1/completions", **body)["param"] == "n"
