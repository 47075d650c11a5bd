"""OpenAI's embeddings and responses, with its own client; llama.cpp's paths by hand."""

from __future__ import annotations

import asyncio
import json
from itertools import dropwhile, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.server.progress import Watched
from tests.server.rig import Rig, turns

openai = pytest.importorskip("openai")
ASK = "Tell me about the sea"
GREEDY: dict[str, Any] = {"model": "tiny-dense", "max_output_tokens": 12, "temperature": 0}


@pytest.fixture
def client(rig: Rig) -> Any:
    return openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)


def said(rig: Rig) -> str:
    text: str = rig.chat(ASK)["choices"][0]["message"]["content"]
    return text


# -- embeddings -----------------------------------------------------------------------------------


def test_vectors_are_those_of_the_model(rig: Rig, client: Any) -> None:
    texts = ["the sea", "a stone"]
    made = client.embeddings.create(model="tiny-dense", input=texts)  # the client asks for base64
    assert np.allclose([one.embedding for one in made.data], rig.llm.embed(texts), atol=1e-6)
    plain = client.embeddings.create(model="tiny-dense", input=texts, encoding_format="float")
    assert np.allclose(plain.data[0].embedding, made.data[0].embedding, atol=1e-6)
    assert made.usage.prompt_tokens == sum(len(rig.llm.encode(text)) for text in texts)
    ids = rig.llm.encode("the sea")
    same = rig.post("/embeddings", model="anything", input=ids)["data"][0]["embedding"]
    assert np.allclose(same, made.data[0].embedding, atol=1e-6)
    short = rig.post("/v1/embeddings", input=texts, dimensions=8)["data"][0]["embedding"]
    assert len(short) == 8 and np.linalg.norm(short) == pytest.approx(1, abs=1e-5)


def test_what_has_no_vector_is_refused(rig: Rig) -> None:
    width = rig.llm.embed("x").shape[1]
    for body in (
        {"input": []}, {"input": ""}, {"input": [10**9]}, {"input": "x", "encoding_format": "hex"},
        {"input": "x", "dimensions": 0}, {"input": "x", "dimensions": width + 1},
        {"input": "word " * 100_000},
    ):  # fmt: skip
        rig.refused(400, "/v1/embeddings", **body)
    rig.refused(404, "/v1/embeddings", input="x", model="no-such-model")


# -- responses ------------------------------------------------------------------------------------


def test_a_response_is_the_same_as_a_chat(rig: Rig, client: Any) -> None:
    made = client.responses.create(input=ASK, **GREEDY)
    assert made.output_text == said(rig)
    assert made.status in ("completed", "incomplete") and made.usage.output_tokens > 0
    listed = client.responses.create(input=turns(ASK), **GREEDY)
    assert listed.output_text == made.output_text


def test_a_stream_of_events_comes_to_the_same(rig: Rig, client: Any) -> None:
    with client.responses.stream(input=ASK, **GREEDY) as stream:
        seen = list(stream)
    kinds = [one.type for one in seen]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [one.sequence_number for one in seen] == list(range(len(seen)))
    pieces = [one.delta for one in seen if one.type == "response.output_text.delta"]
    assert "".join(pieces) == said(rig) == seen[-1].response.output_text


