"""What is asked of a server, and what its clients feel; any server with OpenAI's completions."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from _machine import Watch

WORDS = Path(__file__).parents[1].joinpath("tests/data/models/validation.txt").read_text().split()
_EVENT = re.compile(rb"data: (\{.*\})\r?\n")


def prompt(n_words: int, seed: int) -> str:
    """Some text of the corpus."""
    at = random.Random(seed).randrange(len(WORDS) - n_words)
    return " ".join(WORDS[at : at + n_words])


def body(text: str, tokens: int, stream: bool = True) -> dict[str, Any]:
    """A completion, the same for every server."""
    return {
        "prompt": text, "max_tokens": tokens, "n_predict": tokens, "temperature": 0,
        "stream": stream, "ignore_eos": True,
    }  # fmt: skip


def request(url: str, text: str, tokens: int) -> bytes:
    """The same as a client sends it."""
    data = json.dumps(body(text, tokens)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Stream(asyncio.Protocol):
    """One streamed request, and when each of its tokens came.

    What comes is only kept, and read when it is over: the client shares the processor with the
    server, and is not what is measured.
    """

    def __init__(self, url: str, text: str, tokens: int) -> None:
        self._request = request(url, text, tokens)
        self._pieces: list[tuple[float, bytes]] = []
        self._url = url
        self.over = asyncio.get_running_loop().create_future()
        self.asked = time.perf_counter()

    async def run(self) -> Stream:
        """Asks, and reads to the end; who is cancelled leaves."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: self, *self._url.split(":"))
        try:
            await self.over
        finally:
            transport.abort()
        assert self.times, self._came[:400]
        return self

    def connection_made(self, transport: Any) -> None:
        """Asks."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Something came."""
        self._pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """That was all."""
        if not self.over.done():
            self.over.set_result(None)

    @property
    def _came(self) -> bytes:
        return b"".join(data for _, data in self._pieces)

    @property
    def times(self) -> list[float]:
        """When each token with a text came."""
        ends, at = [], 0
        for _, data in self._pieces:
            at += len(data)
            ends.append(at)
        found = []
        for event in _EVENT.finditer(self._came):
            choices = json.loads(event[1]).get("choices")
            if choices and choices[0].get("text"):
                found.append(self._pieces[bisect_left(ends, event.end())][0])
        return found

    @property
    def whole(self) -> bool:
        """Whether it came to its end; tokens may have come several at a time."""
        ended = rb'"finish_reason":\s*"length".*\[DONE\]'
        return re.search(ended, self._came, re.DOTALL) is not None

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.times[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in pairwise(self.times)]


async def ask(url: str, text: str, tokens: int) -> Stream:
    """A streamed completion, to its end."""
    return await Stream(url, text, tokens).run()


