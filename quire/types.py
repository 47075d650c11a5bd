"""The words that travel between layers: what is asked for, and what comes back.

Who owns what: the engine owns the sequences that serve a request; a `Completion` belongs to the
caller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from quire.errors import QuireError
from quire.sampling import Sampling as Sampling
from quire.sampling import SamplingFields as SamplingFields

FinishReason = Literal["stop", "length", "cancelled"]
Pooling = Literal["last", "mean", "cls"]
"""Which tokens stand for a text as a vector: the last, all in the mean, or the first."""
POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls")


def shortened(text: str, most: int = 60) -> str:
    """A text as far as one line shows it."""
    return text if len(text) <= most else text[: most - 1] + "…"


@dataclass(frozen=True)
class Json:
    """Constrains output to JSON that fits a schema (any JSON when the schema is empty)."""

    schema: Mapping[str, Any] | str = field(default_factory=dict)


@dataclass(frozen=True)
class Regex:
    """Constrains output to text that a regular expression matches as a whole."""

    pattern: str


@dataclass(frozen=True)
class Grammar:
    """Constrains output to a grammar: in llama.cpp's notation (GBNF), or in Lark's."""

    text: str


@dataclass(frozen=True)
class Behind:
    """Constrains output behind something that is written before, such as reasoning."""

    before: str
    """Rules in Lark's notation, of which `before` is what comes first."""
    constraint: Json | Regex | Grammar
    instead: Grammar | None = None
    """What may be written instead of all that: calls, in Lark's notation."""


Constraint = Json | Regex | Grammar | Behind


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model, with the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """What one step added to one sequence."""

    sequence: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: QuireError | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds, as the caller saw them, and the tokens they bought."""

    prefill_s: float
    decode_s: float
    first_token_s: float
    prompt_tokens: int
    decoded_tokens: int
    load_s: float = 0.0
    layers: int = 0
    """Layers that each token went through."""
    experts: int = 0
    """Experts of a layer that each token used; 0 where there are none."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second until the first token came."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first one."""
        return self.decoded_tokens / self.decode_s if self.decode_s > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, rates included."""
        return {
            **dataclasses.asdict(self),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }


@dataclass
class Speculation:
    """What drafts came to; seconds are those of the steps that had one, shared by their batch."""

    drafted: int = 0
    """Tokens proposed and computed."""
    accepted: int = 0
    """Those of them that were right."""
    rounds: int = 0
    """Steps that had a draft."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0

    @property
    def mean_accepted(self) -> float:
        """Tokens of a draft that were right, in the mean of all rounds."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were right."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, means included."""
        means = {"mean_accepted": self.mean_accepted, "acceptance": self.acceptance}
        return dataclasses.asdict(self) | means


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model wants to be called, and with what."""

    id: str = field(compare=False)
    name: str
    arguments: str
    """A JSON object."""

    def as_dict(self) -> dict[str, Any]:
        """As messages have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, repr=False)
class Completion:
    """What a request came to."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    speculation: Speculation | None = None
    """None when nobody asked for it."""
    reasoning: str = ""
    """What a chat model thought before it answered; not part of the text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that a chat model calls; not part of the text."""
    exact_batches: bool = True
    """Whether its bits depend on nothing but its tokens: see `quire.load`."""

    def __repr__(self) -> str:
        calls = f", calls {', '.join(call.name for call in self.tool_calls)}"
        return (
            f"<Completion {shortened(self.text)!r}, {len(self.token_ids)} tokens, "
            f"{self.finish_reason}{calls if self.tool_calls else ''}>"
        )

    def _repr_html_(self) -> str:
        parts = [f"<em>{escape(self.reasoning)}</em>"] if self.reasoning else []
        parts.append(escape(self.text))
        parts += [escape(f"{call.name}({call.arguments})") for call in self.tool_calls]
        speed = f"{self.timings.decode_tokens_per_s:,.1f} tokens/s"
        facts = f"{len(self.token_ids)} tokens, {self.finish_reason}, {speed}"
        blocks = "".join(f'<div style="white-space:pre-wrap">{part}</div>' for part in parts)
        return f"{blocks}<small>{facts}</small>"

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to go on with the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message
