"""What fits alone finishes beside whoever shares its pages, however little room there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.engine.sequence import PARKED
from quire.errors import BudgetError, OutOfMemory
from tests import session_kinds

GO: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
STORY = [(7 * i) % 200 + 3 for i in range(64)]
HERE = STORY[:60]  # ends within the last page that there is


class Tight:
    """A model with pages for one sequence of 64 tokens, and what a roomy one says."""

    def __init__(self, llm: quire.LLM, roomy: quire.LLM) -> None:
        self.llm, self._roomy = llm, roomy

    def goes_on(self, session: quire.Session) -> None:
        """A session goes on as it would alone."""
        tokens = session.tokens
        assert session.generate(**GO).token_ids == self.alone(tokens)
        session.rewind(-GO["max_tokens"])

    def alone(self, tokens: list[int]) -> list[int]:
        self._roomy.forget()
        return self._roomy.generate(tokens, **GO).token_ids


@pytest.fixture(params=["dense", "window", "moe", "hybrid"])
def tight(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tight]:
    path = session_kinds.write(request.param, tmp_path)
    with (
        quire.load(path, n_ctx=64, threads=1) as roomy,
        quire.load(path, n_ctx=64, threads=1, kv_cache_tokens=64) as llm,
    ):
        yield Tight(llm, roomy)
        llm.forget()
        llm.memory.audit()
        assert not any(group["pages_used"] for group in llm.memory.stats.values())
        assert not any(tier["used"] for tier in llm.memory.as_dict()["tiers"].values())


def test_forks(tight: Tight) -> None:
    with tight.llm.session() as first:
        first.append(HERE)
        with first.fork() as second, second.fork() as third:
            for one in (third, first, second, third):
                tight.goes_on(one)


def test_a_fork_of_a_session_that_is_gone_but_for_its_mark(tight: Tight) -> None:
    first = tight.llm.session().append(HERE)
    first.checkpoint("here")
    with first.fork() as fork:
        first.close()
        tight.goes_on(fork)
        tight.goes_on(fork.rewind("here"))


def test_a_session_that_went_back_behind_its_mark(tight: Tight) -> None:
    with tight.llm.session() as session:
        session.append(HERE).checkpoint("here")
        tight.goes_on(session.rewind(-9))
        tight.goes_on(session.rewind("here"))


def test_a_prompt_that_begins_like_a_session(tight: Tight) -> None:
    with tight.llm.session() as session:
        session.append(HERE)
        prompt = [*HERE[:56], 9, 8, 7]
        assert tight.llm.generate(prompt, **GO).token_ids == tight.alone(prompt)
        tight.goes_on(session)


def test_a_prompt_that_is_pinned(tight: Tight) -> None:
    """Its place goes to a tier, and must not come back as one that is here while it goes on."""
    with tight.llm.session() as session:
        session.append(HERE).keep(pin=True)
        tight.goes_on(session)
        assert tight.llm.generate(HERE, **GO).token_ids == tight.alone(HERE)
        tight.goes_on(session)


@pytest.mark.parametrize("tight", ["dense", "window", "moe"], indirect=True)
def test_a_session_that_cannot_be_computed_again_comes_back(tight: Tight) -> None:
    """Tokens were taken out of it, and all the room there is goes to somebody else for a while."""
    with tight.llm.session() as session:
        session.append(HERE).remove(4, 8)
        wanted = session.generate(**GO).token_ids
        tight.llm.generate(HERE[::-1], **GO)
        assert session.sequence.status is PARKED
        session.checkpoint("here")
        tight.llm.generate(HERE[::-1], **GO)
        assert session.sequence.status is PARKED
        session.drop("here")
        assert session.rewind(-4).generate(**GO).token_ids == wanted


@pytest.mark.parametrize("tight", ["dense", "window", "moe"], indirect=True)
def test_a_request_beside_one_that_cannot_be_computed_again(tight: Tight) -> None:
    """It gives way with its mark, which holds all that it has, and comes back."""
    prompt, more = HERE[::-1][:40], [8] * 4
    with tight.llm.session() as session:
        session.append(HERE[:48]).remove(4, 8)
        session.checkpoint("here")
        wanted = session.append(more).logits()
        session.rewind("here")
        with tight.llm.stream(prompt, **GO) as stream:
            assert np.array_equal(session.append(more).logits(), wanted)
            assert "".join(stream) and stream.completion.token_ids == tight.alone(prompt)


def test_what_does_not_fit_alone_fails_as_it_did(tight: Tight) -> None:
    """With a mark that no tier takes, a fork of its place has no page to write in."""
    with quire.load(tight.llm.path, n_ctx=64, threads=1, kv_cache_tokens=64, swap_space=0) as llm:
        first = llm.session().append(HERE)
        first.checkpoint("here")
        with first.fork() as fork:
            first.close()
            with pytest.raises(BudgetError, match="does not fit"):
                fork.generate(**GO)
            fork.drop("here")
            assert fork.tokens[: len(HERE)] == HERE
            if fork.position > len(HERE):  # what it had made stays
                fork.rewind(len(HERE) - fork.position)
            tight.goes_on(fork)


def test_a_session_is_saved_that_does_not_fit_with_all_its_marks(
    tight: Tight, tmp_path: Path
) -> None:
    """Those in a tier are saved as tokens; with the rest it fits, and so it can be opened."""
    file = tmp_path / "saved"
    with tight.llm.session() as session:
        session.append(STORY[:50]).checkpoint("first")
        session.rewind(-48).append(STORY[9:49]).checkpoint("second")
        here = session.tokens
        session.save(file)
    with tight.llm.open(file) as again:
        assert again.tokens == here and list(again.marks) == ["first", "second"]
        tight.goes_on(again)
        tight.goes_on(again.rewind("first"))
        assert again.tokens == STORY[:50]
        tight.goes_on(again.rewind("second"))


@pytest.mark.parametrize("tight", ["dense", "window", "moe"], indirect=True)
def test_a_mark_that_cannot_be_computed_again_is_not_saved_without_its_pages(
    tight: Tight, tmp_path: Path
) -> None:
    with tight.llm.session() as session:
        session.append(STORY[:50]).remove(4, 8)
        session.checkpoint("edited")
        session.rewind(-44).append(STORY[9:49])
        with pytest.raises(OutOfMemory):
            session.save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        tight.goes_on(session)


def test_what_could_never_fit_is_not_computed_again(
    tight: Tight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context may be longer than memory: who shares pages has no more room without them."""
    with quire.load(tight.llm.path, n_ctx=128, threads=1, kv_cache_tokens=64) as llm:
        runner, computed = llm.engine.runner, []
        launch = runner.launch

        def counted(plan: Any, *rest: Any) -> Any:
            computed.append(plan.n_tokens)
            return launch(plan, *rest)

        monkeypatch.setattr(runner, "launch", counted)
        with llm.session() as session:
            session.append(HERE).checkpoint("here")
            with pytest.raises(BudgetError, match="a sequence of 65 tokens does not fit"):
                session.generate(max_tokens=20, ignore_eos=True)
            assert sum(computed) == 64
            tight.goes_on(session.rewind("here"))


