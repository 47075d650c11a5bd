"""`/v1/completions`: prompts as they are, continued."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.llm import LLM
from quire.server import turn as turns
from quire.server.asking import Common, check_ids, in_thread
from quire.server.errors import ApiError, naming, worded
from quire.server.logprobs import Legacy, chat_form, of_prompt
from quire.server.progress import Watched
from quire.server.prompts import MOST_PROMPTS
from quire.server.run import Ask, Delta
from quire.server.session import ServedSession
from quire.server.state import State
from quire.server.turn import Turn, asked_model
from quire.server.wire import DONE, FINGERPRINT, as_json, event, read_as, refused
from quire.text.infill import infill_tokens
from quire.types import TokenLogprob


class CompletionBody(Common, kw_only=True):
    """What a client sends."""

    prompt: str | list[int | str | list[int]] | None = None
    """One text, token ids, or several of either."""
    logprobs: int | bool | None = None
    """How many likeliest tokens are told, in OpenAI's older form; true: as chats are told."""
    top_logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    """What comes behind: the model fills the gap between."""
    best_of: int | None = None

    @property
    def tops(self) -> int | None:
        """How many likeliest tokens are told, if log-probabilities are."""
        if isinstance(self.logprobs, bool):
            return (self.top_logprobs or 0) if self.logprobs else None
        return self.logprobs

    @property
    def only_scores(self) -> bool:
        """Whether nothing is to be generated: the prompt alone is told of."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def scores(self) -> int | None:
        """How many likeliest tokens are told beside a prompt's own, if those are scored."""
        if not self.echo or (self.tops is None and not self.only_scores):
            return None
        return self.tops or 0


ReadPrompts = Callable[[LLM, CompletionBody, int], list[list[int]]]
"""Token ids of a body's prompts, where so many tokens lie before them."""


async def completions(request: Request) -> Response:
    """Continues one prompt or several."""
    body = await read_as(request, CompletionBody)
    beginning = begin_completion(request, body, {})
    if body.streams:
        return await turns.stream(
            request, beginning, lambda turn: _Answer(turn, body).chunks(), refused
        )
    return as_json(await turns.finish(request, beginning, lambda turn: _Answer(turn, body).whole()))


async def begin_completion(
    request: Request, body: CompletionBody, words: Mapping[str, str],
    read: ReadPrompts | None = None,
) -> Turn:  # fmt: skip
    """Puts prompts on the engine, whatever dialect and words they came in."""
    with worded(words):
        return await _begun(request, body, read or _tokens)


async def _begun(request: Request, body: CompletionBody, read: ReadPrompts) -> Turn:
    state: State = request.app.state.quire
    _check(body)
    most = 1 if body.only_scores else 16 if body.max_tokens is None else body.max_tokens
    sampling = body.sampling(most, body.tops)
    n, stops, constraint, salt = body.choices, body.stops(), body.constraint(), body.salt
    model = await asked_model(request, body)

    async def ask(llm: LLM, session: ServedSession | None) -> Ask:
        behind = session.session.position if session else 0
        prompts = await in_thread(read, llm, body, behind)
        if len(prompts) * n > MOST_PROMPTS:
            many = f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} answers"
            raise ApiError(400, f"{many}; at most {MOST_PROMPTS} at a time", param="n")
        return Ask(
            model, prompts, sampling, n, stops, constraint, body.constraint_in,
            salt, request.scope["quire.key"], body.rank, session,
            scores=body.scores, answers=not body.only_scores,
        )  # fmt: skip

    return await Turn(state).begin(model, body.session_id, ask, "prompt")


def _check(body: CompletionBody) -> None:
    if body.best_of not in (None, 1, body.n):
        raise ApiError(400, "best_of is not supported; leave it out", param="best_of")
    if body.suffix and body.session_id is not None:
        raise ApiError(400, "a session has no gap to fill: leave suffix out", param="suffix")
    if body.scores is not None and body.session_id is not None:
        raise ApiError(400, "a session's prompt is not scored: leave echo out", param="echo")
    if body.only_scores and body.n not in (None, 1):
        raise ApiError(400, "with max_tokens 0 there is nothing to choose from", param="n")
    if body.prompt is None and body.session_id is None:
        raise ApiError(
            400, "prompt is missing: a text, token ids, or a list of them", param="prompt"
        )


