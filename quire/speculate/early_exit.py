"""The model drafts for itself: its first layers guess, its others judge.

Both happen in one step. A drafted token's K and V, or log entries, of the first layers are written
once, where they belong; the other layers go on from there. So nothing is kept or computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.engine.drafter import Draft, Drafter, DraftRequest, Offer, Source, Speculator, Target
from quire.engine.odds import Odds, smooth
from quire.engine.plan import Accepted
from quire.engine.runner import Runner
from quire.engine.sequence import Sequence
from quire.errors import RequestError
from quire.speculate.common import check_whole

_START = 0.6  # how sure a draft is taken to be at first


@dataclass(frozen=True)
class EarlyExit(Speculator):
    """Drafts with the first `layers` layers (two thirds of them when None)."""

    layers: int | None = None
    most: int = 8
    """Tokens of the longest draft."""

    def __post_init__(self) -> None:
        if self.layers is not None:
            check_whole("EarlyExit's layers", self.layers)
        check_whole("EarlyExit's most", self.most)
        if self.most < 1:
            raise RequestError(f"EarlyExit's most is {self.most}; a draft has at least 1 token")

    def start(self, target: Target, sequence: Sequence) -> Drafter:
        """A drafter; all that stop after the same layer work together."""
        n_layers = target.runner.model.n_layers
        if n_layers < 2:
            raise RequestError(
                "early-exit drafts with some of a model's layers; this one has a single layer"
            )
        layers = max(n_layers * 2 // 3, 1) if self.layers is None else self.layers
        if not 1 <= layers < n_layers:
            raise RequestError(
                f"EarlyExit stops after {layers} layers; the model has {n_layers}, so 1 to "
                f"{n_layers - 1} are possible"
            )
        source = target.sources.setdefault((EarlyExit, layers), Exit(target.runner, layers))
        return EarlyExitDrafter(source, self.most, target.odds((EarlyExit, layers), _START))


class Exit(Source):
    """Asks the step itself to draft."""

    def __init__(self, runner: Runner, layers: int) -> None:
        self._runner = runner
        self.exit_after = layers

    def draft(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """Places that the step fills in."""
        return [Draft((0,) * one.n, exits=True) for one in requests]

    def settle(self, accepted: Seq[Accepted]) -> None:
        """Notes what drafting took."""
        if drafted := self._runner.drafted:
            self.seconds_inside = drafted.seconds
            self.seconds_per_token = smooth(self.seconds_per_token, drafted.seconds_per_token)


class EarlyExitDrafter(Drafter):
    """Can always draft."""

    def __init__(self, source: Source, most: int, odds: Odds) -> None:
        self._source = source
        self._most = most
        self._odds = odds

    def offer(self, sequence: Sequence, most: int) -> Offer | None:
        """As far as it may."""
        return Offer(self._source, min(most, self._most), self._odds)
