"""A generation on its way: text as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.jobs import Job
from quire.types import Completion

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.session import Session


class Stream:
    """An iterator over pieces of text as they come; closing it early gives its pages back."""

    def __init__(self, llm: LLM, job: Job, session: Session | None = None) -> None:
        self._llm = llm
        self._job = job
        self._session = session  # lives as long as its stream does

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not (piece := self._job.take()):
            if self._job.error:
                raise self._job.error
            if self._job.done:
                raise StopIteration
            try:
                self._llm.jobs.step()
            except BaseException:
                self.close()
                raise
        return piece

    @property
    def completion(self) -> Completion:
        """What has come so far, as a whole."""
        return self._job.completion(self._llm.load_s, self._llm.extent)

    def close(self) -> None:
        """Ends the generation."""
        self._llm.jobs.drop(self._job)

    def __del__(self) -> None:
        jobs, job = self._llm.jobs, self._job
        if not job.done:
            jobs.later(lambda: jobs.drop(job))
