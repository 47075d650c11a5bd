"""Random sessions on a GPU for some minutes: drafts, aborts, forks, files, too little memory.

    python bench/soak_cuda.py MODEL_FOLDER … [--minutes 8] [--warm-up 40] [--budget 512MiB]

Each model is a process of its own, all at once. Each warms up first, which compiles what most
deeds need; then the clock starts. After every round of deeds the conservation laws must hold, the
budget may not be passed, by its own count or by what the driver says this process holds, and what
is mapped must stay flat: the last third of the rounds may not hold more than the first third did
at its most. In the end no page is in use. Every 20 seconds each says how far it is and what it is
doing; what does not end in time is told to show where it is. Ends with one JSON line. With
`--device cpu` bytes are those that the process has resident.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import quire
from quire.errors import QuireError

GO: dict[str, Any] = {"ignore_eos": True}
SLACK = 256 << 20
"""Bytes that the driver takes for kernels as they are loaded, and torch for its own tables."""
ROUND, EVERY, GRACE = 25, 20, 60
"""Deeds of a round; seconds between reports, and those that ending may take."""


class User:
    """Somebody who does this and that with a model."""

    def __init__(self, llm: quire.LLM, seed: int, folder: Path) -> None:
        self.llm, self.rng, self.file = llm, random.Random(seed), folder / "saved.quire"
        self.sessions: list[quire.Session] = []
        self.acts, self.doing, self.since = 0, "nothing", time.monotonic()
        self.deeds = [
            self.open, self.open, self.append, self.generate, self.draft, self.abort, self.fork,
            self.mark, self.back, self.save, self.several, self.close,
        ]  # fmt: skip

    def act(self) -> None:
        """One random thing; refusals are fine."""
        deed = self.rng.choice(self.deeds)
        self.doing, self.since = deed.__name__, time.monotonic()
        with contextlib.suppress(QuireError):
            deed()
        self.acts += 1

    def tokens(self, most: int) -> list[int]:
        """Random ones, often with a start that others have too."""
        start = [self.rng.choice([5, 6])] * self.rng.choice([0, 40])
        return start + [self.rng.randrange(3, 400) for _ in range(self.rng.randint(1, most))]

    def some(self) -> quire.Session:
        """Any session."""
        if not self.sessions:
            self.open()
        return self.rng.choice(self.sessions)

    def open(self) -> None:
        """A new session, in the place of an old one where there are many."""
        if len(self.sessions) >= 12:
            self.close()
        self.sessions.append(self.llm.session())
        self.sessions[-1].append(self.tokens(300))

    def append(self) -> None:
        """More tokens."""
        self.some().append(self.tokens(self.rng.choice([1, 3, 40, 200])))

    def generate(self) -> None:
        """Plain decoding."""
        self.some().generate(max_tokens=self.rng.choice([1, 5, 40]), **GO)

    def draft(self) -> None:
        """Speculative decoding."""
        self.some().generate(max_tokens=self.rng.choice([5, 40]), speculate="ngram", **GO)

    def abort(self) -> None:
        """A stream that is left in the middle."""
        stream = self.llm.stream(self.tokens(100), max_tokens=40, **GO)
        for _, _ in zip(range(self.rng.randint(1, 10)), stream, strict=False):
            pass
        stream.close()

    def fork(self) -> None:
        """Two from one."""
        if len(self.sessions) < 12:
            self.sessions.append(self.some().fork())

    def mark(self) -> None:
        """A checkpoint, and back to one."""
        session = self.some()
        if len(session.marks) > 3:
            session.drop(self.rng.choice([*session.marks.values()]))
        session.checkpoint()
        session.generate(max_tokens=3, **GO)
        session.rewind(self.rng.choice([*session.marks.values()]))

    def back(self) -> None:
        """Some tokens fewer."""
        session = self.some()
        session.rewind(-self.rng.randint(1, max(session.position, 1)))

    def save(self) -> None:
        """To a file and back."""
        session = self.some()
        session.save(self.file)
        with self.llm.open(self.file) as opened:
            assert opened.tokens == session.tokens
            opened.generate(max_tokens=4, **GO)

    def several(self) -> None:
        """A batch."""
        prompts = [self.tokens(120) for _ in range(self.rng.randint(2, 16))]
        self.llm.generate(prompts, max_tokens=12, **GO)

    def close(self) -> None:
        """One less."""
        if self.sessions:
            self.sessions.pop(self.rng.randrange(len(self.sessions))).close()


def held_by(device: str) -> Callable[[], int]:
    """What says how many bytes this process holds, from a context on."""
    if device == "cpu":
        return lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    import torch
    from _watched import held_now

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    assert held_now(), "the driver does not tell what a process holds here"
    return held_now


def rounds(user: User, seconds: float, held: Callable[[], int]) -> list[int]:
    """Rounds of deeds until the time is over: what was held after each."""
    llm, stop, found = user.llm, time.monotonic() + seconds, []
    while time.monotonic() < stop:
        for _ in range(ROUND):
            user.act()
            if time.monotonic() > stop:
                break
        user.doing = "an audit"
        llm.memory.audit()
        used, limit = llm.budget.used, llm.budget.limit
        assert used <= limit, f"{used:,} of {limit:,} bytes"
        found.append(held())
        assert found[-1] <= limit + SLACK, f"{found[-1]:,} bytes by the driver, of {limit:,}"
    return found


def reporting(user: User, name: str, stage: list[str]) -> threading.Event:
    """Says now and then how far a user is, until the event is set."""
    over, start = threading.Event(), time.monotonic()

    def run() -> None:
        while not over.wait(EVERY):
            now = time.monotonic()
            print(f"{name}: {now - start:.0f} s, {stage[0]}, {user.acts} deeds, {user.doing} for "
                  f"{now - user.since:.1f} s", flush=True)  # fmt: skip

    threading.Thread(target=run, daemon=True).start()
    return over


def soak(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Warms up, and soaks one model."""
    held = held_by(args.device)
    before, name = held(), folder.name
    stage = ["warming up"]
    with (
        quire.load(folder, device=args.device, memory_budget=args.budget) as llm,
        tempfile.TemporaryDirectory() as scratch,
    ):
        user = User(llm, args.seed, Path(scratch))
        over = reporting(user, name, stage)
        rounds(user, args.warm_up, lambda: held() - before)
        warmed, stage[0] = user.acts, "soaking"
        found = rounds(user, 60 * args.minutes, lambda: held() - before)
        for session in user.sessions:
            session.close()
        llm.forget()
        llm.memory.audit()
        over.set()
        left = {name: of["pages_used"] for name, of in llm.memory.as_dict()["stats"].items()}
        assert not any(left.values()), f"pages in use at the end: {left}"
    third = max(len(found) // 3, 1)
    first, last = max(found[:third]), max(found[-third:])
    assert last <= first + SLACK // 4, f"{first:,} bytes at first, {last:,} at last"
    return {"model": name, "minutes": args.minutes, "acts": user.acts - warmed, "warm_up": warmed,
            "rounds": len(found), "first": first, "last": last}  # fmt: skip


def watched(folder: Path, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """One model in a process of its own, whose lines are passed on; its result is the last."""
    given = ("--minutes", args.minutes, "--warm-up", args.warm_up, "--budget", args.budget,
             "--seed", args.seed + number, "--device", args.device)  # fmt: skip
    command = [sys.executable, __file__, "--child", str(folder), *map(str, given)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    most = args.warm_up + 60 * args.minutes + GRACE
    late = threading.Timer(most, child.send_signal, [signal.SIGABRT])
    late.start()
    found: dict[str, Any] = {"model": folder.name}
    for line in child.stdout:
        if line.startswith("{"):
            found |= json.loads(line)
        print(line, end="", flush=True)
    late.cancel()
    return found | {"exit": child.wait()}


def main() -> None:
    """All models at once; one of them as a child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--warm-up", type=float, default=40)
    parser.add_argument("--budget", default="512MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        faulthandler.enable()
        print(json.dumps(soak(args.models[0], args)), flush=True)
        return
    with ThreadPoolExecutor(len(args.models)) as pool:
        numbers = range(len(args.models))
        results = list(pool.map(lambda n: watched(args.models[n], n, args), numbers))
    print(json.dumps({"soak": results}))
    if bad := [each["model"] for each in results if each["exit"]]:
        raise SystemExit(f"failed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
