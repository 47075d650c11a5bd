"""Output constrained by a JSON schema, a regular expression or a grammar, through llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.schema import closed
from quire.types import Behind, Constraint, Grammar, Json, Regex

# One space after colons and commas. With free white space small models write nothing else; a
# schema may still ask for it, under "x-guidance".
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_STEP_FUEL = 50_000
"""What one token of a constraint may cost: a mask is made while everybody's step waits."""
_MOST_BYTES = 256 << 10
"""Of a grammar: some take time, and depth of the stack, that grow faster than their length."""
_MOST_KNOWN = 16
"""Lists of texts whose tokens are remembered: requests bring their own."""


class Vocabulary(Protocol):
    """What a constraint needs to know of a tokenizer."""

    n_vocab: int
    eog_ids: frozenset[int]

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for."""

    def is_special(self, id: int) -> bool:
        """Whether a token is a control token."""

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Tokens of a text."""


class Constrainer:
    """Compiles constraints for one vocabulary, which is prepared on first use; in any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer: Any = None
        self._preparing = Lock()
        self._with: dict[tuple[str, ...], frozenset[int]] = {}

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher at its start; a constraint that cannot be compiled is refused."""
        from llguidance import LLMatcher, LLParserLimits

        from quire.engine.daemons import DEEP, begun

        try:
            grammar = _grammar(constraint, LLMatcher)
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"the constraint is not valid: {error!s:.800}") from error
        if len(grammar) > _MOST_BYTES:
            raise RequestError(
                f"the constraint is too complex: its grammar has {len(grammar):,} bytes, and may "
                f"have {_MOST_BYTES:,}; make it simpler"
            )
        limits, tokenizer = LLParserLimits(step_lexer_fuel=_STEP_FUEL), self._prepared()
        # It recurses as deeply as a grammar's rules lead on to each other, and ends the process
        # where the stack has no room for that.
        matcher = begun(
            lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits), DEEP
        ).result()
        if matcher.is_error():
            raise RequestError(f"the constraint cannot be compiled: {_why(matcher)}")
        return Matcher(matcher, self.vocabulary.n_vocab)

    def tokens_with(self, texts: Seq[str]) -> frozenset[int]:
        """The tokens that have one of these texts in theirs."""
        key = tuple(texts)
        if key not in self._with:
            if len(self._with) >= _MOST_KNOWN:
                self._with.pop(next(iter(self._with)))
            parts = [text.encode() for text in key]
            self._with[key] = frozenset(
                i
                for i in range(self.vocabulary.n_vocab if parts else 0)
                if any(part in self.vocabulary.token_bytes(i) for part in parts)
            )
        return self._with[key]

    def _prepared(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._preparing:
            if self._tokenizer is None:
                wrapper = TokenizerWrapper(_Adapter(self.vocabulary))
                n_vocab, ends = self.vocabulary.n_vocab, sorted(self.vocabulary.eog_ids)
                self._tokenizer = LLTokenizer(wrapper, n_vocab=n_vocab, eos_token=ends)
        return self._tokenizer


def _grammar(constraint: Constraint, compiler: Any) -> str:
    match constraint:
        case Json(schema):
            found = json.loads(schema) if isinstance(schema, str) else dict(schema)
            text = json.dumps(closed(found))
            return str(compiler.grammar_from_json_schema(text, defaults=_COMPACT))
        case Regex(pattern):
            # Digits are 0 to 9, as in JSON schemas: models find those of all other scripts too.
            ascii = _ESCAPE.sub(lambda it: "[0-9]" if it[1] == "d" else it[0], pattern)
            return str(compiler.grammar_from_regex(ascii))
        case Grammar(text):
            return str(compiler.grammar_from_lark(text))
        case Behind(before, inner, instead):
            start = "before @answer" if before else "@answer"
            parts = [{**_one(inner, compiler), "name": "answer"}]
            if instead is not None:
                start += " | @instead"
                parts.append({**_one(instead, compiler), "name": "instead"})
            whole = {"name": "whole", "lark_grammar": f"start: {start}\n{before}"}
            return json.dumps({"grammars": [whole, *parts]})


def _one(constraint: Constraint, compiler: Any) -> dict[str, Any]:
    """A constraint as one of several grammars."""
    made = _grammar(constraint, compiler)
    if isinstance(constraint, Grammar):
        return {"lark_grammar": made}
    (found,) = json.loads(made)["grammars"]
    return dict(found)


class Matcher:
    """Where one generation stands in its constraint."""

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher = matcher
        self._words = (n_vocab + 31) // 32

    def mask(self, out: NDArray[np.uint32]) -> None:
        """Fills the bits of the tokens that may come next."""
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, self._words * 4)
        self._raise_error()

    def consume(self, token: int) -> None:
        """Takes the token that was chosen."""
        self._matcher.consume_token(token)
        self._raise_error()

    def warm(self) -> None:
        """Does what the first mask takes, which may be long, ahead of it."""
        self.mask(np.zeros(self._words, np.uint32))

    def copy(self) -> Matcher:
        """Another one that stands at the same place and goes its own way."""
        return Matcher(self._matcher.deep_copy(), self._words * 32)

    @property
    def finished(self) -> bool:
        """Whether nothing but an end may follow."""
        return bool(self._matcher.is_stopped())

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the constraint failed: {_why(self._matcher)}", "constraint")


def _why(matcher: Any) -> str:
    """What llguidance says is wrong, without its own stack and state."""
    said: str = matcher.get_error()
    for inside in ("\n<backtrace>", "\n<state>"):
        said = said.partition(inside)[0]
    return "no text fits it" if said == "NoExtensionBias" else said[:800]


class _Adapter:
    """A vocabulary in the shape that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = range(vocabulary.n_vocab)
        self.eos_token_id = min(vocabulary.eog_ids, default=0)
        self.bos_token_id = None
        self.special_token_ids = [i for i in ids if vocabulary.is_special(i)]
        self.tokens = [vocabulary.token_bytes(i) for i in ids]
        self._vocabulary = vocabulary

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return self._vocabulary.encode(text, add_special=False, parse_special=False)
