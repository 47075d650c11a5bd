"""Clients as people use them, against a real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.rig import Rig, turns

STORY = "It was a dark night, and the old man"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def wanted(rig: Rig) -> str:
    return str(rig.llm.chat(turns("Hello there"), max_tokens=8, temperature=0).text)


def test_openai(rig: Rig, wanted: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny-dense"]
    assert client.models.retrieve("tiny-dense").id == "tiny-dense"
    chat = client.chat.completions
    made = chat.create(model="tiny-dense", messages=turns("Hello there"), **GREEDY)
    assert made.choices[0].message.content == wanted
    assert made.usage.prompt_tokens_details.cached_tokens >= 0
    stream = chat.create(
        model="tiny-dense", messages=turns("Hello there"), stream=True,
        stream_options={"include_usage": True}, **GREEDY,
    )  # fmt: skip
    parts = list(stream)
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text == wanted and parts[-1].usage.completion_tokens > 0
    old = client.completions.create(model="tiny-dense", prompt=STORY, logprobs=2, **GREEDY)
    assert len(old.choices[0].logprobs.tokens) == old.usage.completion_tokens
    session = {"session_id": "from-openai"}
    client.post("/sessions", body={"id": "from-openai"}, cast_to=object)
    kept = chat.create(
        model="tiny-dense", messages=turns("Hello there"), extra_body=session, **GREEDY
    )
    assert kept.choices[0].message.content == wanted
    client.delete("/sessions/from-openai", cast_to=object)


def test_openai_errors(rig: Rig) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=turns("a"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny-dense", prompt="word " * 4000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny-dense", messages=[], **GREEDY)


def test_openai_parses(rig: Rig) -> None:
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        name: str = pydantic.Field(max_length=6)
        tall: bool

    client = openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
    made = client.chat.completions.parse(
        model="tiny-dense", messages=turns("Who?"), response_format=Person, temperature=0,
        max_tokens=100,
    )  # fmt: skip
    assert isinstance(made.choices[0].message.parsed, Person)


def test_openai_async_and_leaving(rig: Rig) -> None:
    openai = pytest.importorskip("openai")

    async def main() -> None:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model="tiny-dense", messages=turns("Hello"), stream=True, max_tokens=1500,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for _ in stream:
            break
        await stream.close()
        await client.close()

    asyncio.run(main())
    rig.idle(within=2)


@pytest.mark.slow  # only because it takes long to import
def test_litellm(rig: Rig, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "true")  # or it asks the network for prices
    litellm = pytest.importorskip("litellm")
    where = {"api_base": f"{rig.url}/v1", "api_key": "none"}
    made = litellm.completion("openai/tiny-dense", turns("Hello there"), **where, **GREEDY)
    assert made.choices[0].message.content == wanted
    parts = litellm.completion(
        "openai/tiny-dense", turns("Hello there"), stream=True, **where, **GREEDY
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == wanted


def test_langchain(rig: Rig, wanted: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        model="tiny-dense", base_url=f"{rig.url}/v1", api_key="none", temperature=0, max_tokens=8
    )
    made = chat.invoke("Hello there")
    assert made.content == wanted and made.usage_metadata["output_tokens"] > 0
    assert "".join(str(part.content) for part in chat.stream("Hello there")) == wanted
    schema = {
        "title": "Answer", "type": "object", "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"], "additionalProperties": False,
    }  # fmt: skip
    longer = langchain.ChatOpenAI(
        model="tiny-dense", base_url=f"{rig.url}/v1", api_key="none", temperature=0, max_tokens=60
    )
    strict = longer.with_structured_output(schema, method="json_schema")
    assert set(strict.invoke("Is it?")) == {"yes"}


def test_plain_http(rig: Rig) -> None:
    """What `curl -N` sees: lines of data, each of them JSON, and the end."""
    body = {"prompt": STORY, "max_tokens": 4, "stream": True}
    text = rig.http.post("/v1/completions", json=body).text
    blocks = text.split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]"
    assert all(json.loads(block.removeprefix("data: ")) for block in blocks[:-2])
