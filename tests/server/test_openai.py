"""Completions and chat, in OpenAI's form."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from quire.engine.constrain import Constrainer
from quire.server import logprobs
from tests.server.rig import Rig, turns

STORY = "It was a dark night, and the old man"


def test_completion_is_what_the_model_says(rig: Rig) -> None:
    wanted = rig.llm.generate(STORY, max_tokens=12, temperature=0, ignore_eos=True)
    answer = rig.complete(STORY)
    assert answer["object"] == "text_completion" and answer["model"] == "tiny-dense"
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": wanted.text, "logprobs": None, "finish_reason": "length"}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (wanted.prompt_tokens, 12)
    assert usage["total_tokens"] == wanted.prompt_tokens + 12
    assert {"pages", "pages_shared", "bytes", "peak_bytes"} == set(answer["memory"])
    assert answer["memory"]["peak_bytes"] >= answer["memory"]["bytes"] > 0
    timings = answer["timings"]
    assert timings["predicted_n"] == 12  # of which the first came with the prompt
    assert timings["predicted_per_second"] == pytest.approx(11e3 / timings["predicted_ms"])


def test_what_was_computed_before_is_cached(rig: Rig) -> None:
    text = "A prompt that nobody has sent before this test did so, and long enough to keep: " * 2
    fresh, again = rig.complete(text)["usage"], rig.complete(text)["usage"]
    first, second = fresh["prompt_tokens_details"], again["prompt_tokens_details"]
    assert first["cached_tokens"] == 0
    assert first["cache_miss"] == {"reason": "new", "tokens": fresh["prompt_tokens"]}
    assert second["cached_tokens"] == again["prompt_tokens"] - 1
    assert "cache_miss" not in second
    salted = rig.complete(text, cache_salt="another")["usage"]["prompt_tokens_details"]
    assert salted["cached_tokens"] == 0 and salted["cache_miss"]["reason"] == "salt"


def test_stream_says_the_same(rig: Rig) -> None:
    whole = rig.complete(STORY)
    body = {"prompt": STORY, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    *events, end = rig.events("/v1/completions", **body, stream_options={"include_usage": True})
    assert end == "[DONE]"
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == whole["choices"][0]["text"]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "length"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert all(e["usage"] is None for e in events[:-1])


def test_several_prompts_and_choices(rig: Rig) -> None:
    prompts = ["The king", "A river"]
    alone = [rig.complete(p)["choices"][0]["text"] for p in prompts]
    together = rig.complete(prompts, n=2)
    assert [c["index"] for c in together["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in together["choices"]] == [alone[0]] * 2 + [alone[1]] * 2
    one = sum(len(rig.llm.encode(p)) for p in prompts)
    assert together["usage"]["prompt_tokens"] == one  # once for each prompt, however many choices
    assert together["usage"]["completion_tokens"] == 48
    ids = [rig.llm.encode(p) for p in prompts]
    assert [c["text"] for c in rig.complete(ids)["choices"]] == alone
    assert rig.complete(ids[0])["choices"][0]["text"] == alone[0]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "max_tokens": 12, "temperature": 0}
    texts = [""] * 4
    for event in rig.events("/v1/completions", **body, ignore_eos=True)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in together["choices"]]


def test_seed_repeats_and_choices_differ(rig: Rig) -> None:
    body = {"temperature": 1.0, "seed": 7, "n": 3, "top_k": 50, "min_p": 0.01}
    first = [c["text"] for c in rig.complete(STORY, 16, **body)["choices"]]
    again = [c["text"] for c in rig.complete(STORY, 16, **body)["choices"]]
    assert first == again and len(set(first)) > 1


def test_chats_sample_as_the_models_makers_say(rig: Rig) -> None:
    """As `llm.chat` does; a field that is given replaces theirs."""
    talk = turns("Hello there")
    for given in ({}, {"temperature": 1.5}, {"temperature": 1.5, "top_k": 0, "min_p": 0.0}):
        wanted = rig.llm.chat(talk, seed=7, max_tokens=16, **given).text
        made = rig.post("/v1/chat/completions", messages=talk, seed=7, max_tokens=16, **given)
        assert made["choices"][0]["message"]["content"] == wanted


def test_stop_ends_before_its_text(rig: Rig) -> None:
    whole = rig.complete(STORY, 24)["choices"][0]["text"]
    stop = whole[8:12]
    (choice,) = rig.complete(STORY, 24, stop=stop)["choices"]
    assert choice["text"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"
    streamed = rig.events(
        "/v1/completions", prompt=STORY, max_tokens=24, temperature=0, stop=[stop], ignore_eos=True
    )
    assert "".join(e["choices"][0]["text"] for e in streamed[:-1]) == choice["text"]


def test_logit_bias_bans_and_forces(rig: Rig) -> None:
    first = rig.llm.generate(STORY, max_tokens=1, temperature=0).token_ids[0]
    banned = rig.complete(STORY, 1, logit_bias={str(first): -100}, logprobs=0)
    assert banned["choices"][0]["text"] != rig.llm.decode([first])
    forced = rig.complete(STORY, 1, logit_bias={"300": 100})
    assert forced["choices"][0]["text"] == rig.llm.decode([300])
    error = rig.refused(400, "/v1/completions", prompt="a", logit_bias={"x": 1})
    assert error["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": STORY, "logprobs": 100, "max_tokens": 40}),
        ("/v1/completions", {"prompt": [9] * 40, "logprobs": 100, "max_tokens": 1, "echo": True}),
        ("/v1/chat/completions", {"messages": turns("a"), "logprobs": True, "top_logprobs": 20}),
        ("/completion", {"prompt": STORY, "n_probs": 100, "n_predict": 40}),
        ("/api/generate", {"prompt": STORY, "raw": True, "logprobs": True, "top_logprobs": 20,
                           "model": "tiny-dense", "stream": False}),
    ],
)  # fmt: skip
def test_many_logprobs_are_not_written_on_the_event_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """It would stand still for seconds, and with it everybody's answers."""
    writers = set()

    def noting(logprob: float, finite: Any = logprobs._finite) -> Any:
        writers.add(threading.current_thread().name)
        return finite(logprob)

    monkeypatch.setattr(logprobs, "_finite", noting)
    most = {"max_tokens": 90, "options": {"num_predict": 90, "temperature": 0}}
    rig.post(path, **{**most, "ignore_eos": True, "temperature": 0, **body})
    assert writers and all(name.startswith("quire") for name in writers), writers


