"""Work between the steps of others: vectors, and prompts whose own tokens are scored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from quire.engine.aside import Aside
from quire.server.models import ServedModel

_PAUSE_S = 0.02
"""Before room is looked for again."""

Work = TypeVar("Work", bound=Aside)


async def computed(model: ServedModel, make: Callable[[], Work]) -> Work:
    """Some work from its beginning to its end; one at a time, since they give way to each other.

    Whoever is cancelled meanwhile gives everything back.
    """
    async with model.aside:
        work = await model.call(make, lambda made: made.close())
        try:
            while not work.done:
                if not await model.call(work.step):
                    await asyncio.sleep(_PAUSE_S)
        except BaseException:
            await closed(model, work)
            raise
    return work


async def closed(model: ServedModel, work: Aside) -> None:
    """Gives back what some work holds, even if that is not waited for."""
    model.llm.loop.later(work.close)
    await model.call(lambda: None)
