"""Helpers for tests of drafts: drafting as far as possible, and counting what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import quire
from quire.devices.device import PageWork
from quire.engine import drafting


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are as long as they can be, up to 5, whatever that costs."""
    monkeypatch.setattr(
        drafting, "lengths", lambda choices, *rest: [min(c.most, 5) for c in choices]
    )


@contextmanager
def counting(llm: quire.LLM) -> Iterator[Counter[str]]:
    """Pages copied, tokens embedded, and rows times layers computed, while the block runs."""
    counts: Counter[str] = Counter()
    model: Any = llm.model
    embed, run, copy = model.embed, model.run, PageWork.copy

    def counted_embed(batch: Any) -> Any:
        counts["tokens"] += len(batch.tokens)
        return embed(batch)

    def counted_run(x: Any, batch: Any, start: int, stop: int, **wanted: Any) -> Any:
        counts["rows"] += len(batch.tokens) * (stop - start)
        return run(x, batch, start, stop, **wanted)

    def counted_copy(work: PageWork, pool: str, source: int, target: int) -> None:
        counts["copies"] += 1
        copy(work, pool, source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "embed", counted_embed)
        patch.setattr(model, "run", counted_run)
        patch.setattr(PageWork, "copy", counted_copy)
        yield counts


def pages_held(llm: quire.LLM) -> int:
    """Pages in use, once nothing is cached any more; the books must balance."""
    llm.memory.audit()
    llm.forget()
    return sum(group["pages_used"] for group in llm.memory.as_dict()["stats"].values())
