"""What drafts bring: tokens per second with and without, in one run, on the same prompts.

    python bench/speculation.py [--model smollm2] [--rounds 7] [--peer-python peer/bin/python]

Every way to draft is run right beside plain decoding, now before it and now after it, so that a
machine that gets slower does so for both; a ratio is the median over all such pairs. Output is
checked to be the same. The first round is not counted. Trained small models come from the tests.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _peers import Side, Worker, running, turns

import quire
from quire.api.requests import Speculate
from quire.speculate import EarlyExit, FirstOf, Ngram, drafting
from quire.weights import pull

MODELS = Path(__file__).parents[1] / "tests" / "data" / "models"
CODE = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("negative size")
    return width * height

def volume(width, height, depth):
    if depth < 0:
        raise ValueError("negative size")
    return area(width, height) * depth

def surface(width, height, depth):
    return 2 * (area(width, height) + area(width, depth) + area(height, depth))
"""
TEXTS = {
    "repetitive": "id,name,colour,size\n1,cup,red,small\n2,cup,blue,large\n" * 8,
    "code editing": f"Here is a Python file:\n\n{CODE}\nHere is the same file with `depth` renamed "
    "to `length`:\n\n",
    "prose": "Once upon a time, in a village by the sea, there lived an old fisherman who had "
    "never told anyone his name. One winter morning",
}
PEER_DRAFT = 10  # tokens that llama-cpp-python's prompt lookup drafts by default


def main() -> None:
    """Measures, prints tables, ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--peer-python", help="an interpreter that has llama-cpp-python")
    args = parser.parse_args()
    result: dict[str, Any] = {"text": {}, "early exit": [], "small models": {}}
    with quire.load(args.model, threads=args.threads) as llm:
        threads = llm.settings.thread_count()
        for name, text in TEXTS.items():
            ids = llm.encode(text)
            rows = compare(_runs(llm, ids, args.tokens, _own_ways()), args.rounds)
            result["text"][name] = _show(f"{llm.path.name}: {name}", rows)
        result["early exit"] = _by_layer(llm, llm.encode(TEXTS["prose"]), args)
    if args.peer_python:
        result["peer"] = _peer(args, threads)
    result["small models"] = _small(args)
    print(json.dumps(result))


Run = Callable[[], tuple[float, list[int], dict[str, Any]]]
"""Tokens per second, the tokens, and what drafts came to."""


def _own_ways() -> dict[str, Speculate]:
    return {
        "plain": None,
        "ngram": "ngram",
        "lookahead": "lookahead",
        "early-exit": "early-exit",
        "ngram, else early-exit": FirstOf(Ngram(), EarlyExit()),
    }


def _runs(
    llm: quire.LLM, ids: list[int], tokens: int, ways: dict[str, Speculate]
) -> dict[str, Run]:
    def run(speculate: Speculate) -> tuple[float, list[int], dict[str, Any]]:
        done = llm.generate(ids, max_tokens=tokens, ignore_eos=True, speculate=speculate)
        figures = done.speculation.as_dict() if done.speculation else {}
        return done.timings.decode_tokens_per_s, done.token_ids, figures

    return {name: lambda way=way: run(way) for name, way in ways.items()}


def compare(runs: dict[str, Run], rounds: int, first: str = "plain") -> dict[str, dict[str, Any]]:
    """Every run beside the first one, round by round."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    ratios: dict[str, list[float]] = {first: [1.0]}
    figures: dict[str, dict[str, Any]] = {}
    wanted = runs[first]()[1]
    for turn in range(rounds + 1):
        for name in [n for n in runs if n != first]:
            now: dict[str, float] = {}
            for one in turns([first, name], turn):
                now[one], tokens, figures[one] = runs[one]()
                assert tokens == wanted, f"{one} changes the output"
            if turn:
                for one, speed in now.items():
                    speeds[one].append(speed)
                ratios.setdefault(name, []).append(now[name] / now[first])
    return {
        name: {
            "tokens_per_s": statistics.median(speeds[name]),
            "ratio": statistics.median(ratios[name]),
            "ratios": ratios[name],
            **figures[name],
        }
        for name in runs
    }


