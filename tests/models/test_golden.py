"""Trained models in folders against what transformers computes with them in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from tests.model_folders import exactly

MODELS = Path(__file__).parents[1] / "data" / "models"
EXACT = {"activations": "f32", "type_k": "f32", "type_v": "f32"}
CLOSE = 2e-4


@pytest.fixture(scope="module", params=sorted(p.parent.name for p in MODELS.glob("*/golden.json")))
def golden(request: pytest.FixtureRequest) -> Iterator[tuple[quire.LLM, dict[str, Any]]]:
    folder = MODELS / request.param
    with quire.load(folder, **exactly(folder)) as llm:
        yield llm, json.loads((folder / "golden.json").read_text())


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_text_is_encoded_alike(golden) -> None:
    llm, expected = golden
    for prompt in expected["prompts"]:
        assert llm.encode(prompt["text"]) == prompt["token_ids"]
        assert llm.decode(prompt["greedy"]) == prompt["greedy_text"]


def test_logprobs_are_those_of_float32(golden) -> None:
    llm, expected = golden
    worst = 0.0
    for prompt in expected["prompts"]:
        got = logprobs(llm.logits(prompt["token_ids"]))
        for place in prompt["positions"]:
            ids, wanted = zip(*place["top"], strict=True)
            worst = max(worst, np.abs(got[place["position"], list(ids)] - wanted).max())
    assert worst < CLOSE


def test_greedy_tokens_are_the_same(golden) -> None:
    """Up to the first token that other arithmetic may choose otherwise."""
    llm, expected = golden
    for prompt in expected["prompts"]:
        got = llm.generate(prompt["token_ids"], max_tokens=64, ignore_eos=True).token_ids
        sure = next((i for i, m in enumerate(prompt["greedy_margin"]) if m < 1e-3), 64)
        assert sure > 8
        assert got[:sure] == prompt["greedy"][:sure]


def test_validation_loss(golden) -> None:
    llm, expected = golden
    tokens = llm.encode((MODELS / "validation.txt").read_text())
    wanted = expected["validation"]
    for start, loss in list(zip(wanted["starts"], wanted["mean_nll"], strict=True))[:2]:
        window = tokens[start : start + wanted["length"]]
        got = logprobs(llm.logits(window))[np.arange(len(window) - 1), window[1:]]
        assert abs(-got.mean() - loss) < 1e-4


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_change_no_bit(golden, chunk: int) -> None:
    """One token at a time is decoding, so decoding equals prefill as well."""
    llm, expected = golden
    ids = expected["prompts"][-1]["token_ids"][:200]
    whole = llm.logits(ids)
    with llm.session() as s:
        for at in range(0, len(ids), chunk):
            s.append(ids[at : at + chunk])
            assert np.array_equal(s.logits(), whole[min(at + chunk, len(ids)) - 1])


@pytest.mark.parametrize(("quantize", "most"), [("q8_0", 0.01), ("q4_0", 0.25)])
def test_quantised_while_loading(golden, quantize: str, most: float) -> None:
    """Losing bits costs a little, and the model takes the less memory the fewer there are."""
    exact, _ = golden
    window = exact.encode((MODELS / "validation.txt").read_text()[:4000])[:512]

    def loss(llm: quire.LLM) -> float:
        got = logprobs(llm.logits(window))
        return float(-got[np.arange(len(window) - 1), window[1:]].mean())

    with quire.load(exact.path, quantize=quantize) as llm:
        assert abs(loss(llm) - loss(exact)) < most
        assert llm.model.weight_bytes < exact.model.weight_bytes * (0.6 if most < 0.1 else 0.5)


def test_batched_greedy_equals_alone(golden) -> None:
    llm, expected = golden
    prompts = [prompt["token_ids"] for prompt in expected["prompts"]]
    alone = [llm.generate(p, max_tokens=24, ignore_eos=True).token_ids for p in prompts]
    llm.forget()  # so that the batch computes everything itself
    together = llm.generate(prompts, max_tokens=24, ignore_eos=True)
    assert [c.token_ids for c in together] == alone


def test_a_state_stays_as_large_as_it_is() -> None:
    """However long the context, which nothing limits."""
    with quire.load(MODELS / "tiny-recurrent") as llm, llm.session() as s:
        assert llm.n_ctx == 2**20
        ids = llm.encode((MODELS / "validation.txt").read_text())
        for end in (7, 1500, 1501):
            s.append(ids[s.position : end])
            llm.forget()
            stats = llm.memory.as_dict()["stats"]
            assert stats["recurrent state"]["pages_used"] <= 1
            assert stats["recurrent log"]["pages_used"] <= 1


def test_a_window_keeps_what_can_still_be_seen() -> None:
    """64 positions and what shares a page with them, however long the context."""
    with quire.load(MODELS / "tiny-window") as llm, llm.session() as s:
        ids = llm.encode((MODELS / "validation.txt").read_text())[:1500]
        s.append(ids)
        llm.forget()
        stats = llm.memory.as_dict()["stats"]
        assert stats["attention"]["tokens_held"] >= 1500
        assert 64 <= stats["window"]["tokens_held"] <= 64 + 2 * 16
