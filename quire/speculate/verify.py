"""What of a draft is right: the last word on what a step adds to each sequence.

Every token is chosen exactly as it would be without a draft: by the same sampler, which has seen
the same tokens, with the random number of its place. A draft is right as far as it says the same.
So output, greedy or sampled, is the same with and without drafts. A drafted token x that does not
depend on chance (an n-gram's) agrees with probability p(x), as often as any rule that keeps the
distribution can accept it. Models draft with the same random number, and so in the same race of
tokens as the target: they agree nearly as often as the best such rule would accept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.engine.sampling import logprob, sample
from quire.engine.scheduler import Plan
from quire.engine.sequence import Accepted, Generation
from quire.errors import QuireError
from quire.memory.layout import Int32
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

    def take(self, token: int | QuireError, logits: Array, ops: Ops) -> None:
        """The next token is chosen; goes on where a draft says the same."""
        one, generation = self.accepted, self.generation
        if isinstance(token, QuireError):  # this request fails, the others go on
            one.sequence.error, one.branch, self.done = token, self.paths[0].branch, True
            return
        one.tokens.append(token)
        if (top := generation.sampling.logprobs) is not None:
            one.logprobs.append(logprob(ops, logits, self.row, token, top))
        try:
            one.finish_reason = generation.take(token)
        except QuireError as error:  # this request fails, the others go on
            one.sequence.error = error
        agreeing = [p for p in self.paths if p.tokens[self.depth : self.depth + 1] == (token,)]
        if one.finish_reason or one.sequence.error or not agreeing:
            self.done = True
            one.branch = self.paths[0].branch
        else:
            self.paths = agreeing
            self.depth += 1
            one.kept += 1


def verify(plan: Plan, tokens: Int32, logits: Array, ops: Ops) -> list[Accepted]:
    """Chooses what follows each ending sequence; plain sampling is a draft of length zero.

    `tokens` are those of all rows of the step; the logits are of the plan's `wanted_rows`.
    """
    accepted, trials = _trials(plan, tokens, logits, ops)
    _choose_in_advance([t for t in trials if not t.generation.looks_back], logits, ops)
    while live := [t for t in trials if not t.done]:
        chosen = _next_tokens(live, logits, ops)
        for trial, token in chosen:
            trial.take(token, logits, ops)
    return accepted


def choose(accepted: Accepted, logits: Array, ops: Ops) -> None:
    """The first token of a generation whose logits are known already: the only row."""
    assert accepted.sequence.generation is not None
    trial = Trial(accepted, accepted.sequence.generation, [Path(0, ())])
    for _, token in _next_tokens([trial], logits, ops):
        trial.take(token, logits, ops)


def _trials(
    plan: Plan, tokens: Int32, logits: Array, ops: Ops
) -> tuple[list[Accepted], list[Trial]]:
    accepted: list[Accepted] = []
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
    return accepted, trials


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


def _next_tokens(
    trials: list[Trial], logits: Array, ops: Ops
) -> Iterator[tuple[Trial, int | QuireError]]:
    """The next token of each trial; one whose constraint fails is done."""
    rest = [t for t in trials if t.row not in t.picks]
    yield from ((t, t.picks[t.row]) for t in trials if t.row in t.picks)
    masks = _masks(rest, ops.numpy(logits).shape[1])
    live = [i for i, trial in enumerate(rest) if not trial.done]
    if live:
        wanted = [(rest[i].row, rest[i].generation, 0) for i in live]
        picked = sample(ops, logits, wanted, None if masks is None else masks[live])
        yield from zip([rest[i] for i in live], picked, strict=True)


def _masks(trials: list[Trial], n_vocab: int) -> NDArray[np.uint32] | None:
    """Which tokens each may choose, or None where nobody is constrained."""
    if not any(trial.generation.matcher for trial in trials):
        return None
    masks = np.full((len(trials), (n_vocab + 31) // 32), 2**32 - 1, np.uint32)
    for trial, mask in zip(trials, masks, strict=True):
        if trial.generation.matcher:
            try:
                trial.generation.matcher.mask(mask)
            except QuireError as error:  # this request fails, the others go on
                trial.accepted.sequence.error = error
                trial.done = True
    return masks
