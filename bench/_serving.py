"""What is asked of a server, and what its clients feel; any server with OpenAI's completions."""

from __future__ import annotations

import asyncio
import json
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

WORDS = Path(__file__).parents[1].joinpath("tests/data/models/validation.txt").read_text().split()
_EVENT = "data: {"


def prompt(n_words: int, seed: int) -> str:
    """Some text of the corpus."""
    at = random.Random(seed).randrange(len(WORDS) - n_words)
    return " ".join(WORDS[at : at + n_words])


def client(url: str) -> httpx.AsyncClient:
    """For many connections at once."""
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits)


class Stream:
    """When each token of one request came."""

    def __init__(self) -> None:
        self.asked = time.perf_counter()
        self.times: list[float] = []

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.times[0] - self.asked if self.times else float("inf")

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in pairwise(self.times)]


def body(text: str, tokens: int, stream: bool = True) -> dict[str, Any]:
    """A completion, the same for every server."""
    return {
        "prompt": text, "max_tokens": tokens, "n_predict": tokens, "temperature": 0,
        "stream": stream, "ignore_eos": True,
    }  # fmt: skip


async def ask(
    http: httpx.AsyncClient, text: str, tokens: int, stream: Stream | None = None
) -> Stream:
    """A streamed completion, to its end."""
    stream = stream or Stream()
    async with http.stream("POST", "/v1/completions", json=body(text, tokens)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith(_EVENT):
                choices = json.loads(line[6:]).get("choices")
                if choices and choices[0].get("text"):
                    stream.times.append(time.perf_counter())
    return stream


async def leave(asking: asyncio.Task[Stream]) -> None:
    """A client goes away."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def p99(values: list[float]) -> float:
    """What 99 of 100 stay below; of fewer, the greatest."""
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * 0.99))] if values else 0.0


async def crowd(http: httpx.AsyncClient, clients: int, words: int, tokens: int) -> dict[str, float]:
    """So many clients at once, each with a prompt of its own."""
    start = time.perf_counter()
    asked = (ask(http, prompt(words, 1000 * clients + i), tokens) for i in range(clients))
    streams = await asyncio.gather(*asked)
    took = time.perf_counter() - start
    return {
        "first_p99_s": p99([s.first for s in streams]),
        "tokens_per_s": sum(len(s.times) for s in streams) / took,
        "gap_p99_s": p99([gap for stream in streams for gap in stream.gaps]),
    }


async def beside_a_prompt(http: httpx.AsyncClient) -> dict[str, float]:
    """A reader, alone and while somebody sends a prompt of 3,000 tokens."""
    alone = await ask(http, prompt(20, 900), 100)
    speed = (len(alone.times) - 1) / (alone.times[-1] - alone.times[0])
    stream = Stream()
    reader = asyncio.create_task(ask(http, prompt(20, 901), 3000, stream))
    await asyncio.sleep(0.4)
    start = time.perf_counter()
    other = await ask(http, prompt(1950, 902), 1)
    end = start + other.first
    await leave(reader)
    during = [t for t in stream.times if start <= t <= end]
    gaps = [b - a for a, b in pairwise([start, *during, end])]
    share = len(during) / (end - start) / speed
    return {"longest_gap_s": max(gaps), "share_of_alone": share, "prompt_first_s": other.first}


async def cached(http: httpx.AsyncClient) -> dict[str, float]:
    """Sixteen clients whose prompts begin the same, which was computed before."""
    shared = prompt(600, 77)
    cold = await ask(http, shared, 1)
    tails = (f"{shared} {prompt(8, 500 + i)}" for i in range(16))
    streams = await asyncio.gather(*(ask(http, tail, 16) for tail in tails))
    warm = p99([s.first for s in streams])
    return {"cold_first_s": cold.first, "cached_first_p99_s": warm, "ratio": warm / cold.first}


async def after_leaving(http: httpx.AsyncClient) -> dict[str, float]:
    """A newcomer right after eight others left in the middle."""
    others = [asyncio.create_task(ask(http, prompt(300, 600 + i), 200)) for i in range(8)]
    await asyncio.sleep(1.0)
    await asyncio.gather(*(leave(one) for one in others))
    stream = await ask(http, prompt(20, 700), 4)
    return {"newcomer_first_s": stream.first}


async def beside_a_peer(url: str, clients: list[int], tokens: int) -> dict[str, Any]:
    """What is asked of every server."""
    async with client(url) as http:
        await ask(http, "Hello", 4)
        found: dict[str, Any] = {}
        for n in clients:
            found[f"{n} clients"] = await crowd(http, n, 100, tokens)
        found["beside a prompt"] = await beside_a_prompt(http)
        found["cached prefix"] = await cached(http)
        found["after 8 left"] = await after_leaving(http)
    return found


# -- what only Quire is asked -------------------------------------------------------------------


async def streams16(url: str, pid: int) -> dict[str, float]:
    """Sixteen streams, and the processor time that the event loop takes for each token."""
    async with client(url) as http:
        await crowd(http, 2, 5, 8)
        before = _thread_s(pid)
        found = await crowd(http, 16, 20, 96)
        used = _thread_s(pid) - before
    return {**found, "event_loop_us": used / (16 * 96) * 1e6}


def _thread_s(pid: int) -> float:
    """Processor time of a process's first thread, which its event loop runs in."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def leaving(url: str) -> dict[str, float]:
    """Seconds until nothing is computed any more after a client left, by what it waited for."""
    async with client(url) as http:
        cases = {
            "prompt": (body(prompt(1950, 800), 4), 0.3),
            "stream": (body(prompt(20, 801), 2000), 0.5),
            "unstreamed": (body(prompt(20, 802), 2000, stream=False), 0.5),
        }
        found = {}
        for name, (asked, after) in cases.items():
            task = asyncio.create_task(http.post("/v1/completions", json=asked))
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
        first = asyncio.create_task(ask(http, prompt(20, 810), 2000))
        await asyncio.sleep(0.3)
        second = asyncio.create_task(ask(http, prompt(20, 811), 2000))
        await asyncio.sleep(0.1)
        refusals = []
        for _ in range(20):
            start = time.perf_counter()
            answer = await http.post("/v1/completions", json=body("x", 4))
            refusals.append(time.perf_counter() - start)
            assert answer.status_code == 429, answer.text
        await leave(second)
        start = time.perf_counter()
        while await _waiting(http):
            await asyncio.sleep(0.005)
        queued = time.perf_counter() - start
        await leave(first)
        await _until_idle(http)
    return {"refusal_s": p99(refusals), "left_queue_s": queued}


async def _waiting(http: httpx.AsyncClient) -> bool:
    for line in (await http.get("/metrics")).text.splitlines():
        if line.startswith("quire:num_requests_waiting"):
            return float(line.split()[-1]) > 0
    raise AssertionError("there is no such metric")


async def drained(url: str, end: Any) -> bool:
    """Whether a stream comes to its end although the server is told to end."""
    async with client(url) as http:
        stream = Stream()
        asking = asyncio.create_task(ask(http, prompt(20, 820), 120, stream))
        while len(stream.times) < 5:
            await asyncio.sleep(0.01)
        end()
        await asking
        return len(stream.times) >= 118  # a token may have no text of its own
