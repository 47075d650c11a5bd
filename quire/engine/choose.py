"""Chooses the tokens of a step: the last word on what it adds to each sequence.

Every token is chosen by its own sampler, which has seen the tokens before it, with the random
number of its place (Gumbel-max): so it does not matter with whom or when it is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from quire.engine.generation import Generation
from quire.engine.plan import Accepted, Entry
from quire.engine.sequence import Sequence
from quire.errors import ModelError, QuireError, RequestError
from quire.ops import Array, Drawn, Float32, Int32, Ops, Refused
from quire.types import TokenLogprob

Wanted = tuple[Accepted, Generation, int]
"""Whose next token is chosen, and from which row of the logits."""


def choose(
    entries: Seq[Entry], logits: Array, ops: Ops, n_vocab: int, accepted: list[Accepted],
    drawn: Drawn | None = None,
) -> None:  # fmt: skip
    """What follows each sequence of a step without drafts, one row for each that ends.

    `accepted` grows as tokens are chosen; an error is for one sequence, and stands there. What
    the device has drawn already is taken from there.
    """
    wanted: list[Wanted] = []
    ids: list[int] = []
    row = 0
    for entry in entries:
        sequence = entry.sequence
        one = Accepted(sequence, entry.count)
        accepted.append(one)
        if not entry.ends:
            continue
        if sequence.generation is None:
            last = ops.take_rows(logits, np.array([row], np.int32))
            one.logits = ops.numpy(last)[0].copy()
        elif drawn is not None and sequence.generation.plain:
            ids = ids or drawn.read().tolist()
            take_drawn(one, sequence.generation, ids[row], row, drawn)
        else:
            wanted.append((one, sequence.generation, row))
        row += 1
    if wanted:
        choose_rows(wanted, logits, ops, n_vocab)


def choose_first(sequence: Sequence, ops: Ops, n_vocab: int) -> Accepted:
    """The first token of a generation whose logits are known already."""
    assert sequence.generation is not None and sequence.logits is not None
    one = Accepted(sequence, 0)
    choose_rows([(one, sequence.generation, 0)], ops.array(sequence.logits), ops, n_vocab)
    return one


def choose_rows(wanted: list[Wanted], logits: Array, ops: Ops, n_vocab: int) -> None:
    """One token for each."""
    masks = None
    rows: list[tuple[int, Generation, int]] = []
    constrained = False
    for _, generation, row in wanted:
        constrained = constrained or generation.matcher is not None
        rows.append((row, generation, 0))
    if constrained:
        wanted, masks = _masked(wanted, n_vocab)
        rows = [(row, generation, 0) for _, generation, row in wanted]
        if not rows:
            return
    for (one, generation, row), token in zip(wanted, sample(ops, logits, rows, masks), strict=True):
        take(one, generation, token, row, logits, ops)


def take(
    one: Accepted, generation: Generation, token: int | QuireError, row: int, logits: Array,
    ops: Ops,
) -> None:  # fmt: skip
    """A token was chosen; whatever goes wrong with it is this request's error alone."""
    if isinstance(token, QuireError):
        one.error = token
        return
    one.tokens.append(token)
    try:
        if generation.sampling.logprobs is not None:
            one.logprobs.append(logprob(ops, logits, row, token, generation.sampling.logprobs))
        one.finish_reason = generation.take(token)
    except QuireError as error:
        one.error = error
    except Refused as error:
        one.error = RequestError(str(error))


def take_drawn(
    one: Accepted, generation: Generation, token: int, row: int, drawn: Drawn
) -> None:  # fmt: skip
    """A device has chosen a row's token, or says why it has not."""
    if token >= 0:
        one.tokens.append(token)
        top = generation.sampling.logprobs
        if top is not None:
            one.logprobs.append(_told(token, *drawn.logprobs(row, top)))
        one.finish_reason = generation.take(token)
    else:
        one.error = _not_numbers() if token == -2 else RequestError("every token is excluded")


def _masked(wanted: list[Wanted], n_vocab: int) -> tuple[list[Wanted], NDArray[np.uint32] | None]:
    """Which tokens each may choose; one whose constraint fails is left out."""
    masks = np.full((len(wanted), (n_vocab + 31) // 32), 2**32 - 1, np.uint32)
    live = []
    for i, (one, generation, _) in enumerate(wanted):
        try:
            if generation.matcher:
                generation.matcher.mask(masks[i])
            live.append(i)
        except QuireError as error:
            one.error = error
    return [wanted[i] for i in live], masks[live]


def sample(
    ops: Ops, logits: Array, rows: Seq[tuple[int, Generation, int]],
    masks: NDArray[np.uint32] | None = None,
) -> list[int | QuireError]:  # fmt: skip
    """A token for each (row of the logits, generation, how far ahead of its next token).

    Where a row has none to give, the error says why; it is for that generation alone.
    """
    where, samplers, uniforms = [], [], []
    on_host = False
    for row, generation, ahead in rows:
        on_host = on_host or generation.on_host
        where.append(row)
        samplers.append(generation.sampler)
        uniforms.append(generation.uniform(ahead) if generation.random else 0.0)
    if on_host:
        return _some_on_host(ops, logits, rows, masks)
    try:
        picked = ops.sample(logits, np.array(where, np.int32), samplers, np.array(uniforms), masks)
        tokens: list[int | QuireError] = picked.tolist()
        return tokens
    except Refused as error:
        if len(rows) == 1:
            return [_no_token(ops, logits, rows[0][0], error)]
        alone = [None if masks is None else masks[i : i + 1] for i in range(len(rows))]
        return [sample(ops, logits, [row], alone[i])[0] for i, row in enumerate(rows)]


def _some_on_host(
    ops: Ops, logits: Array, rows: Seq[tuple[int, Generation, int]],
    masks: NDArray[np.uint32] | None,
) -> list[int | QuireError]:  # fmt: skip
    """The same where some rows are edited on the host first."""
    tokens: list[int | QuireError] = [0] * len(rows)
    plain = [i for i, (_, generation, _) in enumerate(rows) if not generation.on_host]
    if plain:
        some = sample(
            ops, logits, [rows[i] for i in plain], None if masks is None else masks[plain]
        )
        for i, token in zip(plain, some, strict=True):
            tokens[i] = token
    for i, (row, generation, ahead) in enumerate(rows):
        if generation.on_host:
            values = ops.numpy(ops.take_rows(logits, np.array([row], np.int32)))[0]
            u = generation.uniform(ahead) if generation.random else 0.0
            mask = None if masks is None else masks[i]
            tokens[i] = generation.sampler.choose(ops, values, mask, u)
    return tokens


def _no_token(ops: Ops, logits: Array, row: int, error: Refused) -> QuireError:
    if np.isnan(ops.numpy(logits)[row]).any():
        return _not_numbers()
    return RequestError(str(error))


def _not_numbers() -> ModelError:
    return ModelError(
        "the model's logits are not numbers (NaN): its weights are damaged, or too large for "
        "what it computes with them"
    )


def logprob(ops: Ops, logits: Array, row: int, token: int, top: int) -> TokenLogprob:
    """A token's log-probability in a row, with the `top` likeliest."""
    one = ops.take_rows(logits, np.array([row], np.int32))
    chosen, ids, values = ops.logprobs(one, np.array([token], np.int32), top)
    return _told(token, float(chosen[0]), ids[0], values[0])


def _told(token: int, chosen: float, ids: Int32, values: Float32) -> TokenLogprob:
    return TokenLogprob(token, chosen, tuple(zip(ids.tolist(), values.tolist(), strict=True)))
