"""Texts as vectors."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from quire.api.requests import Requests
from quire.api.texts import Prompt, prompts_of
from quire.engine.embedding import Embedding
from quire.errors import RequestError
from quire.types import POOLINGS, Pooling


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same vectors with the length 1."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    made: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return made


class Vectors(Requests):
    """Turns texts into vectors on a model, from any thread."""

    pooling: Pooling
    """How the model's files say that vectors are pooled; of the last token if they do not."""

    def embed(
        self, texts: Prompt | Seq[Prompt], pooling: Pooling | None = None, *, normalize: bool = True
    ) -> NDArray[np.float32]:
        """A vector for each text, [n, width]: what the last layer makes of its tokens.

        `pooling` is "last", "mean" or "cls" (the first token), by default as the model's files
        say. With `normalize` all have the length 1, so that a product of two is their cosine.
        """
        embedding = self.embedding(texts, pooling)
        work = self.loop.beside(lambda: embedding)
        return unit(work.vectors) if normalize else work.vectors

    def embedding(self, texts: Prompt | Seq[Prompt], pooling: Pooling | None = None) -> Embedding:
        """Texts on their way to vectors; what cannot be one is refused now."""
        chosen = self.pooling if pooling is None else pooling
        if not isinstance(chosen, str) or chosen not in POOLINGS:
            raise RequestError(f"pooling is one of {', '.join(POOLINGS)}, not {pooling!r:.80}")
        several, _ = prompts_of(texts)
        tokens = [self.engine.prompt_of(0, self.tokens_of(text)) for text in several]
        for number, ids in enumerate(tokens):
            if not len(ids):
                raise RequestError(f"text {number} has no tokens, and so no vector", "input")
        return Embedding(self.engine, tokens, chosen)

    async def aembed(
        self, texts: Prompt | Seq[Prompt], pooling: Pooling | None = None, *, normalize: bool = True
    ) -> NDArray[np.float32]:
        """`embed` for coroutines; cancelling the task gives its pages back."""
        from asyncio import to_thread

        work = await to_thread(self.embedding, texts, pooling)
        try:
            await to_thread(self.loop.beside, lambda: work)
        except BaseException:
            self.loop.later(work.close)  # it is done then
            raise
        return unit(work.vectors) if normalize else work.vectors
