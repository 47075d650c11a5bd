"""The small print: which field an error is about, what is shared, who owns what and how long."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.speculate import NAMES
from tests.server.rig import DENSE, HYBRID, Rig, serving, turns
from tests.speculation import always

__all__ = ["always"]
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETE, "max_tokens", -1), (COMPLETE, "temperature", -1), (COMPLETE, "top_p", 0),
        (COMPLETE, "top_p", 2), (COMPLETE, "min_p", -1), (COMPLETE, "logprobs", 101),
        (COMPLETE, "presence_penalty", 1000), (COMPLETE, "logit_bias", {"99999": 1}),
        (COMPLETE, "logit_bias", {"5": 1e9}), (COMPLETE, "prompt", []),
        (CHAT, "messages", [{"role": "user"}]), (CHAT, "messages", [{"content": "a"}]),
        (CHAT, "messages", turns("word " * 5000)), (COMPLETE, "prompt", "word " * 5000),
        (COMPLETE, "prompt", [5] * 3000), (CHAT, "tools", [TOOL]), (CHAT, "tools", [{}]),
        (CHAT, "tool_choice", "required"), ("/v1/sessions", "prompt", "word " * 5000),
        ("/v1/sessions", "messages", turns("word " * 5000)), ("/v1/sessions", "ttl_s", 1e300),
        ("/detokenize", "tokens", [-1]), ("/detokenize", "tokens", None),
        ("/v1/embeddings", "input", "word " * 5000), ("/v1/embeddings", "input", ""),
        ("/v1/embeddings", "input", [True]), ("/v1/embeddings", "input", [[False, 1]]),
        ("/completion", "prompt", [True]), ("/completion", "prompt", ["a", 1, True]),
        (COMPLETE, "grammar", "root ::= ("), (COMPLETE, "json_schema", {"type": "no"}),
        (CHAT, "structured_outputs", {"regex": "("}), (COMPLETE, "suffix", "b"),
        (CHAT, "response_format", {"type": "json_schema", "schema": {"type": "no"}}),
        (CHAT, "session_id", "a/b"), ("/v1/sessions", "id", "a/b"), ("/v1/sessions", "open", ".a"),
    ],
)  # fmt: skip
def test_an_error_says_which_field_it_is_about(rig: Rig, path: str, field: str, value: Any) -> None:
    text: dict[str, Any] = {COMPLETE: {"prompt": "a"}, CHAT: {"messages": turns("a")}}.get(path, {})
    assert rig.refused(400, path, **{**text, field: value})["param"] == field


def test_what_is_missing_is_named(rig: Rig) -> None:
    for path, field in ((CHAT, "messages"), ("/detokenize", "tokens")):
        assert rig.refused(400, path)["param"] == field
    rig.post("/v1/sessions", id="missing")
    assert rig.refused(400, "/v1/sessions/missing/append")["param"] == "prompt"
    rig.http.delete("/v1/sessions/missing")


def test_a_prompt_that_is_too_long_is_told_by_how_much(rig: Rig) -> None:
    text = "hello " * 2500
    need = len(rig.llm.encode(text))
    for path, body in (
        (COMPLETE, {"prompt": text}), ("/v1/sessions", {"prompt": text}),
        (COMPLETE, {"prompt": rig.llm.encode(text)}),
    ):  # fmt: skip
        error = rig.refused(400, path, **body)
        assert error["code"] == "context_length_exceeded"
        assert str(need) in error["message"] and str(rig.llm.n_ctx) in error["message"]
        assert "maximum context length is" in error["message"]  # by which clients know it


def test_nothing_missed_is_no_miss(rig: Rig) -> None:
    rig.post("/v1/sessions", id="whole", prompt="It was a dark night")
    details = rig.complete("", 1, session_id="whole")["usage"]["prompt_tokens_details"]
    missed = details.get("cache_miss", {"tokens": 1})["tokens"]
    assert missed > 0
    rig.http.delete("/v1/sessions/whole")


def test_counters_begin_at_zero(tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        told = rig.http.get("/metrics").text
        for reason in ("stop", "length", "abort"):
            labels = f'finished_reason="{reason}",model_name="tiny-dense"'
            assert f"quire:request_success_total{{{labels}}} 0.0" in told
        assert 'quire:generation_tokens_total{model_name="tiny-dense"} 0.0' in told


def test_names_with_slashes_are_refused_as_names(rig: Rig) -> None:
    for method, path in (
        ("GET", "/v1/sessions/..%2fx"), ("DELETE", "/v1/sessions/%2Fetc%2Fpasswd"),
        ("POST", "/v1/sessions/..%2f..%2fx/append"),
    ):  # fmt: skip
        answer = rig.http.request(method, path)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_name"


def test_a_slash_behind_models_is_none(rig: Rig) -> None:
    assert rig.http.get("/v1/models/").json() == rig.http.get("/v1/models").json()


def test_what_ollama_has_no_route_for_is_told_in_its_form(rig: Rig) -> None:
    answer = rig.http.post("/api/pull", json={"model": "x"})
    assert answer.status_code == 404 and isinstance(answer.json()["error"], str)


def test_an_answer_that_was_cut_off_is_an_incomplete_item(rig: Rig) -> None:
    body = {"input": "Tell", "max_output_tokens": 3, "temperature": 0}
    told = rig.post("/v1/responses", **body)
    assert told["status"] == "incomplete" and told["output"][0]["status"] == "incomplete"
    events = rig.events("/v1/responses", **body)
    done = [e["item"]["status"] for e in events if e["type"] == "response.output_item.done"]
    assert done == ["incomplete"] and events[-1]["type"] == "response.incomplete"


# -- sessions -----------------------------------------------------------------------------------


def test_notes_are_things_by_name_or_a_text(rig: Rig) -> None:
    made = rig.post("/v1/sessions", id="noted", notes="for the story")
    assert made["notes"] == {"text": "for the story"}
    rig.http.delete("/v1/sessions/noted")


def test_a_session_is_gone_when_its_time_is_over(rig: Rig) -> None:
    for id in ("brief", "brief-too"):
        rig.post("/v1/sessions", id=id, prompt="It was", ttl_s=0.05)
    time.sleep(0.06)
    assert rig.http.get("/v1/sessions/brief").status_code == 404
    rig.post("/v1/sessions", id="brief-too")  # its id is free
    assert "expires" not in rig.http.get("/v1/sessions/brief-too").json()
    rig.http.delete("/v1/sessions/brief-too")


def test_a_session_is_owned_while_its_prompt_is_cut_into_tokens(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutting, go_on, cut = threading.Event(), threading.Event(), type(rig.llm).tokens_of

    def slow(*args: Any) -> list[int]:
        cutting.set()
        assert go_on.wait(10)
        return cut(*args)

    rig.post("/v1/sessions", id="held", prompt="It was")
    monkeypatch.setattr(type(rig.llm), "tokens_of", slow)
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(rig.complete(" a", 2, session_id="held"))
    )
    asking.start()
    assert cutting.wait(10)
    with httpx.Client(base_url=rig.url) as other:
        assert other.delete("/v1/sessions/held").status_code == 409
        assert other.get("/v1/sessions/held").json()["status"] == "generating"
    go_on.set()
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] == 2
    assert rig.http.delete("/v1/sessions/held").status_code == 200


def test_of_two_forks_with_one_id_the_second_holds_nothing(rig: Rig) -> None:
    rig.post("/v1/sessions", id="trunk", prompt="It was a dark night")

    async def both() -> list[int]:
        async with httpx.AsyncClient(base_url=rig.url) as http:
            fork = lambda: http.post("/v1/sessions/trunk/fork", json={"id": "twig"})  # noqa: E731
            return sorted(one.status_code for one in await asyncio.gather(fork(), fork(), fork()))

    assert asyncio.run(both()) == [201, 409, 409]
    for id in ("trunk", "twig"):
        assert rig.http.delete(f"/v1/sessions/{id}").status_code == 200
    assert not rig.state.sessions.by_id and rig.pages() == 0


# -- several models -----------------------------------------------------------------------------


def test_to_look_at_memory_is_not_to_use_a_model(tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID, keep_alive_s=0.3) as rig:
        memory = lambda **q: rig.http.get("/v1/memory", params=q).json()  # noqa: E731
        assert memory()["used_bytes"] == 0 == memory(model="tiny-hybrid")["shared"]["used_bytes"]
        assert not rig.state.models.loaded
        empty = set(memory())
        rig.complete("It was", 2, model="tiny-hybrid")
        rig.complete("It was", 2)
        told = memory()
        assert set(told) == empty
        held = told["shared"]["models"]
        assert held["tiny-dense"] == told["used_bytes"] == sum(told["breakdown"].values())
        assert held["tiny-hybrid"] == memory(model="tiny-hybrid")["used_bytes"]
        budget = rig.state.models.budget
        assert budget is not None and told["budget_bytes"] == budget.limit
        deadline = time.monotonic() + 30
        while rig.state.models.loaded:  # they go although somebody looks all the time
            assert time.monotonic() < deadline
            memory()


def test_all_models_forget(tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID) as rig:
        rig.post("/v1/memory/forget")
        assert not rig.state.models.loaded
        kept = lambda m: rig.state.models.by_name[m].llm.engine.prefix.index.stats()["entries"]  # noqa: E731
        names = ("tiny-dense", "tiny-hybrid")
        for name in names:
            rig.complete("It was a dark night, and the wind was cold.", 2, model=name)
        rig.post("/v1/memory/forget", model="tiny-hybrid")
        assert kept("tiny-dense") and not kept("tiny-hybrid")
        rig.complete("It was a dark night, and the wind was cold.", 2, model="tiny-hybrid")
        rig.post("/v1/memory/forget")
        assert not any(map(kept, names))


def test_a_session_knows_its_model(tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID) as rig:
        rig.post("/v1/sessions", id="s", model="tiny-hybrid", prompt="It was")
        assert rig.complete(" a", 2, session_id="s")["model"] == "tiny-hybrid"
        assert rig.chat("Hello", session_id="s")["model"] == "tiny-hybrid"
        body = {"model": "tiny-dense", "prompt": "", "session_id": "s"}
        assert rig.refused(409, COMPLETE, **body)["code"] == "session_model"


def test_a_budget_that_is_too_small_is_told_what_is_needed(rig: Rig) -> None:
    answer = rig.http.patch("/v1/memory", json={"budget_bytes": 1000})
    told = answer.json()["error"]
    weights = rig.http.get("/v1/memory").json()["breakdown"]["weights"]
    assert answer.status_code == 409 and told["param"] == "budget_bytes"
    numbers = [int(n) for n in told["message"].replace(",", "").split() if n.isdecimal()]
    assert 1000 in numbers and any(n >= weights for n in numbers)


@pytest.mark.parametrize("stream", [True, False])
def test_functions_are_refused_and_not_left_out(rig: Rig, stream: bool) -> None:
    tool = {"name": "look", "parameters": {"type": "object"}}
    for old, value, new in (
        ("functions", [tool], "tools"), ("function_call", {"name": "look"}, "tool_choice"),
    ):  # fmt: skip
        body = {"messages": turns("Hi"), "stream": stream, old: value}
        error = rig.refused(400, "/v1/chat/completions", **body)
        assert error["param"] == old and new in error["message"]
    called = {"role": "assistant", "content": None, "function_call": {"name": "look"}}
    error = rig.refused(400, "/v1/chat/completions", messages=[*turns("Hi"), called])
    assert error["param"] == "messages" and "tool_calls" in error["message"]
    none = {"functions": None, "function_call": None, "max_tokens": 2}  # as some clients write it
    said = {"role": "assistant", "content": "Oh", "function_call": None}
    assert rig.post("/v1/chat/completions", messages=[*turns("Hi"), said], **none)["choices"]


# -- log-probabilities --------------------------------------------------------------------------


def test_characters_of_several_tokens_in_the_older_form(rig: Rig) -> None:
    """Tokens that are parts of a character are told apart, and offsets count characters."""
    prompt = "a😀b日"
    ids = rig.llm.encode(prompt)
    assert len(ids) > len(prompt)  # some characters are several tokens
    choice = rig.complete(prompt, 0, echo=True, logprobs=5)["choices"][0]
    told = choice["logprobs"]
    tokens, offsets = told["tokens"], told["text_offset"]
    for i, (id, token, offset) in enumerate(zip(ids, tokens, offsets, strict=True)):
        before = b"".join(rig.llm.tokenizer.token_bytes(one) for one in ids[:i])
        assert offset == len(before.decode(errors="ignore"))
        data = rig.llm.tokenizer.token_bytes(id)
        try:
            assert token == data.decode()
        except UnicodeDecodeError:
            assert token == "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    assert all(len(top) >= 5 for top in told["top_logprobs"][1:])
    streamed = rig.events(COMPLETE, prompt=prompt, max_tokens=0, echo=True, logprobs=5)
    assert streamed[0]["choices"][0]["logprobs"] == told


# -- drafts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_drafts_change_nothing_but_the_time(always, tmp_path: Path, model: str) -> None:
    prompt = "and the king said, and the queen said, and the king said, and the queen said, " * 2
    with serving(tmp_path, model) as plain:
        wanted = [plain.complete(prompt[i:], 60) for i in range(3)]
        chatted = plain.chat("Say it again and again.", max_tokens=40)["choices"]
    with serving(tmp_path, model, speculate=NAMES["ngram"]) as drafting:
        made = [drafting.complete(prompt[i:], 60) for i in range(3)]
        assert [one["choices"] for one in made] == [one["choices"] for one in wanted]
        assert drafting.chat("Say it again and again.", max_tokens=40)["choices"] == chatted
        told = [(one["timings"]["draft_n"], one["timings"]["draft_n_accepted"]) for one in made]
        assert all(drafted >= right for drafted, right in told)
        assert all(right for _, right in told)
        assert "draft_n" not in wanted[0]["timings"]
        drafting.post("/v1/sessions", id="s", prompt=prompt)
        kept = drafting.complete("", 60, session_id="s")
        assert kept["choices"][0]["text"] == wanted[0]["choices"][0]["text"]
        session = drafting.http.get("/v1/sessions/s").json()
        assert session["position"] == kept["usage"]["total_tokens"]
        drafting.http.delete("/v1/sessions/s")
        assert drafting.pages() == 0


def test_models_that_are_not_loaded_say_how_much_they_read(tmp_path: Path) -> None:
    names = ("tiny-dense", "tiny-hybrid")
    with serving(tmp_path, DENSE, HYBRID, keep_alive_s=100.0) as rig:
        told = rig.http.get("/v1/models").json()["data"]
        assert [(m["max_model_len"], m["loaded"]) for m in told] == [(2048, False)] * 2
        rig.complete("It was", 2)
        (running,) = rig.http.get("/api/ps").json()["models"]
        left = datetime.fromisoformat(running["expires_at"]).timestamp() - time.time()
        assert running["name"] == "tiny-dense" and 90 < left <= 100
    with serving(tmp_path, DENSE, HYBRID, load={"n_ctx": 300}) as rig:
        for name in names:
            assert rig.http.get(f"/v1/models/{name}").json()["max_model_len"] == 300


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/chat/completions", "max_tokens", {"messages": turns("a"), "max_tokens": 0}),
        (
            "/v1/chat/completions",
            "max_completion_tokens",
            {"messages": turns("a"), "max_completion_tokens": 0},
        ),
        ("/v1/responses", "max_output_tokens", {"input": "a", "max_output_tokens": 0}),
        ("/v1/responses", "input", {"input": "word " * 5000}),
        ("/completion", "n_probs", {"prompt": "a", "n_probs": -1}),
        ("/completion", "repeat_penalty", {"prompt": "a", "repeat_penalty": 0}),
        ("/completion", "logit_bias", {"prompt": "a", "logit_bias": [[5, 10**400]]}),
        ("/completion", "logit_bias", {"prompt": "a", "logit_bias": [[True, 1]]}),
        ("/completion", "logit_bias", {"prompt": "a", "logit_bias": [[1.5, 1]]}),
        ("/completion", "logit_bias", {"prompt": "a", "logit_bias": [["a" * 10**6, 1]]}),
        ("/completion", "n_predict", {"prompt": "a", "n_predict": 0, "session_id": "a"}),
        ("/api/generate", "num_predict", {"prompt": "a", "options": {"num_predict": 0}}),
        ("/v1/messages", "stop_sequences", {"messages": turns("a"), "stop_sequences": ["a"] * 999}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_name_fields_as_clients_do(
    rig: Rig, path: str, field: str, body: dict[str, Any], stream: bool
) -> None:
    asked = {"model": "tiny-dense", "stream": stream, **body}
    if path == "/v1/messages":
        asked["max_tokens"] = 5
    answer = rig.http.post(path, json=asked)
    error = answer.json()["error"]
    assert answer.status_code == 400
    if isinstance(error, str):
        assert error.startswith(field)
    else:
        assert error["param"] == field
        assert field in error["message"] or error["code"] == "context_length_exceeded"


def test_so_do_errors_of_streams_that_have_begun(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.turn._SOON_S", 0.0)
    (failed,) = rig.events("/v1/responses", input="word " * 5000)
    assert failed["param"] == "input" and failed["code"] == "context_length_exceeded"


ENDLESS = 'start: "a" x\nx: x x'
"""What no text fits, which is seen behind the first token."""
UNFIT = {
    "type": "array", "minItems": 2, "prefixItems": [{"const": 1}, {"$ref": "#/$defs/x"}],
    "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "schema": UNFIT}


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "structured_outputs", {"structured_outputs": {"grammar": ENDLESS}}),
        ("/v1/completions", "response_format", {"response_format": FORMAT}),
        ("/v1/chat/completions", "response_format", {"response_format": FORMAT}),
        ("/v1/messages", "output_config", {"output_config": {"format": FORMAT}}),
        ("/v1/responses", "text", {"text": {"format": FORMAT}, "input": "a"}),
        ("/completion", "grammar", {"grammar": ENDLESS}),
        ("/completion", "json_schema", {"json_schema": UNFIT}),
    ],
)
def test_so_do_constraints_that_fail_late(
    rig: Rig, path: str, field: str, body: dict[str, Any]
) -> None:
    asked = {"max_tokens": 9, "prompt": "a", "messages": turns("a"), **body}
    answer = rig.http.post(path, json=asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    if path != "/v1/responses":  # whose failures name none
        assert f'"param":"{field}"' in rig.http.post(path, json={**asked, "stream": True}).text
