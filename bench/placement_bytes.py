"""What a plan says of a GPU's bytes, against what the driver says is gone.

    python bench/placement_bytes.py [MODEL:N MODEL:N …] [--n-ctx 2048] [--seconds 60] [--check]

MODEL is a folder, or a made-up model such as 4B-BF16 (see _made_up.py); N is the number of layers
on the GPU, the output counted as one, and `all` is every one. Each case is a process of its own,
watched from outside: its context is there, the model is loaded, and a prompt and decode steps have
filled the whole context. `planned` has the context in it, as `quire plan` for a described GPU does.
What is neither torch's, nor pages, nor the context is `other`: the code of kernels, what they
spill, recorded steps. With --check a difference of more than 2% and 50 MiB is an error.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from _watched import MIB, held, planned, tell, watch

ALLOWED, SLACK = 0.02, 50 * MIB


def child(model: str, n: int, n_ctx: int) -> None:
    """Loads and runs."""
    from _made_up import load

    from quire.devices.cuda import free_bytes

    free_bytes(0)
    tell("context")
    with load(model, device="cuda", n_gpu_layers=n, n_ctx=n_ctx) as llm:
        tell("loaded", held=held(llm))
        vocab = llm.model.n_vocab
        prompt = [(7 * i + 3) % (vocab - 10) + 5 for i in range(n_ctx - 200)]
        llm.generate(prompt, max_tokens=200, ignore_eos=True)
        tell("ran", held=held(llm), planned=planned(llm))


def case(model: str, n: int, n_ctx: int) -> dict[str, Any]:
    """One process, from outside."""
    start = time.perf_counter()
    seen: dict[str, Any] = {}
    for said, used in watch(__file__, f"{model}:{n}", "--n-ctx", str(n_ctx)):
        seen[said["stage"]] = used
        seen |= {key: value for key, value in said.items() if key != "stage"}
    from quire.placement.described import described

    plan, held = seen["planned"], seen["held"]
    known = seen["context"] + held["torch"] + held["pages"]
    whole = plan["total"] - plan["libraries"]
    whole += described("cuda:0", 0).libraries if plan["total"] else 0
    return {
        "model": model.rpartition("/")[2], "n": n, "planned": whole, "measured": seen["ran"],
        "off": seen["ran"] - whole, "context": seen["context"], "other": seen["ran"] - known,
        "loaded": seen["loaded"], "plan": plan, "held": held,
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def main() -> None:
    """Runs the cases that are named, prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--n-ctx", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1e9, help="starts none after so long")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    asked = [text.rpartition(":") for text in args.cases]
    chosen = [(model, 9999 if n == "all" else int(n)) for model, _, n in asked]
    if args.child:
        child(*chosen[0], args.n_ctx)
        return
    end, rows = time.monotonic() + args.seconds, []
    columns = ("planned", "measured", "off", "context", "other")
    print(f"{'MiB':<20}{'N':>5}" + "".join(f"{name:>10}" for name in columns))
    for model, n in chosen:
        if time.monotonic() > end:
            print(f"no time for {model}:{n}")
            continue
        row = case(model, n, args.n_ctx)
        rows.append(row)
        sizes = "".join(f"{row[name] / MIB:>10.1f}" for name in columns)
        print(
            f"{row['model']:<20}{n:>5}{sizes}  {100 * row['off'] / row['measured']:+.2f}%", end="  "
        )
        print({k: round(v / MIB, 1) for k, v in row["plan"].items()}, row["held"], row["seconds"],
              flush=True)  # fmt: skip
    wrong = [row for row in rows if abs(row["off"]) > max(ALLOWED * row["measured"], SLACK)]
    print(json.dumps({"rows": rows, "wrong": len(wrong)}))
    if args.check and wrong:
        raise SystemExit(f"{len(wrong)} of {len(rows)} plans are off by more than 2% and 50 MiB")


if __name__ == "__main__":
    main()
