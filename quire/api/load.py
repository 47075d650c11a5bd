"""Loading a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire import config
from quire.api.devices import budget_of
from quire.api.llm import LLM
from quire.devices.budget import Share
from quire.errors import RequestError
from quire.models.loader import ProgressFn
from quire.weights import pull


def load(
    model: str | Path = "smollm2", *, progress: ProgressFn | None = None,
    beside: LLM | None = None, **settings: Any,
) -> LLM:  # fmt: skip
    """Loads a model: an alias, a .gguf file, a folder, or `owner/repo:quant` of the Hub.

    The settings are the fields of `quire.config.LoadConfig`. With `beside` it takes its memory
    from the budget of a model that is loaded already, which it may draft for.
    """
    if beside is not None and not isinstance(beside, LLM):
        raise RequestError(f"beside takes a loaded model, not {beside!r:.80}")
    if progress is not None and not callable(progress):
        raise RequestError(f"progress takes a function of two numbers, not {progress!r:.80}")
    if beside and settings.get("memory_budget") is not None:
        raise RequestError("beside takes another model's budget; leave memory_budget out")
    known = config.LoadConfig.__dataclass_fields__
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise RequestError(f"load has no {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = config.LoadConfig(**settings)
    path = pull.resolve(str(model), config.cache_folder(), progress)
    budget = Share(beside.budget.whole, path.name) if beside else budget_of(chosen)
    return LLM(path, chosen, budget, progress, beside)
