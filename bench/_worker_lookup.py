"""llama-cpp-python with its prompt lookup, as a worker: drafts go through its own Python loop."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
from _worker import main
from llama_cpp.llama_speculative import (  # type: ignore[import-not-found]
    LlamaPromptLookupDecoding,
)


class Lookup:
    """One sequence, greedy; `drafts` tokens are looked up for each step, 0 for none."""

    def __init__(self, model: str, threads: int, sequences: int, n_ctx: int, drafts: int) -> None:
        assert sequences == 1, "llama-cpp-python's own loop runs one sequence"
        draft = LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None
        self._llama = llama.Llama(
            model, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, draft_model=draft,
            logits_all=draft is not None, verbose=False,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """The version."""
        return {"version": llama.__version__}

    def prefill(self, prompt: list[int]) -> float:
        """Not asked for here."""
        raise NotImplementedError

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """`steps` further tokens after the first."""
        tokens = self._llama.generate(prompts[0], temp=0.0, top_k=1)
        next(tokens)
        start = time.perf_counter()
        for _ in range(steps):
            next(tokens)
        return time.perf_counter() - start

    def complete(self, text: str, steps: int) -> str:
        """Not asked for here."""
        raise NotImplementedError


if __name__ == "__main__":
    main(Lookup)
