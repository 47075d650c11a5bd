"""What sequences of real models hold, against what their layouts say they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.memory.groups.layout import AttentionLayout, KVType
from quire.memory.groups.state_layout import StateLayout
from tests.model_folders import TRAINED, model_folder

PAGE = 16


@pytest.fixture(scope="module", params=TRAINED)
def llm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[quire.LLM]:
    folder: Path = model_folder(request.param, tmp_path_factory.mktemp("models"))
    with quire.load(folder) as loaded:
        yield loaded


def planned(llm: quire.LLM, tokens: int) -> int:
    """Bytes that one sequence of so many tokens may hold at most, from the groups alone."""
    total = 0
    for group in llm.model.groups:
        if group.kind == "recurrent":
            layout = StateLayout(group)
            total += layout.state_page_bytes + layout.log_page_bytes
            continue
        kv = AttentionLayout(group, KVType.F16, KVType.F16, PAGE)
        seen = tokens if group.window is None else min(tokens, group.window + PAGE)
        total += kv.pages_for(seen) * kv.page_bytes
    return total


def held(llm: quire.LLM) -> int:
    return sum(g["bytes_held"] for g in llm.memory.as_dict()["stats"].values())


def test_a_sequence_holds_what_is_planned_at_every_length(llm: quire.LLM) -> None:
    """Over ten times the window, prompt and decoding."""
    llm.forget()
    with llm.session() as s:
        s.append([5 + i % 900 for i in range(100)])
        while s.position < 700:
            s.generate(max_tokens=20, ignore_eos=True)
            llm.forget()
            assert held(llm) <= planned(llm, s.position)
        assert held(llm) >= planned(llm, s.position) * 0.7


def test_only_full_attention_grows(llm: quire.LLM) -> None:
    def after(n: int) -> dict[str, int]:
        with llm.session() as s:
            s.append([5 + i % 900 for i in range(n)])
            llm.forget()
            stats = llm.memory.as_dict()["stats"]
            return {name: g["bytes_held"] for name, g in stats.items()}

    short, long = after(200), after(1800)
    for group in llm.model.groups:
        if group.kind == "attention":
            assert long[group.name] >= 8 * short[group.name]
        else:
            names = [name for name in short if name.startswith(group.name)]
            assert names and all(long[name] <= short[name] * 1.2 for name in names)
