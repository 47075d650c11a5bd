"""Tokens taken out of the middle of a session, under a real model's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.errors import RequestError
from tests import tiny

PROMPT = [(7 * i + 3) % 250 for i in range(70)]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[quire.LLM]:
    # With a single layer K and V depend on their token and position alone, so tokens that move
    # must become what they would have been there.
    tiny.write(tmp_path / "one.gguf", tiny.Tiny(layers=1))
    with quire.load(tmp_path / "one.gguf", activations="f32", type_k="f32", type_v="f32") as loaded:
        yield loaded
        loaded.memory.audit()


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (3, 40), (16, 32), (17, 18), (60, 70)])
def test_what_is_left_moves_up(llm: quire.LLM, start: int, stop: int) -> None:
    rest = PROMPT[:start] + PROMPT[stop:]
    with llm.session() as s, llm.session() as plain:
        s.append(PROMPT).remove(start, stop)
        assert s.tokens == rest and s.position == len(rest)
        s.append([9, 9])
        want = plain.append([*rest, 9, 9]).logits()
        np.testing.assert_allclose(s.logits(), want, atol=2e-4 * want.std())


def test_pages_of_removed_tokens_are_free(llm: quire.LLM) -> None:
    with llm.session() as s:
        s.append(PROMPT)
        llm.forget()
        before = llm.memory.as_dict()["stats"]["attention"]["pages_used"]
        s.remove(5, 39)  # no page of 16 dies whole, yet two are saved
        assert llm.memory.as_dict()["stats"]["attention"]["pages_used"] == before - 2


def test_forks_and_marks_keep_what_one_removes(llm: quire.LLM) -> None:
    with llm.session() as s:
        mark = s.append(PROMPT).checkpoint()
        before = s.logits()
        twin = s.fork()
        s.remove(10, 50)
        np.testing.assert_array_equal(twin.append([]).logits(), before)
        s.rewind(mark)
        assert s.tokens == PROMPT
        np.testing.assert_array_equal(s.append([4]).logits(), twin.append([4]).logits())
        twin.close()


def test_moved_tokens_are_never_given_to_others(llm: quire.LLM) -> None:
    with llm.session() as s:
        s.append(PROMPT).remove(4, 20)
        moved = s.tokens
        llm.forget()
        assert llm.generate(moved, max_tokens=1, temperature=0).cached_tokens < 16
    llm.forget()
    assert llm.generate(moved, max_tokens=1, temperature=0).cached_tokens == 0


@pytest.mark.parametrize("span", [(5, 5), (8, 3), (-1, 4), (0, 70), (60, 71)])
def test_spans_that_are_none_are_refused(llm: quire.LLM, span: tuple[int, int]) -> None:
    with llm.session() as s:
        s.append(PROMPT)
        with pytest.raises(RequestError, match="remove"):
            s.remove(*span)
        assert s.tokens == PROMPT