@pytest.mark.parametrize("tight", ["dense", "window", "moe"], indirect=True)
def test_forks_that_cannot_be_computed_again(tight: Tight) -> None:
    """They share every page that there is, and each needs one more to write in: they take turns."""
    with tight.llm.session() as first:
        first.append(STORY).remove(4, 8)
        wanted = first.generate(**GO).token_ids
        first.rewind(-4)
        with first.fork() as second, second.fork() as third:
            for one in (third, first, second, third):
                assert one.generate(**GO).token_ids == wanted
                one.rewind(-4)
            with second.stream(**GO) as stream:
                assert third.generate(**GO).token_ids == wanted
                assert "".join(stream) and stream.completion.token_ids == wanted
            first.checkpoint("here")
            assert first.generate(**GO).token_ids == wanted


@pytest.mark.parametrize("tight", ["dense", "window", "moe"], indirect=True)
def test_tokens_are_taken_out_of_a_fork(tight: Tight) -> None:
    """All pages behind them are turned, which takes copies of those that others hold."""
    with tight.llm.session() as alone:
        alone.append(HERE).remove(4, 8)
        wanted = alone.generate(**GO).token_ids
    with tight.llm.session() as first:
        first.append(HERE).checkpoint("here")
        with first.fork() as second:
            assert second.remove(4, 8).generate(**GO).token_ids == wanted
            assert first.remove(4, 8).generate(**GO).token_ids == wanted
            tight.goes_on(first.rewind("here"))
            assert second.rewind(-4).generate(**GO).token_ids == wanted


@pytest.mark.parametrize("tight", ["dense", "window", "moe"], indirect=True)
def test_tokens_stay_in_a_fork_that_finds_no_way_back(tight: Tight) -> None:
    """Who shares its pages may be held, as by a file: it is whole, and computed when it is used."""
    history, loop = tight.llm.engine.history, tight.llm.loop
    with tight.llm.session() as first:
        first.append(HERE).logits()
        with first.fork() as second:
            held = loop.call(lambda: history.hold(first.sequence, []))
            with pytest.raises(BudgetError, match="no room to move up"):
                second.remove(4, 8)
            loop.call(lambda: history.let_go(held))
            assert second.tokens == HERE
            tight.goes_on(second)


@pytest.mark.host  # the least of a GPU's budget has room for all of it
@pytest.mark.parametrize("tight", ["dense"], indirect=True)
def test_who_cannot_come_back_is_told_how_far_it_can_go_back(tight: Tight) -> None:
    with quire.load(tight.llm.path, n_ctx=128, threads=1) as llm, llm.session() as session:
        session.append(STORY + STORY[:40]).remove(4, 8)
        assert llm.engine.room.park(session.sequence)
        session.rewind(-80)
        with pytest.raises(BudgetError) as refused:
            llm.resize(1000)
        (least,) = re.findall(r"at least ([\d,]+)", str(refused.value))
        llm.resize(int(least.replace(",", "")))
        for use in (lambda: session.generate(**GO), lambda: session.checkpoint("here")):
            with pytest.raises(BudgetError, match="rewind it to its first 4 tokens"):
                use()
        tight.goes_on(session.rewind(4 - session.position))