def _tokens(llm: LLM, body: CompletionBody, behind: int) -> list[list[int]]:
    """Token ids of all prompts."""
    prompt: Any = body.prompt
    if prompt is None or prompt == []:
        prompt = ""
    if isinstance(prompt, str) or all(isinstance(one, int) for one in prompt):
        prompt = [prompt]
    elif len({type(one) for one in prompt}) > 1:
        raise ApiError(400, "prompts are texts, or lists of token ids, not both", param="prompt")
    if len(prompt) > MOST_PROMPTS:
        raise ApiError(400, f"at most {MOST_PROMPTS} prompts at a time", param="prompt")
    if body.session_id is not None and len(prompt) != 1:
        raise ApiError(400, "a session goes on with one prompt", param="prompt")
    if body.suffix:
        if not all(isinstance(one, str) for one in prompt):
            raise ApiError(400, "with a suffix, prompts are texts", param="prompt")
        with naming("suffix"):
            return [infill_tokens(llm.tokenizer, one, body.suffix, (), llm.n_ctx) for one in prompt]
    made = []
    for one in prompt:
        made.append(llm.tokens_of(one, behind) if isinstance(one, str) else check_ids(llm, one))
    return made


class _Answer:
    """Writes what comes in OpenAI's older form."""

    def __init__(self, turn: Turn, body: CompletionBody) -> None:
        self._state = turn.state
        self._run = turn.run
        self._llm = turn.run.llm
        self._body = body
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion",
            "created": int(time.time()), "model": turn.run.ask.model.name,
            "system_fingerprint": FINGERPRINT,
        }  # fmt: skip
        self._legacy: dict[int, Legacy] = {}
        self._echoed: dict[int, str] = {}

    async def whole(self) -> dict[str, Any]:
        """One object."""
        parts: list[list[Delta]] = [[] for _ in range(self._run.choices)]
        async for delta in self._run.deltas():
            parts[delta.choice].append(delta)
        choices = []
        for index, deltas in enumerate(parts):
            text = await self._echo(index) + "".join(d.text for d in deltas)
            logprobs = self._scores(index) + [one for d in deltas for one in d.logprobs]
            choices.append(await self._choice(index, text, logprobs, deltas[-1].finish_reason))
        return {**self._head, "choices": choices, **self._end()}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        going = self._run.choices
        fresh = set(range(going))
        usage = {"usage": None} if self._body.wants_usage else {}
        watched = Watched(self._run, self._body.return_progress, self._body.timings_per_token)
        try:
            async for progress in watched.prompt():
                yield event({**self._head, "choices": [], **usage, **progress})
            async for delta in self._run.deltas():
                text, logprobs = delta.text, delta.logprobs
                if delta.choice in fresh:
                    fresh.discard(delta.choice)
                    text = await self._echo(delta.choice) + text
                    logprobs = self._scores(delta.choice) + logprobs
                going -= delta.finish_reason is not None
                choice = await self._choice(delta.choice, text, logprobs, delta.finish_reason)
                end = self._end(usage=False) if not going and not usage else {}
                told = {"choices": [choice], **usage, **watched.token(delta.choice), **end}
                yield event({**self._head, **told})
            if self._body.wants_usage:
                yield event({**self._head, "choices": [], **self._end()})
        except Exception as error:
            yield event(self._state.told(error).as_dict())
        yield DONE

    async def _echo(self, index: int) -> str:
        """The prompt of a choice; many choices may have the same, and it may be long."""
        if not self._body.echo:
            return ""
        prompt = index // self._run.ask.n
        if prompt not in self._echoed:
            ids = self._run.ask.prompts[prompt]
            self._echoed[prompt] = await in_thread(self._llm.decode, ids)
        return self._echoed[prompt]

    def _scores(self, index: int) -> list[TokenLogprob]:
        if self._body.scores is None:
            return []
        prompt = index // self._run.ask.n
        return of_prompt(self._run.ask.prompts[prompt], self._run.scores[prompt])

    async def _choice(
        self, index: int, text: str, logprobs: list[TokenLogprob], finish: str | None
    ) -> dict[str, Any]:
        told = None
        if self._body.logprobs is True:
            told = await chat_form(self._llm.tokenizer, logprobs)
        elif self._body.tops is not None:
            if index not in self._legacy:
                self._legacy[index] = Legacy(self._llm.tokenizer)
            told = await self._legacy[index].form(logprobs)
        return {"index": index, "text": text, "logprobs": told, "finish_reason": finish}

    def _end(self, usage: bool = True) -> dict[str, Any]:
        run = self._run
        end = {"timings": run.timings(), "memory": run.memory()}
        return {"usage": run.usage(), **end} if usage else end
