"""Whatever is passed in, what comes out is a result or an error of Quire's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.config import LoadConfig
from quire.errors import QuireError
from quire.speculate import NgramCache
from tests import tiny
from tests.budgets import pages

ODD: list[Any] = [
    None, 5, -1, 2**70, 1.5, float("nan"), "x", "\ud800", "a\0b", b"x", [], [None], ["a"], [1.5],
    [2**70], [-1], {}, {"a": 1}, object(), True, [[1], [2]], range(3), np.array([1, 2]),
    np.array([1.5]), (1, 2), np.int64(2), np.float32(0.5), np.bool_(True), np.array(3), 10**400,
    "9" * 400 + "GiB", "x" * 100_000,
]  # fmt: skip
HELLO = [{"role": "user", "content": "Hello"}]
ONE: dict[str, Any] = {"max_tokens": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=256))
    return made


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[quire.LLM]:
    with quire.load(path, memory_budget="64MiB") as loaded:
        yield loaded
        loaded.memory.audit()


def session(llm: quire.LLM) -> quire.Session:
    return llm.session().append([1, 2, 3, 4, 5])


def noted(llm: quire.LLM, folder: Path, notes: Any) -> None:
    one = session(llm)
    one.notes = notes
    one.save(folder / "noted.quire")


USES: dict[str, Callable[[quire.LLM, Any], object]] = {
    "prompt": lambda llm, odd: llm.generate(odd, **ONE),
    "stop": lambda llm, odd: llm.generate("a", stop=odd, **ONE),
    "sampling": lambda llm, odd: llm.generate("a", odd, **ONE),
    "constraint": lambda llm, odd: llm.generate("a", constraint=odd, **ONE),
    "json": lambda llm, odd: llm.generate("a", constraint=quire.Json(odd), **ONE),
    "regex": lambda llm, odd: llm.generate("a", constraint=quire.Regex(odd), **ONE),
    "grammar": lambda llm, odd: llm.generate("a", constraint=quire.Grammar(odd), **ONE),
    "speculate": lambda llm, odd: llm.generate("a", speculate=odd, **ONE),
    "cache_salt": lambda llm, odd: llm.generate("a", cache_salt=odd, **ONE),
    "logit_bias": lambda llm, odd: llm.generate("a", logit_bias=odd, **ONE),
    "temperature": lambda llm, odd: llm.generate("a", temperature=odd, **ONE),
    "seed": lambda llm, odd: llm.generate("a", seed=odd, **ONE),
    "logprobs": lambda llm, odd: llm.generate("a", logprobs=odd, **ONE),
    "ignore_eos": lambda llm, odd: llm.generate("a", ignore_eos=odd, **ONE),
    "stream": lambda llm, odd: list(llm.stream(odd, **ONE)),
    "chat": lambda llm, odd: llm.chat(odd, **ONE),
    "content": lambda llm, odd: llm.chat([{"role": "user", "content": odd}], **ONE),
    "tools": lambda llm, odd: llm.chat(HELLO, tools=odd, **ONE),
    "tool_choice": lambda llm, odd: llm.chat(HELLO, tool_choice=odd, **ONE),
    "template_options": lambda llm, odd: llm.chat(HELLO, template_options=odd, **ONE),
    "embed": lambda llm, odd: llm.embed(odd),
    "pooling": lambda llm, odd: llm.embed("a", odd),
    "n": lambda llm, odd: llm.generate("a", n=odd, **ONE),
    "resize": lambda llm, odd: llm.resize(odd),
    "encode": lambda llm, odd: llm.encode(odd),
    "decode": lambda llm, odd: llm.decode(odd),
    "logits": lambda llm, odd: llm.logits(odd),
    "session": lambda llm, odd: llm.session(odd),
    "open": lambda llm, odd: llm.open(odd),
    "forget": lambda llm, odd: llm.forget(odd),
    "append": lambda llm, odd: session(llm).append(odd),
    "rewind": lambda llm, odd: session(llm).rewind(odd),
    "remove from": lambda llm, odd: session(llm).remove(odd, 3),
    "remove to": lambda llm, odd: session(llm).remove(1, odd),
    "pin": lambda llm, odd: session(llm).keep(pin=odd),
    "ttl_s": lambda llm, odd: session(llm).keep(pin=True, ttl_s=odd),
    "checkpoint": lambda llm, odd: session(llm).checkpoint(odd),
    "drop": lambda llm, odd: session(llm).drop(odd),
    "tokenizer": lambda llm, odd: quire.Tokenizer(odd),
    "n-grams": lambda llm, odd: NgramCache.build(odd, 64),
    "vocabulary of n-grams": lambda llm, odd: NgramCache.build([[1, 2]], odd),
    "length of n-grams": lambda llm, odd: NgramCache.build([[1, 2]], 64, odd),
    "file of n-grams": lambda llm, odd: NgramCache.load(odd),
}


NAMED = {"open", "tokenizer", "file of n-grams"}
"""A file is told by its whole name."""


@pytest.mark.parametrize("use", USES)
def test_odd_values(llm: quire.LLM, use: str) -> None:
    for odd in ODD:
        try:
            USES[use](llm, odd)
        except QuireError as error:
            assert str(error) and (use in NAMED or len(str(error)) < 1000)
    assert len(llm.generate("a", max_tokens=3, ignore_eos=True).token_ids) == 3


def test_odd_notes_and_names(llm: quire.LLM, tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for odd in [*ODD, np.array([]), deep, {"deep": deep}]:
        try:
            noted(llm, tmp_path, odd)
        except QuireError as error:
            assert str(error)
    for name in ("\ud800", "a\0b", "x" * 5000, tmp_path, None, 5, b"x"):
        with pytest.raises(QuireError):
            session(llm).save(name if not isinstance(name, str) else str(tmp_path / name))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [field.name for field in fields(LoadConfig)])
def test_odd_settings(path: Path, name: str) -> None:
    for odd in ODD:
        try:
            quire.load(path, **{name: odd}).close()
        except QuireError as error:
            assert str(error) and len(str(error)) < 1000


@pytest.mark.parametrize(
    "name", ["devices", "draft", "checkpoints", "n_ctx", "n_parallel", "page_tokens"]
)
def test_odd_plans(path: Path, name: str) -> None:
    """None takes long, however large the numbers are."""
    for odd in [*ODD, 2**20, 2**40, [2**40], "cpu:1GiB", ["cpu:1GiB"], ["cpu:1GiB", "cpu:1GiB"]]:
        try:
            assert quire.plan(path, **{name: odd}).fits
        except QuireError as error:
            assert str(error)


def test_options_of_templates(llm: quire.LLM) -> None:
    for name in ("messages", "tools"):
        with pytest.raises(QuireError, match=f"template_options has {name}"):
            llm.chat(HELLO, template_options={name: []}, **ONE)


def test_no_stop_strings(llm: quire.LLM) -> None:
    wanted = llm.generate("a", max_tokens=9, ignore_eos=True).text
    for none in (None, [], ()):
        assert llm.generate("a", stop=none, max_tokens=9, ignore_eos=True).text == wanted


def test_iterators_are_used_up_once(llm: quire.LLM) -> None:
    """Prompts and token ids may come one by one."""
    wanted = [one.text for one in llm.generate(["a", "b"], **ONE)]
    assert [one.text for one in llm.generate(iter(["a", "b"]), **ONE)] == wanted  # type: ignore[call-overload]
    assert llm.generate(iter([1, 2]), **ONE).text == llm.generate([1, 2], **ONE).text  # type: ignore[call-overload]
    assert np.array_equal(llm.embed(map(str, "ab")), llm.embed(["a", "b"]))  # type: ignore[arg-type]
    for none in ({"a": 1}, np.array(3)):
        with pytest.raises(QuireError, match="a prompt is a text or a list of token ids"):
            llm.generate(none, **ONE)  # type: ignore[call-overload]


def test_numbers_of_numpy_are_numbers(llm: quire.LLM) -> None:
    plain = llm.generate("a", max_tokens=4, temperature=0.5, seed=3, top_k=5, logprobs=1)
    same = llm.generate(
        "a", max_tokens=np.int64(4), temperature=np.float32(0.5), seed=np.uint8(3),  # type: ignore[arg-type]
        top_k=np.int32(5), logprobs=np.int64(1),  # type: ignore[arg-type]
    )  # fmt: skip
    assert same.token_ids == plain.token_ids and same.logprobs == plain.logprobs
    three = llm.generate("a", n=np.int64(3), best_of=np.int8(4), temperature=0.5, seed=1, **ONE)
    same_three = llm.generate("a", n=3, best_of=4, temperature=0.5, seed=1, **ONE)
    assert [one.token_ids for one in three] == [one.token_ids for one in same_three]
    never = plain.token_ids[0]
    biased = llm.generate("a", logit_bias={np.int64(never): np.float32(-100)}, **ONE)  # type: ignore[dict-item]
    assert biased.token_ids == llm.generate("a", logit_bias={never: -100}, **ONE).token_ids
    one, other = session(llm).rewind(np.int64(-2)), session(llm).rewind(-2)  # type: ignore[arg-type]
    assert one.tokens == other.tokens
    one.append([7, 8]).remove(np.int64(1), np.int64(3))  # type: ignore[arg-type]
    assert one.tokens == [1, 7, 8]
    for odd in (np.bool_(True), np.float32(-1)):
        with pytest.raises(QuireError):
            one.rewind(odd)  # type: ignore[arg-type]


def test_settings_of_numpy_are_settings(path: Path) -> None:
    with quire.load(path, n_ctx=np.int64(64), threads=np.uint8(1), swa_full=np.bool_(False)) as llm:  # type: ignore[arg-type]
        assert llm.n_ctx == 64 and type(llm.settings.n_ctx) is int


def test_odd_notes_of_a_fork_leave_nothing_behind(path: Path) -> None:
    with quire.load(path, memory_budget="64MiB") as llm:
        one = session(llm)
        one.checkpoint("here")
        deep: Any = []
        for _ in range(5000):
            deep = [deep]
        for odd in [*ODD, {"a": iter([])}, deep, {"a": deep}]:
            one.notes = odd
            try:
                one.fork().close()
            except QuireError as error:
                assert "notes" in str(error)
        one.close()
        assert pages(llm) == 0 and not llm.memory.checkpoints["names"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes with names")
def test_what_is_no_file_is_told_as_that(llm: quire.LLM, tmp_path: Path) -> None:
    """Neither a pipe nor a device is waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for read in (llm.open, NgramCache.load):
        with pytest.raises(QuireError, match="not a regular file"):
            read(pipe)


@pytest.mark.skipif(sys.platform == "win32", reason="a folder that is used stays there")
def test_a_session_is_not_saved_in_a_folder_that_is_gone(
    llm: quire.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(QuireError, match="cannot be saved"):
        session(llm).save("here.quire")
