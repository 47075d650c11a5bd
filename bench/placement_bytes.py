"""What a plan says of a GPU's bytes, against what the driver says the process holds.

    python bench/placement_bytes.py MODEL:N,N… [MODEL:every …] [--n-ctx 2048] [--jobs 6] [--check]

MODEL is a folder, or a made-up model such as 4B-BF16 (see _made_up.py); N is the number of layers
on the GPU, the output counted as one: `all` is every one, `every` is each number from 1 on, shared
among three processes. Each other case is a process of its own, so many of them at a time. With each
N the model is loaded, and prompts of several lengths and decode steps fill the whole context, so
that steps are run and recorded; layers of the host hold nothing of the GPU, so they are packed once
and compute nothing. `measured` is what the driver says of the process, with arrays at their most;
`planned` has the driver's context in it, as `quire plan` for a described GPU does. What is neither
torch's, nor pages, nor the context is `other`: the code of kernels, recorded steps. With --check a
difference of more than 2% and 50 MiB is an error. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ALLOWED, MIB, PROMPT = 0.02, 1 << 20, 512
SHARES = 3
"""Processes that `every` is shared among."""
SLACK = 50 * MIB
COLUMNS = ("planned", "measured", "off", "context", "other")


def child(model: str, which: str, n_ctx: int) -> None:
    """Loads with one number of layers after the other; a line of JSON for each."""
    from _made_up import Shared, load
    from _watched import held_now

    from quire.devices.cuda import free_bytes

    free_bytes(0)
    context = held_now()
    kind, _, share = which.partition("/")
    counts = [99_999 if n == "all" else int(n) for n in kind.split(",") if n != "every"]
    with Shared(of="cpu"):
        if kind == "every":
            with load(model, device="cpu", n_ctx=64) as llm:
                counts = list(range(1, llm.model.n_layers + 2))[int(share) :: SHARES]
        for n in counts:
            print(json.dumps(measured(model, n, n_ctx, context)), flush=True)


def measured(model: str, n: int, n_ctx: int, context: int) -> dict[str, Any]:
    """One number of layers."""
    import torch
    from _made_up import load
    from _watched import planned

    from quire.placement.described import described

    start = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    with load(model, device="cuda", n_gpu_layers=n, n_ctx=n_ctx) as llm:
        torch.cuda.reset_peak_memory_stats()  # what packing took is given back
        idle_host(llm)
        with run(llm, n_ctx):
            found = facts(llm)
        plan = planned(llm)
    torch.cuda.empty_cache()
    whole = plan["total"] - plan["libraries"] + described("cuda:0", 0).libraries
    other = found["driver"] - context - found["torch"] - found["pages"]
    total = context + other + found["most"] + found["pages"]
    return {
        "model": model.rpartition("/")[2], "n": n, "planned": whole, "measured": total,
        "off": total - whole, "context": context, "other": other, "plan": plan,
        "held": found, "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def idle_host(llm: Any) -> None:
    """Lets the host's layers compute nothing."""
    decoder: Any = llm.model
    calls = []
    for ops, mix, group, at, there, add in decoder._calls:
        here = mix if ops.name.startswith("cuda") else lambda *_: None
        after = add if add is None or there.name.startswith("cuda") else lambda x: x
        calls.append((ops, here, group, at, there, after))
    decoder._calls = calls


def run(llm: Any, n_ctx: int) -> Any:
    """Steps of every size first eagerly, then recorded, then eagerly beside that, since tokens are
    chosen another way. A session that has filled the context is what stays."""
    whole, vocab = (n_ctx - 64) // PROMPT * PROMPT, llm.model.n_vocab

    def prompt(turn: int, tokens: int) -> list[int]:
        return [((7 + turn) * i + 3) % (vocab - 10) + 5 for i in range(tokens)]

    long = n_ctx - 200
    turns = [(long, 200, 0.0)] * 2 + [(whole + 64, 9, 0.0), (whole, 1, 0.7), (long, 1, 0.7)]
    for turn, (tokens, answer, temperature) in enumerate(turns):
        ids = prompt(turn, tokens)
        llm.generate(ids, max_tokens=answer, ignore_eos=True, temperature=temperature)
        llm.forget()  # nobody plans for cached prefixes
    session = llm.session()
    session.append(prompt(len(turns), long))
    session.generate(max_tokens=200, ignore_eos=True)
    llm.forget()
    return session


def facts(llm: Any) -> dict[str, int]:
    """What the process holds: by the driver, by torch, in pages, in steps."""
    import torch
    from _watched import held, held_now

    torch.cuda.synchronize()
    most = int(torch.cuda.max_memory_reserved())
    return {
        **held(llm), "most": most, "driver": held_now(),
        "most allocated": int(torch.cuda.max_memory_allocated()),
    }  # fmt: skip


def case(text: str, n_ctx: int) -> list[dict[str, Any]]:
    """One model in a process of its own."""
    command = [sys.executable, __file__, "--child", text, "--n-ctx", str(n_ctx)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    rows = []
    for line in child.stdout:
        if line.startswith("{"):
            rows.append(json.loads(line))
            show(rows[-1])
        else:
            print(line, end="", flush=True)
    if child.wait() != 0:
        raise SystemExit(f"{text} ended with {child.returncode}")
    return rows


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    sizes = "".join(f"{row[name] / MIB:>9.1f}" for name in COLUMNS)
    plan = " ".join(f"{k} {v / MIB:.1f}" for k, v in row["plan"].items() if v)
    held = " ".join(f"{k} {v / MIB:.1f}" for k, v in row["held"].items() if v > 64)
    print(
        f"{row['model']:<16}{row['n']:>6}{sizes} {100 * row['off'] / row['measured']:+6.2f}% | "
        f"{plan} | {held} graphs {row['held']['graphs']} | {row['seconds']} s", flush=True,
    )  # fmt: skip


def main() -> None:
    """Runs the cases that are named, prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--n-ctx", type=int, default=2048)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        model, _, which = args.cases[0].rpartition(":")
        child(model, which, args.n_ctx)
        return
    print(f"{'MiB':<16}{'N':>6}" + "".join(f"{name:>9}" for name in COLUMNS), flush=True)
    cases = [
        f"{text}/{share}" if share is not None else text
        for text in args.cases
        for share in (range(SHARES) if text.endswith(":every") else [None])
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        found = pool.map(lambda text: case(text, args.n_ctx), cases)
        rows = [row for some in found for row in some]
    wrong = [row for row in rows if abs(row["off"]) > max(ALLOWED * row["measured"], SLACK)]
    worst = max((abs(row["off"]) / MIB for row in rows), default=0)
    print(f"{len(rows)} plans, the worst off by {worst:.1f} MiB, {len(wrong)} by too much")
    print(json.dumps({"rows": rows, "wrong": len(wrong)}))
    if args.check and wrong:
        raise SystemExit(f"{len(wrong)} of {len(rows)} plans are off by more than 2% and 50 MiB")


if __name__ == "__main__":
    main()
