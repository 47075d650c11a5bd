"""Between what people write and token ids."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from quire.api.arguments import listed, messages_of, template_options_of
from quire.engine.signals import SignalsLater
from quire.errors import RequestError
from quire.text.answers import AnswerReader
from quire.text.call_grammar import before_answer, call_grammar
from quire.text.calls import ToolChoice, Tools, chosen_tool, tools_of
from quire.text.styles import Style, style_of
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import Behind, Completion, Constraint, Grammar, Json, Regex
from quire.weights.file import WeightFile

Prompt = str | Seq[int]
"""Text, or token ids that are taken as they are."""
Several = list[str] | list[list[int]] | list[Prompt] | tuple[Prompt, ...]
"""Prompts that are continued at once."""
Messages = Seq[Mapping[str, Any]]
"""A conversation: each message has a role and a content."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation that is ready for the model's answer."""

    text: str
    tokens: list[int]
    style: Style
    tools: Tools | None
    """Those that it may call."""
    constraint: Grammar | None
    """What it must write, where it has to call one."""
    before: str = ""
    """Rules of what comes before the answer itself, as in `types.Behind`."""
    may_call: Callable[[], Grammar] | None = None
    """Makes the grammar of calls, where it may write them instead of an answer."""

    def __repr__(self) -> str:
        return f"<ChatPrompt {len(self.tokens)} tokens>"

    @property
    def stop(self) -> tuple[str, ...]:
        """Where the model's part is over, besides its own ends."""
        return self.style.stop if self.tools else ()

    def reader(self) -> AnswerReader:
        """Takes the answer apart as it comes."""
        return self.style.reader(self.tools, self.text)

    def only(self, constraint: Constraint | None) -> Constraint | None:
        """What the answer must fit: what the caller says is for answers, and calls are none."""
        if self.constraint is not None:
            return self.constraint
        if isinstance(constraint, (Json, Regex, Grammar)) and (self.before or self.may_call):
            return Behind(self.before, constraint, self.may_call and self.may_call())
        return constraint

    def answered(self, completion: Completion | list[Completion]) -> Any:
        """A completion, or each of several, with the answer taken apart."""
        if isinstance(completion, list):
            return [self.answered(one) for one in completion]
        answer = self.reader().parse(completion.text)
        return replace(
            completion, text=answer.text, reasoning=answer.reasoning, tool_calls=answer.tool_calls
        )


