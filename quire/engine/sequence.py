"""A sequence: its tokens, how many of them memory holds, and what it is doing.

Only the methods here change one, so that whoever reads finds every way it can change. A test
holds all other files to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.memory.checkpoint import Checkpoint
from quire.memory.groups.layout import Int32
from quire.memory.tokens import Tokens
from quire.types import Speculation

if TYPE_CHECKING:
    from quire.engine.generation import Generation


class SequenceStatus(Enum):
    """Where a sequence stands."""

    RESTING = "resting"
    """Its pages are here, and it has nothing to do."""
    WAITING = "waiting"
    """Another sequence is computing tokens that this one will share."""
    RUNNING = "running"
    """Its pages are here, and the next steps compute what is pending."""
    PARKED = "parked"
    """Its pages lie in a tier."""
    LOST = "lost"
    """It gave its pages up: its tokens have to be computed again."""


RESTING, WAITING, RUNNING = SequenceStatus.RESTING, SequenceStatus.WAITING, SequenceStatus.RUNNING
PARKED, LOST = SequenceStatus.PARKED, SequenceStatus.LOST


UNKNOWN = -1
"""In place of a token that was not read yet: it is nobody's, so nobody shares what follows."""


@dataclass(frozen=True, eq=False)
class Record:
    """What a sequence is, apart from its pages: what forks, marks and session files keep of it."""

    tokens: Tokens
    computed: int
    """How many of them memory holds."""
    logits: NDArray[np.float32] | None
    """Those after the last token, where they are known."""
    whole: int | None
    """Behind so many tokens some were taken out: to compute the rest again would change it."""
    salt: str
    shared: bool = True
    """Whether others may begin with its pages: what came from a file is nobody else's."""
    exact: bool = True
    """Whether all of it was computed with this arithmetic: else other bits may follow."""


