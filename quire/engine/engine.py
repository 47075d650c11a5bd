"""The engine: `step()` is the whole story; `admission` lets requests in."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

from quire.engine.admission import Admission
from quire.engine.choose import choose
from quire.engine.constrain import Constrainer, Matcher
from quire.engine.drafting import Round
from quire.engine.flight import Flight
from quire.engine.generation import Transcript
from quire.engine.judge import judge
from quire.engine.plan import Accepted, Plan
from quire.engine.planner import Planner
from quire.engine.prefix_cache import PrefixCache
from quire.engine.request import Request
from quire.engine.runner import Runner, for_callers
from quire.engine.sequence import Sequence
from quire.errors import QuireError
from quire.memory.groups.layout import Int32
from quire.memory.lease import Lease
from quire.memory.memory import Memory
from quire.memory.tiers.tiers import Tiers
from quire.ops import Array, Drawn, Refused
from quire.types import StepOutput


class Launched(NamedTuple):
    """A step whose layers run, or have; what follows each sequence is still to be chosen."""

    plan: Plan
    lease: Lease
    logits: Array
    drawn: Drawn | None
    """What follows, where the device has chosen by itself."""
    drafts: Round | None
    """With drafts, it is chosen first what memory keeps; without, memory has kept it all."""
    flight: Flight | None
    """Where the device chooses by itself, and the next step may be launched before this ends."""


class Engine(Admission):
    """Requests over one model and one memory. One caller at a time: see `loop.py`."""

    def __init__(
        self, runner: Runner, memory: Memory, prefix: PrefixCache, tiers: Tiers, n_ctx: int,
        constrainer: Constrainer, end_ids: Iterable[int] = (), max_tokens: int = 512,
    ) -> None:  # fmt: skip
        super().__init__(runner, memory, prefix, tiers, n_ctx, constrainer, end_ids, max_tokens)
        self.planner = Planner(
            self.scheduler, memory, self.room, prefix, self._fail, self.history.start_over
        )
        self.flying: Launched | None = None
        """A step that the device works on, and whose tokens nobody has read yet."""
        self._outputs: list[StepOutput] = []
        self.budget.whole.lenders.append(self.room)

    def start(
        self, sequence: Sequence, request: Request, matcher: Matcher | None = None,
        text: Transcript | None = None,
    ) -> list[StepOutput]:  # fmt: skip
        """Lets a sequence generate; returns its first token where the logits for it are known.

        `matcher` is the request's constraint, compiled; stop strings are found in `text`.
        """
        if (first := self.admit(sequence, request, matcher, text)) is not None:
            self._gain([first])
        outputs, self._outputs = self._outputs, []
        return outputs

    def step(self) -> list[StepOutput]:
        """Computes some tokens of everybody who has any to compute."""
        try:
            started = perf_counter()
            last, self.flying = self.flying, None
            if last is not None:
                self._go_on(last)
            ended = last is not None and any(one.finish_reason for one in self._outputs)
            if self.flying is None and not ended:  # who has ended makes room before others do
                launched = self.launch(self.scheduler.active)
                if launched is not None and launched.flight is not None:
                    self.flying = launched  # it is read when the next one runs
                else:
                    self.finish(launched)
                    last = launched or last
            if last is not None:
                self.scheduler.took(last.plan, perf_counter() - started)
        except (QuireError, Refused):  # one of them is to blame: each has a step of its own
            self._one_by_one()
        outputs, self._outputs = self._outputs, []
        return outputs

    def settle(self) -> list[StepOutput]:
        """Finishes the step that is under way on the device, so that everything is as it says."""
        last, self.flying = self.flying, None
        with suppress(QuireError, Refused):  # what it was to bring comes with the next step
            self.finish(last)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _go_on(self, last: Launched) -> None:
        """Launches the next step, and finishes the last, whatever becomes of the next."""
        try:
            self.flying = self._follow(last)
        finally:
            try:
                self.finish(last)
            except BaseException:
                self._forget()
                raise

    def _follow(self, last: Launched) -> Launched | None:
        """The next step, before the tokens of the last are read; None where it needs them."""
        assert last.flight is not None
        going, sources = last.flight.going(self.scheduler.active)
        for sequence in going:
            sequence.expect()
        launched = None
        try:
            plan = self.scheduler.plan(going, self.memory.fits)
            if plan.entries and not plan.unready and self.memory.fits(plan.counts):
                launched = self._run(plan, sources)
        except (QuireError, Refused):
            pass  # it comes again, once the last step is finished
        finally:
            if launched is None:
                for sequence in going:
                    self.history.truncate(sequence, sequence.length - 1)
        return launched

    def launch(self, active: Seq[Sequence]) -> Launched | None:
        """Plans, drafts, reserves and runs the layers; None where there is nothing to compute."""
        plan = self.scheduler.plan(active, self.memory.fits)
        if plan.unready or plan.back or not self.memory.fits(plan.counts):
            plan = self.planner.plan(active)
        return self._run(plan) if plan.entries else None

    def _run(self, plan: Plan, sources: Int32 | None = None) -> Launched:
        """Reserves, and runs the layers.

        Without drafts it is known how many tokens are kept: memory keeps them at once.
        """
        drafts = lease = None
        try:
            if _has_drafter(plan):
                drafts = Round(self.drafting, plan, self.room)
                plan = drafts.draft()
            lease = self.memory.reserve(plan.tokens())
            logits, drawn = self.runner.launch(plan, lease, sources)
            if drafts is None:
                lease.commit(dict(plan.counts))
                for entry in plan.entries:
                    entry.sequence.advance(entry.count)
        except BaseException:
            _undo(lease, drafts)
            raise
        if drawn is not None:
            self.memory.back_ahead()  # while the device computes
        flies = drawn is not None and drafts is None and self.runner.flies
        flight = Flight.of(plan, drawn) if flies and drawn is not None else None
        return Launched(plan, lease, logits, drawn, drafts, flight)

    def finish(self, launched: Launched | None) -> None:
        """Chooses what follows, keeps what is right of drafts, and moves the sequences on."""
        if launched is None:
            return
        plan, lease, logits, drawn, drafts, flight = launched
        accepted: list[Accepted] = []
        try:
            if flight is not None:
                flight.land(accepted)
            elif drafts is None:
                self.prefix.remember(plan.entries)  # while the device computes
                if drawn is not None:
                    self._pay()
                choose(plan.entries, logits, self.ops, self.n_vocab, accepted, drawn)
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
                self.prefix.remember_drafted(accepted)
        if flight is not None:
            if not (self.runner.steps and self.runner.steps.replayed):
                self._pay()
        elif drafts is not None or drawn is None or not self.runner.flies:
            self._pay()

    def _pay(self) -> None:
        """Pays for the arrays that devices have taken since."""
        for held in self.compute.each:
            if held.ops.compute_bytes != held.paid:
                self.compute.pay(self.room)
                break

    def _gain(self, accepted: list[Accepted]) -> None:
        """Takes what was chosen into the sequences; those that end leave."""
        for one in accepted:
            sequence, tokens = one.sequence, one.tokens
            if one.logits is not None:
                sequence.know_logits(one.logits)
            if sequence.expecting:
                if tokens:
                    sequence.learn(tokens[0])
                else:
                    self.history.truncate(sequence, sequence.length - 1)
            elif tokens:
                sequence.gain(tokens)
            if one.finish_reason or one.error or not (sequence.pending or sequence.generation):
                self.stop(sequence)
            if one.error:
                self.prefix.distrust(sequence)
                sequence.fail()
            if tokens or one.error:
                output = StepOutput(
                    sequence.id, tuple(tokens), tuple(one.logprobs), one.finish_reason, one.error
                )
                self._outputs.append(output)

    def _recover(self, launched: Launched, accepted: list[Accepted]) -> None:
        """A step broke off after its layers had run: what was chosen counts, nothing else does.

        Memory and sequences are as they were before it, or one token is computed once more.
        """
        plan, lease, _, _, drafts, _ = launched
        _undo(lease, drafts)
        self._forget()
        for one in accepted:
            one.kept, one.branch = 0, None
        self._gain([one for one in accepted if one.tokens or one.error])
        for entry in plan.entries:
            self._choose_again(entry.sequence)

    def _forget(self) -> None:
        """Takes back the step that follows one that broke off: what it makes is not read."""
        last, self.flying = self.flying, None
        for entry in last.plan.entries if last is not None else ():
            sequence = entry.sequence
            if sequence.expecting:
                self.history.truncate(sequence, sequence.length - 1)
            else:
                self._choose_again(sequence)

    def _choose_again(self, sequence: Sequence) -> None:
        """Has logits that nobody chose from computed once more; who cannot have that, fails."""
        try:
            if sequence.active and sequence.pending == 0:
                self.history.want_logits(sequence)
        except QuireError as error:
            self._fail(sequence, error)

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

    def discard(self, sequence: Sequence) -> None:
        """Forgets what a step that broke off still has to tell of a sequence: who asked has left,
        and who goes on with it did not ask."""
        self._outputs = [output for output in self._outputs if output.sequence != sequence.id]


def _has_drafter(plan: Plan) -> bool:
    """Whether somebody drafts for any of those who run."""
    for entry in plan.entries:
        if entry.sequence.generation and entry.sequence.generation.drafter:
            return True
    return False


def _undo(lease: Lease | None, drafts: Round | None) -> None:
    """Nothing of a step stays behind that was not kept."""
    try:
        if lease is not None:
            lease.abort()
    finally:
        if drafts is not None:
            drafts.cancel()
