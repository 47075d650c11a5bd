"""The patterns by which tokenizer.json files split text, and how each is read here.

A pattern of a file is never run: it is looked up by its exact text among those that language
models are known to use, and what runs is our own, each of them linear in the text.
"""

from __future__ import annotations

from quire.text.characters import LONG_S
from quire.text.variants import CASED_LETTERS

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a ByteLevel pre-tokenizer splits by."""

# Where case does not matter, the long s is an s too. No other letter folds to one of these.
_FOLDED = rf"'(?:[sStTmMdD{LONG_S}]|[rRvV][eE]|[lL][lL])"
_CONTRACTIONS = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    "'(?i:[sdmt]|ll|ve|re)",
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",  # these fold nothing else
)
_READ_AS = (_FOLDED, _FOLDED, _FOLDED.replace(LONG_S, ""))

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _cased(tail: str, digits: str) -> str:
    """Words that begin anew where the case rises."""
    words = f"{_LEAD}{_UPPER}*{_LOWER}+{tail}|{_LEAD}{_UPPER}+{_LOWER}*{tail}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _forms() -> tuple[str, ...]:
    """Patterns that leave no character out, as files write them."""
    forms = [GPT2, _cased("", r"\p{N}"), _cased("", r"\p{N}{1,3}")]
    for contraction in _CONTRACTIONS:
        for digits in (r"\p{N}", r"\p{N}{1,3}", r"\p{N}+", r"\p{N}{1,2}"):
            forms.append(f"{contraction}|{_WORD}|{digits}|{_OTHERS}|{_SPACES}")
        marked = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
        others = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        forms.append(rf"{contraction}|{marked}|\p{{N}}|{others}|{_SPACES}")
        if contraction.startswith("("):  # so that a ? behind it is about all of it
            forms.append(_cased(f"{contraction}?", r"\p{N}{1,3}"))
        for newline in (r"[\r\n]", r"[\r\n]+"):
            forms.append(
                rf"{contraction}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}{{1,3}}|"
                rf" ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*{newline}|\s+(?!\S)|\s+"
            )
    return tuple(forms)


# Those that leave some characters to the steps before or behind them.
_PARTIAL = (
    r"\p{N}{1,3}",
    r"\p{N}+",
    r"\p{N}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    rf"\s?[{CASED_LETTERS}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    "[一-龥ࠀ-一가-\ud7ff]+",
)


def _ours(pattern: str) -> str:
    for contraction, ours in zip(_CONTRACTIONS, _READ_AS, strict=True):
        optional = f"{contraction}?"
        pattern = pattern.replace(optional, f"(?:{ours})?").replace(contraction, ours)
    return pattern


TOTAL = {pattern: _ours(pattern) for pattern in _forms()}
"""Known patterns under which every character is part of a match."""
PARTIAL = {pattern: pattern for pattern in _PARTIAL}
"""Known patterns under which some characters lie between matches."""
LAST_SPACES = (r"\s+$", r"(?<!\s)\s+\Z")
"""How files that split at every line's end write the spaces at the end, and how it is read."""