async def leave(asking: asyncio.Task[Any]) -> None:
    """A client goes away."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def p99(values: list[float]) -> float:
    """What 99 of 100 stay below; of fewer, the greatest."""
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * 0.99))] if values else 0.0


async def crowd(url: str, clients: int, words: int, tokens: int) -> dict[str, float]:
    """So many clients at once, each with a prompt of its own."""
    start = time.perf_counter()
    asked = (ask(url, prompt(words, 1000 * clients + i), tokens) for i in range(clients))
    streams = await asyncio.gather(*asked)
    took = time.perf_counter() - start
    return {
        "first_p99_s": p99([s.first for s in streams]),
        "tokens_per_s": sum(len(s.times) for s in streams) / took,
        "gap_p99_s": p99([gap for stream in streams for gap in stream.gaps]),
    }


async def beside_a_prompt(url: str) -> dict[str, float]:
    """A reader, alone and while somebody sends a prompt of 3,000 tokens."""
    alone = await ask(url, prompt(20, 900), 100)
    speed = (len(alone.times) - 1) / (alone.times[-1] - alone.times[0])
    stream = Stream(url, prompt(20, 901), 3000)
    reader = asyncio.create_task(stream.run())
    await asyncio.sleep(0.4)
    start = time.perf_counter()
    other = await ask(url, prompt(1950, 902), 1)
    end = start + other.first
    await leave(reader)
    during = [t for t in stream.times if start <= t <= end]
    gaps = [b - a for a, b in pairwise([start, *during, end])]
    share = len(during) / (end - start) / speed
    return {"longest_gap_s": max(gaps), "share_of_alone": share, "prompt_first_s": other.first}


async def cached(url: str, words: int) -> dict[str, float]:
    """Sixteen clients whose prompts begin the same, which was computed before."""
    shared = prompt(words, 77)
    cold = await ask(url, shared, 1)
    tails = (f"{shared} {prompt(8, 500 + i)}" for i in range(16))
    streams = await asyncio.gather(*(ask(url, tail, 16) for tail in tails))
    warm = p99([s.first for s in streams])
    return {"cold_first_s": cold.first, "cached_first_p99_s": warm, "ratio": warm / cold.first}


async def after_leaving(url: str) -> dict[str, float]:
    """A newcomer right after eight others left in the middle."""
    others = [asyncio.create_task(ask(url, prompt(300, 600 + i), 200)) for i in range(8)]
    await asyncio.sleep(1.0)
    await asyncio.gather(*(leave(one) for one in others))
    return {"newcomer_first_s": (await ask(url, prompt(20, 700), 4)).first}


async def beside_a_peer(url: str, tokens: int, pid: int) -> dict[str, Any]:
    """What is asked of every server, and the share of the machine that `others` took meanwhile."""
    found: dict[str, Any] = {}
    phases: dict[str, Any] = {
        "8 clients": lambda: crowd(url, 8, 100, tokens),
        "beside a prompt": lambda: beside_a_prompt(url),
        "after 8 left": lambda: after_leaving(url),
        "cached prefix": lambda: cached(url, 600),
        "long cached prefix": lambda: cached(url, 1950),
        "32 clients": lambda: crowd(url, 32, 100, tokens),
    }
    await ask(url, "Hello", 8)
    for name, measured in phases.items():
        watch = Watch([pid])
        found[name] = {**await measured(), "others": watch.read()[1]}
        told = ", ".join(f"{figure} {value:.3f}" for figure, value in found[name].items())
        print(f"  {name}: {told}", file=sys.stderr, flush=True)
    return found


# -- what only Quire is asked -------------------------------------------------------------------


def client(url: str) -> httpx.AsyncClient:
    """For requests that are not streamed."""
    return httpx.AsyncClient(base_url=f"http://{url}", timeout=60)


async def streams16(url: str, pid: int) -> dict[str, float]:
    """Sixteen streams, and the processor time that the event loop takes for one more token."""
    used = {}
    for tokens in (8, 16, 96):  # the first one warms up
        before = _thread_s(pid)
        found = await crowd(url, 16, 20, tokens)
        used[tokens] = _thread_s(pid) - before
    return {**found, "event_loop_us": (used[96] - used[16]) / (16 * 80) * 1e6}


def _thread_s(pid: int) -> float:
    """Processor time of a process's first thread, which its event loop runs in."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def leaving(url: str) -> dict[str, float]:
    """Seconds until nothing is computed any more after a client left, by what it waited for."""
    async with client(url) as http:
        cases = {
            "prompt": (body(prompt(1950, 800), 4), 0.2),
            "stream": (body(prompt(20, 801), 2000), 0.5),
            "unstreamed": (body(prompt(20, 802), 2000, stream=False), 0.5),
        }
        found = {}
        for name, (asked, after) in cases.items():
            task = asyncio.create_task(http.post("/v1/completions", json=asked))
            while not await _busy(http):
                await asyncio.sleep(0.005)
            await asyncio.sleep(after)
            assert await _busy(http), f"{name}: nothing ran when the client left"
            task.cancel()
            found[name] = await _until_idle(http)
        return found


async def _busy(http: httpx.AsyncClient) -> bool:
    return any(slot["is_processing"] for slot in (await http.get("/slots")).json())


async def _until_idle(http: httpx.AsyncClient) -> float:
    start = time.perf_counter()
    while await _busy(http):
        await asyncio.sleep(0.005)
    return time.perf_counter() - start


async def full(url: str) -> dict[str, float]:
    """A server that answers one and lets one wait: refusals, and leaving the queue."""
    async with client(url) as http:
        first = asyncio.create_task(ask(url, prompt(20, 810), 2000))
        await asyncio.sleep(0.3)
        second = asyncio.create_task(ask(url, prompt(20, 811), 2000))
        await asyncio.sleep(0.1)
        refusals = [await _refused(url) for _ in range(20)]
        await leave(second)
        start = time.perf_counter()
        while await _waiting(http):
            await asyncio.sleep(0.005)
        queued = time.perf_counter() - start
        await leave(first)
        await _until_idle(http)
    return {"refusal_s": p99(refusals), "left_queue_s": queued}


async def _refused(url: str) -> float:
    """Seconds until a refusal, for a client that does nothing else."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(*url.split(":"))
    writer.write(request(url, "x", 4))
    head = await reader.readline()
    writer.close()
    assert b" 429 " in head, head
    return time.perf_counter() - start


async def _waiting(http: httpx.AsyncClient) -> bool:
    for line in (await http.get("/metrics")).text.splitlines():
        if line.startswith("quire:num_requests_waiting"):
            return float(line.split()[-1]) > 0
    raise AssertionError("there is no such metric")


async def drained(url: str, end: Any) -> bool:
    """Whether a stream comes to its end although the server is told to end."""
    stream = Stream(url, prompt(20, 820), 120)
    asking = asyncio.create_task(stream.run())
    while len(stream.times) < 5:
        await asyncio.sleep(0.01)
    end()
    return (await asking).whole
