"""How much of a draft is right, and what follows it (speculative decoding).

Every token is chosen exactly as it would be without a draft: by the same sampler, which has seen
the same tokens, with the random number of its place. A draft is right as far as it says the same.
So output, greedy or sampled, is the same with and without drafts. A drafted token x that does not
depend on chance (an n-gram's) agrees with probability p(x), as often as any rule that keeps the
distribution can accept it. Models draft with the same random number, and so in the same race of
tokens as the target: they agree nearly as often as the best such rule would accept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.choose import choose_rows, sample, take
from quire.engine.generation import Generation
from quire.engine.plan import Accepted, Plan
from quire.errors import QuireError
from quire.memory.groups.layout import Int32
from quire.ops import Array, Ops


@dataclass(frozen=True)
class Path:
    """One way on: drafted tokens, and the row of the logits that judges the first of them."""

    row: int
    tokens: tuple[int, ...]
    branch: int | None = None


@dataclass
class Trial:
    """One sequence's draft being judged, token by token."""

    accepted: Accepted
    generation: Generation
    paths: list[Path]
    """Ways on that agree with everything chosen so far; the sequence's own comes first."""
    depth: int = 0
    done: bool = False
    picks: dict[int, int | QuireError] = field(default_factory=dict)
    """Tokens chosen in advance, by row."""

    @property
    def row(self) -> int:
        """The row that the next token is chosen from."""
        return self.paths[0].row + self.depth

    def follow(self) -> None:
        """The next token is chosen; goes on where a draft says the same."""
        one = self.accepted
        chosen = tuple(one.tokens[self.depth : self.depth + 1])  # empty where there was an error
        agreeing = [p for p in self.paths if p.tokens[self.depth : self.depth + 1] == chosen]
        if one.finish_reason or one.error or not agreeing:
            self.done = True
            one.branch = self.paths[0].branch
        else:
            self.paths = agreeing
            self.depth += 1
            one.kept += 1


def judge(
    plan: Plan, tokens: Int32, logits: Array, ops: Ops, n_vocab: int, accepted: list[Accepted]
) -> None:
    """What follows each sequence of a step with drafts: as much of them as is right, and one more.

    `tokens` are those of all rows of the step; the logits are of the plan's `wanted_rows`.
    """
    trials = _trials(plan, tokens, logits, ops, accepted)
    _choose_in_advance([t for t in trials if not t.generation.looks_back], logits, ops)
    while live := [t for t in trials if not t.done]:
        rest = []
        for trial in live:
            if trial.row in trial.picks:
                token = trial.picks[trial.row]
                take(trial.accepted, trial.generation, token, trial.row, logits, ops)
            else:
                rest.append((trial.accepted, trial.generation, trial.row))
        if rest:
            choose_rows(rest, logits, ops, n_vocab)
        for trial in live:
            trial.follow()


def _trials(
    plan: Plan, tokens: Int32, logits: Array, ops: Ops, accepted: list[Accepted]
) -> list[Trial]:
    trials: list[Trial] = []
    row = at = 0
    for entry in plan.entries:
        one = Accepted(entry.sequence, entry.count, drafted=len(entry.draft))
        accepted.append(one)
        at += entry.count
        draft = tuple(tokens[at : at + len(entry.draft)].tolist())
        at += len(entry.draft)
        if not entry.ends:
            continue
        if entry.sequence.generation is None:
            one.logits = ops.numpy(logits)[row].copy()
        else:
            trials.append(Trial(one, entry.sequence.generation, [Path(row, draft)]))
        row += 1 + len(draft)
    _add_branches(plan, row, trials, logits, ops)
    return trials


def _add_branches(plan: Plan, row: int, trials: list[Trial], logits: Array, ops: Ops) -> None:
    """Drafts in forks are further ways on; what follows the others is only noted."""
    by_owner = {trial.accepted.sequence: trial for trial in trials}
    guesses: list[tuple[int, Trial, int]] = []
    for branch in plan.branches:
        trial, behind_last = by_owner[branch.owner], len(branch.tokens) - 1
        if branch.guess:
            guesses.append((row, trial, behind_last))
            row += 1
        else:
            trial.paths.append(Path(row, branch.tokens[1:], branch.seq))
            trial.accepted.drafted += behind_last
            row += len(branch.tokens)
    if guesses:
        found = sample(ops, logits, [(at, t.generation, ahead) for at, t, ahead in guesses])
        for (_, trial, _), token in zip(guesses, found, strict=True):
            trial.accepted.guesses.append(token if isinstance(token, int) else 0)


def _choose_in_advance(trials: list[Trial], logits: Array, ops: Ops) -> None:
    """All rows at once, where what a row gives does not depend on the tokens before it."""
    rows = [
        (trial, path.row + i, i)
        for trial in trials
        for path in trial.paths
        for i in range(len(path.tokens) + 1)
    ]
    if not rows:
        return
    picked = sample(ops, logits, [(row, trial.generation, i) for trial, row, i in rows])
    for (trial, row, _), token in zip(rows, picked, strict=True):
        trial.picks[row] = token
