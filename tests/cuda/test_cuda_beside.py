"""Several models on one GPU, each used by a thread of its own."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.errors import ContextError
from tests import tiny
from tests.model_folders import MODELS

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
NAMES = ("tiny-dense", "tiny-hybrid35", "tiny-window")


def said(name: str, turn: int) -> list[list[int]]:
    """What a model says that is loaded anew; steps are run, recorded and replayed."""
    found = []
    with quire.load(MODELS / name, device="cuda", memory_budget="1GiB", n_ctx=512) as llm:
        for n in range(4):
            ids = [[(7 * i + j + 3 * n) % 900 + 5 for i in range(20 + 9 * n)] for j in range(n + 1)]
            made = llm.generate(
                ids, max_tokens=24, ignore_eos=True, speculate=["ngram", None][n % 2]
            )
            found += [one.token_ids for one in made]
        if turn % 2:
            llm.resize("512MiB")
    return found


@pytest.mark.gpu
def test_who_records_disturbs_nobody() -> None:
    """Steps are recorded while other threads load, compile, run, record, wait and let go."""
    found: list[tuple[str, list[list[int]]]] = []
    errors: list[BaseException] = []

    def use(name: str) -> None:
        try:
            found.extend((name, said(name, turn)) for turn in range(4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(name,), daemon=True) for name in NAMES * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    if errors:
        raise errors[0]
    alone = {name: said(name, 0) for name in NAMES}
    assert len(found) == 4 * len(threads) and all(tokens == alone[name] for name, tokens in found)


@pytest.mark.gpu
def test_a_draft_model_changes_nothing() -> None:
    """Greedy, by chance, and with penalties, which have to forget what was only drafted."""
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 0.9, "seed": 11}, {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.2, "seed": 5, "top_k": 40, "presence_penalty": 0.5},
    ]  # fmt: skip
    ids = [(7 * i + 3) % 900 + 5 for i in range(90)]
    loads: dict[str, Any] = {"device": "cuda", "n_ctx": 512}
    with (
        quire.load(MODELS / "tiny-hybrid", memory_budget="2GiB", **loads) as llm,
        quire.load(MODELS / "tiny-dense", beside=llm, **loads) as draft,
    ):
        for way in ways:
            wanted = llm.generate(ids, max_tokens=48, ignore_eos=True, **way).token_ids
            for _ in range(2):  # the second finds the prompt, and drafts from the first token on
                found = llm.generate(ids, max_tokens=48, ignore_eos=True, speculate=draft, **way)
                assert found.token_ids == wanted, way


@pytest.mark.gpu
def test_whoever_shares_a_budget_follows_it(tmp_path: Path) -> None:
    """Contexts that nobody fixed, and slabs, whichever of the models was told."""
    whole = 16_384  # tokens of 32 KiB: sixteen slabs
    sizes = tiny.Tiny(layers=8, heads=8, kv_heads=8, head_dim=128, context=whole)
    tiny.write(tmp_path / "m.gguf", sizes)
    ids = [(7 * i + 3) % 250 + 5 for i in range(12_000)]
    with (
        quire.load(tmp_path / "m.gguf", device="cuda", memory_budget="640MiB") as llm,
        quire.load(tmp_path / "m.gguf", beside=llm, n_ctx=64) as fixed,
        quire.load(tmp_path / "m.gguf", beside=llm) as other,
    ):
        wanted = fixed.generate(ids[:40], max_tokens=9, ignore_eos=True).token_ids
        for first, second in ((llm, other), (other, llm)):
            first.resize("2GiB")
            assert llm.n_ctx == other.n_ctx == whole and fixed.n_ctx == 64
            for one in (first, second):
                assert len(one.generate(ids, max_tokens=9, ignore_eos=True).token_ids) == 9
                one.forget()
            first.resize("400MiB")
            assert 0 < other.n_ctx < len(ids) and 0 < llm.n_ctx < len(ids) and fixed.n_ctx == 64
            assert llm.budget.whole.used <= 400 << 20
            with pytest.raises(ContextError):
                second.generate(ids, max_tokens=9)
            for one in (llm, fixed, other):
                found = one.generate(ids[:40], max_tokens=9, ignore_eos=True)
                assert found.token_ids == wanted
        other.close()
        llm.resize("1GiB")
        assert llm.n_ctx == whole
        llm.memory.audit()


def test_nobody_waits_for_the_gpu_while_somebody_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are others' finalizers run within."""
    from quire.ops.cuda.machine import recording, wait

    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: told.append("waited"))
    graph: Any = None
    waiting = threading.Thread(target=wait, args=(0,))
    with recording(graph, None):
        assert not gc.isenabled()
        waiting.start()
        waiting.join(0.1)
        told.append("recorded")
    waiting.join(10)
    assert told == ["recorded", "waited"] and gc.isenabled()
    with pytest.raises(KeyError), recording(graph, None):
        raise KeyError
    assert gc.isenabled()
    wait(0)
