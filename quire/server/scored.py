"""Prompts whose own tokens' log-probabilities are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from quire.engine.constrain import Matcher
from quire.engine.generation import Transcript
from quire.engine.request import Request
from quire.engine.scoring import Scoring
from quire.engine.work import Job
from quire.server.aside import closed, computed
from quire.server.models import ServedModel


class Scored:
    """A prompt that is scored, and what goes on from it; left early, it gives all back."""

    def __init__(self, model: ServedModel, scoring: Scoring) -> None:
        self._model = model
        self._scoring = scoring
        self.logprobs = scoring.logprobs

    @classmethod
    async def of(cls, model: ServedModel, tokens: list[int], top: int, salt: str) -> Scored:
        """Scores a prompt."""
        engine = model.llm.engine
        return cls(model, await computed(model, partial(Scoring, engine, tokens, top, salt)))

    def beginning(
        self, request: Request, transcript: Transcript, matcher: Matcher | None, answers: bool
    ) -> Callable[[], Job]:
        """What starts a job behind the prompt, on the loop; or one that is over at once."""
        loop, asked = self._model.llm.loop, replace(request, tokens=())
        if answers:
            return lambda: self._scoring.start(loop, asked, transcript, matcher)
        return lambda: self._scoring.end(loop, asked, transcript)

    async def close(self) -> None:
        """Gives back what nobody goes on from."""
        await closed(self._model, self._scoring)
