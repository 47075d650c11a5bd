"""`echo` with log-probabilities: what a model thinks of a prompt's own tokens."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.rig import DENSE, HYBRID, Rig, serving

TEXT = "It was a dark night, and the old man went down to the river to look for his boat."
COMPLETE = "/v1/completions"


def oracle(rig: Rig, ids: list[int]) -> np.ndarray[Any, Any]:
    """Log-probabilities of all tokens at each place, from the model's own logits."""
    logits = rig.llm.logits(ids).astype(np.float64)
    top = logits.max(-1, keepdims=True)
    found: np.ndarray[Any, Any] = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return found


def check(rig: Rig, ids: list[int], told: dict[str, Any], top: int) -> None:
    """The first tokens that are told of are the prompt, and as likely as the model says."""
    wanted = oracle(rig, ids)
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    for at in range(1, len(ids)):
        assert told["token_logprobs"][at] == pytest.approx(wanted[at - 1, ids[at]], abs=2e-4)
        likeliest = sorted(wanted[at - 1])[::-1][:top]
        others = sorted(told["top_logprobs"][at].values())[::-1]
        assert others[:top] == pytest.approx(likeliest, abs=2e-4) and len(others) <= top + 1
        assert told["top_logprobs"][at][told["tokens"][at]] >= told["token_logprobs"][at]
    assert told["text_offset"][: len(ids)] == [
        sum(map(len, told["tokens"][:at])) for at in range(len(ids))
    ]


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_a_prompts_tokens_are_as_likely_as_the_model_says(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model) as rig:
        ids = rig.llm.encode(TEXT)
        plain = rig.complete(TEXT, 4, logprobs=2)["choices"][0]  # now its beginning is cached
        for prompt in (TEXT, ids):
            answer = rig.complete(prompt, 4, logprobs=2, echo=True)
            (choice,) = answer["choices"]
            assert choice["text"] == rig.llm.decode(ids) + plain["text"]
            check(rig, ids, choice["logprobs"], 2)
            # What follows is what would have come without.
            assert choice["logprobs"]["tokens"][len(ids) :] == plain["logprobs"]["tokens"]
            assert (
                choice["logprobs"]["token_logprobs"][len(ids) :]
                == (plain["logprobs"]["token_logprobs"])
            )
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 4)
            details = usage["prompt_tokens_details"]
            assert details["cached_tokens"] == 0 and details["cache_miss"]["reason"] == "scored"
        assert rig.pages() == 0


def test_a_prompt_is_scored_and_nothing_follows(rig: Rig) -> None:
    ids = rig.llm.encode(TEXT)
    answer = rig.complete([TEXT, "The king"], 0, logprobs=1, echo=True)
    first, second = answer["choices"]
    assert first["text"] == rig.llm.decode(ids) and first["finish_reason"] == "length"
    assert len(first["logprobs"]["tokens"]) == len(ids)
    check(rig, ids, first["logprobs"], 1)
    check(rig, rig.llm.encode("The king"), second["logprobs"], 1)
    assert answer["usage"]["completion_tokens"] == 0
    assert rig.complete(TEXT, 0, echo=True)["choices"][0]["logprobs"] is None
    rig.refused(400, COMPLETE, prompt=TEXT, max_tokens=0, logprobs=1)
    rig.refused(400, COMPLETE, prompt=TEXT, max_tokens=0, echo=True, n=2)
    rig.refused(400, COMPLETE, prompt=[300] * 2100, max_tokens=0, logprobs=1, echo=True)
    rig.refused(400, COMPLETE, prompt=[], max_tokens=0, logprobs=1, echo=True)
    rig.post("/v1/sessions", id="scored", prompt="a")
    rig.refused(400, COMPLETE, prompt=TEXT, logprobs=1, echo=True, session_id="scored")
    rig.http.delete("/v1/sessions/scored")
    assert rig.pages() == 0


