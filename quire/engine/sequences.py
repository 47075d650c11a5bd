"""The sequences of an engine: how they come, grow, fork and go."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from quire.engine.compute import ComputeBudget
from quire.engine.drafting import Drafting
from quire.engine.history import History
from quire.engine.prefix_cache import PrefixCache
from quire.engine.room import Room
from quire.engine.runner import Runner
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import PARKED, Sequence, check_whole
from quire.errors import BudgetError, ContextError, RequestError, TierError
from quire.memory.groups.layout import Int32
from quire.memory.memory import Memory
from quire.memory.tiers.tiers import Tiers


class Sequences:
    """The sequences of one model, and the parts that serve them."""

    def __init__(
        self, runner: Runner, memory: Memory, prefix: PrefixCache, tiers: Tiers, n_ctx: int,
        max_tokens: int,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.ops = runner.ops
        self.memory = memory
        self.prefix = prefix
        self.n_ctx = n_ctx
        self.n_vocab = runner.model.n_vocab
        self.tiers = tiers
        self.scheduler = Scheduler(max_tokens)
        self.drafting = Drafting(memory, prefix.budget)
        self.compute = ComputeBudget(runner.devices, runner.forget)
        self._sequences: dict[int, Sequence] = {}
        self.room = Room(
            memory, tiers, prefix, self.drafting.give_way, self.compute.trim, self.compute.forget,
            self._sequences, self.scheduler.active, lambda: runner.seconds_per_token,
        )  # fmt: skip
        self.history = History(memory, prefix, self.room, self.ensure_resident)
        self.closed = False

    def close(self) -> None:
        """Ends all sequences and gives everything back; once is enough."""
        if self.closed:
            return
        for sequence in list(self._sequences.values()):
            self.end(sequence)
        self.closed = True
        self.prefix.budget.whole.lenders.remove(self.room)
        self.prefix.index.close()
        self.memory.close()
        self.tiers.close()
        self.compute.close()

    def check_open(self) -> None:
        """Refuses to go on with a model that was closed."""
        if self.closed:
            raise RequestError("this model is closed; load it again")

    def new_sequence(self, salt: str = "") -> Sequence:
        """An empty sequence."""
        self.check_open()
        sequence = Sequence(self.memory.seq_new(), salt=salt)
        self._sequences[sequence.id] = sequence
        return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same past; they share every page."""
        self.check_open()
        self.ensure_resident(sequence)
        twin = self.new_sequence()
        self.memory.seq_cp(sequence.id, twin.id, 0, -1)
        twin.become(sequence.record())
        self.prefix.track(twin)
        return twin

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence, whatever it is doing, and gives its pages back."""
        self.stop(sequence)
        try:
            self.prefix.leave(sequence)
        finally:
            self.memory.seq_free(sequence.id)
            del self._sequences[sequence.id]

    def ensure_resident(self, sequence: Sequence) -> None:
        """Brings a sequence's pages back into memory if they are parked; others make room."""
        check_whole(sequence)
        while sequence.status is PARKED:
            if self.room.make_way_back(sequence):
                if not self.room.bring_back(sequence) and sequence.edited:
                    raise TierError("the pages of a session could not be read back from disk")
            elif sequence.edited:
                raise BudgetError(
                    "a session has to come back from a tier as it left, and there is no room for "
                    "that; close others, raise memory_budget, or rewind it to its first "
                    f"{sequence.whole} tokens, before those that were taken out"
                )
            else:
                self.room.lose(sequence)

    def append(self, sequence: Sequence, tokens: Seq[int] | Int32) -> None:
        """Adds tokens to be computed by the next steps."""
        self.check_tokens(sequence.length, tokens)
        check_whole(sequence)
        if not len(tokens):
            return
        first = not sequence.length
        sequence.extend(tokens)
        if first:
            self.prefix.enter(sequence, self.scheduler.active)
        else:
            self.prefix.track(sequence)
        self.activate(sequence)

    def activate(self, sequence: Sequence) -> None:
        """Lets the next steps compute what is pending of a sequence."""
        self.check_open()
        check_whole(sequence)
        self.scheduler.add(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Ends what a sequence is doing; it keeps its tokens."""
        self.scheduler.remove(sequence)
        sequence.end_generation()

    def prompt_of(self, held: int, tokens: Seq[int]) -> Int32:
        """Tokens to come behind those that a sequence holds, checked."""
        try:
            prompt = np.array(tokens, np.int32)
            wrong = len(prompt) > 0 and prompt.view(np.uint32).max() >= self.n_vocab
        except OverflowError:
            wrong = True
        if wrong or held + len(tokens) > self.n_ctx:
            self.check_tokens(held, tokens)  # says what is wrong
        return prompt

    def check_tokens(self, held: int, tokens: Seq[int] | Int32) -> None:
        """Refuses tokens that are none, or do not fit behind those that a sequence holds."""
        n_vocab = self.n_vocab
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < n_vocab):
            token = next(token for token in tokens if not 0 <= token < n_vocab)
            raise RequestError(f"token id {token} is outside the vocabulary of {n_vocab}")
        if held + len(tokens) > self.n_ctx:
            raise self.too_long(held + len(tokens))

    def too_long(self, tokens: int) -> ContextError:
        trained = self.runner.model.n_ctx_train
        return ContextError(
            f"{tokens} tokens do not fit a context of {self.n_ctx} with room for an answer; "
            f"shorten the prompt, or load with a larger n_ctx or more memory "
            f"(the model was trained for {trained})"
        )
