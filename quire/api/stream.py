"""A generation on its way: text as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from quire.api.copies import Uncopied
from quire.engine.endings import Holder, Readers
from quire.engine.work import Job
from quire.errors import RequestError
from quire.types import Completion

if TYPE_CHECKING:
    from quire.api.session import Session

T = TypeVar("T")
Complete = Callable[[Job], Completion]
"""Makes a whole of what a job has come to; raises what made it fail."""


class Stream(Uncopied):
    """An iterator over pieces of text as they come; closing it early gives its pages back.

    Also a context manager that closes it.
    """

    instead = "it is one answer, whoever reads it; pass on stream.completion"

    def __init__(
        self, job: Job, readers: Readers, complete: Complete, session: Session | None = None
    ) -> None:
        self._job = job
        self._readers = readers
        self._complete = complete
        self._session = session  # lives as long as its stream does

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stream {len(self._job.token_ids)} tokens{', done' if self._job.done else ''}>"

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        job = self._job
        while not (piece := job.take()):
            if job.done and not job.has_text:
                if job.error:
                    raise job.error
                raise StopIteration
            self._wait(job)
        return piece

    def _wait(self, job: Job) -> None:
        """Until there is something to read; whoever is interrupted has ended it."""
        holder = Holder()
        with holder.lock:
            self._readers.waiting.add(holder)
            try:
                job.loop.wait(job, lambda: job.has_news)
            except BaseException:
                self.close()
                raise
            self._readers.waiting.discard(holder)

    @property
    def completion(self) -> Completion:
        """What has come so far, as a whole."""
        return self._complete(self._job)

    def close(self) -> None:
        """Ends the generation; in a child of the process that began it there is nothing to end."""
        job = self._job
        if not (job.done or job.loop.seat.forked):
            job.loop.close_with(lambda: job.loop.end(job))


class AsyncStream(Uncopied):
    """The same for `async for`; the request begins with the first piece that is asked for."""

    instead = Stream.instead

    def __init__(
        self, start: Callable[[Readers], Job], complete: Complete, session: Session | None = None
    ) -> None:
        self._start = start
        self._readers = Readers()
        self._complete = complete
        self._session = session
        self._job: Job | None = None
        self._beginning = Lock()
        self._closed = False

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        from quire.engine.guest import guest_holder

        if self._closed:
            raise StopAsyncIteration
        holder = guest_holder()
        with holder.lock:
            self._readers.waiting.add(holder)
            try:
                job = self._job
                if job is None:
                    job = await off_the_loop(self._begin, end_soon)
                    if self._closed:  # whoever closed it meanwhile had no job to end
                        raise StopAsyncIteration
                while not (piece := job.take()):
                    if job.done and not job.has_text:
                        if job.error:
                            raise job.error
                        raise StopAsyncIteration
                    await job.loop.wait_async(job)
            except BaseException:
                await self.aclose()
                raise
            self._readers.waiting.discard(holder)
        return piece

    def _begin(self) -> Job:
        with self._beginning:  # several readers share one request
            self._job = self._job or self._start(self._readers)
            return self._job

    @property
    def completion(self) -> Completion:
        """What has come so far, as a whole."""
        if self._job is None:
            raise RequestError("the stream has not begun; read from it first")
        return self._complete(self._job)

    async def aclose(self) -> None:
        """Ends the generation; its pages are given back before the next step."""
        self._closed = True
        end_soon(self._job)


def end_soon(job: Job | None) -> None:
    """Ends a job without waiting for it."""
    if job is not None and not job.done:
        loop = job.loop
        loop.later(lambda: loop.end(job))


def end_all_soon(jobs: list[Job]) -> None:
    """The same for several."""
    for job in jobs:
        end_soon(job)


async def off_the_loop(do: Callable[[], T], unwanted: Callable[[T], object] | None = None) -> T:
    """Does something in a thread: compiling and tokenising take their time, and so may a step.

    Cancelled meanwhile, it is over once that has been done, and `unwanted` was told of it: nothing
    happens to a session behind the back of whoever goes on with it.
    """
    import asyncio

    task = asyncio.create_task(asyncio.to_thread(do))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        failed = task.cancelled() or task.exception() is not None  # unseen, asyncio would tell it
        if unwanted and not failed:
            unwanted(task.result())
        raise
