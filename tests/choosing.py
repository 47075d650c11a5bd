"""Requests that ask for all kinds of samples at once, and what becomes of them."""

from __future__ import annotations

from typing import Any

import quire

Said = list[tuple[list[int], Any]]
PENALTIES = {"repetition_penalty": 1.7, "frequency_penalty": 9.0, "presence_penalty": 4.0}
"""Logits of small random models lie far apart."""
BIAS = {7: 30.0, 9: -1000.0, 11: 28.5}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": PENALTIES,
    "hot penalties": {"temperature": 9.0, **PENALTIES},
    "bias": {"logit_bias": BIAS},
    "logprobs": {"logprobs": 4},
    "all": {"temperature": 9.0, "top_p": 0.9, "logit_bias": BIAS, "logprobs": 2, **PENALTIES},
}
PROMPTS = [[3 + i, 4, 5, 6 + i] for i in range(len(WAYS))]


def stream(llm: quire.LLM, i: int, count: int, **more: Any) -> Any:
    """The i-th of all ways."""
    way = list(WAYS.values())[i]
    return llm.stream(PROMPTS[i], max_tokens=count, ignore_eos=True, seed=i, **way, **more)


def result(stream: Any) -> tuple[list[int], Any]:
    """What a request made: tokens, and what was told of them."""
    list(stream)
    done = stream.completion
    told = done.logprobs and [(t.token_id, t.logprob, t.top) for t in done.logprobs]
    return list(done.token_ids), told


def alone(llm: quire.LLM, count: int) -> Said:
    """Each request by itself."""
    return [result(stream(llm, i, count)) for i in range(len(WAYS))]


def together(llm: quire.LLM, count: int) -> Said:
    """All of them at once, one of which is given up; then those that are left go on."""
    gone = stream(llm, 1, 4 * count)
    streams = [stream(llm, i, count) for i in range(len(WAYS))]
    for _ in range(count // 3):
        next(gone)
    gone.close()
    return [result(one) for one in streams]
