"""Texts become ids a part at a time: the same ones, and what is kept of them is bounded."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.text import parts
from quire.text.parts import Parts
from quire.text.pretokenize import WordSplitter
from quire.text.variants import PRE_TOKENIZERS

VARIANTS = {variant: name for name, variant in PRE_TOKENIZERS.items()}
NEWER = "\U00011f50\U0001e4f0"
"""Digits of Unicode 15, which Python 3.11 takes for nothing."""
UNITS = [
    "a", "B", " ", "\n", "\r\n", "\t", "1", "23", "\u0663", *NEWER, "\u4e00", "\u2167", "\u00bd",
    "\u00e9", "e\u0301", "'s", "\u017f", "!", "...", "/", "\u3000", "\u00a0", "\u2028", "\x85",
    "\u200b", "\U0001f600", "\u30ab", "\ud55c", "\u01c5", "_", "$", "\x00", "\x1c", "\ufeff",
]  # fmt: skip


def words_of(kept: Parts, text: str) -> list[str]:
    as_they_are: Any = list
    words: Any = kept.encode(text, as_they_are)
    return [word for some in words for word in some]


@pytest.mark.parametrize("name", VARIANTS.values())
def test_parts_are_cut_where_words_end(name: str) -> None:
    splitter, chance = WordSplitter(PRE_TOKENIZERS[name]), random.Random(name)
    runs = [digit * n for digit in NEWER for n in range(40, 46)]
    for at in range(60):
        few = chance.sample(UNITS, chance.randint(1, 5))
        some = [chance.choice(few) * chance.choice((1, 1, 2, 30)) for _ in range(at)]
        runs.append("".join(some))
    for text in runs:
        assert words_of(Parts(splitter, 16), text) == splitter.split(text), ascii(text)


def test_many_short_texts_are_kept_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of a few characters is a few hundred bytes."""
    monkeypatch.setattr(parts, "_KEPT", 1 << 14)
    kept = Parts(WordSplitter(PRE_TOKENIZERS["gpt-2"]))
    for i in range(2000):
        words_of(kept, f"{i:x}")
        assert len(kept._known) <= (1 << 14) // 64


def test_what_is_too_long_to_be_kept_puts_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_KEPT", 1 << 14)
    kept = Parts(WordSplitter(PRE_TOKENIZERS["gpt-2"]))
    words_of(kept, "a text")
    words_of(kept, " " * (1 << 15))  # one word, however far it is looked
    assert [part for part, _ in kept._known] == ["a text"]
