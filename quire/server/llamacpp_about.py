"""llama.cpp's own paths for looking: `/props` and `/slots`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import quire
from quire.engine.work import Job
from quire.server.run import Run
from quire.server.state import State
from quire.server.wire import as_json
from quire.types import Sampling

DEFAULTS = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, max_tokens=2**31 - 1)
"""How tokens are chosen where a client of `/completion` does not say."""


_MOST_BIASES = 1 << 16


def settings_of(run: Run) -> dict[str, Any]:
    """How a request's tokens are chosen, as each of its answers says, which may be thousands.

    Biases are left out where there would be too many of them in all.
    """
    chosen = run.ask.sampling
    if len(chosen.logit_bias) * run.choices > _MOST_BIASES:
        chosen = chosen.replace(logit_bias={})
    ends = run.llm.engine.end_ids if chosen.ignore_eos else ()
    return _told(chosen, run.ask.stop, ends)


def _told(chosen: Sampling, stop: Iterable[str], never: Iterable[int]) -> dict[str, Any]:
    """In llama.cpp's words: no limit is -1, no seed is all ones, what must not come has no bias."""
    most = -1 if chosen.max_tokens >= 2**31 - 1 else chosen.max_tokens
    biases: dict[int, float | None] = {**chosen.logit_bias, **dict.fromkeys(sorted(never))}
    return {
        "n_predict": most, "max_tokens": most,
        "seed": 2**32 - 1 if chosen.seed is None else chosen.seed,
        "temperature": chosen.temperature, "top_k": chosen.top_k, "top_p": chosen.top_p,
        "min_p": chosen.min_p, "repeat_penalty": chosen.repetition_penalty,
        "presence_penalty": chosen.presence_penalty,
        "frequency_penalty": chosen.frequency_penalty, "n_probs": chosen.logprobs or 0,
        "ignore_eos": chosen.ignore_eos, "stop": list(stop),
        "logit_bias": [{"token": token, "bias": bias} for token, bias in biases.items()],
    }  # fmt: skip


async def props(request: Request) -> Response:
    """What the server is set to."""
    state: State = request.app.state.quire
    model = state.models.find(request.query_params.get("model"))
    async with state.models.using(model) as llm:
        tokenizer = llm.tokenizer
        return as_json({
            "default_generation_settings": {"n_ctx": llm.n_ctx, "params": _told(DEFAULTS, (), ())},
            "total_slots": state.settings.max_running, "model_alias": model.name,
            "model_path": model.name, "chat_template": tokenizer.chat_template or "",
            "bos_token": tokenizer.token_text(tokenizer.bos),
            "eos_token": tokenizer.token_text(tokenizer.eos),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"quire-{quire.__version__}", "is_sleeping": False,
        })  # fmt: skip


def _next(job: Job) -> dict[str, Any]:
    made, most = len(job.token_ids), job.request.sampling.max_tokens
    return {
        "has_next_token": not job.done, "has_new_line": "\n" in job.text,
        "n_remain": -1 if most >= 2**31 - 1 else most - made, "n_decoded": made,
    }  # fmt: skip


async def slots(request: Request) -> Response:
    """Requests under way, each as the slot that llama.cpp would have for it."""
    state: State = request.app.state.quire
    told: list[dict[str, Any]] = []
    for run in state.runs:
        settings = settings_of(run)
        for job in run.jobs:
            told.append({
                "id": len(told), "id_task": len(told), "n_ctx": run.llm.n_ctx,
                "is_processing": not job.done, "params": settings,
                "prompt_tokens": job.prompt_tokens, "next_token": [_next(job)],
            })  # fmt: skip
    n_ctx = await state.models.context(state.models.default)
    while len(told) < state.settings.max_running:
        told.append({"id": len(told), "n_ctx": n_ctx, "is_processing": False})
    return as_json(told)
