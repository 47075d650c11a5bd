"""llama.cpp's own paths for looking: `/props` and `/slots`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import quire
from quire.engine.loop import Job
from quire.server.run import Run
from quire.server.state import State
from quire.server.wire import as_json


def settings_of(run: Run) -> dict[str, Any]:
    """How a request's tokens are chosen."""
    chosen = run.ask.sampling
    return {
        "n_predict": chosen.max_tokens, "seed": chosen.seed, "temperature": chosen.temperature,
        "top_k": chosen.top_k, "top_p": chosen.top_p, "min_p": chosen.min_p,
        "repeat_penalty": chosen.repetition_penalty, "stop": list(run.ask.stop),
    }  # fmt: skip


async def props(request: Request) -> Response:
    """What the server is set to."""
    state: State = request.app.state.quire
    model = state.models.find(request.query_params.get("model"))
    async with state.models.using(model) as llm:
        tokenizer = llm.tokenizer
        return as_json({
            "default_generation_settings": {"n_ctx": llm.n_ctx, "params": {}},
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
        for job in run.jobs:
            told.append({
                "id": len(told), "id_task": len(told), "n_ctx": run.ask.model.llm.n_ctx,
                "is_processing": not job.done, "params": settings_of(run),
                "prompt_tokens": job.prompt_tokens, "next_token": [_next(job)],
            })  # fmt: skip
    while len(told) < state.settings.max_running:
        told.append({"id": len(told), "is_processing": False})
    return as_json(told)
