"""The models of a server: by name, loaded on first use, on one budget."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from quire import config
from quire.api.llm import LLM
from quire.devices.budget import Budget, Share
from quire.engine.pace import Pace
from quire.engine.room import Rank
from quire.errors import BudgetError, QuireError, RequestError
from quire.models.registry import open_weights
from quire.server.errors import ApiError
from quire.server.follow import Driver, on_engine
from quire.server.settings import ServeSettings
from quire.weights import pull

T = TypeVar("T")
log = logging.getLogger("quire.server")


class ServedModel:
    """One model, whether it is loaded or not."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self.created = int(time.time())
        self.users = 0
        """Requests and sessions that need it loaded."""
        self.last_used = time.monotonic()
        self.keep_s: float | None = None
        """Seconds that it stays once nobody uses it, where a client has said how many."""
        self.budget_bytes: int | None = None
        """The budget that a client gave it, also when it is loaded again."""
        self.loading: asyncio.Task[None] | None = None
        self.trained: int | None = None
        """Tokens of context that its file tells of, once somebody has looked."""
        self.aside = asyncio.Lock()
        """Held by whoever computes between the steps of others: see aside.py."""
        self._preempted = 0  # sequences, of all the times that it was loaded before
        self._llm: LLM | None = None
        self._driver: Driver | None = None

    @property
    def loaded(self) -> bool:
        """Whether it is in memory."""
        return self._llm is not None

    @property
    def llm(self) -> LLM:
        """The loaded model, for whoever uses it."""
        assert self._llm is not None, f"{self.name} is used without being loaded"
        return self._llm

    @property
    def preempted(self) -> int:
        """Sequences that gave way since the server began."""
        counts = self._llm.engine.room.counts if self._llm is not None else {}
        return self._preempted + counts.get("parked", 0) + counts.get("recomputed", 0)

    def take(self, llm: LLM, failed: Callable[[BaseException], None]) -> None:
        """It is loaded now."""
        self._llm = llm
        llm.engine.scheduler.pace = Pace()
        self._driver = Driver(llm.loop, failed)

    def give(self) -> LLM:
        """It is not loaded any more; the caller closes it."""
        llm, self._preempted = self.llm, self.preempted
        assert self._driver is not None
        self._driver.stop()
        self._llm = self._driver = self.keep_s = None
        return llm

    @contextmanager
    def kept(self) -> Iterator[None]:
        """It is not given back meanwhile, and is no more in use for it."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    async def call(self, fn: Callable[[], T], unwanted: Callable[[T], None] = lambda _: None) -> T:
        """Does something with the engine between steps.

        Whatever comes of it is driven from before it begins: its client may leave at once.
        """
        assert self._driver is not None
        self._driver.drive()
        return await on_engine(self.llm.loop, fn, unwanted)


class Models:
    """All models that were named, and who is loaded."""

    def __init__(self, settings: ServeSettings, failed: Callable[[BaseException], None]) -> None:
        self._settings = settings
        self._failed = failed
        self._config = config.LoadConfig(**settings.load)
        self._changing = asyncio.Lock()  # one is loaded or given back at a time
        self.by_name: dict[str, ServedModel] = {}
        for source in settings.models:
            name = name_of(source)
            if name in self.by_name:
                raise RequestError(f"two models are called {name!r}; rename one of the files")
            self.by_name[name] = ServedModel(name, source)
        several = len(self.by_name) > 1
        self.budget = Budget(self._config.budget_bytes("cpu")) if several else None
        """What several models share."""

    @property
    def default(self) -> ServedModel:
        """The one that serves whoever names none."""
        return next(iter(self.by_name.values()))

    @property
    def loaded(self) -> list[ServedModel]:
        """Those in memory."""
        return [model for model in self.by_name.values() if model.loaded]

    def find(self, name: str | None, strict: bool = True) -> ServedModel:
        """A model by its name; without `strict` an unknown name is the first one's."""
        if not name:
            return self.default
        found = self.by_name.get(name)
        if found is None and strict:
            raise ApiError(
                404, f"there is no model {name!r:.140}; there are {', '.join(self.by_name)}",
                code="model_not_found", param="model",
            )  # fmt: skip
        return found or self.default

    async def context(self, model: ServedModel) -> int | None:
        """Tokens of a model's context; of one that is not loaded, as asked for or as it says."""
        if model.loaded:
            return model.llm.n_ctx
        if self._config.n_ctx is None and model.trained is None:
            model.trained = await asyncio.to_thread(_trained_for, model.source)
        return self._config.n_ctx or model.trained

    def expires(self, model: ServedModel) -> float:
        """When a model is given back if nobody uses it from now on."""
        return time.time() + self._left_s(model)

    def _left_s(self, model: ServedModel) -> float:
        rested = 0.0 if model.users else time.monotonic() - model.last_used
        return max(self._kept_s(model) - rested, 0.0)

    def _kept_s(self, model: ServedModel) -> float:
        """Seconds that a model stays once nobody uses it; the only one, unless told, for ever."""
        if model.keep_s is not None:
            return model.keep_s
        return self._settings.keep_alive_s if len(self.by_name) > 1 else math.inf

    @asynccontextmanager
    async def using(self, model: ServedModel) -> AsyncIterator[LLM]:
        """A model, loaded if need be; it stays so meanwhile."""
        model.users += 1
        try:
            while not model.loaded:
                await asyncio.shield(self._loading(model))
            yield model.llm
        finally:
            model.users -= 1
            model.last_used = time.monotonic()

    def _loading(self, model: ServedModel) -> asyncio.Task[None]:
        """The one load that all who need a model wait for; it goes on if they leave."""
        if model.loading is None:
            model.loading = task = asyncio.create_task(self._load(model))

            def loaded(done: asyncio.Task[None]) -> None:
                model.loading = None
                done.cancelled() or done.exception()  # whoever waited has heard of it

            task.add_done_callback(loaded)
        return model.loading

    async def _load(self, model: ServedModel) -> None:
        async with self._changing:
            while True:
                try:
                    llm = await asyncio.to_thread(self._loaded, model)
                    break
                except BudgetError as error:
                    if error.needs > await self._most_room():
                        raise
                    idle = [m for m in self.loaded if not m.users]
                    if idle:
                        # Whose time is over first goes first, and last who is to stay for ever.
                        await self._unload(min(idle, key=lambda m: (self._left_s(m), m.last_used)))
                    elif not await self._made_room():
                        raise
                except QuireError as error:
                    message = f"model {model.name!r} cannot be loaded: {error}"
                    raise ApiError(503, message, code="model_unavailable") from error
            model.take(llm, self._failed)
            await self._refit()
            for line in llm.notes:
                log.warning("%s: %s", model.name, line)

    async def _refit(self) -> None:
        """Contexts that nobody fixed become what fits beside what others cannot do without."""
        loaded, budget = self.loaded, self.budget
        if budget is None or not loaded:
            return

        def fit() -> None:
            for one in loaded:
                one.llm.engine.room.trim()
            for follow in budget.followers:
                follow()

        await loaded[0].call(fit)

    async def _most_room(self) -> int:
        """Bytes that another model could have at most: so nobody gives way to it in vain."""

        def lendable(llm: LLM) -> int:
            llm.engine.room.trim()
            return llm.engine.room.lendable(llm.budget)

        lent = 0
        for one in self.loaded:
            lent += await one.call(partial(lendable, one.llm)) if one.users else one.llm.budget.used
        return lent + self.budget.free if self.budget is not None else 0

    async def _made_room(self) -> bool:
        """Has those that are loaded free what they can do without; whether there was any."""

        def free(llm: LLM) -> bool:
            freed = False
            while llm.engine.room.lend(Rank.RESTING):
                freed = True
            llm.budget.reclaim()
            return freed

        return any([await m.call(partial(free, m.llm)) for m in self.loaded])

    def _loaded(self, model: ServedModel) -> LLM:
        path = pull.resolve(model.source, config.cache_folder())
        beside = self.loaded[0].llm if self.loaded else None
        budget = Share(self.budget, model.name) if self.budget is not None else None
        llm = LLM(path, self._config, budget, None, beside)
        if model.budget_bytes is not None and budget is None:
            llm.resize(model.budget_bytes)
        return llm

    async def _unload(self, model: ServedModel) -> None:
        """Gives a model's memory back."""
        if model.loaded:
            await asyncio.to_thread(model.give().close)
            gc.unfreeze()  # what it consisted of can be garbage now
            await self._refit()

    async def unload_idle(self) -> None:
        """Gives back those that nobody has used for as long as they stay."""
        for model in self.loaded:
            async with self._changing:  # somebody may use it by then
                if not model.users and self.expires(model) <= time.time():
                    await self._unload(model)

    async def close(self) -> None:
        """Gives all of them back."""
        for model in self.loaded:
            await self._unload(model)


def _trained_for(source: str) -> int | None:
    """The context that a model's file tells of, if it can be read; whoever uses it is told."""
    try:
        with open_weights(pull.resolve(source, config.cache_folder())) as file:
            name = file.metadata["general.architecture"]
            found = file.metadata.get(f"{name}.context_length")
    except (QuireError, OSError, KeyError):
        return None
    return found if isinstance(found, int) else None


def name_of(source: str) -> str:
    """What clients call a model: an alias, or the name of its file or folder."""
    if source.startswith("hf:"):
        source = source[3:]
    path = Path(source)
    return path.name.removesuffix(".gguf") if "/" in source or path.exists() else source
