"""The Python API: a loaded model, and sessions on it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire import config
from quire.api.arguments import check_salt, path_of
from quire.api.copies import Uncopied
from quire.api.devices import host_tier
from quire.api.ending import ModelEnding
from quire.api.generating import Generating
from quire.api.opening import opened, session_file
from quire.api.placing import place_model
from quire.api.report import MemoryReport
from quire.api.session import Session
from quire.api.texts import tokenizer_of
from quire.devices.budget import Budget
from quire.devices.device import Device
from quire.engine.aside import Reading
from quire.engine.constrain import Constrainer
from quire.engine.engine import Engine
from quire.engine.loop import Loop
from quire.engine.prefix_cache import PrefixCache
from quire.engine.resize import resize
from quire.engine.runner import Runner
from quire.engine.signals import SignalsLater
from quire.errors import RequestError
from quire.files import Writers
from quire.memory.build import build_memory, longest_on_each
from quire.memory.groups.layout import GroupSpec
from quire.memory.groups.state_layout import RecurrentSpec
from quire.memory.memory import Memory
from quire.memory.prefix.index import PrefixIndex
from quire.memory.tiers.tiers import DiskTier, Tier, Tiers
from quire.models.loader import ProgressFn
from quire.models.registry import architecture_of, open_weights
from quire.ops import Array
from quire.placement.plan import Plan
from quire.weights.defaults import chat_sampling_of, pooling_of

if TYPE_CHECKING:
    from quire.models.streaming import Streaming

_WORTH_SHARING = 4
"""Fewer tokens are sooner computed than the page they lie in is copied."""


class LLM(Uncopied, Generating):
    """A loaded model. Made by `quire.load`; a context manager that gives everything back.

    Any number of threads and event loops may use it: their requests are computed in one batch.
    """

    instead = "pass it on as it is; another process loads its own, with quire.load"

    def __init__(
        self, path: Path, settings: config.LoadConfig, budget: Budget | None = None,
        progress: ProgressFn | None = None, beside: LLM | None = None,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        self.settings = settings
        with ExitStack() as failed:  # what was taken goes back if the load does not come to its end
            self._streams = ExitStack()
            failed.callback(self._streams.close)
            with ExitStack() as opened:
                file = opened.enter_context(open_weights(path))
                self.architecture = architecture_of(file)
                super().__init__(tokenizer_of(file), path)
                self.pooling = pooling_of(file) or "last"
                self.chat_sampling = chat_sampling_of(file)
                like = None if beside is None else beside.devices[0]
                self._placed = place_model(file, settings, budget, like)
                blueprint = self._placed.blueprint
                self.active = blueprint.active
                blueprint.raise_errors()
                self._weights = self._placed.weight_bytes(blueprint.part_bytes)
                self._pay_for_weights(failed)
                self.model = blueprint.load(progress)
                self.fingerprint = blueprint.fingerprint()
                """Which weights these are, as loaded; files of sessions only go with the same."""
                self._streaming = self._stream(opened)
            for device in self._placed.devices:
                device.ops.trim()  # what packing took
            self.device = self._placed.devices[0]
            """That with the output."""
            self.budget, self.ops = self.device.budget, self.device.ops
            self.writers = Writers()
            """Of files of sessions."""
            with SignalsLater():  # either what was taken goes back here, or with the model
                self._begin(failed, beside)
        self.load_s = time.perf_counter() - started

    def _pay_for_weights(self, failed: ExitStack) -> None:
        """Before any is loaded."""
        with SignalsLater():
            for device, size in self._weights.items():
                device.budget.reserve(size, "weights")
                failed.callback(device.budget.release, size, "weights")
                device.ops.expect(size)

    def _begin(self, failed: ExitStack, beside: LLM | None) -> None:
        """Memory, and the engine; from here on it all goes when the model does."""
        settings, kernels = self.settings, self.model.kernels
        away = self._placed.elsewhere(kernels)
        room = self._room(away)  # before pages are taken of it
        n_ctx = settings.n_ctx or min(self._placed.n_ctx, room)
        groups, parallel = self.model.groups, settings.n_parallel
        memory = build_memory(groups, self.device, settings, kernels, n_ctx, away, parallel)
        failed.callback(memory.close)
        self.engine = self._engine(memory, away, n_ctx)
        self.loop = Loop(self.engine, beside.loop.seat if beside else None)
        self._end = ModelEnding(self.loop, settings, self._weights, self._streams)
        self._ref = self.loop.when_gone(self, self._end)
        failed.pop_all()

    def _stream(self, opened: ExitStack) -> Streaming | None:
        """Lets long prompts run networks of the host on a GPU, where that may change bits.

        The file stays open then: what is read again has to be what was loaded.
        """
        sizes = self._placed.streaming_bytes
        if not sizes:
            return None
        use = "weights that pass through"
        self._streams.push(opened.pop_all())
        room = self._streams.enter_context(ExitStack())  # once it is used it counts as arrays
        with SignalsLater():
            for device, size in sizes.items():
                device.budget.reserve(size, use)
                held = room if device is self._placed.devices[0] else self._streams
                held.callback(device.budget.release, size, use)
        streaming = self._placed.stream(self.model, room.close)
        self._streams.callback(streaming.close)
        return streaming

    @property
    def n_ctx(self) -> int:
        """Tokens of the longest context."""
        return self.engine.n_ctx

    @property
    def plan(self) -> Plan:
        """What is on which device, and what was changed to make it fit."""
        return self._placed.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed to make it fit, and what was asked for and could not be, a line each."""
        placed = self._placed
        if self.settings.n_ctx is not None or self.n_ctx >= placed.n_ctx:
            return placed.notes
        made_for = self.model.n_ctx_train
        told = f"n_ctx is {self.n_ctx:,} and not the model's {made_for:,}: more does not fit"
        return (*placed.notes, told)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Where it is; the first has the output."""
        return self._placed.devices

    def _room(self, away: Mapping[str, Device]) -> int:
        """How many tokens one sequence can have in what its devices have free."""
        by_device: dict[Device, list[GroupSpec | RecurrentSpec]] = {}
        for group in self.model.groups:
            by_device.setdefault(away.get(group.name, self.device), []).append(group)
        return longest_on_each(by_device, lambda device: device.budget.free, self.settings)

    def _host_tiers(self, swap: int) -> list[Tier]:
        """Pages of one GPU can be parked in the host's memory; those of several go to disk."""
        return host_tier(self.device, swap) if len(self.devices) == 1 else []

    def _engine(self, memory: Memory, away: Mapping[str, Device], n_ctx: int) -> Engine:
        size, tokenizer = self.settings.page_tokens, self.tokenizer
        index = PrefixIndex(memory, size, str(self.path), min_tokens=_WORTH_SHARING)
        prefix = PrefixCache(index, self.budget)
        runner = Runner(self.model, *self._placed.devices, elsewhere=away)
        swap = self.settings.swap_bytes()
        tiers = Tiers(*self._host_tiers(swap), DiskTier(config.cache_folder(), swap))
        constrainer = Constrainer(tokenizer)
        return Engine(runner, memory, prefix, tiers, n_ctx, constrainer, tokenizer.eog_ids)

    def logits(self, ids: Seq[int]) -> NDArray[np.float32]:
        """Logits after each of these tokens, [len(ids), n_vocab], in one pass."""
        ids = self.tokens_of(ids)
        self.engine.check_tokens(0, ids)
        out = np.empty((len(ids), self.model.n_vocab), np.float32)

        def take(at: int, count: int, logits: Array) -> None:
            out[at : at + count] = self.ops.numpy(logits)

        most = self.engine.scheduler.max_tokens
        self.loop.beside(lambda: Reading(self.engine, ids, most, take))
        return out

    def session(self, cache_salt: str = "") -> Session:
        """An empty session: a context to append to, fork, rewind and generate from."""
        salt = check_salt(cache_salt)
        return self.loop.call(lambda: self.new_session(salt))

    def new_session(self, salt: str) -> Session:
        """An empty session; on the loop."""
        return Session(self, self.engine.new_sequence(salt))

    def open(
        self, path: str | os.PathLike[str], *, share: bool = False, strict: bool = False
    ) -> Session:
        """A session as it was saved: it goes on with the same bits, and computes nothing again.

        Its pages serve no other request unless you trust the file so far (`share`). If it was
        computed with other arithmetic (other instructions, another device), `session.exact` is
        False, and other bits may follow; `strict` refuses it instead.
        """
        with session_file(path_of(path)) as file:
            return opened(self, file, share, strict)

    @property
    def memory(self) -> MemoryReport:
        """What memory holds now; prints as a table."""
        return MemoryReport(self.loop, self.devices)

    def resize(self, budget: int | str | Mapping[str, int | str]) -> None:
        """Changes how much memory may be used, while it is used: bytes, or a text like "6GiB".

        A model on several devices takes one size for each, or a mapping of their names. With less,
        cached prefixes go first, then sequences give way to a tier. BudgetError, and the budget as
        it was, if what is held cannot be made to fit.
        """
        known = {device.name: device.budget for device in self.devices}
        asked = budget if isinstance(budget, Mapping) else dict.fromkeys(known, budget)
        if wrong := sorted(set(asked) - set(known)):
            raise RequestError(f"there is no device {wrong[0]!r}; there are {', '.join(known)}")
        limits = {known[name]: config.parse_bytes(size, "budget") for name, size in asked.items()}
        self.loop.call(partial(resize, self.engine, limits, self.settings))

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
            self.loop.close_with(self._close)
            self.loop.seat.dismiss()

    def _close(self) -> None:
        self._end()
        self.loop.seat.endings.settled(self._ref)  # or others on its seat would keep it

    def __repr__(self) -> str:
        state = "closed" if self.engine.closed else f"context {self.n_ctx:,}, {self.ops.name}"
        return f"<LLM {self.path.name}: {self.architecture}, {self.active.layers} layers, {state}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
