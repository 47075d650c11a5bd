"""Tools and reasoning over HTTP; how they are read is tested with the reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.server.rig import Rig, serving, turns

TEMPLATE = """{%- if tools %}{{ tools | tojson }}<tool_call>{"arguments": {}}</tool_call>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.mood }}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
THINKING = TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}"
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "times": {"enum": [1, 2]}},
    "required": ["mood", "times"],
}
GREET = {"type": "function", "function": {"name": "greet", "parameters": SCHEMA}}
PART = {"type": "function", "function": {"name": "part", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "part"}}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("tools")
    paths = []
    for name, template in (("caller", TEMPLATE), ("thinker", THINKING)):
        paths.append(str(folder / f"{name}.gguf"))
        tiny.write(Path(paths[-1]), tiny.Tiny(context=2048), {"tokenizer.chat_template": template})
    with serving(folder, *paths) as running:
        yield running


def checked(call: dict[str, object], name: str) -> None:
    function = call["function"]
    assert isinstance(function, dict) and call["type"] == "function" and call["id"]
    assert function["name"] == name
    assert json.loads(function["arguments"])["mood"] in ("good", "bad")


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_a_named_call_is_made_whatever_its_name(rig: Rig, name: str) -> None:
    function = {"name": name, "parameters": SCHEMA}
    tools = [GREET, {"type": "function", "function": function}]
    choice = {"type": "function", "function": {"name": name}}
    answer = rig.chat("hi", tools=tools, tool_choice=choice, max_tokens=200)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    checked(call, name)
    answer = rig.post(
        "/v1/messages", messages=turns("hi"), max_tokens=200, temperature=0,
        tools=[{"name": one, "input_schema": SCHEMA} for one in ("greet", name)],
        tool_choice={"type": "tool", "name": name},
    )  # fmt: skip
    assert [one.get("name") for one in answer["content"]] == [name]
    answer = rig.post(
        "/v1/responses", input="hi", max_output_tokens=200, temperature=0,
        tools=[{"type": "function", **one} for one in (GREET["function"], function)],
        tool_choice={"type": "function", "name": name},
    )  # fmt: skip
    assert [one.get("name") for one in answer["output"]] == [name]


