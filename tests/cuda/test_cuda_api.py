"""Whole models on a GPU as users have them: sessions, batches, cached prefixes, drafts, files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import quire
from tests.model_folders import TRAINED, model_folder

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

PROMPT = [(7 * i + 3) % 900 + 5 for i in range(70)]


@pytest.fixture(scope="module", params=TRAINED)
def llm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[quire.LLM]:
    folder = model_folder(request.param, tmp_path_factory.mktemp("model"))
    with quire.load(folder, device="cuda", memory_budget="4GiB") as loaded:
        yield loaded
        loaded.memory.audit()


def greedy(llm: quire.LLM, prompt: list[int], n: int = 24, **more: object) -> list[int]:
    return llm.generate(prompt, max_tokens=n, ignore_eos=True, **more).token_ids  # type: ignore[arg-type]


def test_alone_batched_cached_and_drafted_say_the_same(llm: quire.LLM) -> None:
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(0, 50, 10)]
    alone = []
    for prompt in prompts:
        llm.forget()
        alone.append(greedy(llm, prompt))
    llm.forget()
    got = llm.generate(prompts, max_tokens=24, ignore_eos=True)
    assert [one.token_ids for one in got] == alone
    assert [greedy(llm, prompt) for prompt in prompts] == alone  # from cached prefixes
    assert greedy(llm, PROMPT, speculate="ngram") == alone[0]
    llm.memory.audit()


def test_sessions_fork_rewind_and_come_back_from_a_file(llm: quire.LLM, tmp_path: Path) -> None:
    with llm.session() as s:
        mark = s.append(PROMPT).checkpoint("here")
        logits = s.logits()
        twin = s.fork()
        first = s.generate(max_tokens=20, ignore_eos=True).token_ids
        assert twin.generate(max_tokens=20, ignore_eos=True).token_ids == first
        twin.close()
        s.rewind(mark)
        assert np.array_equal(s.logits(), logits)
        s.save(tmp_path / "one.quire")
        assert s.generate(max_tokens=20, ignore_eos=True).token_ids == first
    with llm.open(tmp_path / "one.quire") as back:
        assert back.exact and back.tokens == PROMPT
        assert back.generate(max_tokens=20, ignore_eos=True).token_ids == first
    llm.memory.audit()


def test_checkpoints_move_no_bytes_and_wait_for_nothing(llm: quire.LLM) -> None:
    with llm.session() as s:
        s.append(PROMPT)
        names = [s.checkpoint() for _ in range(200)]
        for mark in names:
            s.drop(mark)
        timings = llm.memory.checkpoints["timings"]
    print({what: round(t["mean_us"], 1) for what, t in timings.items() if t["count"]})
    assert timings["save"]["mean_us"] < 200


def test_sessions_move_between_cpu_and_gpu(llm: quire.LLM, tmp_path: Path) -> None:
    """Pages are converted; the tokens are there, and what follows is close, but has other bits."""
    file, back = tmp_path / "cpu.quire", tmp_path / "gpu.quire"
    with quire.load(llm.path, device="cpu", memory_budget="1GiB") as cpu:
        with cpu.session() as s:
            s.append(PROMPT).save(file)
        with pytest.raises(quire.errors.QuireError, match="arithmetic"):
            llm.open(file, strict=True)
        with llm.open(file) as s:
            assert not s.exact and s.tokens == PROMPT
            s.append([17]).save(back)
            there = s.logits()
        with cpu.open(back) as s:
            assert not s.exact and s.tokens == [*PROMPT, 17]
            s.append([23])
        wanted = cpu.logits([*PROMPT, 17])[-1]
    assert np.abs(there - wanted).max() < 0.05 * np.abs(wanted).max()
    llm.memory.audit()
