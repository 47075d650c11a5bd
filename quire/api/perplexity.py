"""How well a model predicts a text."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.api.llm import LLM
from quire.engine.aside import Reading
from quire.errors import RequestError
from quire.ops import Array

_ROWS = 128  # tokens whose logits are held at a time


@dataclass(frozen=True)
class Perplexity:
    """e to the mean surprise of a token, over the chunks so far."""

    perplexity: float
    stderr: float
    """Of the perplexity, from how surprises spread."""
    tokens: int
    """Tokens that were predicted."""
    chunks: int
    of: int
    """Chunks in all."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


def perplexity(llm: LLM, text: str, n_ctx: int = 512, most: int | None = None) -> Perplexity:
    """The perplexity of a text; `perplexity_by_chunk` says how it is counted."""
    *_, last = perplexity_by_chunk(llm, text, n_ctx, most)
    return last


def perplexity_by_chunk(
    llm: LLM, text: str, n_ctx: int = 512, most: int | None = None
) -> Iterator[Perplexity]:
    """The perplexity after each chunk, as llama.cpp counts it, so that figures compare.

    The text is cut into chunks of `n_ctx` tokens, each read by itself, with the token that texts
    begin with in the place of its first where the model has one. Tokens of a chunk's first half
    are only context; of the second, each is predicted from all before it. A rest that is no whole
    chunk is left out; `most` takes so many chunks.
    """
    if n_ctx < 4 or n_ctx > llm.n_ctx:
        raise RequestError(f"a chunk has 4 to {llm.n_ctx} tokens (the context), not {n_ctx}")
    ids = llm.encode(text, add_special=False, parse_special=False)
    count = min(len(ids) // n_ctx, len(ids) if most is None else most)
    if count < 1:
        raise RequestError(
            f"the text has {len(ids)} tokens, a chunk takes {n_ctx}; take a longer text, or "
            "smaller chunks"
        )
    surprises: list[NDArray[np.float64]] = []
    for i in range(count):
        chunk = ids[i * n_ctx : (i + 1) * n_ctx]
        if llm.tokenizer.add_bos and llm.tokenizer.bos is not None:
            chunk[0] = llm.tokenizer.bos
        surprises.append(_surprises(llm, chunk, n_ctx // 2))
        yield _told(np.concatenate(surprises), i + 1, count)


def _told(surprises: NDArray[np.float64], chunks: int, of: int) -> Perplexity:
    n = len(surprises)
    value = float(np.exp(surprises.mean()))
    error = float(surprises.std(ddof=1) / n**0.5) if n > 1 else 0.0
    return Perplexity(value, value * error, n, chunks, of)


def _surprises(llm: LLM, chunk: Seq[int], start: int) -> NDArray[np.float64]:
    """-log p of the tokens behind `start`, each from all before it."""
    found = np.zeros(len(chunk) - 1)

    def take(at: int, count: int, logits: Array) -> None:
        skip = max(start - at, 0)
        if skip < count:
            wanted = chunk[at + skip + 1 : at + count + 1]
            rows = llm.ops.numpy(logits)[skip:].astype(np.float64)
            found[at + skip : at + count] = surprise(rows, wanted)

    llm.loop.beside(lambda: Reading(llm.engine, chunk[:-1], _ROWS, take))
    return found[start:]


def surprise(logits: NDArray[np.float64], tokens: Seq[int]) -> NDArray[np.float64]:
    """-log p of a token after each row of logits."""
    most = logits.max(axis=1)
    total: NDArray[np.float64] = np.log(np.exp(logits - most[:, None]).sum(axis=1)) + most
    chosen: NDArray[np.float64] = logits[np.arange(len(tokens)), np.asarray(tokens)]
    return total - chosen
