"""Tools in Anthropic's, Ollama's and OpenAI's newer form, with their own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.anthropic_blocks import Blocks, add_to
from quire.text.answers import Answer
from quire.types import ToolCall
from tests import tiny
from tests.server.rig import Rig, serving, turns
from tests.server.test_tools import GREET, SCHEMA, TEMPLATE

ASK = turns("hi")
MOODS = ("good", "bad")


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A model whose template has a place for tools."""
    folder = tmp_path_factory.mktemp("tools")
    path = folder / "caller.gguf"
    tiny.write(Path(path), tiny.Tiny(context=2048), {"tokenizer.chat_template": TEMPLATE})
    with serving(folder, str(path)) as running:
        yield running


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic(caller: Rig, streams: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": "caller", "max_tokens": 200, "messages": ASK,
        "tools": [{"name": "greet", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "greet"},
    }  # fmt: skip
    if streams:
        with client.messages.stream(**asked) as stream:
            made = stream.get_final_message()
    else:
        made = client.messages.create(**asked)
    (call,) = [block for block in made.content if block.type == "tool_use"]
    assert call.name == "greet" and call.input["mood"] in MOODS
    assert made.stop_reason == "tool_use" and made.stop_sequence is None
    use = {"type": "tool_use", "id": call.id, "name": "greet", "input": call.input}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    talk = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**asked, "messages": talk}).usage.output_tokens > 0


def test_blocks_of_anthropic_are_in_the_order_in_which_they_came() -> None:
    """A second call that is cut off is text, behind the first, streamed or not."""
    call = ToolCall("1", "greet", '{"mood": "good"}')
    came = [
        Answer(reasoning="I "), Answer(reasoning="see", text="Oh"), Answer(text=", well"),
        Answer(tool_calls=(call,)), Answer(text="<tool_call>"), Answer(text="{"),
    ]  # fmt: skip
    content: list[dict[str, Any]] = []
    blocks, events = Blocks(), b""
    for part in came:
        add_to(content, part)
        events += b"".join(blocks.add(part))
    assert content == [
        {"type": "thinking", "thinking": "I see", "signature": ""},
        {"type": "text", "text": "Oh, well"},
        {"type": "tool_use", "id": "1", "name": "greet", "input": {"mood": "good"}},
        {"type": "text", "text": "<tool_call>{"},
    ]
    lines = [line[6:] for line in events.decode().splitlines() if line.startswith("data: ")]
    begun = [e["content_block"] for e in map(json.loads, lines) if "content_block" in e]
    assert [one["type"] for one in begun] == [one["type"] for one in content]
    deltas = [e["delta"] for e in map(json.loads, lines) if e["type"] == "content_block_delta"]
    signed = [one for one in deltas if one["type"] == "signature_delta"]
    assert signed == [{"type": "signature_delta", "signature": ""}]  # of the thoughts, at their end
    assert deltas[2] == signed[0] and deltas[1]["type"] == "thinking_delta"


def test_anthropic_calls_nothing_without_tools(caller: Rig) -> None:
    asked = {"model": "caller", "messages": ASK, "max_tokens": 5}
    answer = caller.http.post("/v1/messages", json={**asked, "tool_choice": {"type": "any"}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"
    assert caller.post("/v1/messages", **asked, tool_choice={"type": "auto"})["content"]


@pytest.mark.parametrize("streams", [False, True])
def test_responses(caller: Rig, streams: bool) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": "caller", "max_output_tokens": 200, "input": ASK, "tool_choice": "required",
        "tools": [{"type": "function", "name": "greet", "parameters": SCHEMA}],
    }  # fmt: skip
    if streams:
        with client.responses.stream(**asked) as stream:
            made = stream.get_final_response()
    else:
        made = client.responses.create(**asked)
    (call,) = [item for item in made.output if item.type == "function_call"]
    assert call.name == "greet" and json.loads(call.arguments)["mood"] in MOODS
    back = {"type": "function_call", "call_id": call.call_id, "name": "greet"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    talk = [*ASK, {**back, "arguments": call.arguments}, output]
    assert client.responses.create(**{**asked, "input": talk}).usage.input_tokens > 0


def test_ollama(caller: Rig) -> None:
    """There a model cannot be made to call a tool; calls of before have objects as arguments."""
    ollama = pytest.importorskip("ollama")
    call = {"function": {"name": "greet", "arguments": {"mood": "good", "times": 1}}}
    talk = [
        *ASK, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_name": "greet"},
    ]  # fmt: skip
    client = ollama.Client(host=caller.url)
    made = client.chat(model="caller", messages=talk, tools=[GREET], options={"num_predict": 8})
    assert made.done
