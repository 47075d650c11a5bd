"""What both workers share: questions as JSON lines, the single cold run, the memory figures.

Kept light, because the cold start of either engine includes importing this module.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TextIO

COLD_STEPS = 16


class Engine(Protocol):
    """What a worker can be asked. Times are wall-clock seconds around the whole engine."""

    def describe(self) -> dict[str, Any]:
        """Facts for the report: version, settings, size of the vocabulary."""

    def prefill(self, prompt: list[int]) -> float:
        """From the prompt's ids to the id of the token after it."""

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """`steps` further tokens for every prompt, without the prompts and the first token."""

    def complete(self, text: str, steps: int) -> str:
        """Greedy text after `text`, end-of-text ignored."""


# Given model, threads, sequences, n_ctx (of each sequence) and what only that engine knows.
OpenEngine = Callable[..., Engine]


def main(open_engine: OpenEngine) -> None:
    """Answer questions from standard input, or (`--cold SETTINGS PROMPT`) answer one and end."""
    channel = _private_stdout()
    if sys.argv[1:2] == ["--cold"]:
        answer = _cold(open_engine, json.loads(sys.argv[2]), sys.argv[3])
        print(json.dumps(answer), file=channel)
    else:
        _serve(open_engine, channel)


def _private_stdout() -> TextIO:
    """The real standard output; whatever a library prints goes to standard error instead."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def _serve(open_engine: OpenEngine, channel: TextIO) -> None:
    """One model at a time: `load` replaces the engine, the other questions go to it."""
    engine: Engine | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["what"] == "load":
                engine = None  # frees the model before, so that two are never held at once
                engine = open_engine(**question["settings"])
                answer: Any = engine.describe()
            else:
                answer = _ask(engine, **question)
        except Exception:
            print(json.dumps({"error": traceback.format_exc()}), file=channel)
        else:
            print(json.dumps({"answer": answer}), file=channel)


def _ask(engine: Engine | None, what: str, prompts: list[list[int]], steps: int) -> float:
    assert engine, "a model must be loaded first"
    return engine.prefill(prompts[0]) if what == "prefill" else engine.decode(prompts, steps)


def _cold(open_engine: OpenEngine, settings: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Moments on the system's monotonic clock, then what the process came to hold."""
    imported, bare = time.monotonic(), _status("VmRSS")
    engine = open_engine(**settings)
    loaded = time.monotonic()
    engine.complete(prompt, 1)
    first = time.monotonic()
    text = engine.complete(prompt, COLD_STEPS)
    return {
        "imported": imported,
        "loaded": loaded,
        "first": first,
        "text": text,
        "bare_bytes": bare,
        "peak_bytes": _status("VmHWM"),
        "maxrss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "anon_bytes": _status("RssAnon"),
        "file_bytes": _status("RssFile"),
    }


def _status(field: str) -> int:
    """A figure of this process from the kernel, in bytes."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
