"""Every request's record: for its id, one line in the log, the metrics and the page."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.work import Job
from quire.server.metrics import Metrics, reason_of
from quire.server.run import Ask, Run

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNSEEN = re.compile(
    "[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""What JSON leaves as it is, and ends a line or commands a terminal where the log is read."""
_RECENT = 8
_current: ContextVar[Record | None] = ContextVar("record", default=None)
log = logging.getLogger("quire.requests")


class Record:
    """One request, from its head to its last byte."""

    def __init__(self, id: str, method: str, path: str) -> None:
        self.id = id
        self.method = method
        self.path = path
        self.time = time.time()
        self.arrived = time.perf_counter()
        self.status = 0
        self.ask: Ask | None = None
        self.run: Run | None = None
        self.waits_since = self.arrived
        self.admitted = 0.0

    @property
    def jobs(self) -> list[Job]:
        """What it has on the engine."""
        return self.run.jobs if self.run else []

    @property
    def made(self) -> int:
        """Tokens generated so far."""
        return sum(len(job.token_ids) for job in self.jobs)

    @property
    def read(self) -> int:
        """Prompt tokens computed so far."""
        firsts = self.run.firsts if self.run else []
        return sum(
            (job.prompt_tokens if job.token_ids else job.sequence.computed) - job.sequence.cached
            for job in firsts
        )

    @property
    def first_token_s(self) -> float | None:
        """Seconds until the first token came, as the client saw it."""
        firsts = [job.first for job in self.jobs if job.token_ids]
        return min(firsts) - self.arrived if firsts else None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token, of all choices together."""
        begun = [job for job in self.jobs if len(job.token_ids) > 1]
        if not begun:
            return None
        span = max(job.last for job in begun) - min(job.first for job in begun)
        return sum(len(job.token_ids) - 1 for job in begun) / span if span > 0 else None

    def told(self) -> dict[str, Any]:
        """What the page shows of it; only of a request that generates."""
        assert self.ask is not None
        firsts = self.run.firsts if self.run else []
        state = "waiting" if not self.jobs else "generating" if self.made else "reading"
        if self.jobs and all(job.done for job in self.jobs):
            state = "sending"  # all is made, and whoever asked has not read it yet
        prompt = sum(job.prompt_tokens for job in firsts) or sum(map(len, self.ask.prompts))
        return {
            "id": self.id, "state": state, "model": self.ask.model.name,
            "session": self.ask.session.id if self.ask.session else None,
            "prompt_tokens": prompt,
            "cached_tokens": sum(job.sequence.cached for job in firsts),
            "tokens": self.made, "first_token_s": self.first_token_s,
            "tokens_per_s": self.tokens_per_s,
        }  # fmt: skip

    def line(self, log_text: bool) -> dict[str, Any]:
        """What the log says of it."""
        line: dict[str, Any] = {
            "time": round(self.time, 3), "id": self.id, "method": self.method, "path": self.path,
            "status": self.status, "ms": round((time.perf_counter() - self.arrived) * 1e3, 1),
        }  # fmt: skip
        if self.ask is None or self.run is None or not self.jobs:
            return line
        told, usage = self.told(), self.run.usage()
        details: Any = usage["prompt_tokens_details"]
        first, speed = told["first_token_s"], told["tokens_per_s"]
        line |= {
            "model": told["model"], "session": told["session"],
            "prompt_tokens": told["prompt_tokens"], "cached_tokens": told["cached_tokens"],
            "miss": details.get("cache_miss", {}).get("reason"), "tokens": told["tokens"],
            "finish": [reason_of(job) for job in self.jobs], **self.run.memory(),
            "queue_ms": round((self.admitted - self.waits_since) * 1e3, 1),
            "first_token_ms": first and round(first * 1e3, 1),
            "tokens_per_s": speed and round(speed, 1),
        }  # fmt: skip
        if log_text:
            line["prompt"] = [self.run.llm.decode(prompt) for prompt in self.ask.prompts]
            line["text"] = [job.text for job in self.jobs]
        return line


class Records:
    """All requests under way, and the last ones that were."""

    def __init__(self, log_text: bool, models: Iterable[str]) -> None:
        self._log_text = log_text
        self.open: dict[Record, None] = {}  # in order of arrival
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.metrics = Metrics(models)
        self._made = self._read = 0

    def asked(self, ask: Ask) -> None:
        """The request that is handled here wants this, and waits for its turn."""
        if record := _current.get():
            record.ask, record.waits_since = ask, time.perf_counter()

    def runs(self, run: Run) -> None:
        """It has its turn."""
        if record := _current.get():
            record.run, record.admitted = run, time.perf_counter()

    def ends_as(self, status: int) -> None:
        """What becomes of a stream whose head said 200 before that was known."""
        if record := _current.get():
            record.status = status

    def counters(self) -> dict[str, int]:
        """Tokens since the server began."""
        records = list(self.open)
        return {
            "generated_tokens": self._made + sum(r.made for r in records),
            "computed_tokens": self._read + sum(r.read for r in records),
        }

    def told(self) -> list[dict[str, Any]]:
        """Requests that generate or wait, and those that did so last."""
        return [r.told() for r in self.open if r.ask is not None] + list(self.recent)

    def ended(self, record: Record) -> None:
        """Its last byte is sent, or nobody reads it."""
        self.open.pop(record, None)
        if record.ask is not None and not record.jobs and record.status == 499:
            self.metrics.gave_up(record.ask)
        if record.jobs:
            self._made, self._read = self._made + record.made, self._read + record.read
            finished = reason_of(record.jobs[0])
            self.recent.appendleft({**record.told(), "state": "done", "finished": finished})
            self.metrics.observe(record)
        told = json.dumps(record.line(self._log_text), ensure_ascii=False)
        log.info("%s", _UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], told))
        record.run = record.ask = None  # what they hold is not kept for as long as this is


class Recording:
    """Gives every request an id and a record. Pure ASGI, around everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Follows a request to its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        records: Records = scope["app"].state.quire.records
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        record = Record(id, scope["method"], scope["path"])
        records.open[record] = None
        _current.set(record)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = id  # OpenAI's and Anthropic's
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception:
            record.status = 500
            raise
        finally:
            record.status = record.status or 499  # nobody was there to be answered
            records.ended(record)


def log_to_stderr() -> None:
    """One line of JSON for each request, where servers write their logs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
