"""The engine: `step()` is the whole story; the rest lets requests in."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from quire.devices.budget import Budget
from quire.engine.choose import choose, choose_first
from quire.engine.constrain import Constrainer, Matcher
from quire.engine.drafter import Source
from quire.engine.drafting import Round
from quire.engine.generation import Generation, StopRules, Transcript, make_sampler
from quire.engine.judge import judge
from quire.engine.odds import Odds
from quire.engine.plan import Accepted, Plan
from quire.engine.planner import Planner
from quire.engine.prefix_cache import PrefixCache
from quire.engine.request import Request
from quire.engine.runner import Runner, for_callers
from quire.engine.sequence import Sequence, check_whole
from quire.engine.sequences import Sequences
from quire.errors import QuireError, RequestError
from quire.memory.groups.layout import Int32
from quire.memory.lease import Lease
from quire.memory.memory import Memory
from quire.memory.tiers.tiers import Tiers
from quire.ops import Array, Refused
from quire.types import StepOutput


class Launched(NamedTuple):
    """A step whose layers have run; what follows each sequence is still to be chosen."""

    plan: Plan
    lease: Lease
    logits: Array
    drafts: Round | None
    """With drafts, it is chosen first what memory keeps; without, memory has kept it all."""


class Engine(Sequences):
    """Requests over one model and one memory. One caller at a time: see `loop.py`."""

    def __init__(
        self, runner: Runner, memory: Memory, prefix: PrefixCache, tiers: Tiers, n_ctx: int,
        constrainer: Constrainer, end_ids: Iterable[int] = (), max_tokens: int = 512,
    ) -> None:  # fmt: skip
        super().__init__(runner, memory, prefix, tiers, n_ctx, max_tokens)
        self.constrainer = constrainer
        self.end_ids = frozenset(end_ids)
        self.planner = Planner(self.scheduler, memory, self.room, prefix, self._fail)
        self._outputs: list[StepOutput] = []

    def step(self) -> list[StepOutput]:
        """Computes some tokens of everybody who has any to compute."""
        try:
            self.finish(self.launch(self.scheduler.active))
        except (QuireError, Refused):  # one of them is to blame: each has a step of its own
            self._one_by_one()
        outputs, self._outputs = self._outputs, []
        return outputs

    def launch(self, active: Seq[Sequence]) -> Launched | None:
        """Plans, drafts, reserves and runs the layers; None where there is nothing to compute.

        Without drafts it is known how many tokens are kept: memory keeps them at once.
        """
        plan = self.scheduler.plan(active, self.memory.fits)
        if plan.unready or plan.back or not self.memory.fits(plan.counts):
            plan = self.planner.plan(active)
        if not plan.entries:
            return None
        drafts = lease = None
        try:
            if _has_drafter(plan):
                drafts = Round(self.drafting, plan, self.room)
                plan = drafts.draft()
            lease = self.memory.reserve(plan.tokens())
            logits = self.runner.forward(plan, lease)
            if drafts is None:
                lease.commit(dict(plan.counts))
                for entry in plan.entries:
                    entry.sequence.advance(entry.count)
        except BaseException:
            _undo(lease, drafts)
            raise
        return Launched(plan, lease, logits, drafts)

    def finish(self, launched: Launched | None) -> None:
        """Chooses what follows, keeps what is right of drafts, and moves the sequences on."""
        if launched is None:
            return
        plan, lease, logits, drafts = launched
        accepted: list[Accepted] = []
        try:
            if drafts is None:
                choose(plan.entries, logits, self.ops, self.n_vocab, accepted)
            else:
                judge(plan, lease.tokens, logits, self.ops, self.n_vocab, accepted)
                drafts.tick()
                lease.commit(drafts.kept(accepted))
        except BaseException:
            self._recover(launched, accepted)
            raise
        if drafts is None:
            self._gain(accepted)
        else:
            for one in accepted:
                one.sequence.advance(one.kept)
            try:
                drafts.settle(accepted)
            finally:
                self._gain(accepted)
        if self.ops.compute_bytes != self.compute.paid:
            self.compute.pay(self.room)

    def _gain(self, accepted: list[Accepted]) -> None:
        """Takes what was chosen into the sequences; those that end leave."""
        for one in accepted:
            sequence, tokens = one.sequence, one.tokens
            if one.logits is not None:
                sequence.know_logits(one.logits)
            if tokens:
                sequence.gain(tokens)
            if one.finish_reason or one.error or sequence.pending == 0:
                self.stop(sequence)
            if one.error:
                sequence.fail()
            if tokens or one.error:
                output = StepOutput(
                    sequence.id, tuple(tokens), tuple(one.logprobs), one.finish_reason, one.error
                )
                self._outputs.append(output)
        self.prefix.remember(accepted)

    def _recover(self, launched: Launched, accepted: list[Accepted]) -> None:
        """A step broke off after its layers had run: what was chosen counts, nothing else does.

        Memory and sequences are as they were before it, or one token is computed once more.
        """
        plan, lease, _, drafts = launched
        _undo(lease, drafts)
        for one in accepted:
            one.kept, one.branch = 0, None
        self._gain([one for one in accepted if one.tokens or one.error])
        for entry in plan.entries:
            if entry.sequence.active and entry.sequence.pending == 0:
                self.history.want_logits(entry.sequence)

    def _one_by_one(self) -> None:
        """Steps each sequence alone; one that cannot go on fails, and the others do not."""
        for sequence in list(self.scheduler.active):
            try:
                with for_callers():
                    self.finish(self.launch([sequence] if sequence.active else []))
            except QuireError as error:
                self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: QuireError) -> None:
        """Ends what a sequence is doing; it keeps its tokens, and its pages where it must."""
        self.stop(sequence)
        if not sequence.edited:
            self.room.lose(sequence)
        sequence.fail()
        self._outputs.append(StepOutput(sequence.id, (), error=error))

    # -- requests -------------------------------------------------------------------------------

    def start(
        self, sequence: Sequence, request: Request, matcher: Matcher | None = None,
        text: Transcript | None = None,
    ) -> list[StepOutput]:  # fmt: skip
        """Lets a sequence generate; returns its first token where the logits for it are known.

        `matcher` is the request's constraint, compiled; stop strings are found in `text`.
        """
        self.check_open()
        check_whole(sequence)
        self.check_tokens(sequence.length, request.tokens)
        self._check_bias(request)
        n_tokens = sequence.length + len(request.tokens)
        if not n_tokens:
            raise RequestError("there is nothing to continue: the prompt has no tokens")
        if n_tokens >= self.n_ctx:
            raise self.too_long(n_tokens)
        sampling = request.sampling
        sampler = make_sampler(self.ops, sampling)
        prompt = np.array(request.tokens, np.int32)
        sampler.observe_prompt(np.concatenate([sequence.tokens.array(), prompt]))
        rules = StopRules(self.end_ids, min(sampling.max_tokens, self.n_ctx - n_tokens), text)
        drafter = request.speculate.start(self, sequence) if request.speculate else None
        sequence.start(Generation(sampling, sampler, matcher, rules, drafter))
        try:
            self._take_prompt(sequence, request, prompt)
            if sequence.pending == 0:
                self._gain([choose_first(sequence, self.ops, self.n_vocab)])
        except BaseException:
            self.stop(sequence)
            raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take_prompt(self, sequence: Sequence, request: Request, prompt: Int32) -> None:
        """Puts the prompt behind what is there, and finds what of it need not be computed."""
        if not sequence.length:
            sequence.use_salt(request.salt)
            sequence.extend(prompt)
            self.prefix.enter(sequence, self.scheduler.active)
            self.activate(sequence)
            return
        if not request.tokens:
            self.history.want_logits(sequence)  # a rewind may have dropped them
        else:
            sequence.extend(prompt)
        self.activate(sequence)
        sequence.count_cached(sequence.computed)
        self.prefix.track(sequence)

    def _check_bias(self, request: Request) -> None:
        for token in request.sampling.logit_bias:
            if token >= self.n_vocab:
                raise RequestError(
                    f"logit_bias names token {token}; the vocabulary has {self.n_vocab} tokens"
                )

    # -- what drafters see ----------------------------------------------------------------------

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


def _has_drafter(plan: Plan) -> bool:
    """Whether somebody drafts for any of those who run."""
    for entry in plan.entries:
        if entry.sequence.generation and entry.sequence.generation.drafter:
            return True
    return False


def _undo(lease: Lease | None, drafts: Round | None) -> None:
    """Nothing of a step stays behind that was not kept."""
    if lease is not None:
        lease.abort()
    if drafts is not None:
        drafts.cancel()
