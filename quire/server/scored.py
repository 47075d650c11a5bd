"""Prompts whose own tokens' log-probabilities are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from quire.engine.constrain import Matcher
from quire.engine.generation import Transcript
from quire.engine.loop import Job
from quire.engine.request import Request
from quire.engine.scoring import Scoring
from quire.server.models import ServedModel

_PAUSE_S = 0.02
"""Before room is looked for again."""


class Scored:
    """A prompt that is scored, and what goes on from it; left early, it gives all back."""

    def __init__(self, model: ServedModel, scoring: Scoring) -> None:
        self._model = model
        self._scoring = scoring
        self.logprobs = scoring.logprobs

    @classmethod
    async def of(cls, model: ServedModel, tokens: list[int], top: int, salt: str) -> Scored:
        """Scores a prompt; one at a time, since they give way to each other."""
        engine = model.llm.engine
        async with model.scoring:
            scoring = await model.call(lambda: Scoring(engine, tokens, top, salt), Scoring.close)
            scored = cls(model, scoring)
            try:
                while not scoring.done:
                    if not await model.call(scoring.step):
                        await asyncio.sleep(_PAUSE_S)
            except BaseException:
                await scored.close()
                raise
        return scored

    def beginning(
        self, request: Request, transcript: Transcript, matcher: Matcher | None, answers: bool
    ) -> Callable[[], Job]:
        """What starts a job behind the prompt, on the loop; or one that is over at once."""
        loop, asked = self._model.llm.loop, replace(request, tokens=())
        if answers:
            return lambda: self._scoring.start(loop, asked, transcript, matcher)
        return lambda: self._scoring.end(loop, asked, transcript)

    async def close(self) -> None:
        """Gives back what nobody goes on from, even if it is not waited for."""
        self._model.llm.loop.later(self._scoring.close)
        await self._model.call(lambda: None)
