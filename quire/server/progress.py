"""What llama.cpp's clients may watch of an answer: how far its prompt is, and how fast it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from quire.server.run import Run
from quire.server.timings import speed, timings

_EVERY_S = 0.03


class Watched:
    """Both, where a client has asked for them: `return_progress` and `timings_per_token`."""

    def __init__(self, run: Run, progress: bool | None, timings: bool | None) -> None:
        self._run = run
        self._progress = bool(progress)
        self._timings = bool(timings)

    async def prompt(self) -> AsyncIterator[dict[str, Any]]:
        """How many tokens of the prompts are computed, until answers begin."""
        if not self._progress:
            return
        jobs = self._run.firsts
        total = sum(job.prompt_tokens for job in jobs)
        cached = processed = sum(job.sequence.cached for job in jobs)
        started = min(job.started for job in jobs)
        told = -1
        while told < total:
            if processed > told:
                told = processed
                ms = (time.perf_counter() - started) * 1e3
                progress = {"total": total, "cache": cached, "processed": told, "time_ms": ms}
                yield {"prompt_progress": progress, **self._so_far(cached, told - cached, ms)}
                continue
            if self._run.failure or any(job.error for job in jobs):
                return
            if any(job.done or job.token_ids for job in jobs):
                processed = total
                continue
            await asyncio.sleep(_EVERY_S)
            processed = sum(min(job.sequence.computed, job.prompt_tokens) for job in jobs)

    def _so_far(self, cached: int, n: int, ms: float) -> dict[str, Any]:
        """Timings of a prompt that is still being computed."""
        if not self._timings:
            return {}
        prompt = speed("prompt", n, n, ms if n else 0.0)
        return {"timings": {"cache_n": cached, **prompt, **speed("predicted", 0, 0, 0.0)}}

    def token(self, choice: int) -> dict[str, Any]:
        """What is told with each piece of an answer, of that one: there may be thousands."""
        job = self._run.jobs[choice]
        return {"timings": timings([job], [job])} if self._timings else {}