def _by_layer(llm: quire.LLM, ids: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Early exit after each of some layers, always with drafts of three tokens, and left alone."""
    n_layers, out = llm.model.n_layers, []
    print(f"\n{llm.path.name}: early exit by layer, drafts of 3 (prose)")
    print(f"{'layers':>8} {'accepted':>9} {'ratio':>6} {'left alone':>11}")
    for layers in sorted({n_layers * i // 6 for i in range(1, 6)} | {n_layers - 2, n_layers - 1}):
        ways: dict[str, Speculate] = {"plain": None, "exit": EarlyExit(layers)}
        with _fixed_length(3):
            fixed = compare(_runs(llm, ids, args.tokens, ways), max(args.rounds // 2, 2))["exit"]
        free = compare(_runs(llm, ids, args.tokens, ways), max(args.rounds // 2, 2))["exit"]
        print(
            f"{layers:>5}/{n_layers} {fixed['acceptance']:>9.0%} {fixed['ratio']:>6.2f} "
            f"{free['ratio']:>11.2f}"
        )
        out.append({"layers": layers, "fixed": fixed, "adaptive": free})
    return out


@contextmanager
def _fixed_length(n: int) -> Iterator[None]:
    """Drafts of n tokens, whether they pay or not."""
    before = drafting.lengths
    drafting.lengths = lambda choices, *_: [min(c.most, n) for c in choices]
    try:
        yield
    finally:
        drafting.lengths = before


def _small(args: argparse.Namespace) -> dict[str, Any]:
    """The trained small models: recurrent and hybrid ones with the dense one as draft."""
    out: dict[str, Any] = {}
    text = (MODELS / "validation.txt").read_text()
    for folder in sorted(p.parent for p in MODELS.glob("*/golden.json")):
        with ExitStack() as stack:
            llm = stack.enter_context(quire.load(folder, threads=args.threads))
            ways: dict[str, Speculate] = {"plain": None, "ngram": "ngram"}
            if folder.name != "tiny-dense":
                other = quire.load(MODELS / "tiny-dense", beside=llm, threads=args.threads)
                ways["draft: tiny-dense"] = stack.enter_context(other)
            for name, part in (("prose", text[:400]), ("repetitive", text[:60] * 6)):
                runs = _runs(llm, llm.encode(part), 2 * args.tokens, ways)
                rows = _show(f"{folder.name}: {name}", compare(runs, args.rounds))
                out[f"{folder.name}: {name}"] = rows
    return out


def _peer(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """llama.cpp's prompt lookup through llama-cpp-python, beside Quire, on the same file."""
    from quire import config

    path = pull.resolve(args.model, config.cache_folder())
    settings = {"model": str(path), "threads": threads, "sequences": 1, "n_ctx": 1024}
    out: dict[str, Any] = {}
    with ExitStack() as stack:
        llm = stack.enter_context(quire.load(path, threads=threads))
        workers = {}
        for name, drafts in (("llama.cpp plain", 0), ("llama.cpp lookup", PEER_DRAFT)):
            side = Side(name, args.peer_python, "_worker_lookup.py", {"drafts": drafts})
            workers[name] = stack.enter_context(running(side))
            workers[name].load(settings)
        for name, text in TEXTS.items():
            ids = llm.encode(text)
            runs = _runs(llm, ids, args.tokens, {"plain": None, "ngram": "ngram"})
            rows = compare(runs, args.rounds)
            theirs = compare(
                {n: _asking(w, ids, args.tokens) for n, w in workers.items()}, args.rounds,
                "llama.cpp plain",
            )  # fmt: skip
            out[name] = _show(f"beside llama.cpp: {name}", rows | theirs)
    return out


def _asking(worker: Worker, ids: list[int], tokens: int) -> Run:
    def run() -> tuple[float, list[int], dict[str, Any]]:
        seconds = worker.ask("decode", prompts=[ids], steps=tokens - 1)
        return (tokens - 1) / seconds, [0], {}

    return run


def _show(title: str, rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    print(f"\n{title}")
    for name, row in rows.items():
        drafts = ""
        if row.get("rounds"):
            drafts = (
                f"{row['accepted']:>5.0f} of {row['drafted']:<5.0f} accepted, "
                f"{row['mean_accepted']:.1f} a round, rollback {row['rollback_s'] * 1e3:.1f} ms"
            )
        print(f"{name:>24} {row['tokens_per_s']:>8.1f}/s {row['ratio']:>6.2f}x  {drafts}")
    return rows


if __name__ == "__main__":
    main()
