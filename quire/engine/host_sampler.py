"""Samplers that devices do not have: computed on the host over one row of logits.

    row ─▶ bias, penalties, DRY ─▶ mask ─▶ processors ─▶ filters ─▶ row ─▶ the device draws

The device has the last word, with the random number of the token's place, as everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError, QuireError, RequestError
from quire.memory.groups.layout import Int32
from quire.ops import Ops, Refused, Sampler
from quire.ops.reference.sampling import Sampling as Plain
from quire.ops.reference.sampling import edit_logits
from quire.sampling import Sampling

Row = NDArray[np.float32]
Kept = tuple[NDArray[np.intp], NDArray[np.float64]]
"""Tokens that are left, and their logits divided by the temperature."""
_LONGEST = 50  # tokens of a repetition that count


class HostSampler:
    """What one generation wants of its samples, and the tokens it has seen."""

    def __init__(self, sampling: Sampling, draws: Sampler, breakers: frozenset[int]) -> None:
        s = self.sampling = sampling
        self._draws = draws
        self._breakers = breakers
        bias = tuple(s.logit_bias.items())
        self._plain = Plain(
            s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty,
            s.frequency_penalty, bias,
        )  # fmt: skip
        self._tokens: list[int] = []
        self._n_prompt = 0
        self._surprise = [2 * s.mirostat_tau]  # bits that are let through, before each token
        self._last: Kept | None = None  # what the last token was drawn from

    def observe_prompt(self, ids: Int32) -> None:
        """Notes the tokens that come before the output."""
        self._tokens += ids.tolist()
        self._n_prompt = len(self._tokens)

    def observe(self, ids: Int32) -> None:
        """Takes tokens of the output in."""
        for token in ids.tolist():
            self._tokens.append(token)
            self._surprise.append(self._learned(token))

    def unobserve(self, ids: Int32) -> None:
        """Takes back the last tokens that were observed."""
        if len(ids):
            del self._tokens[-len(ids) :]
            del self._surprise[-len(ids) :]

    def choose(
        self, ops: Ops, row: Row, mask: NDArray[np.uint32] | None, u: float
    ) -> int | QuireError:
        """The next token, or why there is none."""
        if np.isnan(row).any():
            return ModelError("the model's logits are not numbers (NaN): its weights are damaged")
        try:
            edited = ops.array(self.edit(row, _allowed(mask, len(row)), u)[None])
            first = np.zeros(1, np.int32)
            return int(ops.sample(edited, first, [self._draws], np.array([u]), None)[0])
        except QuireError as error:
            return error
        except Refused as error:
            return RequestError(str(error))

    def edit(self, row: Row, allowed: NDArray[np.bool_] | None, u: float) -> Row:
        """A row in which all tokens that are out have minus infinity."""
        s = self.sampling
        x = edit_logits(row, self._plain, self._counts(), None)
        if s.dry_multiplier > 0:
            self._discourage_repetition(x)
        _exclude(x, allowed)
        for processor in s.logit_processors:
            x = _processed(processor, self._tokens, x)
            _exclude(x, allowed)
        if not (x > -np.inf).any():
            raise RequestError("mask, bias and processors exclude every token")
        if s.temperature == 0:
            return x
        kept = self._filtered(x, u)
        self._last = kept
        out = np.full_like(x, -np.inf)
        out[kept[0]] = x[kept[0]]
        return out

    def _counts(self) -> dict[int, int]:
        p = self._plain
        if p.repetition_penalty == 1 and p.presence_penalty == 0 and p.frequency_penalty == 0:
            return {}
        counts = dict.fromkeys(self._tokens[: self._n_prompt], 0)
        return counts | Counter(self._tokens[self._n_prompt :])

    def _discourage_repetition(self, x: Row) -> None:
        """DRY: what would go on with a repetition, by how long that is already."""
        s, breakers = self.sampling, self._breakers
        last_n = s.dry_penalty_last_n
        seen = self._tokens if last_n < 0 else self._tokens[max(len(self._tokens) - last_n, 0) :]
        n = len(seen)
        if n < 2 or seen[-1] in breakers:
            return
        longest: dict[int, int] = {}
        for at in np.flatnonzero(np.array(seen[:-1]) == seen[-1]).tolist():
            length = 1
            while length <= min(at, _LONGEST) and seen[at - length] == seen[n - 1 - length]:
                if seen[at - length] in breakers:
                    break
                length += 1
            longest[seen[at + 1]] = max(longest.get(seen[at + 1], 0), length)
        for token, length in longest.items():
            if length >= s.dry_allowed_length:
                x[token] -= s.dry_multiplier * s.dry_base ** (length - s.dry_allowed_length)

    def _filtered(self, x: Row, u: float) -> Kept:
        """The tokens that all filters leave."""
        s = self.sampling
        ids = np.flatnonzero(x > -np.inf)
        kept: Kept = ids, x[ids].astype(np.float64) / s.temperature
        if s.top_n_sigma > 0:
            kept = _where(kept, kept[1] >= kept[1].max() - s.top_n_sigma * kept[1].std())
        if 0 < s.top_k < len(kept[0]):
            kept = _first(kept, kept[1], s.top_k)
        if s.typical_p < 1:
            p = _shares(kept)
            typical = -np.abs(np.log(p) - (p * np.log(p)).sum())
            kept = _mass(kept, typical, s.typical_p)
        if s.top_p < 1:
            kept = _mass(kept, kept[1], s.top_p)
        if s.min_p > 0:
            p = _shares(kept)
            kept = _where(kept, p >= s.min_p * p.max())
        if s.xtc_probability > 0:
            kept = self._without_top_choices(kept, u)
        if s.mirostat:
            p = _shares(kept)
            kept = _where(kept, (-np.log2(p) <= self._surprise[-1]) | (p == p.max()))
        return kept

    def _without_top_choices(self, kept: Kept, u: float) -> Kept:
        """XTC, by the lower half of the random number's bits: the draw has its own."""
        chance = (int(u * 2.0**53) & (2**26 - 1)) / 2.0**26
        p = _shares(kept)
        viable = np.flatnonzero(p >= self.sampling.xtc_threshold)
        if chance >= self.sampling.xtc_probability or len(viable) < 2:
            return kept
        keep = np.ones(len(p), np.bool_)
        keep[viable] = False
        keep[viable[p[viable].argmin()]] = True
        return _where(kept, keep)

    def _learned(self, token: int) -> float:
        """What mirostat lets through next, now that this token has come."""
        s, now, last = self.sampling, self._surprise[-1], self._last
        if not s.mirostat or last is None:
            return now
        found = np.flatnonzero(last[0] == token)
        bits = -float(np.log2(_shares(last)[found[0]])) if len(found) else now
        return now - s.mirostat_eta * (bits - s.mirostat_tau)


