"""Anthropic's dialect, with Anthropic's own client and by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.rig import Rig, turns

anthropic = pytest.importorskip("anthropic")
GREEDY: dict[str, Any] = {
    "model": "tiny-dense", "max_tokens": 12, "extra_body": {"temperature": 0}
}  # fmt: skip
ASK = turns("Tell me about the sea")


@pytest.fixture
def client(rig: Rig) -> Any:
    return anthropic.Anthropic(base_url=rig.url, api_key="none", max_retries=0)


def plain(rig: Rig, **more: Any) -> str:
    text: str = rig.chat("Tell me about the sea", **more)["choices"][0]["message"]["content"]
    return text


def test_an_answer_is_the_same_as_in_openais_form(rig: Rig, client: Any) -> None:
    made = client.messages.create(messages=ASK, **GREEDY)
    assert made.content[0].text == plain(rig)
    assert made.role == "assistant" and made.model == "tiny-dense"
    assert made.stop_reason in ("end_turn", "max_tokens")
    read = made.usage.input_tokens + made.usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model="tiny-dense", messages=ASK)
    assert read == counted.input_tokens
    assert 0 < made.usage.output_tokens <= 12


def test_a_stream_is_made_of_the_same_pieces(rig: Rig, client: Any) -> None:
    with client.messages.stream(messages=ASK, **GREEDY) as stream:
        kinds = [one.type for one in stream]
        whole = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert whole.content[0].text == plain(rig)
    assert whole.usage.output_tokens > 0


def test_system_and_blocks_are_read(rig: Rig, client: Any) -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": "Tell me about the sea"}]}]
    made = client.messages.create(messages=blocks, system="Be short", **GREEDY)
    system = {"role": "system", "content": "Be short"}
    other = rig.post("/v1/chat/completions", messages=[system, *ASK], max_tokens=12, temperature=0)
    assert made.content[0].text == other["choices"][0]["message"]["content"]


def test_a_stop_sequence_is_named(rig: Rig, client: Any) -> None:
    text = plain(rig, max_tokens=12)
    stop = text[3:6]
    made = client.messages.create(messages=ASK, stop_sequences=["\x00never", stop], **GREEDY)
    assert made.stop_reason == "stop_sequence" and made.stop_sequence == stop
    assert stop not in made.content[0].text


def test_errors_are_in_its_own_form(rig: Rig, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=ASK, **{**GREEDY, "model": "no-such-model"})
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        client.messages.create(messages=image, **GREEDY)
    bodies: list[dict[str, Any]] = [{"messages": ASK}, {"max_tokens": 3, "messages": 3}]
    for choice in ({"type": {}}, {"type": "never"}, {"type": "tool"}, 3):
        bodies.append({"max_tokens": 3, "messages": ASK, "tool_choice": choice})
    bodies.append({"max_tokens": 3, "messages": ASK, "output_config": {"format": 1}})
    for body in bodies:
        told = rig.http.post("/v1/messages", json=body)
        assert told.status_code == 400
        assert told.json()["type"] == "error" and told.json()["error"]["message"]


def test_what_it_has_no_route_for_is_told_in_its_form(rig: Rig, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.batches.list()
    assert unknown.value.body["type"] == "error" and unknown.value.type == "not_found_error"
    assert unknown.value.request_id == unknown.value.response.headers["x-request-id"]


def test_answers_fit_their_schema(rig: Rig, client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        tall: bool

    more = {**GREEDY, "max_tokens": 40}
    assert client.messages.parse(messages=ASK, output_format=Person, **more).parsed_output
    form = {"type": "json_schema", "schema": Person.model_json_schema()}
    for place in ({"output_format": form}, {"output_config": {"format": form}}):
        body = {"model": "tiny-dense", "messages": ASK, "max_tokens": 40, **place}
        Person.model_validate_json(rig.post("/v1/messages", **body)["content"][0]["text"])


def test_a_session_can_be_named(rig: Rig, client: Any) -> None:
    rig.post("/v1/sessions", id="mine")
    named = {**GREEDY, "extra_body": {"temperature": 0, "session_id": "mine"}}
    made = client.messages.create(messages=ASK, **named)
    assert made.content[0].text == plain(rig)
    assert rig.http.get("/v1/sessions/mine").json()["position"] > 0
    rig.http.delete("/v1/sessions/mine")


def test_the_wire_has_names_for_events(rig: Rig) -> None:
    body = {"messages": ASK, "model": "tiny-dense", "max_tokens": 8, "stream": True}
    with rig.http.stream("POST", "/v1/messages", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    names = [line[7:] for line in lines if line.startswith("event: ")]
    types = [json.loads(line[6:])["type"] for line in lines if line.startswith("data: ")]
    assert names == types


def test_models_are_told_in_its_form_too(client: Any) -> None:
    (model,) = listed = list(client.models.list())
    assert client.models.retrieve("tiny-dense") == model
    assert (model.type, model.id, model.display_name) == ("model", "tiny-dense", "tiny-dense")
    assert model.created_at.tzinfo is not None and len(listed) == 1
    assert client.models.list().has_more is False


def test_tools_that_only_its_own_servers_have_are_refused(client: Any) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        client.messages.create(messages=ASK, tools=[search], **GREEDY)
