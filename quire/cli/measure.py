"""What `quire bench` measures, each as a figure with its unit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

import quire
from quire.types import Sampling

_WARM_UP = 16
_SHORT = 16  # tokens of a prompt where the prompt is not what is measured
_TIMES = 200  # checkpoints and forks are too quick for a single look
# For drafts: a text that repeats itself, as code and edited text do.
_REPEATED = "The first item is ready. The second item is ready. The third item is ready. " * 6


@dataclass(frozen=True)
class Figure:
    """One figure; of `more_is_better` ones, a ratio above one is a gain."""

    name: str
    value: float
    unit: str
    more_is_better: bool = True


@dataclass(frozen=True)
class Sizes:
    """How much is computed."""

    prompt: int
    decode: int
    sequences: int
    repeat: int


class Bench:
    """Measures a loaded model; each figure is the median of several looks."""

    def __init__(self, llm: quire.LLM, sizes: Sizes) -> None:
        self._llm = llm
        self._sizes = sizes
        self._random = np.random.default_rng(0)
        self._greedy = Sampling(temperature=0, max_tokens=sizes.decode, ignore_eos=True)

    def figures(self) -> Iterator[Figure]:
        """One after the other, so that somebody can watch."""
        self._llm.generate(self._tokens(_WARM_UP), max_tokens=2, ignore_eos=True)
        yield Figure("load", self._llm.load_s, "s", more_is_better=False)
        yield Figure(f"prefill {self._sizes.prompt}", self._median(self._prefill), "tokens/s")
        yield Figure(f"decode {self._sizes.decode}", self._median(self._decode), "tokens/s")
        many = f"decode, {self._sizes.sequences} sequences"
        yield Figure(many, self._median(self._batched), "tokens/s")
        yield from self._prefix()
        yield from self._tables()
        yield from self._drafts()
        yield from self._memory()

    def _median(self, look: Callable[[], float]) -> float:
        return median(look() for _ in range(self._sizes.repeat))

    def _tokens(self, count: int) -> list[int]:
        """Tokens that nobody has computed before."""
        found = self._random.integers(0, self._llm.model.n_vocab, count)
        return [int(token) for token in found]

    def _prefill(self) -> float:
        self._llm.forget()
        prompt = self._tokens(self._sizes.prompt)
        made: quire.Completion = self._llm.generate(prompt, max_tokens=1)
        return made.timings.prefill_tokens_per_s

    def _decode(self) -> float:
        made: quire.Completion = self._llm.generate(self._tokens(_SHORT), self._greedy)
        return made.timings.decode_tokens_per_s

    def _batched(self) -> float:
        """Tokens of all sequences together, per second of the one that took longest."""
        prompts = [self._tokens(_SHORT) for _ in range(self._sizes.sequences)]
        made = self._llm.generate(prompts, self._greedy)
        longest = max(one.timings.decode_s for one in made)
        return sum(one.timings.decoded_tokens for one in made) / longest if longest else 0.0

    def _prefix(self) -> Iterator[Figure]:
        """The first token of a prompt that was computed before, beside that of one that was not."""
        cold: list[float] = []
        warm: list[float] = []
        for _ in range(self._sizes.repeat):
            self._llm.forget()
            prompt = self._tokens(self._sizes.prompt)
            for times in (cold, warm):
                made: quire.Completion = self._llm.generate(prompt, max_tokens=1)
                times.append(made.timings.first_token_s)
        yield Figure("first token, new prompt", median(cold) * 1e3, "ms", more_is_better=False)
        yield Figure("first token, known prompt", median(warm) * 1e3, "ms", more_is_better=False)

    def _tables(self) -> Iterator[Figure]:
        """Operations that move no bytes, on a sequence as long as the prompt."""
        with self._llm.session() as session:
            session.append(self._tokens(self._sizes.prompt))
            marks, forks, back = [], [], []
            for _ in range(_TIMES):
                start = time.perf_counter()
                mark = session.checkpoint()
                marks.append(time.perf_counter() - start)
                start = time.perf_counter()
                fork = session.fork()
                forks.append(time.perf_counter() - start)
                start = time.perf_counter()
                session.rewind(mark)
                back.append(time.perf_counter() - start)
                fork.close()
                session.drop(mark)
        for name, times in (("checkpoint", marks), ("fork", forks), ("rewind", back)):
            yield Figure(name, median(times) * 1e6, "µs", more_is_better=False)

    def _drafts(self) -> Iterator[Figure]:
        """Decoding with n-grams, on a text that repeats itself."""
        tokens = self._llm.encode(_REPEATED)
        rates: list[float] = []
        accepted: list[float] = []
        for _ in range(self._sizes.repeat):
            made: quire.Completion = self._llm.generate(tokens, self._greedy, speculate="ngram")
            rates.append(made.timings.decode_tokens_per_s)
            accepted.append(made.speculation.acceptance if made.speculation else 0.0)
        yield Figure("decode with n-gram drafts", median(rates), "tokens/s")
        yield Figure("drafted tokens accepted", 100 * median(accepted), "%")

    def _memory(self) -> Iterator[Figure]:
        held = self._llm.memory.as_dict()
        mib = 1 / 2**20
        uses = held["uses"]
        yield Figure("weights", uses.get("weights", 0) * mib, "MiB", more_is_better=False)
        for name, group in held["stats"].items():
            if size := group["bytes_per_token"]:
                yield Figure(f"{name}, a token", size / 1024, "KiB", more_is_better=False)
        yield Figure("process", held["process_bytes"] * mib, "MiB", more_is_better=False)