def test_a_form_is_kept_to(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    made = client.responses.create(**{**GREEDY, "max_output_tokens": 40}, input=ASK, text=text)
    assert json.loads(made.output_text)["n"] in (1, 2)


def test_what_would_have_to_be_stored_is_refused(rig: Rig) -> None:
    told = rig.refused(400, "/v1/responses", input=ASK, previous_response_id="resp_1")
    assert told["param"] == "previous_response_id" and "session_id" in told["message"]
    rig.refused(400, "/v1/responses", input=[{"type": "computer_call"}])
    rig.refused(400, "/v1/responses", input=ASK, tools=[{"type": "web_search"}])


# -- llama.cpp ------------------------------------------------------------------------------------


def test_llamacpps_completion(rig: Rig) -> None:
    body = {"prompt": "Once upon", "n_predict": 10, "temperature": 0, "model": "whatever"}
    made = rig.post("/completion", **body, return_tokens=True)
    other = rig.post("/v1/completions", prompt="Once upon", max_tokens=10, temperature=0)
    text = other["choices"][0]["text"]
    assert made["content"] == text and made["stop"] is True
    assert made["stop_type"] == ("limit" if len(made["tokens"]) == 10 else "eos")
    assert made["tokens_evaluated"] == other["usage"]["prompt_tokens"]
    assert made["timings"]["predicted_n"] == made["tokens_predicted"] == len(made["tokens"])
    parts = rig.events("/completion", **body)
    assert "".join(part["content"] for part in parts) == text
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    stop = text[2:5]
    cut = rig.post("/completion", **body, stop=[stop])
    assert cut["stop_type"] == "word" and cut["stopping_word"] == stop
    several = rig.post("/completion", **{**body, "prompt": ["Once", "Twice"]})
    assert [one["index"] for one in several] == [0, 1]
    rig.refused(400, "/completion", prompt="x", grammar="root ::= a")


def test_llamacpps_prompts(rig: Rig) -> None:
    """Texts, ids, both in turn, and several of any kind."""
    ids = rig.llm.encode("Once upon")
    body = {"n_predict": 6, "temperature": 0}
    one = rig.post("/completion", prompt="Once upon", **body)["content"]
    several = [
        ids,
        "Once upon",
        {"prompt_string": "Once upon"},
        [*ids[:-1], rig.llm.decode(ids[-1:])],
    ]
    assert [r["content"] for r in rig.post("/completion", prompt=several, **body)] == [one] * 4
    made = rig.post("/completion", prompt=[*ids, " a time", *ids], n_predict=0)
    assert made["content"] == "" and made["tokens_predicted"] == 0 and made["stop_type"] == "limit"
    assert made["tokens_evaluated"] == 2 * len(ids) + len(rig.llm.encode(" a time", False))


def test_llamacpps_bias_names_tokens_or_texts(rig: Rig) -> None:
    body = {"prompt": "Once upon", "n_predict": 1, "temperature": 0, "return_tokens": True}
    (first,) = rig.post("/completion", **body)["tokens"]
    text = rig.llm.decode([first])
    forms = [[[first, False]], [[text, -100]], {text: -100}, {str(first): -100}]
    made = [rig.post("/completion", **body, logit_bias=form)["tokens"] for form in forms]
    assert made[0] != [first] and made == [made[0]] * 4


def test_llamacpps_probabilities_and_fields(rig: Rig) -> None:
    body = {"prompt": "Once upon", "n_predict": 3, "temperature": 0, "ignore_eos": True}
    wanted = rig.llm.generate("Once upon", max_tokens=3, temperature=0, logprobs=2, ignore_eos=True)
    told = rig.post("/completion", **body, n_probs=2)["completion_probabilities"]
    assert [one["id"] for one in told] == wanted.token_ids
    for one, mine in zip(told, wanted.logprobs, strict=True):
        assert one["logprob"] == pytest.approx(mine.logprob, abs=1e-5)
        assert [top["id"] for top in one["top_logprobs"]] == [token for token, _ in mine.top]
    streamed = rig.events("/completion", **body, n_probs=2)
    assert [p for e in streamed for p in e.get("completion_probabilities", [])] == told
    assert "completion_probabilities" not in rig.post("/completion", **body)
    text = "".join(one["token"] for one in told)
    body |= {"n_probs": 1, "stop": [text]}  # no token comes with a text
    told = rig.post("/completion", **body, return_tokens=True)
    streamed = rig.events("/completion", **body)
    assert [token for e in streamed for token in e["tokens"]] == told["tokens"]
    parts = [p for e in streamed for p in e.get("completion_probabilities", [])]
    assert parts == told["completion_probabilities"] and len(parts) == 3
    del body["stop"], body["n_probs"]
    fields = ["content", "timings/predicted_n", "nothing/here"]
    some = rig.post("/completion", **body, response_fields=fields)
    assert some == {"content": wanted.text, "timings/predicted_n": 3}


def test_llamacpp_tells_how_tokens_were_chosen(rig: Rig) -> None:
    ask = {"prompt": "It was", "n_predict": 3, "seed": 7, "logit_bias": [[65, -2.5]]}
    told = rig.post("/completion", **ask)["generation_settings"]
    assert told["n_predict"] == told["max_tokens"] == 3 and told["seed"] == 7
    assert told["logit_bias"] == [{"token": 65, "bias": -2.5}] and told["ignore_eos"] is False
    defaults = rig.http.get("/props").json()["default_generation_settings"]["params"]
    assert defaults.keys() == told.keys() and defaults["n_predict"] == -1
    assert (defaults["temperature"], defaults["top_k"]) == (told["temperature"], told["top_k"])
    told = rig.post("/completion", **ask | {"ignore_eos": True})["generation_settings"]
    ends = [one["token"] for one in told["logit_bias"] if one["bias"] is None]
    assert ends == sorted(rig.llm.engine.end_ids)


def test_llamacpp_tells_whether_the_context_was_full(rig: Rig) -> None:
    room = 20
    prompt = [300] * (rig.llm.n_ctx - room)
    ask = {"prompt": prompt, "ignore_eos": True, "response_fields": ["truncated", "stop_type"]}
    assert rig.post("/completion", **ask) == {"truncated": True, "stop_type": "limit"}
    for most in (0, 3):
        fits = rig.post("/completion", **ask, n_predict=most)
        assert fits == {"truncated": False, "stop_type": "limit"}


def test_llamacpps_props_and_slots(rig: Rig) -> None:
    props = rig.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == rig.llm.n_ctx
    assert props["model_path"] == "tiny-dense" and props["chat_template"]
    slots = rig.http.get("/slots").json()
    assert {slot["n_ctx"] for slot in slots} == {rig.llm.n_ctx}
    assert len(slots) == props["total_slots"] and not any(s["is_processing"] for s in slots)


# -- bad input ------------------------------------------------------------------------------------

TALK = {"messages": turns(ASK), "max_tokens": 4}
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {**TALK, "max_tokens": 0}),
    ("/v1/messages", {**TALK, "messages": []}),
    ("/v1/messages", {**TALK, "messages": [{"role": "user"}]}),
    ("/v1/messages", {**TALK, "messages": [{"role": "user", "content": [5]}]}),
    ("/v1/messages", {**TALK, "messages": [{"role": "god", "content": "x"}]}),
    ("/v1/messages", {**TALK, "messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": 5}]}]}),
    ("/v1/messages", {**TALK, "system": [{"type": "image"}]}),
    ("/v1/messages", {**TALK, "tool_choice": {"type": "sometimes"}}),
    ("/v1/messages", {**TALK, "temperature": 1e308}),
    ("/v1/messages/count_tokens", {"messages": 3}),
    ("/v1/responses", {"input": ASK, "text": {"format": 5}}),
    ("/v1/responses", {"input": ASK, "text": {"format": {"type": "json_schema"}}}),
    ("/v1/responses", {"input": ASK, "max_output_tokens": -1}),
    ("/v1/responses", {"input": [{"role": "user", "content": {"text": 5}}]}),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a", "name": "b",
                                  "arguments": 5}]}),
    ("/v1/responses", {"input": []}),
    ("/api/chat", {"messages": turns(ASK), "options": {"num_predict": "many"}}),
    ("/api/chat", {"messages": turns(ASK), "options": {"num_predict": 0}}),
    ("/api/chat", {"messages": turns(ASK), "options": {"stop": [5]}}),
    ("/api/chat", {"messages": turns(ASK), "format": "yaml"}),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}),
    ("/api/generate", {"prompt": "x", "suffix": "y"}),
    ("/api/embed", {}),
    ("/completion", {"prompt": []}),
    ("/completion", {"prompt": [[1], {"prompt_string": 5}]}),
    ("/completion", {"prompt": [1, [2]]}),
    ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["y"]}}),
    ("/completion", {"prompt": "x", "logit_bias": [5]}),
    ("/completion", {"prompt": "x", "logit_bias": [[10**9, 1.0]]}),
    ("/completion", {"prompt": [10**9]}),
    ("/completion", {"prompt": "x", "top_p": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), HOSTILE, ids=lambda one: str(one)[:60])
