"""What is under way on a sequence, and what has come of it: an append, or a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from quire.engine.generation import Transcript
from quire.engine.request import Request
from quire.engine.sequence import Sequence
from quire.errors import QuireError
from quire.memory.stats import Footprint
from quire.types import FinishReason, StepOutput, TokenLogprob

if TYPE_CHECKING:
    from quire.engine.loop import Loop


class Work:
    """Something under way on a sequence; whoever lets go of it early ends it."""

    def __init__(self, loop: Loop, sequence: Sequence, undo: Callable[[], None]) -> None:
        self.loop = loop
        self.sequence = sequence
        self.error: QuireError | None = None
        self.ended = False
        self.undo = undo
        """Ends it early; on the loop."""
        self.told: list[Callable[[], None]] = []
        """Called on the loop whenever something came of it."""

        def gone() -> None:
            loop.engine.discard(sequence)
            undo()

        self.ref = loop.when_gone(self, gone)

    @property
    def done(self) -> bool:
        """Whether nothing more will come; what was computed may have lost its pages since."""
        return self.ended or self.error is not None or not self.sequence.active

    @property
    def has_news(self) -> bool:
        """Whether a reader has something to take, or nothing to wait for."""
        return self.done

    def receive(self, output: StepOutput) -> None:
        """Takes in what a step added, or that it failed."""
        self.error = output.error


class Job(Work):
    """One request: its tokens and its text, as far as they have come."""

    def __init__(
        self, loop: Loop, sequence: Sequence, request: Request, transcript: Transcript,
        undo: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(loop, sequence, undo)
        self.request = request
        self.transcript = transcript
        self.prompt_tokens = sequence.length + len(request.tokens)
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.started = self.first = self.last = time.perf_counter()
        self.held: Footprint | None = None
        """What its sequence held when it ended."""
        self.peak_bytes = 0
        self._taken = 0
        self._reading = Lock()
        ends = frozenset() if request.sampling.ignore_eos else loop.engine.end_ids
        self._hidden: frozenset[int] = ends

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    def receive(self, output: StepOutput) -> None:
        """Takes in what a step added; it is done once everything else is there."""
        self.last = time.perf_counter()
        if not self.token_ids:
            self.first = self.last
            if not output.finish_reason:  # else it is looked at below
                self._look()
        self.logprobs.extend(output.logprobs)
        self.token_ids.extend(output.token_ids)
        self.transcript.read(self.token_ids, self._hidden)
        if output.finish_reason:
            self.transcript.end()
            self.held = self._look()
        self.error = output.error
        self.finish_reason = output.finish_reason

    def cancel(self) -> None:
        """Nobody waits for the rest; its pages are still there to be counted."""
        if not self.done:
            self.held = self._look()
            self.finish_reason = "cancelled"

    def _look(self) -> Footprint:
        held = self.loop.engine.memory.footprint(self.sequence.id)
        self.peak_bytes = max(self.peak_bytes, held.bytes)
        return held

    @property
    def text(self) -> str:
        """All that has come."""
        return "".join(self.transcript.pieces)

    @property
    def has_text(self) -> bool:
        """Whether a reader has something to take."""
        return any(self.transcript.pieces[self._taken :])

    @property
    def has_news(self) -> bool:
        """Whether a reader has something to take, or nothing to wait for."""
        return self.done or self.has_text

    def take(self) -> str:
        """The text that came since the last call; of several readers, each gets what is new."""
        with self._reading:
            end = len(self.transcript.pieces)
            text = "".join(self.transcript.pieces[self._taken : end])
            self._taken = end
            return text
