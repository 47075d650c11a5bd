"""Chat with tools: the template shows them, and calls come out, held to their schema if asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.api.arguments import messages_of
from quire.errors import RequestError
from quire.text.styles import style_of
from quire.types import Behind, Completion, Timings
from tests import tiny

TEMPLATE = """{%- if tools %}{{ tools | tojson }}<tool_call>{"arguments": {}}</tool_call>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.mood }}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
THINKING = TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}"
SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "times": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["mood", "times"],
}
TOOLS = [{"type": "function", "function": {"name": "greet", "parameters": SCHEMA}}]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[quire.LLM]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(path, tiny.Tiny(context=1024), {"tokenizer.chat_template": TEMPLATE})
    with quire.load(path) as loaded:
        yield loaded


@pytest.mark.parametrize("choice", ["required", "greet"])
def test_a_call_must_be_made(llm: quire.LLM, choice: str) -> None:
    done = llm.chat(HI, tools=TOOLS, tool_choice=choice, max_tokens=200)
    again = asyncio.run(llm.achat(HI, tools=TOOLS, tool_choice=choice, max_tokens=200))
    assert done.tool_calls and (choice == "required" or done.finish_reason == "stop")
    assert again.tool_calls == done.tool_calls
    for call in done.tool_calls:
        assert call.name == "greet"
        arguments = json.loads(call.arguments)
        assert arguments["mood"] in ("good", "bad") and 1 <= arguments["times"] <= 9


def test_a_constraint_is_for_answers(llm: quire.LLM) -> None:
    forced = llm.chat(
        HI, tools=TOOLS, tool_choice="required", constraint=quire.Regex("a"), max_tokens=200
    )
    assert forced.tool_calls
    may = llm.chat_prompt(HI, TOOLS).only(quire.Regex("a"))
    assert isinstance(may, Behind) and may.instead is not None
    assert "greet" in may.instead.text and "mood" not in may.instead.text  # any arguments
    assert llm.chat_prompt(HI, TOOLS, "none").only(quire.Regex("a")) == quire.Regex("a")
    assert not style_of("<|python_tag|>").marks_calls  # both begin with a brace


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_a_tool_may_be_called_like_a_choice(llm: quire.LLM, name: str) -> None:
    tools = [{"type": "function", "function": {"name": one}} for one in (name, "other")]
    named = {"type": "function", "function": {"name": name}}
    done = llm.chat(HI, tools=tools, tool_choice=named, max_tokens=200)
    assert [call.name for call in done.tool_calls] == [name]
    assert "other" in llm.chat_prompt(HI, tools, named).text


def test_tools_reach_the_template(llm: quire.LLM) -> None:
    plain, shown = llm.chat_prompt(HI), llm.chat_prompt(HI, TOOLS)
    assert "greet" in shown.text and "greet" not in plain.text
    assert llm.chat_prompt(HI, TOOLS, "none").text == plain.text
    assert llm.chat(HI, tools=TOOLS, max_tokens=3).prompt_tokens == len(shown.tokens)


def test_reasoning_comes_apart(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny.write(path, tiny.Tiny(), {"tokenizer.chat_template": THINKING})
    llm = quire.load(path)
    prompt = llm.chat_prompt(HI, template_options={"enable_thinking": True})
    assert prompt.text.endswith("<think>\n")
    written = 'hm</think>Hi <tool_call>{"name": "greet"}</tool_call>'
    raw = Completion(written, [1], None, "stop", 1, 0, Timings(0, 0, 0, 1, 1))
    done = prompt.answered(raw)
    assert (done.reasoning, done.text) == ("hm", 'Hi <tool_call>{"name": "greet"}</tool_call>')


def test_an_answer_goes_back_as_a_message(llm: quire.LLM) -> None:
    prompt = llm.chat_prompt(HI, TOOLS)
    written = '<tool_call>{"name": "greet", "arguments": {"mood": "good"}}</tool_call>'
    raw = Completion(written, [1], None, "stop", 1, 0, Timings(0, 0, 0, 1, 1))
    message = prompt.answered(raw).message
    assert message["content"] == "" and message["tool_calls"][0]["function"]["name"] == "greet"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"mood": "good"}
    # Templates take the arguments as an object.
    assert "assistant\ngood<|im_end|>" in llm.chat_text([*HI, message])


@pytest.mark.parametrize(("given", "shown"), [
    ('{"mood": "good"}', {"mood": "good"}), ("{}", {}), ("", {}), ("no JSON", "no JSON"),
])  # fmt: skip
def test_arguments_are_objects_for_templates(given: str, shown: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "greet", "arguments": given}}
    (message,) = messages_of([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == shown


def test_content_in_parts_is_text_for_templates(llm: quire.LLM) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    asked = llm.chat_text([{"role": "user", "content": parts}])
    assert asked == llm.chat_text([{"role": "user", "content": "Hello"}])
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(
        RequestError, match=r"messages\[0\] has a part of type 'image_url'; .* text"
    ):
        llm.chat([{"role": "user", "content": [*parts, picture]}])


def test_what_cannot_be_is_refused(llm: quire.LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the tools are: greet"):
        llm.chat(HI, tools=TOOLS, tool_choice="meet")
    with pytest.raises(RequestError, match="no tools"):
        llm.chat(HI, tool_choice="required")
    with pytest.raises(RequestError, match="tool_choice is"):
        llm.chat(HI, tools=TOOLS, tool_choice={"name": "greet"})
    path = tmp_path / "plain.gguf"
    tiny.write(path, tiny.Tiny())
    with quire.load(path) as plain:
        assert plain.chat(HI, tools=[], max_tokens=2).tool_calls == ()
        with pytest.raises(RequestError, match="no place for tools"):
            plain.chat(HI, tools=TOOLS)
