"""The best plan that fits: only what was left open is changed, and every change is told.

everything on the GPUs, with the whole context
a smaller context, down to a floor
experts to the host, those of the first layers first, in a layer its last matrix; dense parts stay
fewer layers on the GPUs: the output goes there first, then layers from the last backwards
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from quire.errors import RequestError
from quire.models.loader import DOWN, EMBEDDING, EXPERTS, MIXER, OUTPUT, Part
from quire.placement.described import Described
from quire.placement.facts import ModelFacts
from quire.placement.plan import Load, Plan, lay_out, over
from quire.placement.wanted import DoesNotFit, Wanted, by_share, check, in_order, number_of


def fit(
    model: ModelFacts, devices: Sequence[Described], wanted: Wanted,
    draft: ModelFacts | None = None,
) -> Plan:  # fmt: skip
    """The best plan for these devices, the host being the last; DoesNotFit if there is none."""
    return _Search(model, devices, wanted, draft).best()


def whole_context(model: ModelFacts, wanted: Wanted) -> int:
    """The context that is wanted, or the one that the model was made for."""
    return wanted.n_ctx or model.n_ctx_train


def _turn(part: Part) -> float:
    """When a matrix of experts goes to the host: 1 for the first; other parts never do."""
    return 2 * part.layer + {DOWN: 1, EXPERTS: 2}.get(part.kind, math.inf)


def _moved(plan: Plan) -> int:
    """How many matrices of experts went to the host from layers that are elsewhere."""
    host, places, turns = len(plan.devices) - 1, plan.places, [0.0]
    for part, at in places.items():
        if at == host and part.layer >= 0 and places[Part(MIXER, part.layer)] != host:
            turns.append(_turn(part))
    return int(max(turn for turn in turns if turn < math.inf))


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
        self.notes: list[str] = []
        self.page = max([1, *(g.page_tokens for g in model.groups)])
        self.full = whole_context(model, wanted)
        open_ctx = wanted.n_ctx is None and wanted.fit
        self.least = min(wanted.floor, self.full) if open_ctx else self.full
        check(wanted, model, len(self.gpus))

    # -- the order of things ----------------------------------------------------------------------

    def best(self) -> Plan:
        """The first in order that fits."""
        model, wanted = self.model, self.wanted
        most = model.n_layers + 1 if self.gpus else 0
        asked = wanted.n_gpu_layers
        if asked and not self.gpus:
            self.notes.append(
                f"n_gpu_layers={asked}: there is no GPU, so all layers are on the CPU"
            )
        layers = [most] if asked is None else [min(asked, most)]
        moved = [2 * (wanted.n_cpu_moe or 0)]  # matrices of experts: two in a layer
        if not wanted.fit:
            plan = self.even(self.plan(layers[0], moved[0], self.full))
            return plan if plan.fits else self.refuse(plan)
        if found := self.widest(layers[0], moved[0]):
            return self.told(found)
        if wanted.n_cpu_moe is None and model.has_experts and self.gpus:
            moved = list(range(1, 2 * model.n_layers + 1))
            if found := self.first(self.widest(layers[0], k) for k in moved):
                return self.told(found)
        if asked is None and self.gpus:
            rest = range(most - 1, -1, -1)
            if found := self.first(self.widest(n, moved[-1]) for n in rest):
                return self.told(found)
        return self.refuse(self.plan(layers[0], moved[-1], self.least))

    @staticmethod
    def first(plans: Iterable[Plan | None]) -> Plan | None:
        """The first that there is."""
        return next((plan for plan in plans if plan), None)

    def widest(self, n: int, moved: int) -> Plan | None:
        """The plan with the largest context, from the least to the whole; None if none fits."""
        if not (least := self.plan(n, moved, self.least)).fits:
            return None
        if (whole := self.plan(n, moved, self.full)).fits:
            return whole
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

    def even(self, plan: Plan) -> Plan:
        """With GPUs as evenly filled as they can be, by the share of what each has."""
        n, moved = plan.n_gpu_layers, max(_moved(plan), 2 * (self.wanted.n_cpu_moe or 0))
        if len(self.gpus) < 2 or self.wanted.tensor_split or not plan.fits or not n:
            return plan
        if not self.wanted.kv_offload:
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
        if n > self.model.n_layers and self.wanted.kv_offload and not self.wanted.overrides:
            whole = laid_out(cuts, self.gpus[0])
            if whole.fits and (self.model.tied or whole.load.n_ctx == self.full):
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
            for part in model.layer_parts(i):
                away = _turn(part) <= moved
                stays = part.kind == MIXER and not self.wanted.kv_offload
                places[part] = host if away or stays else at
        return self.overridden(places)

    def overridden(self, places: dict[Part, int]) -> dict[Part, int]:
        """With what the user put elsewhere by name."""
        for pattern, name in self.wanted.overrides:
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

    def told(self, plan: Plan) -> Plan:
        """With a line for everything that is not as it would be with more memory."""
        plan = self.even(plan)
        notes = list(self.notes)
        if plan.load.n_ctx < self.full:
            notes.append(
                f"n_ctx is {plan.load.n_ctx:,} and not the model's {self.full:,}: more does not fit"
            )
        if plan.n_cpu_moe and self.wanted.n_cpu_moe is None:
            part = ", of the last of these their last matrix" if _moved(plan) % 2 else ""
            notes.append(
                f"the experts of the first {plan.n_cpu_moe} of {self.model.n_layers} layers are on "
                f"the host{part}"
            )
        most = self.model.n_layers + 1
        if self.gpus and self.wanted.n_gpu_layers is None and plan.n_gpu_layers < most:
            notes.append(
                f"n_gpu_layers is {plan.n_gpu_layers} of {most}: the other layers are on the host"
            )
        return replace(plan, notes=tuple(notes))

    def refuse(self, plan: Plan) -> Plan:
        """Raises with what is missing where, and what would fit."""
        need = "; ".join(
            f"{name} needs {need:,} bytes and has {have:,}"
            for name, need, have in over(plan.devices)
        )
        nearest = self.nearest()
        said = "close other programs, or take a smaller model"
        if nearest:
            load = nearest.load
            said = (
                f"what would fit: n_ctx={load.n_ctx}, {load.sequences} sequences, "
                f"n_gpu_layers={nearest.n_gpu_layers}, n_cpu_moe={nearest.n_cpu_moe}"
            )
        raise DoesNotFit(f"{self.model.name} does not fit: {need}; {said}", nearest)

    def nearest(self) -> Plan | None:
        """What fits when one thing after the other that the user asked for is let go."""
        wanted = self.wanted
        tries = [
            replace(wanted, n_ctx=None, fit=True),
            replace(wanted, n_gpu_layers=None, n_cpu_moe=None, tensor_split=None, fit=True),
            replace(
                wanted, n_ctx=None, n_gpu_layers=None, n_cpu_moe=None, tensor_split=None, fit=True
            ),
        ]
        tries += [replace(one, floor=self.page) for one in tries]
        tries += [replace(one, sequences=1, checkpoints=0) for one in tries]
        for one in tries:
            if one == wanted:
                continue
            search = _Search(self.model, self.devices, one, self.draft)
            search.nearest = lambda: None  # type: ignore[method-assign]
            try:
                return search.best()
            except DoesNotFit:
                pass
        return None
