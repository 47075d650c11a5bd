"""The engine: `step()` is the whole story; the rest puts sequences in and takes them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from quire.engine.compute import ComputeBudget
from quire.engine.constrain import Constrainer
from quire.engine.places import Places
from quire.engine.preempt import MakeRoom
from quire.engine.prefix_cache import PrefixCache
from quire.engine.runner import Runner
from quire.engine.sampling import make_sampler
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Accepted, Ends, Generation, Sequence
from quire.errors import BudgetError, ContextError, RequestError, TierError
from quire.memory.budget import Budget
from quire.memory.interface import Memory, SeqTokens
from quire.memory.tiers import Tiers
from quire.speculate.drafting import Drafting
from quire.speculate.interface import Source
from quire.speculate.odds import Odds
from quire.speculate.verify import choose, verify
from quire.types import Request, Speculation, StepOutput


class Engine:
    """Sequences over one model and one memory."""

    def __init__(
        self, runner: Runner, memory: Memory, prefix: PrefixCache, tiers: Tiers, n_ctx: int,
        constrainer: Constrainer, end_ids: Iterable[int] = (), max_tokens: int = 512,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.ops = runner.ops
        self.memory = memory
        self.prefix = prefix
        self.n_ctx = n_ctx
        self.constrainer = constrainer
        self.tiers = tiers
        self._sequences: dict[int, Sequence] = {}
        self.compute = ComputeBudget(self.ops, prefix.budget)
        self.room = MakeRoom(
            memory, tiers, prefix, self._idle_sequences, lambda: runner.seconds_per_token,
            lambda: self.drafting.give_way(), self.compute.trim,
        )  # fmt: skip
        self.places = Places(memory, prefix, self.room, self.hold)
        self.end_ids = frozenset(end_ids)
        self.scheduler = Scheduler(max_tokens, self.room)
        self.drafting = Drafting(memory, prefix.budget, self.room)
        self.closed = False

    def step(self) -> list[StepOutput]:
        """Computes some tokens of everybody who has any to compute."""
        self.prefix.release_waiting(self.scheduler.active)
        plan = self.scheduler.plan(self.memory)
        if not plan.entries:
            return self.scheduler.advance([])
        with self.drafting.round(plan) as drafts:
            with self.memory.reserve(drafts.plan.tokens()) as lease:
                logits = self.runner.forward(drafts.plan, lease)
                accepted = verify(drafts.plan, lease.tokens, logits, self.ops)
                drafts.tick()
                lease.commit(drafts.kept(accepted))
            drafts.settle(accepted)
        outputs = self.scheduler.advance(accepted)
        self.prefix.remember(accepted)
        self.compute.pay(self.room.evict_one)
        return outputs

    def shut(self) -> None:
        """Ends all sequences and gives everything back; once is enough."""
        if self.closed:
            return
        for sequence in list(self._sequences.values()):
            self.close(sequence)
        self.closed = True
        self.prefix.index.close()
        self.memory.close()
        self.tiers.close()
        self.compute.close()

    def check_open(self) -> None:
        """Refuses to go on with a model that was closed."""
        if self.closed:
            raise RequestError("this model is closed; load it again")

    def open(self, salt: str = "") -> Sequence:
        """An empty sequence."""
        self.check_open()
        return self._opened(Sequence(self.memory.seq_new(), salt=salt))

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same past; they share every page."""
        self.hold(sequence)
        twin = self._opened(Sequence(self.memory.seq_new(), sequence.tokens, sequence.salt))
        self.memory.seq_cp(sequence.id, twin.id, 0, -1)
        twin.computed, twin.logits = sequence.computed, sequence.logits
        twin.moved = sequence.moved
        self.prefix.track(twin)
        return twin

    def close(self, sequence: Sequence) -> None:
        """Ends a sequence, whatever it is doing, and gives its pages back."""
        self.stop(sequence)
        try:
            self.prefix.leave(sequence)
        finally:
            self.memory.seq_free(sequence.id)
            del self._sequences[sequence.id]

    def hold(self, sequence: Sequence) -> None:
        """Brings a sequence's pages back into memory if they are parked."""
        while sequence.parked:
            if self.memory.fits([(sequence.id, 1)]):
                if not self.room.bring_back(sequence) and sequence.moved:
                    raise TierError("the pages of a session could not be read back from disk")
            elif not self.free_some(sequence):
                if sequence.moved:
                    raise BudgetError(
                        f"a session of {len(sequence.tokens)} tokens has no room to come back to; "
                        "close others, or raise memory_budget"
                    )
                self.room.give_up(sequence)

    def free_some(self, needy: Sequence) -> bool:
        """Makes some room for a sequence; False when nothing gives way to it any more."""
        return (
            self.room.evict_one()
            or self.room.park_idle(but=needy)
            or self.scheduler.take_from_others(needy)
        )

    def _opened(self, sequence: Sequence) -> Sequence:
        self._sequences[sequence.id] = sequence
        return sequence

    def _idle_sequences(self) -> list[Sequence]:
        active = self.scheduler.active
        return [s for s in self._sequences.values() if s not in active and s.computed > 0]

    def append(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Adds tokens to be computed by the next steps."""
        self._check_tokens(sequence, tokens)
        if not tokens:
            return
        first = not sequence.tokens
        sequence.tokens.extend(tokens)
        sequence.logits, sequence.error = None, None
        if first:
            self.prefix.enter(sequence, self.scheduler.active)
        else:
            self.prefix.track(sequence)
        self.activate(sequence)

    @property
    def budget(self) -> Budget:
        """What its memory is taken from."""
        return self.prefix.budget

    def odds(self, key: object, start: float, burst: int = 1) -> Odds:
        """Odds for a new generation, from what is known of those with the same key."""
        return self.drafting.odds(key, start, burst)

    @property
    def sources(self) -> dict[object, Source]:
        """Those who draft for its sequences, by what they were made from."""
        return self.drafting.sources

    def start(
        self, sequence: Sequence, request: Request, text_ends: Callable[[int], bool] | None = None
    ) -> list[StepOutput]:
        """Lets a sequence generate; returns its first token where the logits for it are known.

        `text_ends` is told every token in turn, and says when a stop string is complete.
        """
        self.check_open()
        matcher = self.constrainer.compile(request.constraint) if request.constraint else None
        self._check_tokens(sequence, request.tokens)
        self._check_bias(request)
        if not sequence.tokens and not request.tokens:
            raise RequestError("there is nothing to continue: the prompt has no tokens")
        n_tokens = len(sequence.tokens) + len(request.tokens)
        if n_tokens >= self.n_ctx:
            raise self._too_long(n_tokens)
        drafter = request.speculate.start(self, sequence) if request.speculate else None
        sampler = make_sampler(self.ops, request.sampling)
        sampler.observe_prompt(np.array([*sequence.tokens, *request.tokens], np.int32))
        most = min(request.sampling.max_tokens, self.n_ctx - n_tokens)
        ends = Ends(self.end_ids, most, text_ends)
        sequence.generation = Generation(request, sampler, matcher, ends, drafter)
        sequence.speculation = Speculation() if drafter else None
        sequence.error = None
        self._take_prompt(sequence, request)
        self.activate(sequence)
        if sequence.pending > 0 or sequence.logits is None:
            return []
        first = Accepted(sequence, 0)
        choose(first, self.ops.array(sequence.logits), self.ops)
        outputs = self.scheduler.advance([first])
        self.prefix.remember([first])
        return outputs

    def _take_prompt(self, sequence: Sequence, request: Request) -> None:
        """Puts the prompt behind what is there, and finds what of it need not be computed."""
        if not sequence.tokens:
            sequence.salt = request.salt
            sequence.tokens.extend(request.tokens)
            self.prefix.enter(sequence, self.scheduler.active)
            return
        if not request.tokens:
            self.places.want_logits(sequence)  # a rewind may have dropped them
        sequence.tokens.extend(request.tokens)
        sequence.cached = sequence.computed
        self.prefix.track(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Ends what a sequence is doing; it keeps its tokens."""
        if sequence in self.scheduler.active:
            self.scheduler.remove(sequence)
        sequence.end_generation()

    def logits(self, tokens: Seq[int]) -> NDArray[np.float32]:
        """Logits after every one of these tokens, in one pass from an empty memory."""
        sequence = self.open()
        try:
            self._check_tokens(sequence, tokens)
            out = np.empty((len(tokens), self.runner.model.n_vocab), np.float32)
            for at in range(0, len(tokens), self.scheduler.max_tokens):
                part = np.array(tokens[at : at + self.scheduler.max_tokens], np.int32)
                while not self.memory.fits([(sequence.id, len(part))]):
                    if not self.free_some(sequence):
                        break  # what is missing, memory says best
                with self.memory.reserve([SeqTokens(sequence.id, part)]) as lease:
                    rows = np.arange(len(part), dtype=np.int32)
                    logits = self.runner.forward_rows(lease, rows)
                    out[at : at + len(part)] = self.ops.numpy(logits)
                    lease.commit({sequence.id: len(part)})
            return out
        finally:
            self.close(sequence)
            self.compute.pay(self.room.evict_one)

    def activate(self, sequence: Sequence) -> None:
        """Lets the next steps compute what is pending of a sequence."""
        self.check_open()
        if sequence not in self.scheduler.active:
            self.scheduler.add(sequence)

    def _check_tokens(self, sequence: Sequence, tokens: Seq[int]) -> None:
        n_vocab = self.runner.model.n_vocab
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise RequestError(f"token id {token} is outside the vocabulary of {n_vocab}")
        if len(sequence.tokens) + len(tokens) > self.n_ctx:
            raise self._too_long(len(sequence.tokens) + len(tokens))

    def _check_bias(self, request: Request) -> None:
        n_vocab = self.runner.model.n_vocab
        for token in request.sampling.logit_bias:
            if token >= n_vocab:
                raise RequestError(
                    f"logit_bias names token {token}; the vocabulary has {n_vocab} tokens"
                )

    def _too_long(self, tokens: int) -> ContextError:
        trained = self.runner.model.n_ctx_train
        return ContextError(
            f"{tokens} tokens do not fit a context of {self.n_ctx} with room for an answer; "
            f"shorten the prompt, or load with a larger n_ctx or more memory "
            f"(the model was trained for {trained})"
        )
