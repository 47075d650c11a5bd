"""Quire as a worker: the public Python API, measured from outside with the wall clock."""

from __future__ import annotations

import time
from typing import Any

from _worker import main

import quire


class Quire:
    """One loaded model; every prompt must be new, so that no cached prefix helps."""

    def __init__(self, model: str, *, threads: int, n_ctx: int, sequences: int) -> None:
        self._llm = quire.load(
            model,
            threads=threads,
            n_ctx=n_ctx,
            kv_cache_tokens=n_ctx * sequences,
            type_k="f16",
            type_v="f16",
        )

    def describe(self) -> dict[str, Any]:
        return {"version": quire.__version__}

    def prefill(self, prompt: list[int]) -> float:
        seconds, _ = self._generate([prompt], 1)
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """The slower of two figures: the engine's own, and the wall clock less a short run's.

        The short run has prompts of the same lengths (these, backwards) and stops after the first
        token; the engine's own figure guards against a short run that a hiccup made long.
        """
        backwards = [prompt[::-1] for prompt in prompts]
        short, _ = self._generate(backwards, 1)
        whole, own = self._generate(prompts, steps + 1)
        return max(whole - short, own)

    def complete(self, text: str, steps: int) -> str:
        return self._llm.generate(text, sampling=_sampling(steps)).text

    def _generate(self, prompts: list[list[int]], n: int) -> tuple[float, float]:
        """Seconds on the wall clock, and what the engine says that tokens after the first took."""
        start = time.perf_counter()
        completions = self._llm.generate(prompts, sampling=_sampling(n))
        seconds = time.perf_counter() - start
        for completion in completions:
            if len(completion.token_ids) != n or completion.cached_tokens:
                raise RuntimeError(
                    f"asked for {n} tokens without a cached prefix, got "
                    f"{len(completion.token_ids)} with {completion.cached_tokens} cached"
                )
        return seconds, max(completion.timings.decode_s for completion in completions)


def _sampling(n: int) -> quire.Sampling:
    return quire.Sampling(temperature=0.0, max_tokens=n, ignore_eos=True)


if __name__ == "__main__":
    main(Quire)
