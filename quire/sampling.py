"""How tokens are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError

LogitProcessor = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32] | None]
"""Gets all tokens so far and the logits of the next; changes them in place, or returns others."""


class SamplingFields(TypedDict, total=False):
    """Fields of `Sampling` as keyword arguments."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    seed: int | None
    max_tokens: int
    logprobs: int | None
    logit_bias: Mapping[int, float]
    logit_processors: Sequence[LogitProcessor]
    ignore_eos: bool


@dataclass(frozen=True, repr=False)
class Sampling:
    """How tokens are chosen; the default is greedy, which is reproducible.

    Applied in this order: bias, penalties, DRY, the constraint's mask, logit processors,
    temperature, top_n_sigma, top_k, typical_p, top_p, min_p, XTC, mirostat. With a temperature of 0
    the likeliest token is taken, and everything behind it in this order does nothing.

    - `top_k=0`, `top_p=1`, `min_p=0`, `typical_p=1` and `top_n_sigma=0` are off.
    - XTC leaves out, with a probability of `xtc_probability`, all tokens that have at least
      `xtc_threshold`, but for the least likely of them.
    - `mirostat=2` lets through what keeps the surprise of the text near `mirostat_tau` bits;
      other filters are better left off with it. `mirostat_eta` is how fast it learns.
    - DRY makes a token less likely that would go on with a repetition: by
      `dry_multiplier * dry_base ** (length - dry_allowed_length)`, for repetitions of at least
      `dry_allowed_length` tokens among the last `dry_penalty_last_n` (-1: all) that none of
      `dry_sequence_breakers` interrupts.
    - `logprobs=k` reports the chosen token's log-probability and the k likeliest, of the model's
      own distribution before any of this.

    The filters that devices do not know themselves (typical_p, top_n_sigma, XTC, mirostat, DRY,
    processors) are computed on the host, row by row: they cost some time where they are used.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    seed: int | None = None
    max_tokens: int = 256
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logit_processors: Sequence[LogitProcessor] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        fields = self.__dict__
        for name, value in fields.items():
            fields[name] = _plain(value)
        for name, (low, high) in _NUMBERS.items():
            value = fields[name]
            if type(value) is not float or not low <= value <= high:  # else all is well
                _check(name, value, low, high)
        for name, (least, most) in _WHOLE.items():
            _check_int(name, fields[name], least, most)
        for name in ("top_p", "typical_p"):
            if getattr(self, name) == 0.0:
                raise RequestError(
                    f"{name} is 0, which keeps no token; use temperature=0 for greedy", name
                )
        if self.mirostat not in (0, 2):
            raise RequestError(
                f"mirostat is 0 (off) or 2, its second version, not {self.mirostat}", "mirostat"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, 100)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is True or False, not {self.ignore_eos!r:.80}")
        self._check_lists()

    def _check_lists(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias has a number by token id, not {self.logit_bias!r:.80}")
        if any(isinstance(one, np.generic) for both in self.logit_bias.items() for one in both):
            self.__dict__["logit_bias"] = {_plain(t): _plain(b) for t, b in self.logit_bias.items()}
        for token, bias in self.logit_bias.items():
            if type(token) is not int or not 0 <= token < 2**31:  # else all is well
                _check_int("logit_bias", token, 0, 2**31 - 1, "a token of logit_bias")
            if type(bias) is not float or not -1000.0 <= bias <= 1000.0:
                _check("logit_bias", bias, -1000.0, 1000.0, f"logit_bias of token {token}")
        breakers, processors = self.dry_sequence_breakers, self.logit_processors
        texts = isinstance(breakers, (list, tuple)) and all(isinstance(b, str) for b in breakers)
        if not texts or "" in breakers:
            raise RequestError(f"dry_sequence_breakers are texts in a list, not {breakers!r:.80}")
        if not isinstance(processors, (list, tuple)) or not all(map(callable, processors)):
            raise RequestError(f"logit_processors are functions in a list, not {processors!r:.80}")

    def __repr__(self) -> str:
        usual = Sampling()
        said = [f.name for f in dataclasses.fields(self)
                if getattr(self, f.name) != getattr(usual, f.name)]  # fmt: skip
        return f"Sampling({', '.join(f'{name}={getattr(self, name)!r}' for name in said)})"

    @property
    def on_host(self) -> bool:
        """Whether some of it is nothing that devices do themselves."""
        random = self.temperature > 0 and (
            self.typical_p < 1
            or self.top_n_sigma > 0
            or self.xtc_probability > 0
            or self.mirostat > 0
        )
        return random or self.dry_multiplier > 0 or bool(self.logit_processors)

    def replace(self, **fields: Any) -> Sampling:
        """This sampling with other values; unknown names are refused."""
        known = self.__dataclass_fields__
        unknown = sorted(fields.keys() - known)
        if unknown:
            raise RequestError(
                f"unknown sampling field {', '.join(unknown)}; there are {', '.join(sorted(known))}"
            )
        return Sampling(**{**self.__dict__, **fields})


_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "typical_p": (0.0, 1.0),
    "top_n_sigma": (0.0, 1000.0), "xtc_probability": (0.0, 1.0), "xtc_threshold": (0.0, 1.0),
    "mirostat_tau": (0.0, 100.0), "mirostat_eta": (0.0, 1.0), "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-100.0, 100.0), "frequency_penalty": (-100.0, 100.0),
    "dry_multiplier": (0.0, 100.0), "dry_base": (1.0, 100.0),
}  # fmt: skip
_WHOLE: Mapping[str, tuple[int, int]] = {
    "top_k": (0, 2**31 - 1), "max_tokens": (1, 2**31 - 1), "mirostat": (0, 2),
    "dry_allowed_length": (1, 2**31 - 1), "dry_penalty_last_n": (-1, 2**31 - 1),
}  # fmt: skip


def _plain(value: Any) -> Any:
    """A value as it is, NumPy's as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def _check(name: str, value: float, low: float, high: float, what: str = "") -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise RequestError(
            f"{what or name} must be a number from {low:g} to {high:g}, not {value!r:.80}", name
        )


def _check_int(name: str, value: int, low: int, high: int, what: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(
            f"{what or name} must be a whole number from {low} to {high}, not {value!r:.80}", name
        )
