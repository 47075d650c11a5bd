"""Quire beside llama.cpp on the CPU: same files, same threads, taking turns in one run.

    python bench/peer_cpu.py --peer-python PYTHON_WITH_LLAMA_CPP [--quick]

bench/README.md says what each figure means.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _cold import COLD, ColdRuns
from _machine import Bandwidth, Quiet, Watch, cpu_name
from _peers import Side
from _report import HEAD, OURS, PEER, Row, json_line, table
from _speed import SPEEDS, SpeedRuns

MODEL_NAME = "SmolLM2-135M-Instruct"
FORMATS = ("Q4_1", "Q4_0", "Q4_K_M", "Q8_0", "F16")
QUESTIONS = (*SPEEDS, *COLD)
HERE = Path(__file__).parent


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Measure Quire beside llama.cpp; ends with one JSON line."
    )
    parser.add_argument("--peer-python", required=True, help="interpreter with llama-cpp-python")
    parser.add_argument("--model", help="the Q4_1 file; default: Quire's cached one")
    parser.add_argument(
        "--folder", type=Path, default=HERE / "out" / "formats", help="the files; made if missing"
    )
    parser.add_argument("--formats", type=_some_of(FORMATS), default=list(FORMATS))
    parser.add_argument("--questions", type=_some_of(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each figure")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument(
        "--patience", type=float, default=300, help="seconds to wait for a quiet machine, in all"
    )
    parser.add_argument("--peer-only", action="store_true", help="leave Quire out")
    parser.add_argument("--peer-flash-attention", choices=["auto", "on", "off"], default="auto")
    parser.add_argument(
        "--peer-kv-unified", action="store_true", help="one K/V buffer for all sequences"
    )
    args = parser.parse_args()
    if not shutil.which(args.peer_python):
        parser.error(f"{args.peer_python} is no interpreter; bench/README.md says how to make one")
    return args


def _some_of(known: tuple[str, ...]) -> Any:
    """A parser of comma-separated names."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}; there are {', '.join(known)}")
        return names

    return parse


def sides(args: argparse.Namespace) -> list[Side]:
    """The two engines, the peer first."""
    own = {"flash_attention": args.peer_flash_attention, "kv_unified": args.peer_kv_unified}
    peer = Side(PEER, args.peer_python, "_worker_llama.py", own)
    return [peer] if args.peer_only else [peer, Side(OURS, sys.executable, "_worker_quire.py")]


def files(args: argparse.Namespace) -> dict[str, Path]:
    """The file of each format, made now where it is missing."""
    paths = {name: args.folder / f"{MODEL_NAME}.{name}.gguf" for name in args.formats}
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        command = [args.peer_python, str(HERE / "make_formats.py"), str(args.folder)]
        command += ["--formats", ",".join(missing)]
        command += ["--model", args.model] if args.model else []
        if subprocess.run(command).returncode:
            sys.exit("the files could not be made")
    return paths


def main() -> None:
    """Ask all questions about all files; print each row as it comes, then the table."""
    args = arguments()
    engines, paths = sides(args), files(args)
    rounds = 2 if args.quick else args.rounds
    watch, quiet, rows = Watch([]), Quiet(args.patience), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        bandwidth = Bandwidth(Path(folder), args.threads)
        speed = SpeedRuns(engines, args.threads, rounds, quiet, bandwidth)
        cold = ColdRuns(engines, args.threads, rounds, quiet)
        for name, path in paths.items():
            new = [*speed.rows(name, path, args.questions), *cold.rows(name, path, args.questions)]
            print(table(HEAD, (row.cells() for row in new)), end="\n\n", flush=True)
            rows += new
    share = watch.read()[1]
    print(f"{cpu_name()}; {args.threads} threads; medians of {rounds} rounds (least–greatest)")
    print(f"other programs used {share:.0%} of the machine; disturbed figures: {quiet.disturbed}")
    for who, used in speed.idle_shares().items():
        print(f"{who} used {used:.1%} of a core while the other one was measured")
    print(f"targets missed: {sum(row.met is False for row in rows)}")
    result = {
        "benchmark": "peer_cpu",
        "machine": cpu_name(),
        "threads": args.threads,
        "rounds": rounds,
        "others_share": share,
        "disturbed": quiet.disturbed,
        "idle_shares": speed.idle_shares(),
        "limits_bytes_per_s": speed.limits,
        "engines": speed.engines,
        "texts": cold.texts,
        "rows": [row.as_dict() for row in rows],
    }
    print(json_line(result))


if __name__ == "__main__":
    main()
