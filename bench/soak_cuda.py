"""Random sessions on a GPU for some minutes: drafts, aborts, forks, files, too little memory.

After every round the conservation laws must hold, the budget may not be passed, by its own count
or by what the driver says this process holds, and what is mapped must stay flat: the last third of
the rounds may not hold more than the first third did at its most. In the end no page is in use.
Prints a line for each model and one of JSON.

    python bench/soak_cuda.py MODEL_FOLDER … [--minutes 10] [--budget 512MiB] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from _watched import held_now

import quire
from quire.errors import QuireError

GO: dict[str, Any] = {"ignore_eos": True}
SLACK = 256 << 20
"""Bytes that the driver takes for kernels as they are loaded, and torch for its own tables."""


class User:
    """Somebody who does this and that with a model."""

    def __init__(self, llm: quire.LLM, seed: int, folder: Path) -> None:
        self.llm, self.rng, self.file = llm, random.Random(seed), folder / "saved.quire"
        self.sessions: list[quire.Session] = []
        self.deeds = [
            self.open, self.open, self.append, self.generate, self.draft, self.abort, self.fork,
            self.mark, self.back, self.save, self.several, self.close,
        ]  # fmt: skip

    def act(self) -> None:
        """One random thing; refusals are fine."""
        with contextlib.suppress(QuireError):
            self.rng.choice(self.deeds)()

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


def soak(folder: Path, minutes: float, budget: str, seed: int) -> dict[str, Any]:
    """Rounds on one model until the time is over."""
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    before = held_now()
    assert before, "the driver does not tell what a process holds here"
    held: list[int] = []
    with quire.load(folder, device="cuda", memory_budget=budget) as llm:
        with tempfile.TemporaryDirectory() as scratch:
            user, stop, acts = User(llm, seed, Path(scratch)), time.time() + 60 * minutes, 0
            while time.time() < stop:
                for _ in range(25):
                    user.act()
                acts += 25
                llm.memory.audit()
                used, limit = llm.budget.used, llm.budget.limit
                assert used <= limit, f"{used:,} of {limit:,} bytes"
                gone = held_now() - before
                assert gone <= limit + SLACK, f"{gone:,} bytes by the driver, of {limit:,}"
                held.append(gone)
            for session in user.sessions:
                session.close()
        llm.forget()
        llm.memory.audit()
        left = {name: of["pages_used"] for name, of in llm.memory.as_dict()["stats"].items()}
        assert not any(left.values()), f"pages in use at the end: {left}"
    third = max(len(held) // 3, 1)
    first, last = max(held[:third]), max(held[-third:])
    assert last <= first + SLACK // 4, f"{first:,} bytes at first, {last:,} at last"
    return {"model": folder.name, "acts": acts, "rounds": len(held), "first": first, "last": last}


def main() -> None:
    """Each model for its share of the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--budget", default="512MiB")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = []
    for i, folder in enumerate(args.models):
        share = args.minutes / len(args.models)
        results.append(soak(folder, share, args.budget, args.seed + i))
        print(results[-1], flush=True)
    print(json.dumps({"soak": results}))


if __name__ == "__main__":
    main()