def test_bad_input_is_refused(rig: Rig, path: str, body: dict[str, Any]) -> None:
    answer = rig.http.post(path, json={"model": "tiny-dense", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]
    assert not rig.state.admission.running


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat", "/v1/responses", "/completion"])
def test_whoever_leaves_a_stream_gives_its_pages_back(rig: Rig, path: str) -> None:
    body = {
        "model": "tiny-dense", "messages": turns(ASK), "input": ASK, "prompt": ASK, "stream": True,
        "max_tokens": 400, "max_output_tokens": 400, "n_predict": 400,
        "options": {"num_predict": 400},
    }  # fmt: skip
    with rig.http.stream("POST", path, json=body) as answer:
        next(answer.iter_lines())
    assert rig.pages() == 0


def test_tokens_of_a_conversation_are_counted(rig: Rig) -> None:
    read = rig.chat(ASK)["usage"]["prompt_tokens"]
    for path in ("/v1/chat/completions", "/chat/completions"):
        told = rig.post(f"{path}/input_tokens", messages=turns(ASK))
        assert told == {"object": "chat.completion.input_tokens", "input_tokens": read}
    told = rig.post("/v1/responses/input_tokens", input=ASK)
    assert told == {"object": "response.input_tokens", "input_tokens": read}
    rig.refused(400, "/v1/chat/completions/input_tokens", messages=[])
    rig.refused(404, "/v1/responses/input_tokens", input=ASK, model="no-such-model")


def test_vectors_of_texts_and_ids_in_turn(rig: Rig) -> None:
    def vectors(given: Any) -> Any:
        return [one["embedding"] for one in rig.post("/v1/embeddings", input=given)["data"]]

    ids = rig.llm.encode("the sea")
    (wanted,) = vectors("the sea")
    parts = {"content": [{"type": "text", "text": "the "}, {"type": "text", "text": "sea"}]}
    for given in (ids, [*ids[:1], *ids[1:]], parts, {"prompt_string": "the sea"}):
        assert vectors(given) == [wanted]
    assert vectors(["the sea", ids, parts]) == [wanted] * 3
    assert vectors([*ids, " and on"]) == vectors([ids + rig.llm.encode(" and on", False)])
    for wrong in ({"content": "a"}, {"content": []}, {"content": [{"type": "image_url"}]}, [None]):
        rig.refused(400, "/v1/embeddings", input=wrong)


def written(told: dict[str, Any]) -> str:
    """The text of an event, in any of four forms."""
    if isinstance(told.get("delta"), str):
        return str(told["delta"])
    choice = (told.get("choices") or [{}])[0]
    delta = choice.get("delta", {})
    return told.get("content") or choice.get("text") or delta.get("content") or ""


@pytest.mark.parametrize(
    "path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses"]
)
def test_the_progress_of_a_prompt_and_the_speed_of_an_answer(rig: Rig, path: str) -> None:
    rig.llm.forget()
    asked: dict[str, Any] = {"prompt": ASK * 20, "max_tokens": 4, "temperature": 0}
    if "chat" in path:
        asked["messages"] = turns(asked.pop("prompt"))
    if "responses" in path:
        asked = {"input": ASK * 20, "max_output_tokens": 4, "temperature": 0}
    more = {"return_progress": True, "timings_per_token": True}
    events = [one for one in rig.events(path, **asked, **more) if one != "[DONE]"]
    events = list(dropwhile(lambda one: "prompt_progress" not in one, events))
    told = [one["prompt_progress"] for one in events if "prompt_progress" in one]
    total = told[0]["total"]
    assert told[0]["processed"] == told[0]["cache"] and told[-1]["processed"] == total
    assert events[0]["timings"]["prompt_n"] == events[0]["timings"]["prompt_ms"] == 0
    assert total == events[-1]["timings"]["prompt_n"] + events[-1]["timings"]["cache_n"]
    assert all(a["processed"] < b["processed"] for a, b in pairwise(told))
    behind = events[len(told) :]
    assert not any("prompt_progress" in one for one in behind)
    said = [one for one in behind if written(one)]
    assert said and all("timings" in one for one in said)
    plain = rig.events(path, **asked)
    assert not any("prompt_progress" in one for one in plain if one != "[DONE]")


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_each_of_several_answers_has_its_own_speed(rig: Rig, path: str) -> None:
    """There may be thousands, and each piece would tell of them all."""
    events = rig.events(path, prompt=["a", "b", "c"], max_tokens=6, n_predict=6, ignore_eos=True,
                        timings_per_token=True)  # fmt: skip
    told = [one["timings"]["predicted_n"] for one in events if "timings" in one]
    ended = told.pop() if path.startswith("/v1") else None  # of all of them
    assert set(told) <= set(range(1, 7)) and max(told) == 6 and ended in (18, None)