def test_logprobs_in_both_forms(rig: Rig) -> None:
    wanted = rig.llm.generate(
        STORY, max_tokens=4, temperature=0, logprobs=2, ignore_eos=True
    ).logprobs
    told = rig.complete(STORY, 4, logprobs=2)["choices"][0]["logprobs"]
    assert told["token_logprobs"] == pytest.approx([one.logprob for one in wanted])
    assert [len(top) for top in told["top_logprobs"]] == [2] * 4
    assert told["text_offset"][0] == 0 and len(told["tokens"]) == 4
    answer = rig.chat("Hello", max_tokens=3, logprobs=True, top_logprobs=2, ignore_eos=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for one in content:
        assert len(one["top_logprobs"]) == 2
        assert bytes(one["bytes"]).decode(errors="replace") == one["token"]
        assert one["logprob"] <= 0


@pytest.mark.parametrize("most", [0, 1])
def test_the_chosen_token_is_among_the_likeliest_in_the_older_form(rig: Rig, most: int) -> None:
    told = rig.complete(STORY, 20, temperature=2, seed=1, logprobs=most)["choices"][0]["logprobs"]
    rows = list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))
    assert all(top[token] >= logprob for token, logprob, top in rows)
    assert max(len(top) for _, _, top in rows) == most + 1


def test_chat_follows_the_template(rig: Rig) -> None:
    wanted = rig.llm.chat(turns("Hello there"), max_tokens=12, temperature=0)
    answer = rig.chat("Hello there")
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == wanted.text
    assert answer["choices"][0]["message"]["role"] == "assistant"
    events = rig.events(
        "/v1/chat/completions", messages=turns("Hello there"), max_tokens=12, temperature=0
    )
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    deltas = [e["choices"][0]["delta"].get("content") or "" for e in events[:-1]]
    assert "".join(deltas) == wanted.text
    assert events[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert events[-2]["timings"]["predicted_n"] == len(wanted.token_ids)


def test_parts_of_text_and_developers(rig: Rig) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    answer = rig.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": parts}], temperature=0,
        max_tokens=12,
    )  # fmt: skip
    assert answer["choices"][0]["message"] == rig.chat("Hello there")["choices"][0]["message"]
    told = rig.post("/apply-template", messages=[{"role": "developer", "content": "Be kind"}])
    assert "system" in told["prompt"]
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    error = rig.refused(400, "/v1/chat/completions", messages=[{"role": "user", "content": image}])
    assert "image_url" in error["message"]


def test_last_message_of_the_assistant_is_gone_on_with(rig: Rig) -> None:
    prompt = rig.post("/apply-template", messages=turns("Hello", "I think "))["prompt"]
    assert prompt.endswith("I think ")
    text = rig.chat("Hello", "I think ")["choices"][0]["message"]["content"]
    ids = rig.llm.text_tokens(prompt)
    assert text == rig.llm.generate(ids, max_tokens=12, temperature=0).text
    closed = rig.post(
        "/apply-template", messages=turns("Hello", "I think "), continue_final_message=False
    )
    assert not closed["prompt"].endswith("I think ")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    rig.refused(400, "/v1/chat/completions", messages=turns("Hello", "I"), **both)


def test_template_arguments_reach_the_template(rig: Rig) -> None:
    error = rig.refused(
        400, "/v1/chat/completions", messages=turns("a"), chat_template_kwargs={"messages": []}
    )
    assert error["param"] == "chat_template_kwargs"
    rig.chat("a", chat_template_kwargs={"enable_thinking": False})


SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 8},
                                     "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("form", ["response_format", "structured_outputs"])
