"""What people who use a server feel: first tokens, gaps, speed; beside llama-server if wanted.

    python bench/serve.py [-m MODEL.gguf] [--llama-server BINARY] [--llama-args "-np 8 …"]

Starts `quire serve` (and llama-server) on this machine, asks both the same, one after the other,
and prints a table with ratios and targets. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from _machine import Quiet
from _serving import beside_a_peer, drained, full, leaving, prompt, streams16

_BATCH = """
import json, sys, time
import quire
model, threads, tokens, *prompts = json.loads(sys.stdin.read())
llm = quire.load(model, threads=threads)
llm.generate(["Once", "Twice"], max_tokens=8, ignore_eos=True)
start = time.perf_counter()
done = llm.generate(prompts, max_tokens=tokens, temperature=0, ignore_eos=True)
print(sum(len(d.token_ids) for d in done) / (time.perf_counter() - start))
"""


class Server(NamedTuple):
    """One that runs."""

    url: str
    process: subprocess.Popen[bytes]
    ready_s: float


@contextmanager
def running(command: list[str]) -> Iterator[Server]:
    """A server, until the block is left."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    url = f"127.0.0.1:{port}"
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not _healthy(url):
            if process.poll() is not None or time.perf_counter() > start + 120:
                raise SystemExit(f"{command[0]} does not start")
            time.sleep(0.01)
        yield Server(url, process, time.perf_counter() - start)
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{url}/health", timeout=2).read()
        return True
    except OSError:
        return False


def quire_alone(model: str, threads: int, serve: list[str]) -> dict[str, Any]:
    """What only Quire is asked: leaving, refusals, its own overhead, an orderly end."""
    found: dict[str, Any] = {}
    with running(serve) as server:
        found["16 streams"] = asyncio.run(streams16(server.url, server.process.pid))
        found["left"] = asyncio.run(leaving(server.url))
    asked = json.dumps([model, threads, 96, *(prompt(20, 16000 + i) for i in range(16))])
    command = [sys.executable, "-c", _BATCH]
    batch = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    found["16 streams"]["in_process_per_s"] = float(batch.stdout)
    with running([*serve, "--max-running", "1", "--max-queue", "1"]) as server:
        found["full"] = asyncio.run(full(server.url))
        done = asyncio.run(drained(server.url, server.process.terminate))
        found["drained"] = {"complete": done, "exit": server.process.wait(60)}
    return found


class Row(NamedTuple):
    """One line of the table."""

    what: str
    quire: float
    peer: float | None
    target: float
    """The most it may be; below 0, the least without the sign."""
    disturbed: bool = False
    """Whether other programs computed meanwhile."""

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.quire >= -self.target if self.target < 0 else self.quire <= self.target

    def __str__(self) -> str:
        peer, ratio = "", ""
        if self.peer is not None:
            most = max(self.quire, self.peer) / max(min(self.quire, self.peer), 1e-9)
            peer, ratio = f"{self.peer:.3f}", f"{most:.1f} x"
        sign = ">=" if self.target < 0 else "<="
        told = f"{sign} {abs(self.target):.3g}"
        mark = ("" if self.met else "  MISSED") + ("  ?" if self.disturbed else "")
        return f"{self.what:46}{self.quire:10.3f}{peer:>14}{ratio:>9}{told:>10}{mark}"


def rows(found: dict[str, Any]) -> list[Row]:
    """The figures that were to be reached, those beside the peer first."""
    ours, theirs = found["quire"], found.get("llama-server")
    made: list[Row] = []

    def row(what: str, phase: str, figure: str, target: float) -> None:
        both = [server[phase] for server in found.values() if phase in server]
        peer = both[1][figure] if len(both) > 1 else None
        disturbed = any(one.get("others", 0) > Quiet.LIMIT for one in both)
        made.append(Row(what, both[0][figure], peer, target, disturbed))

    for phase in ("8 clients", "32 clients"):
        most = theirs[phase]["first_p99_s"] / 8 if theirs else inf
        row(f"{phase}, first token p99, s", phase, "first_p99_s", most)
    for phase, times in (("8 clients", 5), ("32 clients", 8)):
        least = times * theirs[phase]["tokens_per_s"] if theirs else 1
        row(f"{phase}, tokens per second", phase, "tokens_per_s", -least)
    row("8 clients, between tokens p99, s", "8 clients", "gap_p99_s", 0.06)
    beside = "beside a prompt"
    row("a reader's longest gap beside a prompt, s", beside, "longest_gap_s", 0.12)
    row("its speed meanwhile, share of alone", beside, "share_of_alone", -0.4)
    row("16 on a cached prefix of 1,100, p99 by cold", "cached prefix", "ratio", 0.3)
    row("16 on a cached prefix of 3,100, p99 by cold", "long cached prefix", "ratio", 0.3)
    row("newcomer after 8 left, first token, s", "after 8 left", "newcomer_first_s", 0.25)
    for state in ours["left"]:
        row(f"idle after a client left ({state}), s", "left", state, 0.3)
    row("idle after a client left (queued), s", "full", "left_queue_s", 0.3)
    row("a refusal, s", "full", "refusal_s", 0.01)
    streams = ours["16 streams"]
    share = streams["tokens_per_s"] / streams["in_process_per_s"]
    made.append(Row("16 streams, by the same batch in process", share, None, -0.9))
    made.append(Row("event loop, us per token", streams["event_loop_us"], None, 60))
    made.append(Row("ready, s", ours["ready_s"], theirs and theirs["ready_s"], 1.5))
    made.append(Row("exit when drained", ours["drained"]["exit"], None, 0))
    made.append(Row("streams cut off by that", float(not ours["drained"]["complete"]), None, 0))
    return made


def main() -> None:
    """Measures, prints the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="a GGUF file; by default the default model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="of each client of a crowd")
    parser.add_argument("--llama-server", help="binary to compare with")
    parser.add_argument("--llama-args", default="-np 8 -b 128", help="its better setting")
    parser.add_argument("--peer-only", action="store_true", help="try its settings")
    args = parser.parse_args()
    if find_spec("uvloop") is None:
        print("uvloop, which quire[serve] brings, is missing: it is slower so", file=sys.stderr)
    model = args.model or str(_default_model())
    found: dict[str, Any] = {}
    cli = [sys.executable, "-c", "from quire.cli import main; main()"]
    serve = [*cli, "serve", "-m", model, "-t", str(args.threads)]
    if not args.peer_only:
        found["quire"] = beside(serve, args.tokens) | quire_alone(model, args.threads, serve)
    if args.llama_server:
        theirs = [args.llama_server, "-m", model, "-t", str(args.threads)]
        found["llama-server"] = beside([*theirs, *args.llama_args.split()], args.tokens)
    if not args.peer_only:
        print(f"{'':46}{'quire':>10}{'llama-server':>14}{'':>9}{'target':>10}")
        print(*rows(found), sep="\n")
    print(json.dumps(found))


def beside(command: list[str], tokens: int) -> dict[str, Any]:
    """What every server is asked."""
    print(Path(command[0]).name, *command[-4:], file=sys.stderr)
    with running(command) as server:
        asked = beside_a_peer(server.url, tokens, server.process.pid)
        return {"ready_s": server.ready_s, **asyncio.run(asked)}


def _default_model() -> Path:
    from quire.config import cache_folder
    from quire.weights import pull

    return pull.resolve("smollm2", cache_folder())


if __name__ == "__main__":
    main()
