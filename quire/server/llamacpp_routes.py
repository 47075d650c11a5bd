"""llama.cpp's own paths for generating: `/completion` and `/infill`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.llm import LLM
from quire.server import turn as turns
from quire.server.asking import in_thread
from quire.server.completions_routes import CompletionBody, begin_completion
from quire.server.dialect import stopped_by
from quire.server.errors import ApiError, about
from quire.server.llamacpp_about import DEFAULTS, settings_of
from quire.server.logprobs import with_ids
from quire.server.progress import Watched
from quire.server.prompts import prompts_of
from quire.server.run import Delta, Run
from quire.server.timings import timings
from quire.server.turn import Turn, asked_model
from quire.server.usage import memory
from quire.server.wire import as_json, event, read_as
from quire.text.infill import infill_tokens
from quire.types import TokenLogprob

_WORDS = {
    "max_tokens": "n_predict", "logprobs": "n_probs", "repetition_penalty": "repeat_penalty",
}  # fmt: skip
"""What llama.cpp's clients call some of our fields."""
_MOST_FIELDS, _LONGEST_FIELD = 256, 256
"""Of `response_fields`: each is looked for in each answer."""


class LlamaBody(msgspec.Struct, kw_only=True):
    """What a client sends, with llama.cpp's defaults; what it sends besides is not looked at."""

    prompt: str | dict[str, Any] | list[Any]
    """A text, token ids, both in turn, or a list of such prompts."""
    model: str | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    temperature: float = DEFAULTS.temperature
    top_k: int = DEFAULTS.top_k
    top_p: float = DEFAULTS.top_p
    min_p: float = DEFAULTS.min_p
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    logit_bias: Any = None
    n_probs: int | None = None
    response_fields: list[str] | None = None
    """What of the answer is told, as `content` or `timings/predicted_n`; else all of it."""
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    session_id: str | None = None
    cache_salt: str | None = None

    def as_completion(self, bias: dict[str, float] | None) -> CompletionBody:
        """The same in OpenAI's words."""
        most = self.n_predict if self.n_predict is not None else self.max_tokens
        return CompletionBody(
            prompt="", model=self.model,
            max_tokens=2**31 - 1 if most is None or most < 0 else most,
            echo=most == 0,  # the prompt is computed, and nothing follows
            temperature=max(self.temperature, 0.0), top_k=self.top_k, top_p=self.top_p,
            min_p=self.min_p, seed=self.seed, stop=self.stop,
            repetition_penalty=self.repeat_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, ignore_eos=self.ignore_eos,
            logit_bias=bias, logprobs=self.n_probs or None,
            json_schema=self.json_schema, grammar=self.grammar,
            stream=self.stream, session_id=self.session_id, cache_salt=self.cache_salt,
        )  # fmt: skip


def _bias(llm: LLM, given: Any) -> dict[str, float]:
    """llama.cpp's form: pairs of a token id, or a text for all of its tokens, and a number.

    False forbids them.
    """
    made: dict[str, float] = {}
    try:
        for what, bias in given.items() if isinstance(given, dict) else given:
            for token in _biased(llm, what):
                made[str(token)] = -1000.0 if bias is False else float(bias)
    except (TypeError, ValueError, OverflowError):
        raise ApiError(
            400, "logit_bias is a list of [id or text, number]", param="logit_bias"
        ) from None
    return made


def _biased(llm: LLM, what: Any) -> list[int]:
    """The tokens that a bias is for."""
    if isinstance(what, str) and not what.isdecimal():
        return llm.tokenizer.encode(what, add_special=False, max_tokens=llm.n_ctx)
    if not isinstance(what, (int, str)) or isinstance(what, bool):
        raise TypeError("neither a token id nor a text")
    return [int(what)]


class OtherFile(msgspec.Struct, kw_only=True):
    """A file that is shown beside the one with the gap."""

    text: str
    filename: str | None = None