def _shares(kept: Kept) -> NDArray[np.float64]:
    """Probabilities among what is left."""
    weights = np.exp(kept[1] - kept[1].max())
    shares: NDArray[np.float64] = np.maximum(weights, np.finfo(np.float64).tiny) / weights.sum()
    return shares


def _where(kept: Kept, keep: NDArray[np.bool_]) -> Kept:
    return kept[0][keep], kept[1][keep]


def _first(kept: Kept, worth: NDArray[np.float64], n: int) -> Kept:
    """The n that are worth most; of equal ones, those with lower ids."""
    edge = np.partition(worth, len(worth) - n)[len(worth) - n]
    keep = worth > edge
    keep[np.flatnonzero(worth == edge)[: n - keep.sum()]] = True
    return _where(kept, keep)


def _mass(kept: Kept, worth: NDArray[np.float64], share: float) -> Kept:
    """Those that are worth most, until they have this share of the probability."""
    order = np.argsort(-worth, kind="stable")
    reached = np.cumsum(_shares(kept)[order]) >= share
    n = int(reached.argmax()) + 1 if reached.any() else len(order)
    keep = np.zeros(len(worth), np.bool_)
    keep[order[:n]] = True
    return _where(kept, keep)


def _allowed(mask: NDArray[np.uint32] | None, n: int) -> NDArray[np.bool_] | None:
    if mask is None:
        return None
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return bits[:n].astype(np.bool_)


def _exclude(x: Row, allowed: NDArray[np.bool_] | None) -> None:
    if allowed is not None:
        x[~allowed] = -np.inf


def _processed(processor: Callable[[list[int], Row], Row | None], tokens: list[int], x: Row) -> Row:
    """What a user's function makes of a row; whatever it does wrong is its request's error.

    Where it makes some infinitely likely, they are all there is: nothing computes with infinity.
    """
    name = getattr(processor, "__name__", repr(processor))
    try:
        made = processor(list(tokens), x)
    except Exception as error:
        raise RequestError(f"the logit processor {name:.80} failed: {error!r:.200}") from error
    if made is None:
        made = x
    if not isinstance(made, np.ndarray) or made.shape != x.shape or np.isnan(made).any():
        raise RequestError(
            f"the logit processor {name:.80} must return {len(x)} numbers, or None where it "
            f"changed those it got, not {made!r:.80}"
        )
    with np.errstate(over="ignore"):
        made = made.astype(np.float32)
    if made.max() == np.inf:
        made = np.where(made == np.inf, 0, -np.inf).astype(np.float32)
    return made
