"""Ollama's `/api/tags`, `/api/ps`, `/api/show` and `/api/version`: which models there are."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import quire
from quire.api.llm import LLM
from quire.server.models import ServedModel
from quire.server.ollama_routes import KINDS, served
from quire.server.state import State
from quire.server.wire import as_json, read_as
from quire.text.styles import style_of

_NEVER = datetime(2300, 1, 1, tzinfo=UTC).timestamp()


class ShowBody(msgspec.Struct, kw_only=True):
    """Which model; `name` is the older word."""

    model: str = ""
    name: str = ""


async def version(request: Request) -> Response:
    """Which Quire this is."""
    return as_json({"version": quire.__version__})


async def tags(request: Request) -> Response:
    """All models."""
    state: State = request.app.state.quire
    return as_json({"models": [_told(model) for model in state.models.by_name.values()]})


async def loaded(request: Request) -> Response:
    """Those in memory."""
    state: State = request.app.state.quire
    told = []
    for model in state.models.loaded:
        held = model.llm.budget.used
        on_gpu = held if model.llm.settings.gpu is not None else 0
        told.append({
            **_told(model), "size": held, "size_vram": on_gpu,
            "expires_at": _time(min(state.models.expires(model), _NEVER)),
            "context_length": model.llm.n_ctx,
        })  # fmt: skip
    return as_json({"models": told})


async def show(request: Request) -> Response:
    """One model."""
    state: State = request.app.state.quire
    body = await read_as(request, ShowBody, KINDS)
    model = served(request, body.model or body.name)
    async with state.models.using(model) as llm:
        template = llm.tokenizer.chat_template or ""
        arch = llm.architecture
        return as_json({
            "modelfile": "", "parameters": "", "template": template, "details": _details(model),
            "capabilities": _capabilities(llm, template),
            "model_info": {
                "general.architecture": arch, f"{arch}.context_length": llm.model.n_ctx_train,
                f"{arch}.block_count": llm.model.n_layers,
                f"{arch}.vocab_size": llm.tokenizer.n_vocab,
            },
            "modified_at": _modified(model),
        })  # fmt: skip


def _capabilities(llm: LLM, template: str) -> list[str]:
    """What it can be asked for: some clients ask for nothing else."""
    style, marks = style_of(template), ("fim_pre", "fim_suf", "fim_mid")
    some = {
        "tools": style.takes_tools, "thinking": style.reasoning or style.name == "gpt-oss",
        "insert": all(mark in llm.tokenizer.fill for mark in marks),
    }  # fmt: skip
    return ["completion", "embedding", *(name for name, can in some.items() if can)]


def _told(model: ServedModel) -> dict[str, Any]:
    return {
        "name": model.name, "model": model.name, "modified_at": _modified(model),
        "size": _size(model), "digest": model.llm.fingerprint if model.loaded else "",
        "details": _details(model),
    }  # fmt: skip


def _details(model: ServedModel) -> dict[str, Any]:
    family = model.llm.architecture if model.loaded else ""
    path = _path(model)
    return {
        "parent_model": "", "format": "gguf" if path and path.suffix == ".gguf" else "safetensors",
        "family": family, "families": [family] if family else None,
        "parameter_size": "", "quantization_level": "",
    }  # fmt: skip


def _path(model: ServedModel) -> Path | None:
    """Where a model's file lies, if that is known without fetching it."""
    path = model.llm.path if model.loaded else Path(model.source)
    return path if path.exists() else None


def _size(model: ServedModel) -> int:
    path = _path(model)
    if path is None:
        return 0
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _modified(model: ServedModel) -> str:
    path = _path(model)
    at = path.stat().st_mtime if path else float(model.created)
    return _time(at)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