class InfillBody(LlamaBody, kw_only=True):
    """A text with a gap; `prompt` is what the gap begins with."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[OtherFile] = []


async def completion(request: Request) -> Response:
    """Continues one prompt or several."""
    body = await read_as(request, LlamaBody)
    return await _completed(request, body, lambda llm, at: prompts_of(llm, body.prompt, at))


async def infill(request: Request) -> Response:
    """Fills a gap in a text."""
    body = await read_as(request, InfillBody)
    if body.session_id is not None:
        raise ApiError(400, "a session has no gap to fill", param="session_id")
    files = [(other.filename, other.text) for other in body.input_extra]
    before, behind = body.input_prefix + body.prompt, body.input_suffix

    def prompts(llm: LLM, at: int) -> list[list[int]]:
        return [infill_tokens(llm.tokenizer, before, behind, files, llm.n_ctx)]

    return await _completed(request, body, prompts)


async def _completed(
    request: Request, body: LlamaBody, read: Callable[[LLM, int], list[list[int]]]
) -> Response:
    if body.n_predict == 0 and body.session_id is not None:
        raise ApiError(
            400, "n_predict 0 makes nothing: POST /v1/sessions/{id}/append adds to a session",
            param="n_predict",
        )  # fmt: skip
    fields = body.response_fields or ()
    if len(fields) > _MOST_FIELDS or any(len(path) > _LONGEST_FIELD for path in fields):
        most = f"{_MOST_FIELDS} paths, each of {_LONGEST_FIELD} characters at most"
        raise ApiError(400, f"response_fields has at most {most}", param="response_fields")
    bias = None
    if body.logit_bias:
        models = request.app.state.quire.models
        async with models.using(await asked_model(request, body.as_completion(None))) as llm:
            with about("logit_bias"):
                bias = await in_thread(_bias, llm, body.logit_bias)
    beginning = begin_completion(
        request, body.as_completion(bias), _WORDS, lambda llm, _, behind: read(llm, behind)
    )
    if body.stream:
        return await turns.stream(request, beginning, lambda turn: _events(turn, body), _refused)
    made = await turns.finish(request, beginning, lambda turn: _whole(turn.run, body))
    if body.response_fields:
        made = [_only(one, body.response_fields) for one in made]
    return as_json(made[0] if len(made) == 1 else made)


def _only(made: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    """Some fields of an answer, by their paths."""
    told = {}
    for path in fields:
        value: Any = made
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            told[path] = value
    return told


async def _whole(run: Run, body: LlamaBody) -> list[dict[str, Any]]:
    parts: list[list[Delta]] = [[] for _ in range(run.choices)]
    async for delta in run.deltas():
        parts[delta.choice].append(delta)
    made = []
    for at, said in enumerate(parts):
        tokens = [token for part in said for token in part.token_ids]
        logprobs = [one for part in said for one in part.logprobs]
        end = await _end(run, body, at, "".join(part.text for part in said), tokens)
        made.append(end | await _probabilities(run, logprobs))
    return made


async def _events(turn: Turn, body: LlamaBody) -> AsyncGenerator[bytes, None]:
    run = turn.run
    watched = Watched(run, body.return_progress, body.timings_per_token)
    try:
        async for progress in watched.prompt():
            yield event({"index": 0, "content": "", "tokens": [], "stop": False, **progress})
        async for delta in run.deltas():
            at, job = delta.choice, run.jobs[delta.choice]
            if delta.text or delta.token_ids:  # an end, or the rest of a stop string, has no text
                yield event({
                    "index": at, "content": delta.text, "tokens": delta.token_ids, "stop": False,
                    "id_slot": -1, "tokens_predicted": len(job.token_ids),
                    "tokens_evaluated": job.prompt_tokens,
                    **await _probabilities(run, delta.logprobs), **watched.token(at),
                })  # fmt: skip
            if delta.finish_reason:
                yield event(await _end(run, body, at, "", []))
    except Exception as error:
        yield _refused(turn.state.told(error))


def _refused(error: ApiError) -> bytes:
    return event(error.as_dict())


async def _end(run: Run, body: LlamaBody, at: int, text: str, tokens: list[int]) -> dict[str, Any]:
    """How one answer ended, and what that one took: there may be thousands."""
    job, word = run.jobs[at], None
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    if job.finish_reason == "stop":
        word = stopped_by(run, stops, at)
    kind = "word" if word else "eos" if job.finish_reason == "stop" else "limit"
    llm = run.llm
    return {
        "index": at, "content": text, "tokens": tokens if body.return_tokens else [],
        "id_slot": -1, "stop": True, "model": run.ask.model.name,
        "tokens_predicted": len(job.token_ids), "tokens_evaluated": job.prompt_tokens,
        "tokens_cached": job.sequence.cached,
        "prompt": await in_thread(llm.decode, run.ask.prompts[at]),
        "truncated": _cut_off(run, at), "has_new_line": "\n" in job.text,
        "stop_type": kind, "stopping_word": word or "", "generation_settings": settings_of(run),
        "timings": timings([job], [job]), "memory": memory([job]),
    }  # fmt: skip


def _cut_off(run: Run, at: int) -> bool:
    """Whether an answer ended because the context was full."""
    job, most = run.jobs[at], run.ask.sampling.max_tokens
    return run.ask.answers and job.finish_reason == "length" and len(job.token_ids) < most


async def _probabilities(run: Run, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    """Of the tokens that came, where that was asked for."""
    if run.ask.sampling.logprobs is None:
        return {}
    return {"completion_probabilities": await with_ids(run.llm.tokenizer, logprobs)}
