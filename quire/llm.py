"""The Python API: a loaded model, and sessions on it."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from quire import config
from quire.engine.constrain import Constrainer
from quire.engine.engine import Engine
from quire.engine.prefix_cache import PrefixCache
from quire.engine.runner import Runner
from quire.engine.sequence import Sequence
from quire.errors import RequestError
from quire.jobs import Job, JobRunner
from quire.memory.budget import Budget, Share
from quire.memory.build import build_memory, longest_sequence
from quire.memory.prefix import PrefixIndex
from quire.memory.tiers import DiskTier, Tiers
from quire.models.extent import Extent, limited
from quire.models.loader import ProgressFn, loaded_bytes
from quire.models.registry import architecture_of, declared_groups, load_model, open_weights
from quire.models.settings import check_settings
from quire.ops.cpu import CpuOps
from quire.report import MemoryReport
from quire.session import Session
from quire.session_file import open_session
from quire.speculate import speculator
from quire.speculate.interface import Speculator
from quire.stream import Stream
from quire.text.detokenize import Detokenizer
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import Completion, Constraint, Request, Sampling, SamplingFields
from quire.weights import pull
from quire.weights.file import WeightFile
from quire.weights.fingerprint import fingerprint

Prompt = str | Seq[int]
"""Text, or token ids that are taken as they are."""
Speculate: TypeAlias = "str | LLM | Speculator | None"
"""Who drafts: a name of `quire.speculate.NAMES`, a smaller model, or a configured object."""


class LLM:
    """A loaded model. Made by `quire.load`; a context manager that gives everything back."""

    def __init__(
        self, path: Path, settings: config.LoadConfig, budget: Budget,
        progress: ProgressFn | None = None,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        self.path = path
        self.settings = settings
        self.budget = budget
        self.ops = CpuOps(settings.thread_count(), exact=settings.activations == "f32")
        with open_weights(path) as file:
            self.architecture = architecture_of(file)
            self.tokenizer = _tokenizer(file)
            seen = limited(file, settings.n_layer_exit, settings.moe_n_expert)
            self.extent = Extent.of(seen)
            check_settings(path, declared_groups(seen, self.ops), settings)
            expected = loaded_bytes(seen, settings.quantize)
            self.budget.reserve(expected, "weights")  # too much is refused before it is loaded
            self.model = load_model(
                seen, self.ops, settings.type_k, settings.type_v, progress, settings.quantize
            )
        self.budget.release(expected, "weights")
        self.budget.reserve(self.model.weight_bytes, "weights")
        memory = build_memory(self.model.groups, self.budget, settings, self.model.kernels)
        room = longest_sequence(self.model.groups, self.budget.free, settings)
        self.n_ctx = settings.n_ctx or min(self.model.n_ctx_train, room)
        constrainer = Constrainer(self.tokenizer)
        end_ids = self.tokenizer.eog_ids
        prefix = PrefixCache(
            PrefixIndex(memory, settings.page_tokens, str(path), settings.page_tokens), self.budget
        )
        runner = Runner(self.model, self.ops)
        tiers = Tiers(DiskTier(config.cache_folder(), settings.swap_bytes()))
        self.engine = Engine(runner, memory, prefix, tiers, self.n_ctx, constrainer, end_ids)
        self.jobs = JobRunner(self.engine, end_ids)
        self.load_s = time.perf_counter() - started

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special, parse_special)

    def decode(self, ids: Seq[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids)

    def logits(self, ids: Seq[int]) -> NDArray[np.float32]:
        """Logits after each of these tokens, [len(ids), n_vocab], in one pass."""
        return self.engine.logits(ids)

    @overload
    def generate(
        self, prompt: str, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: str | Seq[str] = (), constraint: Constraint | None = None,
        cache_salt: str = "",
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Seq[int] | Seq[Prompt], sampling: Sampling | None = None, *,
        speculate: Speculate = None, stop: str | Seq[str] = (),
        constraint: Constraint | None = None, cache_salt: str = "",
        **fields: Unpack[SamplingFields],
    ) -> Any: ...  # fmt: skip

    def generate(
        self, prompt: Prompt | Seq[Prompt], sampling: Sampling | None = None, *,
        speculate: Speculate = None, stop: str | Seq[str] = (),
        constraint: Constraint | None = None, cache_salt: str = "",
        **fields: Unpack[SamplingFields],
    ) -> Any:  # fmt: skip
        """Continues a prompt, or several at once; a list of prompts gives a list of completions."""
        batched = _is_batch(prompt)
        prompts: Any = prompt if batched else [prompt]
        chosen = (sampling or Sampling()).replace(**fields)
        request = Request((), chosen, constraint, _salt(cache_salt), self.speculator(speculate))
        jobs: list[Job] = []
        try:
            for one in prompts:
                jobs.append(self._start(one, request, stop))
            self.jobs.finish(jobs)
            completions = [job.completion(self.load_s, self.extent) for job in jobs]
        finally:
            for job in jobs:
                self.jobs.drop(job)
        return completions if batched else completions[0]

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: str | Seq[str] = (), constraint: Constraint | None = None,
        cache_salt: str = "",
        **fields: Unpack[SamplingFields],
    ) -> Stream:  # fmt: skip
        """Continues a prompt piece by piece; its `completion` is there once it is used up."""
        chosen = (sampling or Sampling()).replace(**fields)
        request = Request((), chosen, constraint, _salt(cache_salt), self.speculator(speculate))
        return Stream(self, self._start(prompt, request, stop))

    def chat(
        self, messages: Seq[Mapping[str, Any]], sampling: Sampling | None = None, *,
        speculate: Speculate = None, stop: str | Seq[str] = (),
        constraint: Constraint | None = None, cache_salt: str = "",
        **fields: Unpack[SamplingFields],
    ) -> Completion:  # fmt: skip
        """The model's next turn in a conversation."""
        completion: Completion = self.generate(
            self.chat_tokens(messages), sampling, speculate=speculate, stop=stop,
            constraint=constraint, cache_salt=cache_salt, **fields,
        )  # fmt: skip
        return completion

    def chat_tokens(self, messages: Seq[Mapping[str, Any]]) -> list[int]:
        """A conversation as the model's own template writes it, ready for the answer."""
        return self.text_tokens(self.chat_text(messages))

    def chat_text(self, messages: Seq[Mapping[str, Any]]) -> str:
        """The text of a conversation, ready for the answer."""
        return self.template.render([dict(m) for m in messages])

    def text_tokens(self, text: str) -> list[int]:
        """Token ids of a whole text that may begin with the token all texts begin with."""
        bos = self.tokenizer.token_text(self.tokenizer.bos)
        return self.encode(text, add_special=not (bos and text.startswith(bos)))

    @cached_property
    def template(self) -> ChatTemplate:
        """How the model wants a conversation to be written."""
        bos, eos = (self.tokenizer.token_text(i) for i in (self.tokenizer.bos, self.tokenizer.eos))
        return ChatTemplate(self.tokenizer.chat_template, bos, eos, name=str(self.path))

    @property
    def has_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return self.tokenizer.chat_template is not None

    def session(self, cache_salt: str = "") -> Session:
        """An empty session: a context to append to, fork, rewind and generate from."""
        return Session(self, self.engine.open(_salt(cache_salt)))

    def open(self, path: str | os.PathLike[str]) -> Session:
        """A session as it was saved: it goes on with the same bits, and computes nothing again."""
        return Session(self, *open_session(path, self.engine, self.fingerprint))

    @cached_property
    def fingerprint(self) -> str:
        """Which weights these are, as loaded; files of sessions only go with the same."""
        settings = self.settings
        with open_weights(self.path) as file:
            seen = limited(file, settings.n_layer_exit, settings.moe_n_expert)
            return fingerprint(seen, f"{settings.quantize=} {settings.activations=}")

    @property
    def memory(self) -> MemoryReport:
        """What memory holds now; prints as a table."""
        self.jobs.tidy()
        return MemoryReport(self.engine, self.budget)

    def forget(self, salt: str | None = None) -> None:
        """Drops cached prefixes: all of them, or those of one salt."""
        self.jobs.tidy()
        self.engine.prefix.index.forget(salt)

    def close(self) -> None:
        """Ends what runs, closes sessions and gives everything back; once is enough."""
        if not self.engine.closed:
            self.jobs.close()
            self.engine.shut()
            self.budget.release(self.model.weight_bytes, "weights")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new_job(
        self, sequence: Sequence, request: Request, stop: str | Seq[str], keep: bool
    ) -> Job:
        """A job on a sequence, started; `keep` lets the sequence live on."""
        stops = [stop] if isinstance(stop, str) else list(stop)
        continues = bool(sequence.tokens or request.tokens)
        detokenizer = Detokenizer(self.tokenizer, stops, continuation=continues)
        text_ends = None
        if stops and request.speculate:  # a step may go past a stop string: the engine looks too
            text_ends = Detokenizer(self.tokenizer, stops, continuation=continues).ends_with
        job = Job(sequence, request, detokenizer, keep, text_ends)
        self.jobs.start(job)
        return job

    def speculator(self, speculate: Speculate) -> Speculator | None:
        """Who drafts: by name, a loaded model, or as it is configured."""
        return None if speculate is None else speculator(speculate)

    def tokens_of(self, prompt: Prompt, add_special: bool = True) -> list[int]:
        """A prompt's token ids."""
        if isinstance(prompt, str):
            return self.encode(prompt, add_special)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise RequestError(
                f"a prompt is a text or a list of token ids, not {prompt!r:.80}"
            ) from error

    def _start(self, prompt: Prompt, request: Request, stop: str | Seq[str]) -> Job:
        request = replace(request, tokens=tuple(self.tokens_of(prompt)))
        return self.new_job(self.engine.open(), request, stop, keep=False)


