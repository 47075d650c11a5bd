"""Tokens that whole steps choose are the reference's: with bias, penalties, log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.ops import Draw
from quire.ops.cuda.arrays import values_of
from quire.ops.cuda.steps import Steps
from quire.ops.reference import sampling as plain
from quire.ops.reference.sampling import Sampling
from tests.cuda.sides import GPU, cuda, reference
from tests.cuda.test_cuda_sampling import sampler

VOCAB = 1100
BIAS = ((7, 3.0), (VOCAB - 1, 9.0), (3, float("-inf")), (1050, -2.5))
WISHES: list[tuple[Sampling, int | None]] = [
    (Sampling(0.0), None),
    (Sampling(0.0, repetition_penalty=1.7, presence_penalty=0.3), None),
    (Sampling(0.9, 40 * GPU, 1.0, 0.01, 1.2, 0.4, 0.3, BIAS), 5),
    (Sampling(1.2), 0),
    (Sampling(0.0, bias=BIAS), None),
    (Sampling(0.0, frequency_penalty=1.5), 7),
]
"""What rows want, and how many of the likeliest tokens they are told."""


class Markov:
    """A model whose logits depend on the last token alone."""

    n_layers, width, n_vocab = 1, VOCAB, VOCAB

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.table = (2 * rng.standard_normal((VOCAB, VOCAB))).astype(np.float32)
        # The likeliest tokens follow each other, so that what was said comes again.
        self.table[:, :40] += 5
        self._on_device = cuda().machine.upload(self.table)

    def embed(self, batch: Any) -> Any:
        return cuda().new(self._on_device.index_select(0, batch.tokens.tensor))

    def run(self, x: Any, *_: Any) -> Any:
        return x

    def logits(self, x: Any) -> Any:
        return cuda().new(values_of(x).clone())


class Speaker:
    """One sequence: its sampler on the GPU, and the same of the reference."""

    def __init__(self, index: int, model: Markov) -> None:
        self.wish, self.top = WISHES[index]
        self.mine, self.theirs = (sampler(ops, self.wish) for ops in (cuda(), reference()))
        for each in (self.mine, self.theirs):
            each.observe_prompt(np.array([5, index], np.int32))
        self.said = [index]
        self._model, self._index = model, index

    def uniform(self, n: int) -> float:
        """The random number of the n-th token."""
        return ((n * 7 + self._index * 3) % 17 + 0.5) / 17

    def next(self) -> int:
        """What the reference says, which then has heard it."""
        x = self._model.table[self.said[-1:]]
        u = np.array([self.uniform(len(self.said))])
        ops: Any = reference()
        found = int(ops.sample(ops.array(x), np.zeros(1, np.int32), [self.theirs], u)[0])
        self.theirs.observe(np.array([found], np.int32))
        self.said.append(found)
        return found


class Table:
    """Speakers, and steps of all or some of them."""

    def __init__(self) -> None:
        self.model = Markov()
        self.steps = Steps(self.model, cuda())
        self.speakers = [Speaker(i, self.model) for i in range(len(WISHES))]
        self.unread: dict[int, tuple[int, Any]] = {}
        """Speakers of the step before, with their rows, and what it drew."""

    def step(self, who: list[int], late: bool) -> None:
        """One step; with `late`, the one before is read behind it."""
        if not late:
            self.read()
        sources = np.array([self.unread[i][0] for i in who], np.int32) if late else None
        mine = [self.speakers[i] for i in who]
        tokens = [0 if late else s.said[-1] for s in mine]
        n = len(who)
        draws = [Draw(s.mine, s.uniform(len(s.said) + late), s.top) for s in mine]
        before = dict(self.unread)
        found = self.steps.run(
            np.array(tokens, np.int32), np.arange(n, dtype=np.int32),
            np.arange(n, dtype=np.int32), {}, np.arange(n, dtype=np.int32), draws, sources,
        )  # fmt: skip
        assert found is not None
        self.unread = before
        self.read()
        self.unread = {i: (row, found[1]) for row, i in enumerate(who)}

    def read(self) -> None:
        """What the last step drew is what the reference draws, and is told as it tells it."""
        for i, (row, drawn) in self.unread.items():
            speaker = self.speakers[i]
            x = self.model.table[speaker.said[-1:]]
            token = int(drawn.read()[row])
            assert token == speaker.next(), (i, speaker.said)
            speaker.mine.observe(np.array([token], np.int32))
            if speaker.top is not None:
                chosen, ids, values = drawn.logprobs(row, speaker.top)
                want = plain.logprobs(x, np.array([token], np.int32), speaker.top)
                assert ids.tolist() == want[1][0].tolist()
                np.testing.assert_allclose([chosen], want[0], rtol=1e-6)
                np.testing.assert_allclose(values, want[2][0], rtol=1e-6)
        self.unread = {}


def test_late_and_waiting_steps_draw_what_the_reference_draws() -> None:
    table, everybody = Table(), list(range(len(WISHES)))
    table.step(everybody, late=False)
    for _ in range(6 if GPU else 1):
        table.step(everybody, late=True)
    table.step([1, 2, 4, 5], late=True)  # some drop out
    table.step([5, 2, 1], late=True)  # in another order
    table.step(everybody, late=False)  # some come back, and it waits
    for _ in range(20 if GPU else 1):
        table.step(everybody, late=True)
    told = {}
    for i, (row, drawn) in table.unread.items():
        drawn.read()
        if (top := WISHES[i][1]) is not None:
            told[i] = drawn.logprobs(row, top)
    logits = {i: table.model.table[table.speakers[i].said[-1:]] for i in told}
    table.read()
    for i, found in told.items():  # a waiting request is told the same, bit by bit
        ops: Any = cuda()
        ids = np.array(table.speakers[i].said[-1:], np.int32)
        alone = ops.logprobs(ops.array(logits[i]), ids, WISHES[i][1])
        assert found[0] == alone[0][0] and (found[2] == alone[2][0]).all()
    said = [s.said for s in table.speakers]
    assert said[0] != said[1] and VOCAB - 1 in said[4], "edits had something to do"


@pytest.mark.parametrize("ran", [False, True])
def test_a_step_that_breaks_off_counts_nothing_twice(ran: bool, monkeypatch: Any) -> None:
    table, everybody = Table(), [1, 4]
    table.step(everybody, late=False)
    table.step(everybody, late=True)
    real = table.steps._replay

    def broken(*given: Any) -> None:
        if ran:
            real(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(table.steps, "_replay", broken)
    before = dict(table.unread)
    with pytest.raises(KeyboardInterrupt):
        table.step(everybody, late=True)
    monkeypatch.undo()
    table.unread = before
    table.step(everybody, late=False)
    table.step(everybody, late=True)
    table.read()


def test_a_step_that_nobody_reads_is_counted_anew() -> None:
    """The token that it counted was not taken, as after an exception."""
    table, everybody = Table(), [1, 4]
    table.step(everybody, late=False)
    table.step(everybody, late=True)
    kept = [list(s.said) for s in table.speakers]
    table.unread = {}  # what it drew is lost, and drawn once more
    for _ in range(2):
        table.step(everybody, late=False)
    table.read()
    assert all(s.said[: len(k)] == k for s, k in zip(table.speakers, kept, strict=True))


def test_who_edits_nothing_sends_nothing() -> None:
    """Neither columns nor kernels: steps of others are as they were."""
    table = Table()
    table.step([0], late=False)
    (key,) = table.steps._known
    assert key.choice == type(key.choice)()
    assert key.choice.sizes(1) == [] and key.choice.report_size == 0