def test_named_call_is_made(rig: Rig) -> None:
    body = {"tools": [GREET, PART], "tool_choice": NAMED, "max_tokens": 200}
    (choice,) = rig.chat("hi", **body)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    checked(call, "part")
    events = rig.events(CHAT, messages=turns("hi"), temperature=0, **body)
    deltas = [e["choices"][0]["delta"] for e in events[:-1]]
    (streamed,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert streamed["index"] == 0 and streamed["function"] == call["function"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_arguments_may_have_a_format_that_nobody_knows(rig: Rig) -> None:
    place = {"type": "string", "format": "path", "maxLength": 3}
    schema = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    answer = rig.chat("hi", model="caller", tools=[tool], tool_choice="required", max_tokens=200)
    (call, *_) = answer["choices"][0]["message"]["tool_calls"]
    assert len(json.loads(call["function"]["arguments"])["place"]) <= 3


def test_required_call_is_one_of_them(rig: Rig) -> None:
    body = {"tools": [GREET, PART], "tool_choice": "required", "max_tokens": 300}
    more = {"ignore_eos": True, "logit_bias": {"10": 100}}  # what comes between two calls
    (choice,) = rig.chat("hi", parallel_tool_calls=False, **more, **body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    checked(call, call["function"]["name"])
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (choice,) = rig.chat("hi", **more, **body)["choices"]
    assert choice["finish_reason"] == "length" and len(choice["message"]["tool_calls"]) > 1


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_tools_that_are_allowed_are_shown_or_called(rig: Rig, mode: str) -> None:
    name = {"type": "function", "function": {"name": "part"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [name]}}
    asked = {"max_tokens": 200, "parallel_tool_calls": False}
    some = rig.chat("hi", tools=[GREET, PART], tool_choice=choice, **asked)
    alone = rig.chat("hi", tools=[PART], tool_choice=mode, **asked)
    assert some["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    if mode == "required":
        (call,) = some["choices"][0]["message"]["tool_calls"]
        checked(call, "part")
    flat = {"type": "function", "name": "part"}
    newer = {
        "input": "hi", "temperature": 0, "max_output_tokens": 200, "parallel_tool_calls": False,
        "tools": [{"type": "function", **tool["function"]} for tool in (GREET, PART)],
        "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": [flat]},
    }  # fmt: skip
    response = rig.post("/v1/responses", **newer)
    assert response["usage"]["input_tokens"] == alone["usage"]["prompt_tokens"]


@pytest.mark.parametrize("allowed", [
    {}, {"mode": "auto"}, {"mode": "auto", "tools": []}, {"mode": "auto", "tools": "part"}, 3,
    {"mode": "none", "tools": [NAMED]}, {"tools": [{"type": "function"}]}, {"tools": [[], None]},
    {"mode": "auto", "tools": [NAMED, {"type": "function", "function": {"name": "other"}}]},
])  # fmt: skip
def test_allowed_tools_are_some_of_the_tools(rig: Rig, allowed: object) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    error = rig.refused(400, CHAT, messages=turns("hi"), tools=[GREET, PART], tool_choice=choice)
    assert error["param"] == "tool_choice"


def test_no_call_without_tools(rig: Rig) -> None:
    plain = rig.chat("hi", max_tokens=5)
    none = rig.chat("hi", tools=[GREET], tool_choice="none", max_tokens=5)
    assert none["choices"] == plain["choices"]
    assert "tool_calls" not in none["choices"][0]["message"]
    error = rig.refused(400, CHAT, messages=turns("hi"), tool_choice="required")
    assert "tools" in error["message"]
    rig.refused(400, CHAT, messages=turns("hi"), tools=[GREET], tool_choice={"type": "x"})
    rig.refused(400, CHAT, messages=turns("hi"), tools=[{"type": "function"}])


def test_answers_of_tools_reach_the_template(rig: Rig) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "greet", "arguments": '{"mood": "good"}'},
    }
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    prompt = rig.post("/apply-template", messages=messages, tools=[GREET])["prompt"]
    assert "assistant\ngood<|im_end|>" in prompt and "tool\ndone" in prompt


@pytest.mark.parametrize(("field", "value"), [
    ("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"}),
])  # fmt: skip
def test_a_form_is_that_of_answers_and_not_of_calls(
    rig: Rig, field: str, value: dict[str, str]
) -> None:
    """Agents name the form of their last answer while they have a tool called first."""
    body = {"tools": [PART], "tool_choice": "required", "max_tokens": 200, field: value}
    checked(rig.chat("hi", **body)["choices"][0]["message"]["tool_calls"][0], "part")
    flat = {"type": "function", **PART["function"]}  # type: ignore[dict-item]
    text = {"format": {"type": "json_object"}}
    made = rig.post("/v1/responses", input="hi", tools=[flat], tool_choice="required", text=text)
    assert made["output"][0]["type"] == "function_call"


@pytest.mark.parametrize("odd", [{}, {"uniqueItems": True, "not": {}, "$ref": "#/nowhere"}])
def test_tools_may_be_called_instead_of_an_answer_of_a_form(
    rig: Rig, odd: dict[str, object]
) -> None:
    """Whatever their schemas say: nobody asked that calls be held to them."""
    part = {"type": "function", "function": {"name": "part", "parameters": {
        "properties": {"number": {"type": "integer", **odd}}, **odd}}}  # fmt: skip
    said = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA}}
    body = {"tools": [part], "max_tokens": 200, "response_format": said}
    call, answer = (
        rig.chat("hi", **body, logit_bias={str(rig.llm.encode(one, False)[0]): 100 for one in to})[
            "choices"
        ][0]
        for to in ("<}", "{")
    )
    assert call["finish_reason"] == "tool_calls" and answer["finish_reason"] == "stop"
    (made,) = call["message"]["tool_calls"]
    assert made["function"]["name"] == "part"
    assert isinstance(json.loads(made["function"]["arguments"]), dict)
    assert json.loads(answer["message"]["content"])["mood"] in ("good", "bad")
    assert "tool_calls" not in answer["message"]


