"""Ollama's dialect, with Ollama's own client and by hand."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.server.errors import ApiError
from quire.server.keep_alive import keep
from quire.server.models import ServedModel
from tests.server.rig import Rig, serving, turns

ollama = pytest.importorskip("ollama")
GREEDY = {"temperature": 0, "num_predict": 12}
ASK = turns("Tell me about the sea")


@pytest.fixture
def client(rig: Rig) -> Any:
    return ollama.Client(host=rig.url)


def test_a_chat_is_the_same_as_in_openais_form(rig: Rig, client: Any) -> None:
    made = client.chat(model="tiny-dense", messages=ASK, options=GREEDY)
    other = rig.chat("Tell me about the sea")
    assert made.message.content == other["choices"][0]["message"]["content"]
    assert made.done and made.done_reason in ("stop", "length")
    assert made.prompt_eval_count == other["usage"]["prompt_tokens"]
    assert made.eval_count == other["usage"]["completion_tokens"]
    parts = list(client.chat(model="tiny-dense:latest", messages=ASK, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == made.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_prompt_goes_on_raw_or_as_a_message(rig: Rig, client: Any) -> None:
    raw = client.generate(model="tiny-dense", prompt="Once upon", raw=True, options=GREEDY)
    body = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}
    assert raw.response == rig.post("/v1/completions", **body)["choices"][0]["text"]
    said = client.generate(model="tiny-dense", prompt="Tell me about the sea", options=GREEDY)
    other = rig.chat("Tell me about the sea")["choices"][0]["message"]["content"]
    assert said.response == other
    asked = {"model": "tiny-dense", "prompt": "Tell me about the sea", "options": GREEDY}
    parts = list(client.generate(**asked, stream=True))
    assert "".join(part.response for part in parts) == other


def test_a_stream_is_what_comes_unless_it_is_not_wanted(rig: Rig) -> None:
    body = {"model": "tiny-dense", "messages": ASK, "options": GREEDY}
    answer = rig.http.post("/api/chat", json=body)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines() if line]
    assert lines[-1]["done"] and lines[-1]["total_duration"] > 0


def test_formats_are_kept_to(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    made = client.chat(model="tiny-dense", messages=ASK, format=schema, options={"num_predict": 40})
    assert json.loads(made.message.content)["n"] in (1, 2)


def test_a_message_may_be_empty(rig: Rig, client: Any) -> None:
    """The client leaves out a content that is empty."""
    options = {"temperature": 0, "num_predict": 4}
    made = client.chat(model="tiny-dense", messages=turns(""), options=options)
    assert made.message.content == rig.llm.chat(turns(""), max_tokens=4, temperature=0).text
    assert rig.post("/api/chat", model="tiny-dense", messages=turns(""), stream=False)["done"]


@pytest.mark.parametrize("raw", [True, False])
def test_logprobs_are_those_of_openais_form(rig: Rig, client: Any, raw: bool) -> None:
    body: dict[str, Any] = {
        "model": "tiny-dense", "options": {"temperature": 0, "num_predict": 4}, "logprobs": True,
        "top_logprobs": 2,
    }  # fmt: skip
    if raw:
        made = client.generate(prompt="It was", raw=True, **body)
        parts = list(client.generate(prompt="It was", raw=True, stream=True, **body))
        plain = rig.post(
            "/v1/completions", prompt="It was", max_tokens=4, temperature=0, logprobs=True,
            top_logprobs=2,
        )  # fmt: skip
    else:
        made = client.chat(messages=turns("Hello"), **body)
        parts = list(client.chat(messages=turns("Hello"), stream=True, **body))
        plain = rig.chat("Hello", max_tokens=4, logprobs=True, top_logprobs=2)
    wanted = [one["logprob"] for one in plain["choices"][0]["logprobs"]["content"]]
    assert [one.logprob for one in made.logprobs] == wanted
    assert [one.logprob for part in parts for one in part.logprobs or []] == wanted
    assert len(made.logprobs[0].top_logprobs) == 2


def test_models_are_told(rig: Rig, client: Any) -> None:
    (model,) = client.list().models
    assert model.model == "tiny-dense" and model.size > 0
    (running,) = client.ps().models
    assert running.model == "tiny-dense" and running.context_length == rig.llm.n_ctx
    shown = client.show("tiny-dense")
    assert "completion" in shown.capabilities and shown.template
    assert rig.http.get("/api/version").json() == {"version": quire.__version__}


def test_nothing_to_say_loads_the_model(rig: Rig) -> None:
    for path in ("/api/generate", "/api/chat"):
        told = rig.post(path, model="tiny-dense")
        assert told["done"] and told["done_reason"] == "load"


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_a_model_is_kept_for_as_long_as_it_is_said(tmp_path: Path, path: str) -> None:
    with serving(tmp_path) as rig:
        rig.http.patch("/v1/memory", json={"budget_bytes": 300 << 20})
        said = rig.post(path, model="tiny-dense", keep_alive=0)
        assert said["done_reason"] == "unload" and said["done"]
        assert rig.http.get("/api/ps").json() == {"models": []}
        assert rig.http.get("/health").json()["status"] == "ok"
        loaded = rig.post(path, model="tiny-dense", keep_alive="1h30m")
        assert loaded["done_reason"] == "load"
        assert 5390 < left(rig) < 5410
        for said, seconds in ((-1, 1e9), ("-1m", 1e9), (20, 20), ("1500ms", 1.5)):
            rig.post(path, model="tiny-dense", keep_alive=said)
            assert left(rig) > 1e9 if seconds == 1e9 else 0 < left(rig) < seconds + 1
        rig.post("/v1/sessions", id="stays", prompt="It was")
        rig.post(path, model="tiny-dense", keep_alive=0)  # not while somebody uses it
        assert rig.http.get("/v1/sessions/stays").json()["position"] > 0
        rig.http.delete("/v1/sessions/stays")
        deadline = time.monotonic() + 5
        while rig.http.get("/api/ps").json()["models"]:
            assert time.monotonic() < deadline, "it is not given back"
            time.sleep(0.05)
        assert rig.chat("hi")["choices"]  # loaded again, for as long as the server was told
        assert left(rig) > 1e9 and rig.http.get("/v1/memory").json()["budget_bytes"] == 300 << 20
        for odd in ("x", "5 m", "", "m", "1e5"):
            answer = rig.http.post(path, json={"model": "tiny-dense", "keep_alive": odd})
            assert answer.status_code == 400 and "keep_alive" in answer.json()["error"]


def test_a_long_time_is_read_in_no_time() -> None:
    model, start = ServedModel("a", "a"), time.process_time()
    for odd in ("1" * 24 + "x", "1" * 10, "1h5", "1.5.5h"):
        with pytest.raises(ApiError, match="keep_alive"):
            keep(model, odd)
    assert time.process_time() - start < 0.5
    keep(model, "1h1.5m30s500ms")
    assert model.keep_s == 3720.5
    keep(model, "300")
    assert model.keep_s == 300


def left(rig: Rig) -> float:
    """Seconds until the model is given back."""
    (told,) = rig.http.get("/api/ps").json()["models"]
    return datetime.fromisoformat(told["expires_at"]).timestamp() - time.time()


def test_errors_are_in_its_own_form(rig: Rig, client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model="no-such-model", messages=ASK)
    assert caught.value.status_code == 404
    told = rig.http.post(
        "/api/chat", json={"model": "tiny-dense", "messages": ASK, "options": {"seed": "x"}}
    )
    assert told.status_code == 400 and isinstance(told.json()["error"], str)


def test_vectors_have_length_one(rig: Rig, client: Any) -> None:
    made = client.embed(model="tiny-dense", input=["the sea", "the sea", "a stone"])
    assert len(made.embeddings) == 3 and list(made.embeddings[0]) == list(made.embeddings[1])
    assert sum(x * x for x in made.embeddings[2]) == pytest.approx(1, abs=1e-4)
    old = client.embeddings(model="tiny-dense", prompt="the sea")
    assert list(old.embedding) == pytest.approx(list(made.embeddings[0]), abs=1e-5)


def test_json_is_taken_whatever_it_is_called_but_from_no_other_page(rig: Rig) -> None:
    body = json.dumps({"model": "tiny-dense", "prompt": "Once", "stream": False, "options": GREEDY})
    form = {"content-type": "application/x-www-form-urlencoded"}  # as curl -d sends it
    some = {"content-type": "application/octet-stream"}  # as litellm does where it streams
    for headers in ({}, form, some):
        answer = rig.http.post("/api/generate", content=body, headers=headers)
        assert answer.status_code == 200 and answer.json()["done"]
    elsewhere = {**form, "origin": "http://elsewhere.example"}
    assert rig.http.post("/api/generate", content=body, headers=elsewhere).status_code == 403
    plain = {"content-type": "text/plain"}
    assert rig.http.post("/api/generate", content=body, headers=plain).status_code == 415


def test_litellm(rig: Rig) -> None:
    litellm = pytest.importorskip("litellm")
    asked = {"messages": ASK, "temperature": 0, "max_tokens": 12, "api_base": rig.url}
    wanted = rig.chat("Tell me about the sea")["choices"][0]["message"]["content"]
    for model in ("ollama_chat/tiny-dense", "anthropic/tiny-dense"):
        made = litellm.completion(model=model, api_key="none", **asked)
        assert made.choices[0].message.content == wanted
        parts = litellm.completion(model=model, api_key="none", stream=True, **asked)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == wanted

    async def streamed(model: str) -> str:
        parts = await litellm.acompletion(model=model, api_key="none", stream=True, **asked)
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    assert asyncio.run(streamed("ollama_chat/tiny-dense")) == wanted
