"""The best plan that fits: only what was left open is changed, and every change is told.

everything on the GPUs, with the whole context
a smaller context, down to a floor
experts to the host, those of the first layers first, in a layer its last matrix; dense parts stay
fewer layers on the GPUs: the output goes there first, then layers from the last backwards
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from quire.errors import RequestError
from quire.models.loader import DOWN, EMBEDDING, EXPERTS, MIXER, OUTPUT, Part
from quire.placement.advice import refusal
from quire.placement.described import Described
from quire.placement.facts import ModelFacts
from quire.placement.plan import Load, Plan, lay_out
from quire.placement.wanted import (
    Wanted,
    by_share,
    check,
    in_order,
    moot,
    number_of,
)
from quire.placement.words import counted


def fit(
    model: ModelFacts, devices: Sequence[Described], wanted: Wanted,
    draft: ModelFacts | None = None,
) -> Plan:  # fmt: skip
    """The best plan for these devices, the host being the last; DoesNotFit if there is none."""

    @cache  # a refusal tries some wishes more than once
    def best(wanted: Wanted) -> Plan:
        return _Search(model, devices, wanted, draft).best()

    plan = best(wanted)
    if not plan.fits:
        raise refusal(plan, wanted, best)
    return plan


def whole_context(model: ModelFacts, wanted: Wanted) -> int:
    """The context that is wanted, or the one that the model was made for."""
    return wanted.n_ctx or model.n_ctx_train


_TURNS = {DOWN: 1, EXPERTS: 2}


def _turn(part: Part) -> float:
    """When a matrix of experts goes to the host: 1 for the first; other parts never do."""
    return 2 * part.layer + _TURNS.get(part.kind, math.inf)


class _Search:
    """Looks for plans in the order of the module's first lines."""

    def __init__(
        self, model: ModelFacts, devices: Sequence[Described], wanted: Wanted,
        draft: ModelFacts | None,
    ) -> None:  # fmt: skip
        self.model, self.wanted, self.draft = model, wanted, draft
        self.devices = list(devices)
        self.host = len(self.devices) - 1
        self.gpus = in_order(self.devices[:-1], wanted.main_gpu)
        self.notes = moot(wanted, devices)
        self.page = max([1, *(g.page_tokens for g in model.groups)])
        self.full = whole_context(model, wanted)
        open_ctx = wanted.n_ctx is None and wanted.fit
        self.least = min(wanted.floor, self.full) if open_ctx else self.full
        check(wanted, model, len(self.gpus))

    # -- the order of things ----------------------------------------------------------------------

    def best(self) -> Plan:
        """The first in order that fits; if there is none, the one that has the most on GPUs."""
        most = self.model.n_layers + 1 if self.gpus else 0
        asked, moved = self.wanted.n_gpu_layers, 0
        first = most if asked is None else min(asked, most)
        for n, moved in self.turns(first):
            if plan := self.widest(n, moved):
                return self.told(self.even(plan, n, moved), moved)
        return self.plan(first, moved, self.least)

    def turns(self, n: int) -> Iterator[tuple[int, int]]:
        """How many layers are on GPUs, and matrices of experts on the host: two in a layer."""
        wanted = self.wanted
        moved = 2 * (wanted.n_cpu_moe or 0)
        yield n, moved
        if not (wanted.fit and self.gpus):
            return
        if wanted.n_cpu_moe is None and self.model.has_experts:
            for moved in range(1, 2 * self.model.n_layers + 1):
                yield n, moved
        if wanted.n_gpu_layers is None:
            for fewer in range(n - 1, -1, -1):
                yield fewer, moved

    def widest(self, n: int, moved: int) -> Plan | None:
        """The plan with the largest context, from the least to the whole; None if none fits."""
        if (whole := self.plan(n, moved, self.full)).fits:
            return whole
        if self.least == self.full or not (least := self.plan(n, moved, self.least)).fits:
            return None
        size = self.page
        low, high = self.least // size, -(-self.full // size)  # low fits, high does not
        found = least
        while high - low > 1:
            middle = (low + high) // 2
            plan = self.plan(n, moved, middle * size)
            if plan.fits:
                low, found = middle, plan
            else:
                high = middle
        return found

    # -- one plan ---------------------------------------------------------------------------------

    def plan(self, n: int, moved: int, n_ctx: int, share: float = 1.0) -> Plan:
        """With n layers on GPUs, and the first `moved` matrices of experts on the host.

        Several GPUs are filled up to a share of what each has, the last one first.
        """
        wanted = self.wanted
        load = Load(n_ctx, wanted.sequences, wanted.checkpoints, wanted.streams)

        def laid_out(cuts: Sequence[int], home: int) -> Plan:
            places = self.places(n, moved, cuts, home)
            return lay_out(self.model, self.devices, places, load, self.notes, self.draft)

        if len(self.gpus) < 2 or n == 0:
            return self.with_embedding(n, laid_out)
        first = self.model.n_layers - (n - 1)
        if self.wanted.tensor_split:
            shares = [self.wanted.tensor_split[gpu] for gpu in self.gpus]
            return laid_out(by_share(first, self.model.n_layers, shares), self.host)
        return laid_out(self.starts(first, share, laid_out), self.host)

    def even(self, plan: Plan, n: int, moved: int) -> Plan:
        """With GPUs as evenly filled as they can be, by the share of what each has."""
        if len(self.gpus) < 2 or self.wanted.tensor_split or not n or not self.wanted.kv_offload:
            return plan
        low, high = 0.0, 1.0
        for _ in range(16):  # to a few kilobytes of a gigabyte
            middle = (low + high) / 2
            found = self.plan(n, moved, plan.load.n_ctx, middle)
            if found.fits and all(
                one.total <= middle * one.device.limit for one in found.devices[:-1]
            ):
                high, plan = middle, found
            else:
                low = middle
        return plan

    def with_embedding(self, n: int, laid_out: Callable[[Sequence[int], int], Plan]) -> Plan:
        """The embedding is on the host, unless the one GPU has all else and room for it.

        A whole model on one device needs no token ids from the host.
        """
        cuts = [self.model.n_layers]
        if n > self.model.n_layers and not self.wanted.overrides:
            whole = laid_out(cuts, self.gpus[0])
            alone = set(whole.places.values()) == {self.gpus[0]}
            if alone and whole.fits and (self.model.tied or whole.load.n_ctx == self.full):
                return whole
        return laid_out(cuts, self.host)

    def starts(
        self, first: int, share: float, laid_out: Callable[[Sequence[int], int], Plan]
    ) -> list[int]:
        """Where each GPU begins; the first has all that the others cannot take."""
        end = self.model.n_layers
        starts = [end] * len(self.gpus)
        for place in range(len(self.gpus) - 1, 0, -1):
            at = self.gpus[place]
            low = max(first, 0)
            high = starts[place]  # so many layers less fit at least: none
            while low < high:
                middle = (low + high) // 2
                trial = [*[middle] * (place + 1), *starts[place + 1 :]]
                one = laid_out(trial, self.host).devices[at]
                if one.total <= share * one.device.limit:
                    high = middle
                else:
                    low = middle + 1
            starts = [*[high] * (place + 1), *starts[place + 1 :]]
        return [first, *starts[1:]]

    def places(self, n: int, moved: int, starts: Sequence[int], home: int) -> dict[Part, int]:
        """Where everything is; GPU i has the layers from starts[i] to the next one's start."""
        model, host = self.model, self.host
        places = {Part(EMBEDDING): home, Part(OUTPUT): self.gpus[-1] if n else host}
        first = model.n_layers - max(n - 1, 0)
        if len(self.gpus) < 2:
            starts = [first]
        for i in range(model.n_layers):
            at = host
            if n and i >= first:
                at = self.gpus[max(sum(s <= i for s in starts) - 1, 0)]
            for part in model.layer_parts[i]:
                away = _turn(part) <= moved
                stays = part.kind == MIXER and not self.wanted.kv_offload
                places[part] = host if away or stays else at
        return self.overridden(places)

    def overridden(self, places: dict[Part, int]) -> dict[Part, int]:
        """With what the user put elsewhere by name."""
        for pattern, name in self.wanted.overrides if self.gpus else ():
            at = number_of(self.devices, name)
            hit = False
            for part, names in (self.model.tensors or {}).items():
                main = [one for one in names if "ffn_gate_inp" not in one]  # routers follow
                found = [one for one in main if re.search(pattern, one)]
                hit = hit or bool(found)
                if found and len(found) < len(main):
                    rest = next(one for one in main if one not in found)
                    raise RequestError(
                        f"override_tensor {pattern}={name} names {found[0]} without {rest}; these "
                        "are computed together, so name both"
                    )
                if found:
                    places[part] = at
            if not hit:
                raise RequestError(f"override_tensor {pattern!r} matches no matrix of this model")
        return places

    # -- what is said ---------------------------------------------------------------------------

    def told(self, plan: Plan, moved: int) -> Plan:
        """With a line for everything that is not as it would be with more memory."""
        notes = list(self.notes)
        if plan.load.n_ctx < self.full:
            notes.append(
                f"n_ctx is {plan.load.n_ctx:,} and not the model's {self.full:,}: more does not fit"
            )
        if plan.n_cpu_moe and moved and self.wanted.n_cpu_moe is None:
            part = ", of the last of these their last matrix" if moved % 2 else ""
            notes.append(
                f"the experts of the first {plan.n_cpu_moe} of {self.model.n_layers} layers are on "
                f"the host{part}"
            )
        most = self.model.n_layers + 1
        if self.gpus and self.wanted.n_gpu_layers is None and plan.n_gpu_layers < most:
            notes.append(
                f"n_gpu_layers is {plan.n_gpu_layers} of {most}: the other layers are on the host"
            )
        notes += self.capped(plan)
        return replace(plan, notes=tuple(notes))

    def capped(self, plan: Plan) -> list[str]:
        """What kv_cache_tokens does not have pages for, though bytes there are."""
        load = plan.load
        has = int(min([load.sequences, *(g.most_sequences(load.n_ctx) for g in plan.model.groups)]))
        if has == load.sequences:
            return []
        told = f"kv_cache_tokens has pages for {counted(has, 'sequence')} of {load.n_ctx:,} tokens"
        return [f"{told} at once, not for {load.sequences}"]
