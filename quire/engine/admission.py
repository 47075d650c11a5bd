"""How requests come in: they are checked, and their sequences begin to generate."""

from __future__ import annotations

from collections.abc import Iterable

from quire.devices.budget import Budget
from quire.engine.choose import choose_first
from quire.engine.constrain import Constrainer, Matcher
from quire.engine.drafter import Source
from quire.engine.generation import Generation, StopRules, Transcript, make_sampler
from quire.engine.odds import Odds
from quire.engine.plan import Accepted
from quire.engine.prefix_cache import PrefixCache
from quire.engine.request import Request
from quire.engine.runner import Runner
from quire.engine.sequence import Sequence, check_whole
from quire.engine.sequences import Sequences
from quire.errors import RequestError
from quire.memory.groups.layout import Int32
from quire.memory.memory import Memory
from quire.memory.tiers.tiers import Tiers


class Admission(Sequences):
    """The sequences of one model, and the requests that they serve."""

    def __init__(
        self, runner: Runner, memory: Memory, prefix: PrefixCache, tiers: Tiers, n_ctx: int,
        constrainer: Constrainer, end_ids: Iterable[int], max_tokens: int,
    ) -> None:  # fmt: skip
        super().__init__(runner, memory, prefix, tiers, n_ctx, max_tokens)
        self.constrainer = constrainer
        self.end_ids = frozenset(end_ids)

    def admit(
        self, sequence: Sequence, request: Request, matcher: Matcher | None, text: Transcript | None
    ) -> Accepted | None:
        """Lets a sequence generate; its first token, where the logits for it are known."""
        self.check_open()
        check_whole(sequence)
        prompt = self.prompt_of(sequence.length, request.tokens)
        self._check_sampling(request)
        n_tokens = sequence.length + len(request.tokens)
        if not n_tokens:
            raise RequestError("there is nothing to continue: the prompt has no tokens", "prompt")
        if n_tokens >= self.n_ctx:
            raise self.too_long(n_tokens)
        sampling = request.sampling
        sampler = make_sampler(self.ops, sampling, self.constrainer.tokens_with)
        if sequence.length:
            sampler.observe_prompt(sequence.tokens.array())
        sampler.observe_prompt(prompt)
        rules = StopRules(self.end_ids, min(sampling.max_tokens, self.n_ctx - n_tokens), text)
        drafter = request.speculate.start(self, sequence) if request.speculate else None
        generation = Generation(sampling, sampler, matcher, rules, drafter)
        sequence.start(generation, request.owner, request.priority)
        try:
            self._take_prompt(sequence, request, prompt)
            return None if sequence.pending else choose_first(sequence, self.ops, self.n_vocab)
        except BaseException:
            self.stop(sequence)
            raise

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

    def _check_sampling(self, request: Request) -> None:
        has = f"the vocabulary has {self.n_vocab} tokens"
        if (token := max(request.sampling.logit_bias, default=0)) >= self.n_vocab:
            raise RequestError(f"logit_bias names token {token}; {has}", "logit_bias")
        if (wanted := request.sampling.logprobs or 0) > self.n_vocab:
            raise RequestError(f"logprobs asks for {wanted} tokens; {has}", "logprobs")

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
