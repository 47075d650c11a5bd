"""Spaces written as marks, in a tokenizer.json, and how its tokens become text again."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import TokenizerError
from quire.text.bpe import SPACE_MARK
from quire.text.hf_part import Part
from quire.weights.gguf_format import quote


@dataclass(frozen=True)
class Metaspace:
    """Spaces become marks; one is put before the text: always, first (at its start) or never."""

    scheme: str
    split: bool


@dataclass(frozen=True)
class Decoding:
    """How tokens are written as text."""

    byte_level: bool
    marks: bool = False  # U+2581 is a space
    byte_tokens: bool = False  # <0x0A> is a byte
    strip: bool = False  # one space at the start of a text is left out


def expect_replace(part: Part, old: str, new: str) -> None:
    pattern = part.part("pattern")
    if pattern is None:
        part.refuse("has no pattern")
    pattern.expect("String", old)
    pattern.finish()
    part.expect("content", new)


def read_metaspace(part: Part) -> Metaspace:
    part.expect("replacement", SPACE_MARK)
    part.expect("str_rep", SPACE_MARK, None)
    legacy = part.get("add_prefix_space", bool, None)
    scheme = part.get("prepend_scheme", str, "never" if legacy is False else "always")
    if scheme not in ("always", "first", "never") or (legacy is False and scheme != "never"):
        part.refuse(f"prepend_scheme {quote(scheme)}, add_prefix_space {legacy}")
    return Metaspace(scheme, part.get("split", bool, True))


def read_decoding(parts: list[Part], name: str) -> Decoding:
    """Decoders in the one order that models have them in."""
    kinds = [part.kind for part in parts]
    for part in parts:
        if part.kind == "Replace":
            expect_replace(part, SPACE_MARK, " ")
        elif part.kind == "Strip":
            part.expect("content", " ")
            part.expect("start", 1)
            part.expect("stop", 0)
        elif part.kind == "ByteLevel":
            part.skip("add_prefix_space", "trim_offsets", "use_regex")
        elif part.kind == "Metaspace":
            strip = read_metaspace(part).scheme != "never"
        elif part.kind not in ("ByteFallback", "Fuse"):
            part.refuse(
                "is not known; decoders are ByteLevel, Metaspace, Replace, ByteFallback, Fuse, "
                "Strip"
            )
        part.finish()
    if kinds == ["ByteLevel"]:
        return Decoding(byte_level=True)
    if kinds == ["Metaspace"]:
        return Decoding(False, marks=True, strip=strip)
    order = [kind for kind in ("Replace", "ByteFallback", "Fuse", "Strip") if kind in kinds]
    if kinds != order or "Fuse" not in kinds:
        raise TokenizerError(
            f"{name}: the decoder is {quote(', '.join(kinds) or 'missing')}; known are ByteLevel, "
            "Metaspace, and Replace, ByteFallback, Fuse, Strip in this order"
        )
    return Decoding(False, "Replace" in kinds, "ByteFallback" in kinds, "Strip" in kinds)
