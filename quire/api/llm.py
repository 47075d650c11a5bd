"""The Python API: a loaded model, and sessions on it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire import config
from quire.api.arguments import check_salt, path_of
from quire.api.devices import device_of, host_tier
from quire.api.generating import Generating
from quire.api.report import MemoryReport
from quire.api.session import Session
from quire.api.texts import tokenizer_of
from quire.devices.budget import Budget
from quire.engine.constrain import Constrainer
from quire.engine.engine import Engine
from quire.engine.loop import Loop
from quire.engine.prefix_cache import PrefixCache
from quire.engine.resize import resize
from quire.engine.runner import Runner
from quire.engine.session_file import open_session
from quire.memory.build import build_memory, longest_sequence
from quire.memory.memory import Memory
from quire.memory.prefix.index import PrefixIndex
from quire.memory.tiers.tiers import DiskTier, Tiers
from quire.models.loader import ProgressFn
from quire.models.registry import architecture_of, open_weights
from quire.placement.blueprint import Blueprint
from quire.weights.defaults import chat_sampling_of, pooling_of

_WORTH_SHARING = 4
"""Fewer tokens are sooner computed than the page they lie in is copied."""


class LLM(Generating):
    """A loaded model. Made by `quire.load`; a context manager that gives everything back.

    Any number of threads and event loops may use it: their requests are computed in one batch.
    """

    def __init__(
        self, path: Path, settings: config.LoadConfig, budget: Budget,
        progress: ProgressFn | None = None, beside: LLM | None = None,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        self.settings = settings
        self.budget = budget
        self.device = device_of(settings, budget)
        self.ops = self.device.ops
        with ExitStack() as failed:  # what was taken goes back if the load does not come to its end
            with open_weights(path) as file:
                self.architecture = architecture_of(file)
                super().__init__(tokenizer_of(file), path)
                self.pooling = pooling_of(file) or "last"
                self.chat_sampling = chat_sampling_of(file)
                blueprint = Blueprint.read(file, self.ops, settings)
                self.active = blueprint.active
                blueprint.raise_errors()
                self.budget.reserve(blueprint.weight_bytes, "weights")  # before any is loaded
                failed.callback(self.budget.release, blueprint.weight_bytes, "weights")
                self.model = blueprint.load(progress)
                self.fingerprint = blueprint.fingerprint()
                """Which weights these are, as loaded; files of sessions only go with the same."""
            groups, free = self.model.groups, self.budget.free  # before pages are taken of it
            room = longest_sequence(groups, free - free % self.device.granularity, settings)
            self.n_ctx = settings.n_ctx or min(self.model.n_ctx_train, room)
            memory = build_memory(groups, self.device, settings, self.model.kernels, self.n_ctx)
            failed.callback(memory.close)
            self.engine = self._engine(memory)
            failed.pop_all()
        self.loop = Loop(self.engine, beside.loop.seat if beside else None)
        self.load_s = time.perf_counter() - started

    def _engine(self, memory: Memory) -> Engine:
        size, tokenizer = self.settings.page_tokens, self.tokenizer
        index = PrefixIndex(memory, size, str(self.path), min_tokens=_WORTH_SHARING)
        prefix = PrefixCache(index, self.budget)
        runner = Runner(self.model, self.device)
        swap = self.settings.swap_bytes()
        tiers = Tiers(*host_tier(self.device, swap), DiskTier(config.cache_folder(), swap))
        constrainer = Constrainer(tokenizer)
        return Engine(runner, memory, prefix, tiers, self.n_ctx, constrainer, tokenizer.eog_ids)

    def logits(self, ids: Seq[int]) -> NDArray[np.float32]:
        """Logits after each of these tokens, [len(ids), n_vocab], in one pass."""
        ids = self.tokens_of(ids)
        self.engine.check_tokens(0, ids)
        out = np.empty((len(ids), self.model.n_vocab), np.float32)
        with self.session() as scratch:
            step = self.engine.scheduler.max_tokens
            for at in range(0, len(ids), step):
                read = partial(self.engine.read, scratch.sequence, ids[at : at + step])
                out[at : at + step] = self.loop.call(read)
        return out

    def session(self, cache_salt: str = "") -> Session:
        """An empty session: a context to append to, fork, rewind and generate from."""
        salt = check_salt(cache_salt)
        return self.loop.call(lambda: Session(self, self.engine.new_sequence(salt)))

    def open(
        self, path: str | os.PathLike[str], *, share: bool = False, strict: bool = False
    ) -> Session:
        """A session as it was saved: it goes on with the same bits, and computes nothing again.

        Its pages serve no other request unless you trust the file so far (`share`). If it was
        computed with other arithmetic (other instructions, another device), `session.exact` is
        False, and other bits may follow; `strict` refuses it instead.
        """
        read = partial(open_session, path_of(path), self.engine, self.fingerprint, share, strict)
        return self.loop.call(lambda: Session(self, *read()))

    @property
    def memory(self) -> MemoryReport:
        """What memory holds now; prints as a table."""
        return MemoryReport(self.loop, self.budget)

    def resize(self, budget: int | str) -> None:
        """Changes how much memory may be used, while it is used: bytes, or a text like "6GiB".

        With less, cached prefixes go first, then sequences give way to a tier. BudgetError, and
        the budget as it was, if what is held cannot be made to fit.
        """
        self.loop.call(partial(self._resize, config.parse_bytes(budget)))

    def _resize(self, limit: int) -> None:
        resize(self.engine, limit, self.settings)
        self.n_ctx = self.engine.n_ctx

    def forget(self, salt: str | None = None) -> None:
        """Drops cached prefixes: all of them, or those of one salt."""
        kept = None if salt is None else check_salt(salt)
        self.loop.call(lambda: self.engine.prefix.index.forget(kept))

    def close(self) -> None:
        """Ends what runs, closes sessions and gives everything back; once is enough.

        Whoever waits for something gets an error. In a child of the process that loaded the model
        there is nothing to give back.
        """
        if not self.loop.seat.forked:
            self.loop.call(self._close)
            self.loop.seat.dismiss()

    def _close(self) -> None:
        if not self.engine.closed:
            self.loop.close()
            self.model.close()
            self.ops.trim()
            self.budget.release(self.model.weight_bytes, "weights")

    def __repr__(self) -> str:
        state = "closed" if self.engine.closed else f"context {self.n_ctx:,}, {self.ops.name}"
        return f"<LLM {self.path.name}: {self.architecture}, {self.active.layers} layers, {state}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
