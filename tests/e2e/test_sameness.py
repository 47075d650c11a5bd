"""However a place was come to, greedy output goes on the same: the default model, in every way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire

N = 24


@pytest.fixture(scope="module")
def prompts(golden: dict[str, Any]) -> list[list[int]]:
    return [p["token_ids"] for p in golden["prompts"] if 40 < len(p["token_ids"]) < 400]


@pytest.fixture(scope="module")
def cold(llm: quire.LLM, prompts: list[list[int]]) -> list[list[int]]:
    out = []
    for prompt in prompts:
        llm.forget()
        out.append(llm.generate(prompt, max_tokens=N, ignore_eos=True).token_ids)
    return out


def generate(session: quire.Session) -> list[int]:
    return session.generate(max_tokens=N, ignore_eos=True).token_ids


def test_after_fork_rewind_and_fragmentation(
    llm: quire.LLM, prompts: list[list[int]], cold: list[list[int]]
) -> None:
    llm.forget()
    # Pages of sessions that come and go in between lie all over the pool.
    fillers = [llm.session().append([i + 5] * 20) for i in range(12)]
    for i, (prompt, expected) in enumerate(zip(prompts, cold, strict=True)):
        with llm.session() as s:
            for at in range(0, len(prompt), 30):
                s.append(prompt[at : at + 30])
                if at % 60 == 0:
                    fillers.pop(i % len(fillers)).close()
                    fillers.append(llm.session().append([at + 7] * 33))
            mark = s.checkpoint()
            twin = s.fork()
            s.append([9] * 40)
            assert generate(twin) == expected
            assert generate(s.rewind(mark)) == expected
            assert generate(s.rewind(-N)) == expected
            twin.close()
        llm.memory.audit()
    for filler in fillers:
        filler.close()


@pytest.mark.parametrize("manner", ["parked", "recomputed"])
def test_after_preemption(
    model_path: Path, prompts: list[list[int]], cold: list[list[int]], manner: str
) -> None:
    room = max(len(p) for p in prompts) + 160
    with quire.load(model_path, kv_cache_tokens=room) as llm:
        speed = {"parked": 1e6, "recomputed": 0.0}[manner]
        llm.engine.room._seconds_per_token = lambda: speed
        got = llm.generate(prompts, max_tokens=N, ignore_eos=True)
        assert [c.token_ids for c in got] == cold
        assert llm.memory.as_dict()["preemption"][manner] > 0
        llm.memory.audit()


def test_sixteen_at_once_never_hear_each_other(llm: quire.LLM) -> None:
    """Each has a fact of its own; what follows is what follows it alone."""
    facts = [f"The secret word of box number {i} is {word}. The secret word of box number {i} is"
             for i, word in zip(range(16), words(), strict=False)]  # fmt: skip
    alone = []
    for fact in facts:
        llm.forget()
        alone.append(llm.generate(fact, max_tokens=8).token_ids)
    llm.forget()
    together = llm.generate(facts, max_tokens=8)
    assert [c.token_ids for c in together] == alone
    for fact, completion, word in zip(facts, together, words(), strict=False):
        others = [w for w in itertools.islice(words(), 16) if w not in fact]
        assert not any(other in completion.text for other in others), (word, completion.text)


def words() -> Iterator[str]:
    yield from (
        "amber", "basalt", "cobalt", "dahlia", "ermine", "falcon", "garnet", "heron", "indigo",
        "jasper", "krypton", "lotus", "marble", "nectar", "onyx", "pepper",
    )  # fmt: skip


def test_streams_and_batches_are_the_same_words(
    llm: quire.LLM, prompts: list[list[int]], cold: list[list[int]]
) -> None:
    ways: list[Callable[[list[int]], str]] = [
        lambda p: "".join(llm.stream(p, max_tokens=N, ignore_eos=True)),
        lambda p: "".join(llm.session().append(p).stream(max_tokens=N, ignore_eos=True)),
        lambda p: llm.generate([p, p], max_tokens=N, ignore_eos=True)[1].text,
    ]
    text = llm.generate(prompts[0], max_tokens=N, ignore_eos=True).text
    assert [way(prompts[0]) for way in ways] == [text] * len(ways)
