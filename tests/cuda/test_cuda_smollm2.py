"""A real model on a GPU: as near to exact arithmetic as on CPUs, and nothing beyond f16's range."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire import config
from quire.errors import FetchError
from quire.weights import pull

pytestmark = pytest.mark.gpu
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2.json").read_text())
NOISE = 0.35
"""Of the exact margin: below it another token may be chosen; see tests/e2e."""


@pytest.fixture(scope="module")
def llm() -> Iterator[quire.LLM]:
    try:
        path = pull.resolve("smollm2", config.cache_folder())
    except FetchError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")
    with quire.load(path, device="cuda") as loaded:
        yield loaded
        loaded.memory.audit()


def logprobs(logits: np.ndarray) -> np.ndarray:
    assert np.isfinite(logits).all()
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_it_is_no_further_off_than_llama_cpp(llm: quire.LLM) -> None:
    off = []
    for prompt in GOLDEN["prompts"]:
        n = len(prompt["top"])
        got = logprobs(llm.logits(prompt["token_ids"] + prompt["greedy"][: n - 1])[-n:])
        off += [abs(got[i, top[0][0]] - top[0][1]) for i, top in enumerate(prompt["top"])]
    print(f"mean |Δ logprob| {np.mean(off):.4f}")
    assert np.mean(off) <= GOLDEN["llama_cpp_mean_abs_dlogprob_first16"]


def test_greedy_texts_follow_wherever_the_margin_is_clear(llm: quire.LLM) -> None:
    prompts: list[dict[str, Any]] = GOLDEN["prompts"]
    together = llm.generate([p["token_ids"] for p in prompts], max_tokens=64)
    for prompt, made in zip(prompts, together, strict=True):
        pairs = enumerate(zip(made.token_ids, prompt["greedy"], strict=False))
        first = next((i for i, (one, two) in pairs if one != two), None)
        assert first is None or prompt["margins"][first] < NOISE, prompt["name"]
        alone = llm.generate(prompt["token_ids"], max_tokens=64)
        assert alone.token_ids == made.token_ids, prompt["name"]
