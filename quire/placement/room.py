"""What a plan leaves room for: longer contexts, more sequences, and what more memory would buy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.errors import DoesNotFit
from quire.placement.described import GIB, Described
from quire.placement.facts import ModelFacts
from quire.placement.fit import fit
from quire.placement.plan import Load, Plan
from quire.placement.wanted import Wanted
from quire.placement.words import counted

_MOST = 1 << 20


def longest_context(plan: Plan) -> int:
    """The longest context that fits with every part where it is, up to what the model was made for,
    or what was asked for.

    0 where not even one token fits.
    """
    fits = _tried(plan, lambda n: replace(plan.load, n_ctx=n))
    return _largest(fits, max(plan.model.n_ctx_train, plan.load.n_ctx))


def most_sequences(plan: Plan) -> int:
    """How many sequences of the plan's context fit at once."""
    allowed = [group.most_sequences(plan.load.n_ctx) for group in plan.model.groups]
    most = int(min([_MOST, *allowed]))
    return _largest(_tried(plan, lambda n: replace(plan.load, sequences=n)), most)


def next_gib(
    plan: Plan, model: ModelFacts, devices: Sequence[Described], wanted: Wanted,
    draft: ModelFacts | None = None,
) -> dict[str, str]:  # fmt: skip
    """What one more GiB on each device would buy, in words."""
    found = {}
    for at, device in enumerate(devices):
        more = [*devices]
        more[at] = replace(device, free=device.free + GIB)
        try:
            found[device.name] = _gain(plan, fit(model, more, wanted, draft))
        except DoesNotFit:
            found[device.name] = "nothing: it would still not fit"
    return found


def _gain(now: Plan, then: Plan) -> str:
    gains = []
    if then.n_gpu_layers > now.n_gpu_layers:
        gains.append(f"{counted(then.n_gpu_layers - now.n_gpu_layers, 'more layer')} on GPUs")
    if then.n_cpu_moe < now.n_cpu_moe:
        fewer = counted(now.n_cpu_moe - then.n_cpu_moe, "more layer")
        gains.append(f"the experts of {fewer} on GPUs")
    if then.load.n_ctx > now.load.n_ctx:
        gains.append(f"{counted(then.load.n_ctx - now.load.n_ctx, 'more token')} of context")
    if not gains and (more := most_sequences(then) - most_sequences(now)) > 0:
        gains.append(f"{counted(more, 'more sequence')} at once")
    return ", ".join(gains) or "nothing"


def _tried(plan: Plan, load: Callable[[int], Load]) -> Callable[[int], bool]:
    return lambda n: plan.with_load(load(n)).fits


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where larger ones never fit better."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