def test_schemas_that_are_none_are_refused(rig: Rig) -> None:
    for odd in ({"properties": [1]}, {"properties": {"a": 3}}, {"required": 5}):
        tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
        for more in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
            error = rig.refused(400, CHAT, messages=turns("hi"), tools=[tool], **more)
            assert "odd" in error["message"]


def test_ollamas_clients_are_told_what_a_model_can_do(rig: Rig) -> None:
    """Some ask a model for nothing else."""
    plain = ["completion", "embedding"]
    wanted = {"caller": [*plain, "tools"], "thinker": [*plain, "tools", "thinking"]}
    for model, can in wanted.items():
        assert rig.post("/api/show", model=model)["capabilities"] == can


def test_reasoning_comes_apart(rig: Rig) -> None:
    """What a model says before its reasoning ends is reasoning."""
    body = {
        "model": "thinker", "max_tokens": 5, "chat_template_kwargs": {"enable_thinking": True},
        "ignore_eos": True, "logit_bias": {"100": 100},
    }  # fmt: skip
    message = rig.chat("hi", **body)["choices"][0]["message"]
    assert len(message["reasoning_content"]) == 5 and message["content"] == ""
    events = rig.events(CHAT, messages=turns("hi"), temperature=0, **body)
    deltas = [e["choices"][0]["delta"] for e in events[:-1]]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == message["reasoning_content"]


def test_how_much_to_think_is_told_to_the_template(rig: Rig) -> None:
    body = {"model": "thinker", "temperature": 0}
    plain = rig.chat("hi", **body, max_tokens=1)["usage"]["prompt_tokens"]
    for effort, more in (("none", 0), ("high", len("<think>\n"))):
        asked = {**body, "reasoning_effort": effort, "max_tokens": 1}
        assert rig.chat("hi", **asked)["usage"]["prompt_tokens"] == plain + more
        newer = {**body, "input": "hi", "reasoning": {"effort": effort}, "max_output_tokens": 1}
        made = rig.post("/v1/responses", **newer)
        assert made["usage"]["input_tokens"] == plain + more
        assert made["reasoning"]["effort"] == effort
    own = rig.chat("hi", **asked, chat_template_kwargs={"enable_thinking": False})
    assert own["usage"]["prompt_tokens"] == plain  # what is said of the template itself goes first
    error = rig.refused(400, "/v1/responses", input="hi", reasoning="much")
    assert error["param"] == "reasoning"


def test_a_form_is_that_of_the_answer_and_not_of_the_reasoning(rig: Rig) -> None:
    """Where the template begins the reasoning, a constraint waits until it ends."""
    body = {
        "model": "thinker", "max_tokens": 5, "logit_bias": {"100": 100},
        "structured_outputs": {"regex": "yes|no"},
    }  # fmt: skip
    thinks = rig.chat("hi", **body, chat_template_kwargs={"enable_thinking": True})
    message = thinks["choices"][0]["message"]
    assert message["reasoning_content"] == 5 * "d" and message["content"] == ""
    assert thinks["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    at_once = rig.chat("hi", **body)
    assert at_once["choices"][0]["message"]["content"] in ("yes", "no")
    assert at_once["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    begun = rig.post(CHAT, messages=turns("hi", "<think>\n"), **body)  # a message to go on with
    assert begun["choices"][0]["message"]["reasoning_content"] == 5 * "d"