def _salt(salt: str) -> str:
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt is a text, not {salt!r}")
    return salt


def load(
    model: str | Path = "smollm2", *, progress: ProgressFn | None = None,
    beside: LLM | None = None, **settings: Any,
) -> LLM:  # fmt: skip
    """Loads a model: an alias, a .gguf file, a folder of safetensors, or `hf:owner/repo/file`.

    The settings are the fields of `quire.config.LoadConfig`. With `beside` it takes its memory
    from the budget of a model that is loaded already, which it may draft for.
    """
    if beside and settings.get("memory_budget") is not None:
        raise RequestError("beside takes another model's budget; leave memory_budget out")
    known = config.LoadConfig.__dataclass_fields__
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise RequestError(f"load has no {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = config.LoadConfig(**settings)
    path = pull.resolve(str(model), config.cache_folder(), progress)
    budget = Share(beside.budget.whole, path.name) if beside else Budget(chosen.budget_bytes())
    return LLM(path, chosen, budget, progress)


def _tokenizer(file: WeightFile) -> Tokenizer:
    """The tokenizer that comes with a model: in the file, or beside the weights."""
    if "tokenizer.ggml.model" in file.metadata or not file.path.is_dir():
        return Tokenizer.from_metadata(file.metadata, name=str(file.path))
    return Tokenizer.from_hf(file.path)


def _is_batch(prompt: Prompt | Seq[Prompt]) -> bool:
    """Whether this is several prompts: not a text, and not token ids."""
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is a text or a list of token ids, not {prompt!r:.80}")
    return not all(isinstance(t, (int, np.integer)) for t in prompt)
