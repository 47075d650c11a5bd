"""Detokenizing: the same text whichever way it comes, whole characters, no stop strings."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.text.detokenize import Detokenizer, StopStrings
from quire.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizers"


@dataclass
class FakeTokenizer:
    """Tokens are given as bytes; the id is the position."""

    pieces: list[bytes]
    space_prefix: bool = False
    special: set[int] = field(default_factory=set)

    def token_bytes(self, id: int) -> bytes:
        return self.pieces[id]

    def is_special(self, id: int) -> bool:
        return id in self.special


def truncated(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the first stop string to be complete, the longest of several, ends it."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


class TestProperties:
    @given(
        st.binary(max_size=40) | st.text("ab\u00e9\u4e16\U0001f642", max_size=20).map(str.encode),
        st.lists(st.integers(0, 40), max_size=12),
        st.lists(st.text("ab\u00e9\u4e16\ufffd", min_size=1, max_size=4), max_size=4),
    )
    @settings(max_examples=400, deadline=None)
    @example(b"abcabc", [1, 2, 3, 4], ["bc", "abcab"])
    @example("\u4e16".encode() * 2, [1, 2, 3, 4, 5], ["\u4e16\u4e16"])
    @example(b"\xf0\x9f\x99a", [1, 2, 3], ["\ufffda"])
    def test_pieces_make_up_the_text_before_the_stop(
        self, data: bytes, cuts: list[int], stops: list[str]
    ) -> None:
        pieces = split(data, cuts)
        detokenizer = Detokenizer(FakeTokenizer(pieces), stops)
        parts = [detokenizer.push(id) for id in range(len(pieces))]
        parts.append(detokenizer.flush())
        expected, stop = truncated(data.decode("utf-8", "replace"), stops)
        assert "".join(parts) == expected
        assert detokenizer.stopped == stop

    @given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5)))
    @settings(deadline=None)
    def test_what_is_held_back_is_the_beginning_of_a_stop(
        self, text: str, stops: list[str]
    ) -> None:
        pieces = [character.encode() for character in text]
        detokenizer = Detokenizer(FakeTokenizer(pieces), stops)
        shown = ""
        for id, _ in enumerate(text):
            shown += detokenizer.push(id)
            if detokenizer.stopped is not None:
                break
            held = text[len(shown) : id + 1]
            beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
            longest = max(
                (b for b in beginnings if text[: id + 1].endswith(b)), key=len, default=""
            )
            assert held == longest

    @pytest.mark.parametrize("name", ["spm", "gemma4"])
    @given(st.data(), st.booleans())
    @settings(max_examples=60, deadline=None)
    def test_like_decoding_all_at_once(
        self, name: str, data: st.DataObject, skip_special: bool
    ) -> None:
        fields = json.loads((DATA / f"{name}.json").read_text())
        keys = ("model", "tokens", "token_type", "scores", "merges", "bos_token_id")
        tokenizer = Tokenizer.from_metadata(
            {f"tokenizer.ggml.{key}": fields[key] for key in keys if key in fields}
        )
        ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=12))
        detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        parts = [detokenizer.push(id) for id in ids]
        parts.append(detokenizer.flush())
        assert "".join(parts) == tokenizer.decode(ids, skip_special)


class TestCharacters:
    def test_never_half_a_character(self) -> None:
        pieces = [bytes([byte]) for byte in "é世🙂".encode()]
        detokenizer = Detokenizer(FakeTokenizer(pieces))
        shown = [detokenizer.push(id) for id in range(len(pieces))]
        assert shown == ["", "é", "", "", "世", "", "", "", "🙂"]
        assert detokenizer.flush() == ""

    def test_what_never_becomes_a_character(self) -> None:
        detokenizer = Detokenizer(FakeTokenizer([b"a\xe4\xb8", b"b", b"\xff", b"\xe4"]))
        assert detokenizer.push(0) == "a"
        assert detokenizer.push(1) == "\ufffdb"
        assert detokenizer.push(2) == "\ufffd"
        assert detokenizer.push(3) == ""
        assert detokenizer.flush() == "\ufffd"
        assert detokenizer.flush() == ""


class TestStops:
    def test_nothing_comes_after_a_stop(self) -> None:
        detokenizer = Detokenizer(FakeTokenizer([b"one ST", b"OP two", b"three"]), ["STOP"])
        assert detokenizer.push(0) == "one "
        assert detokenizer.push(1) == ""
        assert detokenizer.stopped == "STOP"
        assert detokenizer.push(2) == detokenizer.flush() == ""

    def test_a_beginning_that_is_not_completed_is_shown(self) -> None:
        detokenizer = Detokenizer(FakeTokenizer([b"a\n", b"\n", b"User", b" x"]), ["\n\nUser:"])
        assert [detokenizer.push(id) for id in range(4)] == ["a", "", "", "\n\nUser x"]
        last = Detokenizer(FakeTokenizer([b"a\n"]), ["\n\n"])
        assert last.push(0) + last.flush() == "a\n"
        assert last.stopped is None

    def test_a_single_string(self) -> None:
        detokenizer = Detokenizer(FakeTokenizer([b"a END b"]), "END")
        assert detokenizer.push(0) == "a "

    @pytest.mark.parametrize("stop", [[""], ["a", ""], [None], [5]])
    def test_stops_that_are_none(self, stop: list[str]) -> None:
        with pytest.raises(RequestError, match="stop string"):
            Detokenizer(FakeTokenizer([]), stop)

    def test_many_and_long_stops_stay_fast(self) -> None:
        stops = [f"{'a' * 50}{n}" for n in range(2000)] + ["a" * 10_000 + "b"]
        pieces = [b"a" * 100] * 200
        start = time.perf_counter()
        detokenizer = Detokenizer(FakeTokenizer(pieces), stops)
        shown = "".join(detokenizer.push(id) for id in range(len(pieces)))
        assert time.perf_counter() - start < 2  # 0.2 on an idle machine
        assert len(shown) == 10_000  # the rest might begin the long one

    def test_the_longest_of_those_complete_at_once(self) -> None:
        states = StopStrings(["bc", "abc"])
        state = 0
        for character in "xabc":
            state = states.follow(state, character)
        assert states.completed[state] == "abc"


class TestStart:
    def test_the_first_space_is_the_vocabularys(self) -> None:
        tokenizer = FakeTokenizer([b" Hello", b" world"], space_prefix=True)
        start = Detokenizer(tokenizer)
        assert start.push(0) + start.push(1) == "Hello world"
        going_on = Detokenizer(tokenizer, continuation=True)
        assert going_on.push(0) == " Hello"
        without = Detokenizer(FakeTokenizer([b" Hello"]))
        assert without.push(0) == " Hello"

    def test_special_tokens_can_be_left_out(self) -> None:
        tokenizer = FakeTokenizer([b"<s>", b" Hello"], space_prefix=True, special={0})
        detokenizer = Detokenizer(tokenizer, skip_special=True)
        assert detokenizer.push(0) + detokenizer.push(1) == "Hello"
        shown = Detokenizer(tokenizer)
        assert shown.push(0) + shown.push(1) == "<s> Hello"