class Texts:
    """A model's tokenizer and chat template; they touch no memory, and any thread may use them."""

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        self.tokenizer = tokenizer
        self.path = path
        self._rendering = Lock()

    @property
    def n_ctx(self) -> int:
        """Tokens of the longest context: what cannot fit is refused before it is cut up."""
        raise NotImplementedError

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special, parse_special)

    def decode(self, ids: Seq[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids)

    def chat_tokens(self, messages: Messages) -> list[int]:
        """A conversation as the model's own template writes it, ready for the answer."""
        return self.text_tokens(self.chat_text(messages))

    def chat_prompt(
        self, messages: Messages, tools: Seq[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto", template_options: Mapping[str, Any] | None = None,
        up_to: str | None = None, one_call: bool = False, most_tokens: int | None = None,
    ) -> ChatPrompt:  # fmt: skip
        """A conversation as the model's own template writes it, and how to read the answer.

        Where the last message is to be gone on with, `up_to` is a mark at its end. With `one_call`
        an answer that has to call a tool ends behind its first call. More than `most_tokens` are
        refused: unless told, more than fit the context.
        """
        mode, name = chosen_tool(tool_choice)
        style, known, listed = self.style, None, None
        if tools is not None and mode != "none":
            listed, known = self._shown(tools)
        text = self.chat_text(messages, listed, **template_options_of(template_options))
        if up_to is not None:
            text, found, _ = text.rpartition(up_to)
            if not found:
                raise RequestError("this model's template cannot go on with a message", "messages")
        if not known and mode == "required":
            raise RequestError(
                f"tool_choice is {name or mode!r:.80}, but there are no tools", "tool_choice"
            )
        constraint, calls = None, None
        if known:
            wanted = known if name is None else known.named(name)
            thinking, many = style.thinking(text), name is None and not one_call
            calls = partial(call_grammar, style, wanted, self._control_token, thinking, many)
        if calls and mode == "required":
            constraint = calls()  # held to the schemas
        before = before_answer(style, text, self._control_token)
        tokens = self.text_tokens(text, most_tokens)
        may_call = partial(calls, held=False) if calls and style.marks_calls else None
        return ChatPrompt(text, tokens, style, known, constraint, before, may_call)

    def _shown(self, tools: object) -> tuple[list[dict[str, Any]] | None, Tools | None]:
        """Tools for the template, and by name; None where there are none."""
        listed, known = tools_of(tools)
        if not listed:
            return None, None
        if not self.style.takes_tools:
            raise RequestError(
                f"the chat template of {self.path} has no place for tools; describe them in a "
                "message, or take a model that was taught to call tools", "tools",
            )  # fmt: skip
        return listed, known

    def chat_text(
        self, messages: Messages, tools: Seq[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:  # fmt: skip
        """The text of a conversation, ready for the answer; options are for the template."""
        # The process that renders answers one at a time; who broke off would leave an answer
        # for the next.
        with SignalsLater(), self._rendering:
            return self.template.render(messages_of(messages), tools=tools, **options)

    def _control_token(self, text: str) -> int | None:
        ids = self.tokenizer.encode(text, add_special=False)
        return ids[0] if len(ids) == 1 and self.tokenizer.is_special(ids[0]) else None

    def text_tokens(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a whole text that may begin with the token all texts begin with."""
        bos = self.tokenizer.token_text(self.tokenizer.bos)
        special = not (bos and text.startswith(bos))
        most = self.n_ctx if most is None else most
        return self.tokenizer.encode(text, special, max_tokens=most)

    @cached_property
    def template(self) -> ChatTemplate:
        """How the model wants a conversation to be written."""
        bos, eos = (self.tokenizer.token_text(i) for i in (self.tokenizer.bos, self.tokenizer.eos))
        return ChatTemplate(self.tokenizer.chat_template, bos, eos, name=str(self.path))

    @cached_property
    def style(self) -> Style:
        """How the model writes reasoning and calls of tools, as its template says."""
        return style_of(self.template.source)

    @property
    def has_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return self.tokenizer.chat_template is not None

    def tokens_of(self, prompt: Prompt, behind: int = 0) -> list[int]:
        """The token ids of a prompt that comes behind so many others."""
        if isinstance(prompt, str):
            room = max(self.n_ctx - behind, 0)  # less than there was, after a resize
            return self.tokenizer.encode(prompt, behind == 0, max_tokens=room)
        if isinstance(prompt, (bytes, bytearray)):
            raise _no_bytes(prompt)
        try:
            return list(map(operator.index, prompt))
        except TypeError as error:
            raise RequestError(
                f"a prompt is a text or a list of token ids, not {prompt!r:.80}"
            ) from error


def tokenizer_of(file: WeightFile) -> Tokenizer:
    """The tokenizer that comes with a model: in the file, or beside the weights."""
    if "tokenizer.ggml.model" in file.metadata or not file.path.is_dir():
        return Tokenizer.from_metadata(file.metadata, name=str(file.path))
    return Tokenizer.from_hf(file.path)


def prompts_of(given: Prompt | Iterable[Prompt]) -> tuple[list[Prompt], bool]:
    """What is to be continued, and whether it is several prompts: not a text, nor token ids."""
    if isinstance(given, str):
        return [given], False
    if isinstance(given, (bytes, bytearray)):
        raise _no_bytes(given)
    found = listed(given)
    if found is None:
        raise RequestError(f"a prompt is a text or a list of token ids, not {given!r:.80}")
    if all(issubclass(kind, (int, np.integer)) for kind in set(map(type, found))):
        return [found], False
    return found, True


def _no_bytes(prompt: bytes | bytearray) -> RequestError:
    return RequestError(
        f"a prompt is a text or a list of token ids, not bytes: decode {bytes(prompt[:20])!r} first"
    )
