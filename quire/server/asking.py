"""What OpenAI's two kinds of generation requests have in common, checked and put in our words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from quire.api.arguments import check_salt
from quire.api.llm import LLM
from quire.server.errors import ApiError
from quire.types import Constraint, Grammar, Json, Regex, Sampling

MOST_CHOICES = 128
MOST_TOPS = 100
_MOST_STOPS, _MOST_STOP_TEXT = 256, 8192
_MOST_SCHEMA = 256 << 10
"""Bytes of a schema that comes as a text, which is one value of a body however many are in it."""
_MOST = 2**31 - 1
_PLAIN = Sampling(temperature=1.0)
"""How OpenAI chooses tokens of a request that does not say."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream ends with."""

    include_usage: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """Fields of completions and chat; what clients send besides is not looked at."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None

    @property
    def choices(self) -> int:
        """How many answers are wanted."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MOST_CHOICES:
            raise ApiError(400, f"n must be 1 to {MOST_CHOICES}, not {n}", param="n")
        if self.session_id is not None and n != 1:
            raise ApiError(400, "a session goes on in one way: n must be 1; fork it", param="n")
        return n

    @property
    def streams(self) -> bool:
        """Whether it is sent as it comes."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with what it took."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def salt(self) -> str:
        """Whose cached prefixes it shares."""
        return check_salt(self.cache_salt or "")

    @property
    def rank(self) -> int:
        """Its place in the queue; lower comes first."""
        return max(-1000, min(self.priority or 0, 1000))

    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        stop = self.stop or []
        found = (stop,) if isinstance(stop, str) else tuple(stop)
        if len(found) > _MOST_STOPS or sum(map(len, found)) > _MOST_STOP_TEXT:
            most = f"{_MOST_STOPS} texts, of {_MOST_STOP_TEXT} characters in all"
            raise ApiError(400, f"stop has at most {most}", param="stop")
        return tuple(s for s in found if s)

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, default: Sampling = _PLAIN
    ) -> Sampling:
        """How tokens are chosen; what the request does not say is as in the default."""
        seed = self.seed
        return default.replace(
            temperature=_or(self.temperature, default.temperature),
            top_p=_or(self.top_p, default.top_p),
            top_k=max(_or(self.top_k, default.top_k), 0),
            min_p=_or(self.min_p, default.min_p),
            repetition_penalty=_or(self.repetition_penalty, default.repetition_penalty),
            presence_penalty=_or(self.presence_penalty, default.presence_penalty),
            frequency_penalty=_or(self.frequency_penalty, default.frequency_penalty),
            seed=None if seed is None or seed == -1 else seed % 2**64,
            max_tokens=_MOST if max_tokens is None else max_tokens,
            logprobs=logprobs,
            logit_bias=self._bias(),
            ignore_eos=bool(self.ignore_eos),
        )

    def _bias(self) -> dict[int, float]:
        try:
            return {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise ApiError(400, "logit_bias has a number by token id", param="logit_bias") from None

    def constraint(self) -> Constraint | None:
        """What the answer must look like."""
        form, structured = self.response_format, self.structured_outputs
        if form and form.get("type") in (None, "text"):
            form = None
        if sum(bool(one) for one in (form, structured, self.json_schema, self.grammar)) > 1:
            raise ApiError(
                400, "response_format, structured_outputs, json_schema and grammar exclude each "
                "other",
            )  # fmt: skip
        if form:
            return _response_format(form)
        if self.json_schema is not None:
            return Json(self.json_schema)
        if self.grammar:
            return Grammar(self.grammar)
        return _structured(structured) if structured else None

    @property
    def constraint_in(self) -> str | None:
        """The field that says what the answer must look like."""
        names = ("response_format", "structured_outputs", "json_schema", "grammar")
        return next((name for name in names if getattr(self, name)), None)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _response_format(form: dict[str, Any]) -> Constraint:
    match form:
        case {"type": "json_object", "schema": dict(schema)}:
            return Json(schema)
        case {"type": "json_object"}:
            return Json({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Json(schema)
        case {"type": "json_schema", "schema": dict(schema)}:
            return Json(schema)
    raise ApiError(
        400, "response_format is {'type': 'text'}, {'type': 'json_object'} or {'type': "
        "'json_schema', 'json_schema': {'schema': {…}}}", param="response_format",
    )  # fmt: skip


_STRUCTURED = "structured_outputs"


def _structured(wanted: dict[str, Any]) -> Constraint:
    """vLLM's form: one of json, regex, choice, grammar."""
    ways = [name for name, value in wanted.items() if value not in (None, False)]
    match {name: wanted[name] for name in ways}:
        case {"json": dict(schema), **rest} if not rest:
            return Json(schema)
        case {"json": str(schema), **rest} if not rest:
            if len(schema) > _MOST_SCHEMA:
                most = f"{len(schema):,} characters, and may have {_MOST_SCHEMA:,}"
                raise ApiError(400, f"structured_outputs.json has {most}", param=_STRUCTURED)
            try:
                return Json(dict(json.loads(schema)))
            except (ValueError, TypeError, RecursionError):
                pass
        case {"json_object": True, **rest} if not rest:
            return Json({"type": "object"})
        case {"regex": str(pattern), **rest} if not rest:
            return Regex(pattern)
        case {"grammar": str(grammar), **rest} if not rest:
            return Grammar(grammar)
        case {"choice": [_, *_] as choices, **rest} if not rest:
            if all(isinstance(one, str) for one in choices):
                return Grammar("start: " + " | ".join(json.dumps(one) for one in choices))
    raise ApiError(
        400, "structured_outputs has one of json, regex, choice, grammar, json_object",
        param=_STRUCTURED,
    )  # fmt: skip


async def in_thread(fn: Any, *args: Any) -> Any:
    """Templates and tokenising take their time: not on the event loop."""
    return await asyncio.to_thread(fn, *args)


def check_ids(llm: LLM, ids: list[int], param: str = "prompt") -> list[int]:
    """Token ids that are some of the model's."""
    n_vocab = llm.tokenizer.n_vocab
    for token in ids:
        if not 0 <= token < n_vocab:
            raise ApiError(
                400, f"token id {token} is outside the vocabulary of {n_vocab}", param=param
            )
    return ids
