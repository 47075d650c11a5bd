"""What other dialects share: streams of lines, and how an answer ended.

A dialect makes a `ChatBody` or an `Ask` out of what its clients send, and writes what comes in its
own form. The generation itself is the same for all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.run import Run
from quire.server.wire import EventStream, in_a_line

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class LineStream(EventStream):
    """The same for streams of one JSON object in each line; blanks before one keep them alive.

    An empty line would do, but Ollama's own client takes every line for an object.
    """

    media_type = "application/x-ndjson"
    ping = b" "


def line(value: Any) -> bytes:
    """One object in a line of its own."""
    return in_a_line(value) + b"\n"


def new_id(prefix: str) -> str:
    """An id that nobody else has."""
    return f"{prefix}{secrets.token_hex(12)}"


def stopped_by(run: Run, stops: Sequence[str] | None, choice: int = 0) -> str | None:
    """Which of these stop strings ended an answer, if one did."""
    job = run.jobs[choice]
    llm = run.llm
    ended = job.token_ids and job.token_ids[-1] in llm.engine.end_ids
    if job.finish_reason != "stop" or ended or not stops:
        return None
    text = llm.decode(job.token_ids)
    found = [stop for stop in stops if stop and stop in text]
    return min(found, key=text.index, default=None)
