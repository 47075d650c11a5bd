"""Small things that people meet in their first hour: clear errors, short reprs, names of marks."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.errors import RequestError
from quire.types import Sampling

GO = {"max_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize(("call", "told"), [
    (lambda llm: llm.chat("Hi"), r"\[\{'role': 'user', 'content': 'Hi'\}\]"),
    (lambda llm: llm.generate(b"abc"), "not bytes"),
    (lambda llm: llm.generate([b"abc"]), "not bytes"),
    (lambda llm: llm.embed(b"abc"), "not bytes"),
    (lambda llm: llm.stream(b"abc"), "not bytes"),
    (lambda llm: llm.session().append(b"abc"), "not bytes"),
    (lambda llm: llm.generate("a", constraint="abc"), "quire.Json, quire.Regex or quire.Grammar"),
    (lambda llm: llm.session().rewind("start"), "it has \\[\\]"),
    (lambda llm: llm.session().drop("start"), "it has \\[\\]"),
])  # fmt: skip
def test_a_mistake_is_told_with_its_remedy(llm: quire.LLM, call: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        call(llm)


def test_everything_shows_itself_on_one_line(llm: quire.LLM) -> None:
    done = llm.generate("a" * 100, max_tokens=100, ignore_eos=True)
    session = llm.session().append("b" * 90)
    mark = session.checkpoint("here")
    with llm.stream("abc", **GO) as stream:
        next(stream)
        shown = [done, session, mark, stream, llm, llm.memory, Sampling(top_k=3),
                 llm.chat_prompt([{"role": "user", "content": "x" * 300}])]  # fmt: skip
        for one in shown:
            assert len(repr(one)) < 160 and "\n" not in repr(one), repr(one)
    assert repr(Sampling(top_k=3, seed=1)) == "Sampling(top_k=3, seed=1)"
    assert "100 tokens, length" in repr(done) and "here" in repr(session)
    assert repr(mark) == "<Mark 'here' at 90 tokens>"
    session.close()
    assert repr(session) == "<Session closed>"


class Tags(HTMLParser):
    """Whether every tag is closed, and what is written between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_notebooks_show_html(llm: quire.LLM) -> None:
    nasty = "<script>alert('x')</script> & co"
    with llm.session() as session:
        session.append(nasty)
        for one in (session, llm.memory, llm.generate(nasty, **GO)):
            tags = Tags(one._repr_html_())
            assert not tags.open and tags.text
        assert nasty in Tags(session._repr_html_()).text
        assert "<script>" not in session._repr_html_()
    assert "weights" in llm.memory._repr_html_() and "weights" in str(llm.memory)


def test_a_plan_has_a_short_name(llm: quire.LLM) -> None:
    assert len(repr(llm.plan)) < 120 and "print it" in repr(llm.plan)
    assert str(llm.plan).count("\n") > 10


def test_a_stream_closes_itself(llm: quire.LLM) -> None:
    with llm.stream("abc", max_tokens=200, ignore_eos=True) as stream:
        next(stream)
    assert stream.completion.finish_reason == "cancelled"
    assert not llm.engine.scheduler.active


def test_sessions_have_a_text_and_marks_have_names(llm: quire.LLM) -> None:
    with llm.session() as session:
        session.append("Once upon a time")
        session.checkpoint("start")
        answer = session.generate(**GO)
        assert session.text == "Once upon a time" + llm.decode(answer.token_ids)
        session.rewind("start")
        assert session.text == "Once upon a time"
        session.drop("start")
        assert session.marks == {}


def test_saved_marks_keep_their_names(llm: quire.LLM, tmp_path: Path) -> None:
    with llm.session() as session:
        session.append("one")
        session.checkpoint("first")
        session.append(" two")
        session.checkpoint("second")
        session.save(tmp_path / "s.quire")
    with llm.open(tmp_path / "s.quire") as again:
        assert list(again.marks) == ["first", "second"]
        assert again.rewind("first").text == "one" and again.rewind("second").text == "one two"


def test_forks_keep_marks_until_the_last_lets_go(llm: quire.LLM, tmp_path: Path) -> None:
    session = llm.session().append("one two three")
    mark = session.checkpoint("early")
    session.append(" four")
    fork = session.fork()
    deeper = fork.fork()
    assert list(fork.marks) == ["early"] == list(deeper.marks)
    fork.checkpoint("own")
    assert list(session.marks) == ["early"]
    session.close()
    assert fork.rewind("early").text == "one two three"
    fork.drop("early")
    with pytest.raises(RequestError, match="early"):
        fork.rewind("early")
    deeper.save(tmp_path / "d.quire")
    assert deeper.rewind(mark).text == "one two three"
    deeper.close()
    with pytest.raises(RequestError, match="gone"):
        fork.rewind(mark)
    fork.close()
    with llm.open(tmp_path / "d.quire") as again:
        assert again.rewind("early").text == "one two three"
