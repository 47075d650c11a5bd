"""Answers and events have every field that clients' own types name, and of that type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests import tiny
from tests.server.rig import Rig, serving, turns
from tests.server.test_tools import GREET, SCHEMA, THINKING

pydantic = pytest.importorskip("pydantic")
MOST = {"max_tokens": 120, "temperature": 0}
CALL = {"tools": [GREET], "tool_choice": "required", **MOST}
FORMAT = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA}}
CHATS = [{"n": 2, **MOST}, {"logprobs": True, "top_logprobs": 2, **MOST}, CALL,
         {"response_format": FORMAT, **MOST}]  # fmt: skip
PROMPTS = [{"n": 2, **MOST}, {"logprobs": 2, **MOST}, {"prompt": [[65, 66], [67]], **MOST}]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("shapes") / "thinker.gguf"
    tiny.write(path, tiny.Tiny(context=1024), {"tokenizer.chat_template": THINKING})
    with serving(path.parent, str(path)) as running:
        yield running


def check(kind: Any, *values: Any) -> None:
    adapter = adapted(kind)
    for value in values:
        adapter.validate_json(json.dumps(value), strict=True)


@cache
def adapted(kind: Any) -> Any:
    return pydantic.TypeAdapter(kind)


def named(rig: Rig, path: str, body: dict[str, Any]) -> list[Any]:
    """Events of a stream whose events have names."""
    text = rig.http.post(path, json={**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("body", CHATS, ids=["n", "logprobs", "tools", "format"])
@pytest.mark.parametrize("think", [True, False])
def test_chats(rig: Rig, body: dict[str, Any], think: bool) -> None:
    types = pytest.importorskip("openai.types.chat")
    kwargs = {"chat_template_kwargs": {"enable_thinking": think}}
    body = {"messages": turns("Hello"), "model": "thinker", **kwargs, **body}
    check(types.ChatCompletion, rig.post("/v1/chat/completions", **body))
    usage = {"stream_options": {"include_usage": True}}
    for more in ({}, usage):
        events = rig.events("/v1/chat/completions", **body, **more)
        check(types.ChatCompletionChunk, *events[:-1])


@pytest.mark.parametrize("body", PROMPTS, ids=["n", "logprobs", "ids"])
def test_prompts(rig: Rig, body: dict[str, Any]) -> None:
    types = pytest.importorskip("openai.types")
    body = {"model": "thinker", "prompt": "Hello", **body}
    check(types.Completion, rig.post("/v1/completions", **body))


def test_models_and_vectors(rig: Rig) -> None:
    types = pytest.importorskip("openai.types")
    check(types.Model, *rig.http.get("/v1/models").json()["data"])
    vectors = rig.post("/v1/embeddings", model="thinker", input=["Hello", "there"])
    check(types.CreateEmbeddingResponse, vectors)


@pytest.mark.parametrize("calls", [True, False])
def test_responses(rig: Rig, calls: bool) -> None:
    types = pytest.importorskip("openai.types.responses")
    tool = {"type": "function", **GREET["function"]}
    tools = {"tools": [tool], "tool_choice": "required"} if calls else {}
    body = {"model": "thinker", "input": "Hello", "max_output_tokens": 120, **tools}
    check(types.Response, rig.post("/v1/responses", **body))
    events = named(rig, "/v1/responses", body)
    check(types.ResponseStreamEvent, *events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("think", ["enabled", "disabled"])
def test_messages(rig: Rig, calls: bool, think: str) -> None:
    types = pytest.importorskip("anthropic.types")
    tool = {"name": "greet", "input_schema": SCHEMA}
    tools = {"tools": [tool], "tool_choice": {"type": "any"}} if calls else {}
    thinking = {"type": think, "budget_tokens": 1024}
    body = {"model": "thinker", "messages": turns("Hello"), "thinking": thinking, **tools, **MOST}
    check(types.Message, rig.post("/v1/messages", **body))
    events = named(rig, "/v1/messages", body)
    check(types.RawMessageStreamEvent, *(one for one in events if one["type"] != "ping"))
    blocks = [one["content_block"]["type"] for one in events if "content_block" in one]
    assert blocks[0] == "thinking" or not (calls and think == "enabled")


def test_a_stream_is_cut_into_lines_where_every_client_cuts_it(rig: Rig) -> None:
    """Some take more characters for the end of a line than the standard does."""
    said = "a\u2028b\u0085c\u2029d"
    asked: dict[str, Any] = {"prompt": "x", "structured_outputs": {"choice": [said]}}
    events = rig.events("/v1/completions", **asked, max_tokens=50)  # as httpx cuts lines
    assert "".join(one["choices"][0]["text"] for one in events[:-1]) == said
    chat = {"model": "thinker", "messages": turns("x"), "format": {"enum": [said]}}
    with rig.http.stream("POST", "/api/chat", json=chat) as lines:
        told = [json.loads(line)["message"]["content"] for line in lines.iter_lines()]
    assert json.loads("".join(told)) == said