def test_a_stream_ends_with_whether_there_was_a_new_line(rig: Rig) -> None:
    for first, there in (("\n", True), ("a", False)):
        (id,) = rig.llm.encode(first, False)
        body = {"prompt": "a", "n_predict": 3, "logit_bias": [[id, 100]]}
        whole, ended = rig.post("/completion", **body), rig.events("/completion", **body)[-1]
        assert whole["has_new_line"] == ended["has_new_line"] == there


def test_settings_are_not_told_a_million_times(rig: Rig) -> None:
    biases = [[id, 0.5] for id in range(300, 500)]
    few, many = (
        rig.http.post("/completion", json={
            "prompt": [[300]] * n, "n_predict": 1, "logit_bias": biases,
        }) for n in (2, 400)
    )  # fmt: skip
    assert len(few.json()[1]["generation_settings"]["logit_bias"]) == len(biases)
    assert len(many.json()) == 400 and len(many.content) < 2 << 20


def test_the_progress_of_a_prompt_ends_with_its_run() -> None:
    """Whoever is cut off, or whose engine fails, waits for no tokens."""
    sequence = SimpleNamespace(cached=0, computed=0)
    job = SimpleNamespace(
        prompt_tokens=9, sequence=sequence, started=0.0, error=None, done=False, token_ids=[]
    )
    run: Any = SimpleNamespace(firsts=[job], failure=None)

    async def told() -> int:
        count = 0
        async for _ in Watched(run, True, False).prompt():
            count += 1
            run.failure = ValueError()
        return count

    assert asyncio.run(asyncio.wait_for(told(), 5)) == 1
