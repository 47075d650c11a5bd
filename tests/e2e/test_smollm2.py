"""The default model against exact float32 arithmetic, and against itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import quire

# An int8 engine may choose otherwise where the exact margin is below this: llama.cpp's own
# largest exact margin at a first difference on these prompts is 0.30.
NOISE = 0.35


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def differences(llm: quire.LLM, golden: dict[str, Any]) -> list[float]:
    """|Δ logprob| of the exact top-1 over the first 16 places of each exact continuation."""
    out = []
    for prompt in golden["prompts"]:
        n = len(prompt["top"])
        ids = prompt["token_ids"] + prompt["greedy"][: n - 1]
        got = logprobs(llm.logits(ids)[-n:])
        out += [abs(got[i, top[0][0]] - top[0][1]) for i, top in enumerate(prompt["top"])]
    return out


def first_difference(a: list[int], b: list[int]) -> int | None:
    pairs = zip(a, b, strict=False)
    return next((i for i, (one, two) in enumerate(pairs) if one != two), None)


def perplexity(llm: quire.LLM, ids: list[int]) -> float:
    nll: list[float] = []
    for at in range(0, len(ids) - 511, 512):
        chunk = ids[at : at + 512]
        got = logprobs(llm.logits(chunk))
        nll += [-got[j, chunk[j + 1]] for j in range(256, 511)]
    return math.exp(float(np.mean(nll)))


def test_int8_is_no_further_off_than_llama_cpp(llm: quire.LLM, golden: dict[str, Any]) -> None:
    assert np.mean(differences(llm, golden)) <= golden["llama_cpp_mean_abs_dlogprob_first16"]


def test_exact_mode_is_exact(exact: quire.LLM, golden: dict[str, Any]) -> None:
    assert np.mean(differences(exact, golden)) < 0.001


def test_exact_greedy_is_the_golden_one(exact: quire.LLM, golden: dict[str, Any]) -> None:
    prompts = [p["token_ids"] for p in golden["prompts"]]
    together = [c.token_ids for c in exact.generate(prompts, max_tokens=64)]
    exact.forget()
    assert exact.generate(prompts[0], max_tokens=64).token_ids == together[0]
    for prompt, got in zip(golden["prompts"], together, strict=True):
        first = first_difference(got, prompt["greedy"])
        assert first is None or prompt["margins"][first] < 0.001, prompt["name"]
        assert first is not None or len(got) == len(prompt["greedy"])


def test_int8_greedy_follows_wherever_the_margin_is_clear(
    llm: quire.LLM, golden: dict[str, Any]
) -> None:
    prompts = [p["token_ids"] for p in golden["prompts"]]
    for prompt, completion in zip(
        golden["prompts"], llm.generate(prompts, max_tokens=64), strict=True
    ):
        first = first_difference(completion.token_ids, prompt["greedy"])
        assert first is None or prompt["margins"][first] < NOISE, prompt["name"]


def test_perplexity(llm: quire.LLM, golden: dict[str, Any]) -> None:
    expected = golden["perplexity"]
    assert perplexity(llm, expected["token_ids"]) == pytest.approx(expected["ppl"], rel=0.005)


def test_texts_and_templates(llm: quire.LLM, golden: dict[str, Any]) -> None:
    assert sorted(llm.tokenizer.eog_ids) == sorted(golden["eog_token_ids"])
    for prompt in golden["prompts"]:
        assert llm.encode(prompt["text"]) == prompt["token_ids"], prompt["name"]
        assert llm.decode(prompt["token_ids"]) == prompt["text"]
        if "messages" in prompt:
            assert llm.chat_tokens(prompt["messages"]) == prompt["token_ids"]


def test_greedy_is_the_same_alone_in_a_batch_and_in_chunks(
    llm: quire.LLM, model_path: Any, golden: dict[str, Any]
) -> None:
    prompts = [p["token_ids"] for p in golden["prompts"]]
    assert len(prompts) == 16
    alone = [llm.generate(p, max_tokens=24).token_ids for p in prompts]
    llm.forget()  # so that nothing but the batch computes the prompts
    together = [c.token_ids for c in llm.generate(prompts, max_tokens=24)]
    assert together == alone
    for chunk in (1, 7, 100):
        llm.engine.scheduler.max_tokens, whole = chunk, llm.engine.scheduler.max_tokens
        try:
            some = [3, 5, 9] if chunk == 1 else range(16)
            for i in some:
                llm.forget()
                assert llm.generate(prompts[i], max_tokens=24).token_ids == alone[i]
        finally:
            llm.engine.scheduler.max_tokens = whole
    with quire.load(model_path, threads=1) as single:
        assert [single.generate(p, max_tokens=8).token_ids for p in prompts[:4]] == [
            a[:8] for a in alone[:4]
        ]


@pytest.mark.parametrize(
    "kinds", [("f32", "f32"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q8_0", "q4_0")]
)
def test_every_kv_type_runs_and_stays_near(
    llm: quire.LLM, model_path: Any, golden: dict[str, Any], kinds: tuple[str, str]
) -> None:
    ids = golden["perplexity"]["token_ids"][:256]
    with quire.load(model_path, type_k=kinds[0], type_v=kinds[1]) as other:
        got = logprobs(other.logits(ids))
    expected = logprobs(llm.logits(ids))
    kl = (np.exp(expected) * (expected - got)).sum(-1).mean()
    assert kl < {"f32": 0.01, "bf16": 0.02, "q8_0": 0.02, "q4_0": 0.2}[kinds[1]]


def test_a_cached_prefix_changes_nothing(llm: quire.LLM, golden: dict[str, Any]) -> None:
    prompt = golden["prompts"][3]["token_ids"]
    llm.forget()
    cold = llm.generate(prompt, max_tokens=32)
    warm = llm.generate(prompt, max_tokens=32)
    half = llm.generate(prompt[:100] + prompt[:50], max_tokens=32)
    llm.forget()
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(prompt) - 1)
    assert half.cached_tokens == 100
    assert cold.token_ids == warm.token_ids
    assert half.token_ids == llm.generate(prompt[:100] + prompt[:50], max_tokens=32).token_ids


def test_pages_come_back(llm: quire.LLM) -> None:
    def held() -> list[int]:
        groups = llm.memory.as_dict()["stats"].values()
        return [g[what] for g in groups for what in ("pages_used", "bytes_committed")]

    llm.forget()
    before = held()
    stream = llm.stream("Count to ten: one, two,", max_tokens=40)
    next(iter(stream))
    stream.close()
    llm.generate(["a", "b"], max_tokens=3)
    with pytest.raises(quire.errors.ContextError):
        llm.generate([1] * (llm.n_ctx + 1))
    llm.forget()
    llm.memory.audit()
    assert held() == before
