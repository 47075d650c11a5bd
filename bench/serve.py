"""What people who use a server feel: first tokens, gaps, speed; beside llama-server if wanted.

    python bench/serve.py [-m MODEL.gguf] [--llama-server BINARY] [--clients 8 32]

Starts `quire serve` (and llama-server) on this machine, asks both the same, one after the other,
and prints a table. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

WORDS = Path(__file__).parents[1].joinpath("tests/data/models/validation.txt").read_text().split()


def prompt(n_words: int, seed: int) -> str:
    """Some text of the corpus."""
    at = random.Random(seed).randrange(len(WORDS) - n_words)
    return " ".join(WORDS[at : at + n_words])


class Stream:
    """When each token of one request came."""

    def __init__(self) -> None:
        self.asked = time.perf_counter()
        self.times: list[float] = []

    @property
    def first(self) -> float:
        return self.times[0] - self.asked if self.times else float("inf")

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times)]


async def ask(
    http: httpx.AsyncClient, text: str, tokens: int, stream: Stream | None = None
) -> Stream:
    """A streamed completion."""
    stream = stream or Stream()
    body = {
        "prompt": text, "max_tokens": tokens, "n_predict": tokens, "temperature": 0,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:]).get("choices")
                if choices and choices[0].get("text"):
                    stream.times.append(time.perf_counter())
    return stream


def p99(values: list[float]) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * 0.99))] if values else 0.0


async def crowd(http: httpx.AsyncClient, clients: int, seed: int) -> dict[str, float]:
    """So many clients, each with a prompt of its own."""
    start = time.perf_counter()
    asked = (ask(http, prompt(100, seed + i), 64) for i in range(clients))
    streams = await asyncio.gather(*asked)
    took = time.perf_counter() - start
    gaps = [gap for stream in streams for gap in stream.gaps]
    return {
        "first_p99_s": p99([s.first for s in streams]),
        "tokens_per_s": sum(len(s.times) for s in streams) / took,
        "gap_p99_s": p99(gaps),
    }


async def beside_a_prompt(http: httpx.AsyncClient) -> dict[str, float]:
    """A reader, alone and while somebody sends a long prompt."""
    alone = await ask(http, prompt(20, 900), 100)
    speed = (len(alone.times) - 1) / (alone.times[-1] - alone.times[0])
    stream = Stream()
    reader = asyncio.create_task(ask(http, prompt(20, 901), 4000, stream))
    await asyncio.sleep(0.4)
    start = time.perf_counter()
    other = await ask(http, prompt(2100, 902), 1)
    end = start + other.first
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    during = [t for t in stream.times if start <= t <= end]
    gaps = [b - a for a, b in pairwise(during)]
    share = len(during) / (end - start) / speed
    return {"longest_gap_s": max(gaps), "share_of_alone": share, "prompt_first_s": other.first}


async def cached(http: httpx.AsyncClient) -> dict[str, float]:
    """Sixteen clients whose prompts begin the same, which was computed before."""
    shared = prompt(600, 77)
    cold = await ask(http, shared, 1)
    streams = await asyncio.gather(
        *(ask(http, f"{shared} {prompt(8, 500 + i)}", 16) for i in range(16))
    )
    warm = p99([s.first for s in streams])
    return {"cold_first_s": cold.first, "cached_first_p99_s": warm, "ratio": warm / cold.first}


async def after_leaving(http: httpx.AsyncClient) -> dict[str, float]:
    """A newcomer right after eight others left in the middle."""
    others = [asyncio.create_task(ask(http, prompt(300, 600 + i), 200)) for i in range(8)]
    await asyncio.sleep(1.0)
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    stream = await ask(http, prompt(20, 700), 4)
    return {"newcomer_first_s": stream.first}


async def measure(url: str, clients: list[int]) -> dict[str, Any]:
    """All of it, against one server."""
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await ask(http, "Hello", 4)
        found: dict[str, Any] = {}
        for n in clients:
            found[f"{n} clients"] = await crowd(http, n, 1000 * n)
        found["beside a prompt"] = await beside_a_prompt(http)
        found["cached prefix"] = await cached(http)
        found["after 8 left"] = await after_leaving(http)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def running(command: list[str], url: str) -> Iterator[None]:
    """A server, until the block is left."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).read()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} does not start") from None
                time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--llama-server", help="binary to compare with; needs -m FILE.gguf")
    parser.add_argument("--llama-args", default="-np 8 -b 128", help="its better setting")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    ours = [sys.executable, "-c", "from quire.cli import main; main()", "serve", "-m", args.model]
    started = time.perf_counter()
    with running([*ours, "-t", str(args.threads), "--port", str(port)], url):
        found["quire"] = {"ready_s": time.perf_counter() - started}
        found["quire"] |= asyncio.run(measure(url, args.clients))
    if args.llama_server:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        theirs = [args.llama_server, "-m", args.model, "-t", str(args.threads), "--port", str(port)]
        with running([*theirs, *args.llama_args.split()], url):
            found["llama-server"] = asyncio.run(measure(url, args.clients))
    table(found)
    print(json.dumps(found))


def table(found: dict[str, Any]) -> None:
    """One row for each figure, one column for each server."""
    print(f"{'':36}" + "".join(f"{name:>16}" for name in found))
    first = next(iter(found.values()))
    for what, figures in first.items():
        if not isinstance(figures, dict):
            print(f"{what:36}{figures:16.3f}")
            continue
        for figure in figures:
            values = [server.get(what, {}).get(figure, float("nan")) for server in found.values()]
            print(f"{what + ', ' + figure:36}" + "".join(f"{v:16.3f}" for v in values))


if __name__ == "__main__":
    main()