def test_json_fits_its_schema(rig: Rig, form: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {form: wanted if form == "response_format" else {"json": SCHEMA}}
    answer = rig.chat("Who are you?", max_tokens=80, **body)
    made = json.loads(answer["choices"][0]["message"]["content"])
    assert set(made) == {"name", "age"} and 0 <= made["age"] <= 99


def test_json_object_is_an_object(rig: Rig) -> None:
    answer = rig.chat("A list", max_tokens=400, response_format={"type": "json_object"})
    text, end = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
    assert text.startswith("{")
    if end == "stop":
        assert isinstance(json.loads(text), dict)


def test_other_structures(rig: Rig) -> None:
    def text(**wanted: Any) -> str:
        answer = rig.complete("So", 20, structured_outputs=wanted)
        return str(answer["choices"][0]["text"])

    assert text(choice=["yes", "no"]) in ("yes", "no")
    assert text(regex="[ab]{3}c").strip("ab") == "c"
    assert text(grammar='start: "x" "y"') == "xy"
    rig.refused(400, "/v1/completions", prompt="a", structured_outputs={"regex": "a", "json": {}})
    rig.refused(400, "/v1/completions", prompt="a", response_format={"type": "xml"})
    made = rig.complete("So", 8, json_schema={"const": "a"})["choices"][0]["text"]
    assert made == '"a"'
    assert rig.complete("So", 2, echo=True)["choices"][0]["text"].startswith("So")


GBNF = 'root ::= "yes" | "no" # llama.cpp writes grammars so\n'


def test_a_constraint_is_compiled_once_for_all_answers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    compile = Constrainer.compile
    monkeypatch.setattr(Constrainer, "compile", lambda *a: made.append(a) or compile(*a))
    body = {"structured_outputs": {"regex": "[ab]{4}"}, "temperature": 1, "n": 3}
    choices = rig.complete(["a", "b"], **body)["choices"]
    assert len(made) == 1 and len(choices) == 6
    assert all(re.fullmatch("[ab]{4}", choice["text"]) for choice in choices)


def test_grammars_in_both_notations(rig: Rig) -> None:
    for wanted in (
        {"grammar": GBNF}, {"structured_outputs": {"grammar": GBNF}},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
    ):  # fmt: skip
        assert rig.complete("So", 8, **wanted)["choices"][0]["text"] in ("yes", "no")
        answer = rig.chat("Is it so?", max_tokens=8, **wanted)
        assert answer["choices"][0]["message"]["content"] in ("yes", "no")
    assert rig.post("/completion", prompt="So", n_predict=8, grammar=GBNF)["content"] in (
        "yes", "no",
    )  # fmt: skip
    error = rig.refused(400, "/v1/completions", prompt="So", grammar="root ::= nowhere")
    assert "line 1" in error["message"] and "nowhere" in error["message"]
    rig.refused(400, "/v1/completions", prompt="a", grammar=GBNF, json_schema={"const": 1})


def test_models_have_names(rig: Rig) -> None:
    (model,) = rig.http.get("/v1/models").json()["data"]
    assert model["id"] == "tiny-dense" and model["max_model_len"] == 2048
    assert rig.http.get("/v1/models/tiny-dense").json() == model
    assert rig.http.get("/v1/models/other").status_code == 404
    error = rig.refused(404, "/v1/completions", model="other", prompt="a")
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert (
        rig.post("/completions", model="other", prompt="a", max_tokens=1)["model"] == "tiny-dense"
    )


def test_tokens_and_templates(rig: Rig) -> None:
    ids = rig.llm.encode("Hello world")
    assert rig.post("/tokenize", prompt="Hello world")["tokens"] == ids
    assert rig.post("/tokenize", content="Hello world")["tokens"] == rig.llm.encode(
        "Hello world", add_special=False
    )
    told = rig.post("/detokenize", tokens=ids)
    assert told["content"] == told["prompt"] == rig.llm.decode(ids)
    pieces = rig.post("/tokenize", content="Hello", with_pieces=True)["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "Hello"
    text = rig.llm.chat_text(turns("Hello"))
    assert rig.post("/apply-template", messages=turns("Hello"))["prompt"] == text
    assert rig.post("/tokenize", messages=turns("Hello"))["tokens"] == rig.llm.text_tokens(text)


def test_health(rig: Rig) -> None:
    for path in ("/health", "/livez", "/readyz"):
        assert rig.http.get(path).json() == {"status": "ok"}
    assert rig.http.get("/version").json()["version"]


def test_context_that_is_too_long(rig: Rig) -> None:
    error = rig.refused(400, "/v1/completions", prompt=[300] * 2100, max_tokens=4)
    assert error["code"] == "context_length_exceeded"
    assert "2100" in error["message"] and "2048" in error["message"]
    error = rig.refused(400, "/v1/chat/completions", messages=turns("word " * 5000))
    assert error["code"] == "context_length_exceeded"


def test_memory_is_told(rig: Rig) -> None:
    told = rig.http.get("/v1/memory").json()
    assert told["budget_bytes"] > told["used_bytes"] > 0
    assert str(rig.llm.path) not in json.dumps(told)
    rig.complete("Something to be cached, which is long enough to fill a page of tokens or two")
    rig.post("/v1/memory/forget")
    assert rig.http.get("/v1/memory").json()["prefix"]["entries"] == 0
