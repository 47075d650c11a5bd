"""A tokenizer.json: the parts that language models use, and a refusal by name of all others.

The file is not trusted. Whatever it says is read by code of our own that is linear in the text,
and its sizes are held against limits before anything is built.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.errors import TokenizerError
from quire.text.added import AddedToken, is_space
from quire.text.bpe import SPACE_MARK
from quire.text.hf_decoder import (
    Decoding,
    Metaspace,
    expect_replace,
    read_decoding,
    read_metaspace,
)
from quire.text.hf_model import Pairs, read_model
from quire.text.hf_part import Part, parse
from quire.text.hf_patterns import GPT2, LAST_SPACES, PARTIAL, TOTAL
from quire.text.pretokenize import PreTokenizer
from quire.weights.gguf_format import quote

MOST_ADDED: Final = 100_000
MOST_LENGTH: Final = 4096

Normalize = Callable[[str], str]


@dataclass(frozen=True)
class TokenizerFile:
    """All that a file says."""

    pairs: Pairs
    added: list[AddedToken]
    normalize: tuple[Normalize, ...]
    shrinks: bool
    """Whether normalizing may leave fewer bytes than there were: at least a third."""
    words: PreTokenizer | Metaspace | None
    """How text is split; None where it is one word."""
    prefix_space: bool
    before: list[int]
    behind: list[int]
    decoding: Decoding


def read_tokenizer(text: bytes, name: str) -> TokenizerFile:
    """Reads and checks a file; `name` is what errors call it."""
    whole = parse(text, name)
    whole.skip("version", "truncation", "padding")  # how long texts are cut is not its business
    pairs = read_model(whole.part("model"), name)
    added = _added(whole.get("added_tokens", list, []), pairs, f"{name}: added_tokens")
    normalize, steps = _normalizers(whole.sequence("normalizer"))
    words, prefix_space = _words(whole.sequence("pre_tokenizer"), steps)
    before, behind = _frame(whole.sequence("post_processor"), pairs, added)
    decoding = read_decoding(whole.sequence("decoder"), name)
    whole.finish()
    byte_level = isinstance(words, PreTokenizer)
    if byte_level != decoding.byte_level:
        raise TokenizerError(
            f"{name}: pre_tokenizer and decoder must both be ByteLevel, or neither"
        )
    if decoding.strip and any(token.text.startswith(" ") for token in added):
        raise TokenizerError(f"{name}: an added token begins with a space that decoding strips")
    if "Prepend" in steps and isinstance(words, Metaspace):
        raise TokenizerError(f"{name}: Prepend and Metaspace together are not known")
    return TokenizerFile(
        pairs=pairs, added=added, normalize=normalize, shrinks="NFC" in steps, words=words,
        prefix_space=prefix_space, before=before, behind=behind, decoding=decoding,
    )  # fmt: skip


def _added(entries: list[object], pairs: Pairs, where: str) -> list[AddedToken]:
    """The tokens that are not, or not only, in the vocabulary; each must have its rightful id."""
    if len(entries) > MOST_ADDED:
        raise TokenizerError(f"{where}: there are {len(entries)}, at most {MOST_ADDED} are read")
    found: dict[str, AddedToken] = {}
    last = -1
    size = len(pairs.ids)
    taken = set(pairs.ids.values())
    for number, entry in enumerate(entries):
        part = Part(f"{where}: token {number}", entry)
        id, text = part.get("id", int), part.get("content", str)
        lstrip, rstrip, normalized, special = (
            part.get(key, bool, False) for key in ("lstrip", "rstrip", "normalized", "special")
        )
        part.expect("single_word", False, None)
        part.finish()
        if not text or len(text) > MOST_LENGTH:
            part.refuse(f"its text has {len(text)} characters, 1 to {MOST_LENGTH} may be")
        if text in found:
            part.refuse(f"{quote(text)} appears twice")
        new = last + 1 if last >= size else size
        expected = pairs.ids.get(text, new)
        if id != expected or (text not in pairs.ids and id in taken):
            part.refuse(f"{quote(text)} has the id {quote(str(id))}, due is {expected}")
        last = max(last, id)
        found[text] = AddedToken(id, text, lstrip, rstrip, normalized, special)
    added = list(found.values())
    _check_unicode([token.text for token in added], where)
    edges = any(is_space(token.text[0]) or is_space(token.text[-1]) for token in added)
    if edges and any(token.lstrip or token.rstrip for token in added):
        raise TokenizerError(
            f"{where}: tokens that swallow white space (lstrip, rstrip) and tokens that begin or "
            "end with it are not known together"
        )
    # Of two that are written alike once normalized, a special one counts.
    return sorted(added, key=lambda token: not token.special)


def _check_unicode(texts: list[str], where: str) -> None:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise TokenizerError(f"{where}: a token is not valid Unicode") from None


def _normalizers(parts: list[Part]) -> tuple[tuple[Normalize, ...], list[str]]:
    steps: list[str] = []
    found: list[Normalize] = []
    for part in parts:
        if part.kind in steps:  # twice would grow the text
            part.refuse("may be there once")
        steps.append(part.kind)
        if part.kind == "NFC":
            found.append(lambda text: unicodedata.normalize("NFC", text))
        elif part.kind == "Prepend":
            part.expect("prepend", SPACE_MARK)
            found.append(lambda text: SPACE_MARK + text if text else text)
        elif part.kind == "Replace":
            expect_replace(part, " ", SPACE_MARK)
            found.append(lambda text: text.replace(" ", SPACE_MARK))
        else:
            part.refuse("is not known; normalizers are NFC, Prepend, Replace")
        part.finish()
    return tuple(found), steps


def _words(
    parts: list[Part], normalizers: list[str]
) -> tuple[PreTokenizer | Metaspace | None, bool]:
    """How text is split, and whether a space is put before it."""
    steps: list[str] = []
    words: PreTokenizer | Metaspace | None = None
    prefix_space = False
    for part in parts:
        if words is not None:
            part.refuse("comes after a ByteLevel or Metaspace, which must be last")
        if part.kind == "Split":
            steps += _split(part, steps, "Replace" in normalizers)
        elif part.kind == "Digits":
            steps.append(r"\p{N}" if part.get("individual_digits", bool, False) else r"\p{N}+")
        elif part.kind == "ByteLevel":
            prefix_space = part.get("add_prefix_space", bool)
            part.skip("trim_offsets")
            if prefix_space and steps:
                part.refuse("add_prefix_space is not known behind other pre-tokenizers")
            steps += [TOTAL[GPT2]] if part.get("use_regex", bool, True) else []
            words = PreTokenizer(tuple(steps), cased=True)
        elif part.kind == "Metaspace":
            words = read_metaspace(part)
        else:
            part.refuse("is not known; pre-tokenizers are Split, Digits, ByteLevel, Metaspace")
        part.finish()
    if steps and not isinstance(words, PreTokenizer):
        parts[-1].refuse("pre-tokenizers that split text must end in a ByteLevel")
    return words, prefix_space


def _split(part: Part, before: list[str], no_spaces: bool) -> list[str]:
    pattern = part.part("pattern")
    if pattern is None:
        part.refuse("has no pattern")
    regex, text = pattern.get("Regex", str, None), pattern.get("String", str, None)
    pattern.finish()
    behavior, invert = part.get("behavior", str), part.get("invert", bool, False)
    if regex is None and text == " " and no_spaces and not invert:
        return []  # no space is left to split at
    if regex in TOTAL and (behavior, invert) in (("Isolated", False), ("Removed", True)):
        return [TOTAL[regex]]
    if behavior != "Isolated" or invert:
        part.refuse(f"behavior {quote(behavior)}, invert {invert}; known is Isolated")
    if regex in PARTIAL:
        return [PARTIAL[regex]]
    if regex == LAST_SPACES[0] and r"[\r\n]" in before:
        return [LAST_SPACES[1]]
    part.refuse(
        f"the pattern {quote(str(text if regex is None else regex))} is not one of those that "
        "are known here, and patterns of files are not run"
    )


def _frame(parts: list[Part], pairs: Pairs, added: list[AddedToken]) -> tuple[list[int], list[int]]:
    """The tokens put before and behind a text."""
    frames: list[tuple[list[int], list[int]]] = []
    ids = pairs.ids | {token.text: token.id for token in added}
    for part in parts:
        if part.kind == "TemplateProcessing":
            if frames:
                part.refuse("may be there once")
            frames.append(_template(part, ids))
        elif part.kind == "ByteLevel":  # it changes where tokens lie, not which they are
            part.skip("add_prefix_space", "trim_offsets", "use_regex")
        else:
            part.refuse("is not known; post-processors are TemplateProcessing, ByteLevel")
        part.finish()
    return frames[0] if frames else ([], [])


def _template(part: Part, ids: dict[str, int]) -> tuple[list[int], list[int]]:
    named = Part(f"{part.where} special_tokens", part.get("special_tokens", dict, {}))
    part.skip("pair")
    sides: tuple[list[int], list[int]] = ([], [])
    texts = 0
    for entry in part.get("single", list)[:MOST_LENGTH]:
        piece = Part(f"{part.where} single", entry)
        sequence, special = piece.part("Sequence"), piece.part("SpecialToken")
        piece.finish()
        if sequence is not None and special is None:
            sequence.expect("id", "A")
            texts += 1
        elif special is not None:
            token = special.get("id", str)
            use = named.part(token)
            if use is None:
                part.refuse(f"special_tokens has no {quote(token)}")
            tokens, found = use.get("tokens", list), use.get("ids", list)
            if len(tokens) > MOST_LENGTH or [ids.get(t) for t in map(str, tokens)] != found:
                use.refuse(f"the ids of {quote(token)} are not those of the vocabulary")
            sides[min(texts, 1)].extend(found)
    if texts != 1 or len(sides[0]) + len(sides[1]) > MOST_LENGTH:
        part.refuse("single must have the sequence A once, and few tokens")
    return sides
