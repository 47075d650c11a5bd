"""Between what people write and token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from quire.api.arguments import messages_of
from quire.engine.signals import SignalsLater
from quire.errors import RequestError
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.weights.file import WeightFile

Prompt = str | Seq[int]
"""Text, or token ids that are taken as they are."""


class Texts:
    """A model's tokenizer and chat template; they touch no memory, and any thread may use them."""

    n_ctx: int
    """Tokens of the longest context: a prompt that cannot fit is refused before it is cut up."""

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        self.tokenizer = tokenizer
        self.path = path
        self._rendering = Lock()

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special, parse_special)

    def decode(self, ids: Seq[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids)

    def chat_tokens(self, messages: Seq[Mapping[str, Any]]) -> list[int]:
        """A conversation as the model's own template writes it, ready for the answer."""
        return self.text_tokens(self.chat_text(messages))

    def chat_text(self, messages: Seq[Mapping[str, Any]]) -> str:
        """The text of a conversation, ready for the answer."""
        # The process that renders answers one at a time; who broke off would leave an answer
        # for the next.
        with SignalsLater(), self._rendering:
            return self.template.render(messages_of(messages))

    def text_tokens(self, text: str) -> list[int]:
        """Token ids of a whole text that may begin with the token all texts begin with."""
        bos = self.tokenizer.token_text(self.tokenizer.bos)
        special = not (bos and text.startswith(bos))
        return self.tokenizer.encode(text, special, max_tokens=self.n_ctx)

    @cached_property
    def template(self) -> ChatTemplate:
        """How the model wants a conversation to be written."""
        bos, eos = (self.tokenizer.token_text(i) for i in (self.tokenizer.bos, self.tokenizer.eos))
        return ChatTemplate(self.tokenizer.chat_template, bos, eos, name=str(self.path))

    @property
    def has_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return self.tokenizer.chat_template is not None

    def tokens_of(self, prompt: Prompt, behind: int = 0) -> list[int]:
        """The token ids of a prompt that comes behind so many others."""
        if isinstance(prompt, str):
            room = self.n_ctx - behind
            return self.tokenizer.encode(prompt, behind == 0, max_tokens=room)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise RequestError(
                f"a prompt is a text or a list of token ids, not {prompt!r:.80}"
            ) from error


def tokenizer_of(file: WeightFile) -> Tokenizer:
    """The tokenizer that comes with a model: in the file, or beside the weights."""
    if "tokenizer.ggml.model" in file.metadata or not file.path.is_dir():
        return Tokenizer.from_metadata(file.metadata, name=str(file.path))
    return Tokenizer.from_hf(file.path)


def is_batch(prompt: Prompt | Seq[Prompt]) -> bool:
    """Whether this is several prompts: not a text, and not token ids."""
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is a text or a list of token ids, not {prompt!r:.80}")
    return not all(isinstance(t, (int, np.integer)) for t in prompt)
