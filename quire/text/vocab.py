"""The vocabulary of a GGUF file: its tokens, their kinds, and the tokens with a role.

What a file may leave out, and what its tokens mean, follows llama.cpp, which such files are made
for. What it would read past (ids outside the vocabulary, arrays of another length) is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from quire.errors import TokenizerError

_NO_ID = (-1, 0xFFFFFFFF)  # how files write "there is none"

# Tokens that end a generation, whatever the file says of them.
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# Roles in filling a gap: what the file calls them, whether they end a generation, and the texts
# of which the first in the vocabulary has the role where the file names none.
FILL_ROLES = (
    (("fim_pad",), True, ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    (("fim_rep",), True,
     ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    (("fim_sep",), True, ("<|file_sep|>",)),
    (("fim_pre", "prefix"), False,
     ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>",
      "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>")),
    (("fim_suf", "suffix"), False,
     ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>",
      "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>")),
    (("fim_mid", "middle"), False,
     ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>",
      "\u2581<MID>", "<|code_middle|>", "<|middle|>")),
)  # fmt: skip
# Control tokens of one family that belong to the text.
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Kind(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocab:
    """Tokens by id and by text, and the ids with a role; `None` where there is no such token."""

    name: str
    texts: list[str]
    ids: dict[str, int]
    kinds: bytearray
    bos: int | None
    eos: int | None
    unknown: int | None
    ends: frozenset[int]
    fill: Mapping[str, int]
    """The tokens that a gap to be filled is described with, by the first names of their roles."""

    def of_kind(self, *kinds: Kind) -> list[int]:
        """The ids of all tokens of these kinds."""
        array = np.frombuffer(self.kinds, dtype=np.uint8)
        found: list[int] = np.flatnonzero(np.isin(array, kinds)).tolist()
        return found


def read_vocab(metadata: Mapping[str, Any], name: str, defaults: Mapping[str, int]) -> Vocab:
    """Reads and checks the vocabulary; `defaults` are the ids where the file names none."""
    texts = strings(metadata, "tokenizer.ggml.tokens", name)
    ids = _index(texts, name)
    kinds = _kinds(metadata, len(texts), name)
    _check_bytes(texts, kinds, name)
    roles = {role: id for role, id in defaults.items() if id < len(texts)}
    for role in ("bos", "eos", "eot", "eom", "unknown"):
        id = _role(metadata, role, len(texts), name)
        if id is not None:
            roles[role] = id
    ends, fill = _ends(metadata, ids, kinds, name)
    ends.update(roles[role] for role in ("eos", "eot", "eom") if role in roles)
    _except_shown(ends, texts, ids, kinds)
    return Vocab(
        name=name,
        texts=texts,
        ids=ids,
        kinds=kinds,
        bos=roles.get("bos"),
        eos=roles.get("eos"),
        unknown=roles.get("unknown"),
        ends=frozenset(ends),
        fill=fill,
    )


def strings(metadata: Mapping[str, Any], key: str, name: str) -> list[str]:
    """A list of strings from the metadata, all of them valid Unicode."""
    value = metadata.get(key)
    if value is None or not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TokenizerError(f"{name}: {key} must be a list of strings, it is {_brief(value)}")
    texts = list(value)
    try:
        "".join(texts).encode()
    except TypeError:
        raise TokenizerError(f"{name}: {key} must hold strings only") from None
    except UnicodeEncodeError:
        bad = next(i for i, text in enumerate(texts) if not _is_valid(text))
        raise TokenizerError(f"{name}: string {bad} of {key} is not valid UTF-8") from None
    return texts


def scores(metadata: Mapping[str, Any], count: int, name: str) -> list[float]:
    """The score of every token, all zero where the file has none."""
    key = "tokenizer.ggml.scores"
    if key not in metadata:
        return [0.0] * count
    array = _numbers(metadata, key, count, name)
    if not np.isfinite(array).all():
        raise TokenizerError(f"{name}: {key} must be finite numbers")
    found: list[float] = array.astype(np.float32).tolist()
    return found


def flag(metadata: Mapping[str, Any], key: str, name: str, default: bool) -> bool:
    """A truth value from the metadata."""
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, (bool, np.bool_)):
        raise TokenizerError(f"{name}: tokenizer.ggml.{key} must be true or false, it is {value!r}")
    return bool(value)


def byte_of(text: str) -> int | None:
    """The byte a token like `<0x0A>` stands for."""
    if len(text) == 6 and text.startswith("<0x") and text[5] == ">":
        digits = text[3:5]
        if all(digit in "0123456789abcdefABCDEF" for digit in digits):
            return int(digits, 16)
    return None


def _index(texts: list[str], name: str) -> dict[str, int]:
    if not texts:
        raise TokenizerError(f"{name}: tokenizer.ggml.tokens is empty")
    ids = dict(zip(texts, range(len(texts)), strict=True))
    # Empty texts pad vocabularies to a round size: they are never matched and stand for nothing.
    if len(ids) != len(texts) - max(texts.count("") - 1, 0):
        twice = next(i for i, text in enumerate(texts) if text and ids[text] != i)
        raise TokenizerError(
            f"{name}: tokens {twice} and {ids[texts[twice]]} have the same text {texts[twice]!r}"
        )
    ids.pop("", None)
    return ids


def _kinds(metadata: Mapping[str, Any], count: int, name: str) -> bytearray:
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return bytearray([Kind.NORMAL]) * count
    array = _numbers(metadata, key, count, name)
    bad = np.flatnonzero((array < 0) | (array > max(Kind)))
    if len(bad):
        raise TokenizerError(
            f"{name}: the type of token {bad[0]} is {array[bad[0]]}; known are 0 to {max(Kind)}"
        )
    return bytearray(array.astype(np.uint8).tobytes())


def _numbers(metadata: Mapping[str, Any], key: str, count: int, name: str) -> Any:
    try:
        array = np.asarray(metadata[key])
    except (TypeError, ValueError):
        array = np.empty(0, dtype=object)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise TokenizerError(f"{name}: {key} must be a list of numbers")
    if len(array) != count:
        raise TokenizerError(f"{name}: {key} has {len(array)} entries for {count} tokens")
    return array


def _check_bytes(texts: list[str], kinds: bytearray, name: str) -> None:
    for id in np.flatnonzero(np.frombuffer(kinds, dtype=np.uint8) == Kind.BYTE).tolist():
        if byte_of(texts[id]) is None:
            raise TokenizerError(
                f"{name}: token {id} is marked as a byte, but its text is {texts[id]!r}, "
                "not <0x00> to <0xFF>"
            )


def _role(metadata: Mapping[str, Any], role: str, count: int, name: str) -> int | None:
    """The id of the token that the file gives this role."""
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TokenizerError(f"{name}: {key} must be a token id, it is {_brief(value)}")
    if value in _NO_ID:
        return None
    if not 0 <= value < count:
        raise TokenizerError(f"{name}: {key} is {value}, but there are {count} tokens")
    return int(value)


def _ends(
    metadata: Mapping[str, Any], ids: dict[str, int], kinds: bytearray, name: str
) -> tuple[set[int], dict[str, int]]:
    """Ends of generation, and what fills gaps; what is found by its text is a control token."""
    ends = {ids[text] for text in END_TEXTS if text in ids}
    by_text, fill = set(ends), {}
    for roles, is_end, texts in FILL_ROLES:
        named = [_role(metadata, role, len(kinds), name) for role in roles]
        found = [id for id in named if id is not None]
        if not found:
            found = [ids[text] for text in texts if text in ids][:1]
            by_text.update(found)
        if found:
            fill[roles[0]] = found[0]
        if is_end:
            ends.update(found)
    for id in by_text:
        kinds[id] = Kind.CONTROL
    return ends, fill


def _except_shown(ends: set[int], texts: list[str], ids: dict[str, int], kinds: bytearray) -> None:
    """Takes back what the texts alone get wrong, for the families where that is known."""
    for text in _SHOWN_TEXTS:
        if text in ids:
            kinds[ids[text]] = Kind.USER_DEFINED
    present = {texts[id] for id in ends}
    calls = {"<|call|>", "<|calls|>"} & present
    if "<|end|>" in present and calls and {"<|return|>", "<|flush|>"} & present:
        # There <|end|> ends a message of several, and other tokens end the turn.
        ends.discard(ids["<|end|>"])
        kinds[ids["<|end|>"]] = Kind.USER_DEFINED
    if "<|tool_response>" in present and "</s>" in present:
        ends.discard(ids["</s>"])
        kinds[ids["</s>"]] = Kind.NORMAL


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _brief(value: object) -> str:
    return "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