@dataclass(frozen=True, eq=False, repr=False)
class Mark:
    """A place in a session to come back to."""

    name: str
    """What the session calls it."""
    record: Record
    checkpoint: str
    """What memory calls it, where names are of all sessions."""
    memory: object
    """Who holds it."""
    held: Checkpoint
    """What memory holds under that name: names come again, in files of sessions."""

    def __repr__(self) -> str:
        return f"<Mark {self.name!r} at {len(self.record.tokens)} tokens>"

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens up to here."""
        return tuple(self.record.tokens)


class Sequence:
    """Tokens [0, computed) are in memory, the `pending` ones behind them are not yet."""

    def __init__(self, id: int, tokens: Seq[int] | Int32 = (), salt: str = "") -> None:
        self.id = id
        self.tokens = Tokens(tokens)
        self.length = self.pending = len(tokens)
        self.computed = 0
        self.logits: NDArray[np.float32] | None = None
        self.whole: int | None = None  # what its tokens say ends here, where some were taken out
        self.salt = salt
        self.marks: Mapping[str, Mark] = {}  # places along its past, as its session makes them
        self.shared = self.exact = True
        self.status = RESTING
        self.active = False  # whether the scheduler has it
        self.begun = 0  # how often it was taken in there
        self.expecting = False  # whether only the device knows its last token
        self.preempted = False  # whether it gave way and has not run since
        self.apart = False  # whether it has what others hold for itself: sharing left it no room
        self.cached = 0  # tokens of the current request that were in memory when it came
        self.miss = ""  # why its other tokens were not
        self.branch_at: int | None = None  # where its prompt leaves one that is known already
        self.waits_for: tuple[Sequence, int, int] | None = None  # who computes our first tokens too
        self.generation: Generation | None = None
        self.owner = ""  # of the current or last request
        self.priority = 0  # lower comes first
        self.speculation: Speculation | None = None  # of the current or last request
        self.failed = False  # whether its current or last request could not go on

    @property
    def edited(self) -> bool:
        """Whether tokens were taken out of the middle: those left do not say what it holds."""
        return self.whole is not None

    def is_whole_to(self, length: int) -> bool:
        """Whether computing its first tokens again would bring the same."""
        return self.whole is None or length <= self.whole

    # -- tokens ---------------------------------------------------------------------------------

    def extend(self, tokens: Seq[int] | Int32) -> None:
        """More tokens to compute."""
        self.tokens.extend(tokens)
        self.logits = None
        self._count()

    def advance(self, count: int) -> None:
        """So many more of its tokens are in memory."""
        self.computed += count
        self.pending -= count
        self.logits = None

    def gain(self, tokens: list[int]) -> None:
        """Tokens that were chosen, to be computed by the steps to come."""
        if len(tokens) == 1:
            self.tokens.append(tokens[0])
        else:
            self.tokens.extend(tokens)
        self.length += len(tokens)
        self.pending += len(tokens)

    def expect(self) -> None:
        """A token comes that is chosen, and that only the device knows."""
        self.tokens.append(UNKNOWN)
        self.expecting = True
        self.length += 1
        self.pending += 1

    def learn(self, token: int) -> None:
        """The token that was expected; it may be in memory already."""
        self.tokens.replace_last(token)
        self.expecting = False

    def know_logits(self, logits: NDArray[np.float32]) -> None:
        """The logits after its last token, which was computed just now."""
        self.logits = logits

    def truncate(self, length: int) -> None:
        """Drops the tokens from a position on; memory has done so."""
        if self.is_whole_to(length):
            self.whole = None
        self.tokens.truncate(length)
        self.expecting = False
        if self.computed > length:
            self.computed, self.logits = length, None
        self._count()

    def cut_out(self, start: int, stop: int) -> None:
        """Takes computed tokens out of the middle; memory has done so."""
        self.tokens.remove(start, stop)
        self.computed -= stop - start
        self.logits = None
        if start < self.computed:
            self.whole = start if self.whole is None else min(start, self.whole)
        self._count()

    def _count(self) -> None:
        self.length = len(self.tokens)
        self.pending = self.length - self.computed

    def record(self) -> Record:
        """What it is now; the two go their own ways from here."""
        return Record(
            self.tokens.fork(), self.computed, self.logits, self.whole, self.salt, self.shared,
            self.exact,
        )  # fmt: skip

    def become(self, record: Record) -> None:
        """Makes it what a record says; memory has done so."""
        self.tokens = record.tokens.fork()
        self.computed, self.logits = record.computed, record.logits
        self.whole, self.salt = record.whole, record.salt
        self.shared, self.exact = record.shared, record.exact
        self._count()
        self._at_home()
        if self.length and not (self.computed or self.edited):  # it was lost when it was copied
            self.status = LOST

    # -- pages ----------------------------------------------------------------------------------

    def park(self, apart: bool = False) -> None:
        """Its pages went to a tier; apart, so did copies of those that others hold."""
        self.status, self.apart = PARKED, self.apart or apart

    def unpark(self) -> None:
        """Its pages are back."""
        self._at_home()

    def lose(self, apart: bool = False) -> None:
        """Its pages are gone: it starts from nothing; apart, without what others hold."""
        self.computed, self.logits, self.apart = 0, None, self.apart or apart
        self.status = LOST
        self._count()

    def adopt(self, computed: int, branch_at: int | None) -> None:
        """So many first tokens came from elsewhere; another prompt goes on as far as a branch."""
        self.computed, self.branch_at, self.waits_for = computed, branch_at, None
        self._count()
        self._at_home()

    def _at_home(self) -> None:
        self.status = RUNNING if self.active else RESTING

    # -- work -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """The scheduler takes it in."""
        self.active, self.failed, self.apart = True, False, False
        self.begun += 1
        if self.status is RESTING:
            self.status = RUNNING

    def rest(self) -> None:
        """The scheduler lets it go."""
        self.active, self.preempted, self.waits_for = False, False, None
        if self.status in (RUNNING, WAITING):
            self.status = RESTING

    def wait_for(self, source: Sequence, length: int) -> None:
        """Another sequence computes the first `length` tokens; they are shared then.

        For that it was begun before; begun once more, it may wait for this one.
        """
        self.waits_for, self.status = (source, length, source.begun), WAITING

    def preempt(self) -> None:
        """It gave way to others, and waits until there is room to go on for a while."""
        self.preempted = True

    def run(self) -> None:
        """It is in this step."""
        self.preempted = False

    def count_cached(self, tokens: int, miss: str = "new") -> None:
        """So many tokens of a new request were in memory when it came; why the rest was not."""
        self.cached, self.miss = tokens, miss

    def start(self, generation: Generation, owner: str = "", priority: int = 0) -> None:
        """A request begins to generate."""
        self.owner, self.priority = owner, priority
        self.generation, self.failed = generation, False
        self.speculation = Speculation() if generation.drafter else None

    def end_generation(self) -> None:
        """Lets go of what it was generating, and of what was kept for that."""
        generation, self.generation = self.generation, None
        if generation and generation.drafter:
            generation.drafter.close()

    def fail(self) -> None:
        """What it was doing cannot go on.

        Why is for whoever asked: an error holds the frames it was raised through, and what those
        hold would live as long as the sequence.
        """
        self.failed = True

    def use_marks(self, marks: Mapping[str, Mark]) -> None:
        """Its session's marks, as they come and go."""
        self.marks = marks

    def use_salt(self, salt: str) -> None:
        """An empty one shares with those of a salt."""
        assert self.length == 0
        self.salt = salt


def check_whole(sequence: Sequence) -> None:
    """Refuses one that lost what computing its tokens again would not bring back."""
    if sequence.edited and sequence.status is LOST:
        raise RequestError(
            "tokens were taken out of this session, and its pages are gone: it can only be rewound "
            f"to its first {sequence.whole} tokens or to a mark, or closed"
        )