def test_a_prompt_that_nothing_follows_may_fill_the_context(rig: Rig) -> None:
    full, plus = [300] * rig.llm.n_ctx, [300] * (rig.llm.n_ctx + 1)
    told = rig.complete(full, 0, logprobs=0, echo=True)["choices"][0]["logprobs"]
    assert len(told["token_logprobs"]) == len(full)
    assert rig.post("/completion", prompt=full, n_predict=0)["tokens_evaluated"] == len(full)
    rig.refused(400, COMPLETE, prompt=plus, max_tokens=0, logprobs=0, echo=True)
    rig.refused(400, COMPLETE, prompt=full, max_tokens=1, logprobs=0, echo=True)


def test_what_follows_is_likely_as_harnesses_add_it_up(rig: Rig) -> None:
    """A context, a continuation, and one token more that is not looked at."""
    context, rest = rig.llm.encode("The old man"), rig.llm.encode(" went down", add_special=False)
    asked = {"logprobs": 1, "echo": True, "seed": 1234}
    answer = rig.complete([context + rest, context + rest[:1]], 1, **asked)
    for choice, ids in zip(answer["choices"], (context + rest, context + rest[:1]), strict=True):
        told = choice["logprobs"]["token_logprobs"][len(context) : -1]
        wanted = oracle(rig, ids)
        sums = sum(wanted[at - 1, ids[at]] for at in range(len(context), len(ids)))
        assert math.fsum(told) == pytest.approx(sums, abs=1e-3)


def test_scores_in_the_form_of_chats_streams_and_choices(rig: Rig) -> None:
    ids = rig.llm.encode(TEXT)
    whole = rig.complete(TEXT, 3, logprobs=2, echo=True)["choices"][0]
    answer = rig.complete(TEXT, 3, logprobs=True, top_logprobs=2, echo=True, n=2)
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert [one["logprob"] for one in content] == whole["logprobs"]["token_logprobs"]
        assert content[0]["top_logprobs"] == [] and len(content[1]["top_logprobs"]) == 2
        assert choice["text"] == whole["text"]
    body = {"prompt": TEXT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    *events, _ = rig.events(COMPLETE, **body, logprobs=2, echo=True)
    assert "".join(e["choices"][0]["text"] for e in events) == whole["text"]
    for name, wanted in whole["logprobs"].items():
        assert [x for e in events for x in e["choices"][0]["logprobs"][name]] == wanted
    *events, _ = rig.events(COMPLETE, **{**body, "max_tokens": 0}, logprobs=2, echo=True)
    assert len(events) == 1 and events[0]["choices"][0]["finish_reason"] == "length"
    assert len(events[0]["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert rig.pages() == 0


def test_scoring_gives_way_and_fails_nobody(tmp_path: Path) -> None:
    """In a memory that has no room for a long answer and a long prompt at once."""
    ids = [300 + i % 90 for i in range(300)]
    with serving(tmp_path, load={"kv_cache_tokens": 400, "n_ctx": 380}) as rig:
        alone = rig.complete([301] * 40, 300)["choices"]
        scores = rig.complete(ids, 0, logprobs=1, echo=True)["choices"]
        rig.llm.forget()
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda: found.append(rig.complete([301] * 40, 300)["choices"]))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        beside = [rig.complete(ids, 0, logprobs=1, echo=True)["choices"] for _ in range(2)]
        for thread in threads:
            thread.join()
        assert found == [alone] * 2 and beside == [scores] * 2
        assert rig.pages() == 0


def test_vectors_give_way_and_fail_nobody(tmp_path: Path) -> None:
    """Long texts beside long answers, in a memory that has no room for two of them."""
    texts = [[300 + (i * k) % 90 for i in range(1300)] for k in (1, 2)]
    load = {"kv_cache_tokens": 1500, "n_ctx": 1450}
    with serving(tmp_path, load=load) as rig:
        alone = rig.complete([301] * 40, 500)["choices"]
        vectors = rig.post("/v1/embeddings", input=texts)["data"]
        rig.llm.forget()
        found: list[Any] = []
        ask = [
            lambda: found.append(rig.complete([301] * 40, 500)["choices"] == alone),
            lambda: found.append(rig.post("/v1/embeddings", input=texts)["data"] == vectors),
        ]
        threads = [threading.Thread(target=one) for one in ask * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 4
        assert rig.pages() == 0
