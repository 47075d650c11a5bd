"""What a step is about to do, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.engine.sequence import Sequence
from quire.errors import QuireError
from quire.memory.batch import SeqTokens
from quire.types import FinishReason, TokenLogprob

Counts = list[tuple[int, int]]
"""Sequences and their numbers of new tokens, as memory is asked about them."""


@dataclass(slots=True)
class Entry:
    """One sequence's part of a step: its next `count` tokens.

    A draft comes behind them. With `exits` the model's first layers make it within the step, and
    the tokens here only hold its places.
    """

    sequence: Sequence
    count: int
    ends: bool
    """Whether it reaches the sequence's last token, whose logits are wanted."""
    draft: tuple[int, ...] = ()
    exits: bool = False


@dataclass(frozen=True)
class Branch:
    """Tokens that are tried in a fork of a sequence; `guess` when they are no draft of it."""

    owner: Sequence
    seq: int
    tokens: tuple[int, ...]
    guess: bool


@dataclass(frozen=True)
class Plan:
    """Who runs in this step, and what has to happen first; it changes nothing by itself.

    Rows are in order of entries, then branches.
    """

    entries: Seq[Entry]
    counts: Counts
    branches: tuple[Branch, ...] = ()
    exit_after: int = 0
    """Layers after which drafts are made within the step, for entries that want that."""
    unready: bool = False
    """Whether somebody waits, is parked or lost, and may have to be made ready first."""
    back: Seq[Sequence] = ()
    """Who comes back after having given way, or from a tier."""
    preempted: Seq[Sequence] = ()
    """Who gives way."""
    lost: Seq[Sequence] = ()
    """Who has to be computed again."""
    failed: Seq[tuple[Sequence, QuireError]] = ()
    """Who cannot go on, and why."""

    @property
    def n_tokens(self) -> int:
        """Tokens to compute."""
        return sum(count for _, count in self.counts)

    def tokens(self) -> list[SeqTokens]:
        """What memory must find room for."""
        parts = []
        for entry in self.entries:
            sequence, at = entry.sequence, entry.sequence.computed
            tokens = sequence.tokens.array(at, at + entry.count)
            if entry.draft:
                tokens = np.concatenate([tokens, np.array(entry.draft, np.int32)])
            parts.append(SeqTokens(sequence.id, tokens))
        for branch in self.branches:
            parts.append(SeqTokens(branch.seq, np.array(branch.tokens, np.int32)))
        return parts

    def wanted_rows(self) -> NDArray[np.int32]:
        """Rows whose logits are wanted: each entry's last real token, drafts and branches."""
        rows: list[int] = []
        at = 0
        for entry in self.entries:
            at += entry.count
            if entry.ends:
                rows += range(at - 1, at + len(entry.draft))
            at += len(entry.draft)
        for branch in self.branches:
            at += len(branch.tokens)
            rows += [at - 1] if branch.guess else range(at - len(branch.tokens), at)
        return np.array(rows, np.int32)


def planned(entries: Seq[Entry], branches: tuple[Branch, ...] = (), exit_after: int = 0) -> Plan:
    """The plan in which these run."""
    counts = []
    for entry in entries:
        counts.append((entry.sequence.id, entry.count + len(entry.draft)))
    for branch in branches:
        counts.append((branch.seq, len(branch.tokens)))
    return Plan(entries, counts, branches, exit_after)


@dataclass(slots=True)
class Accepted:
    """What one sequence keeps of a step: its first `kept` tokens, and what follows them.

    A generating sequence gets tokens: those of its draft that were right, and one more. One that
    was only to be computed gets its last logits.
    """

    sequence: Sequence
    kept: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logits: NDArray[np.float32] | None = None
    error: QuireError | None = None
    """Why this request cannot go on."""
    drafted: int = 0
    """Tokens of the draft that were computed."""
    branch: int | None = None
    """The fork that holds the tokens that were right, where it is not the sequence itself."""
    guesses: list[int] = field(default_factory=list)
    """What follows each of its branches that are no drafts."""

    @property
    def agreed(self) -> int:
        """Tokens of the draft that were right: all but the last, which is the model's own."""
        return max(len(self.tokens) - 1, 0)
