"""Token by token to text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from quire.errors import RequestError


class Pieces(Protocol):
    """What a detokenizer needs to know of a tokenizer."""

    space_prefix: bool

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for."""

    def is_special(self, id: int) -> bool:
        """Whether a token is one of control."""


class Detokenizer:
    """Turns the tokens of one generation into text that can be shown as it comes.

    What `push` returns is final: it never ends within a character, and never with the beginning
    of a stop string that might still be completed. Once a stop string is complete, `stopped` is
    it, the text ends before it, and nothing more comes. Of stop strings that overlap, the one
    completed first counts; of those completed at once, the longest.

    With `continuation` the text goes on after a prompt; without, it starts here, and the space
    that some vocabularies put before the first word is left out, as in `Tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: Pieces,
        stop: str | Sequence[str] | StopStrings = (),
        *,
        continuation: bool = False,
        skip_special: bool = False,
    ) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip_space = tokenizer.space_prefix and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        stop = [stop] if isinstance(stop, str) else stop
        self._stops = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._state = 0
        self._held = ""  # as many characters as the state is deep

    def push(self, id: int) -> str:
        """The text that is certain now that this token has come."""
        if self._skip_special and self._tokenizer.is_special(id):
            return ""
        data = self._tokenizer.token_bytes(id)
        if self._strip_space:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._release(self._decoder.decode(data))

    def flush(self) -> str:
        """The rest of the text, at the end of the generation."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text += self._held
            self._held = ""
        return text

    def _release(self, new: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + new
        for at, character in enumerate(new, len(self._held) + 1):
            self._state = self._stops.follow(self._state, character)
            self.stopped = self._stops.completed[self._state]
            if self.stopped is not None:
                self._held = ""
                return text[: at - len(self.stopped)]
        certain = len(text) - self._stops.depth[self._state]
        self._held = text[certain:]
        return text[:certain]


class StopStrings:
    """Finds the first of several strings in text that comes in parts (Aho and Corasick).

    A state is the longest beginning of any string that the text ends with: its length is
    `depth`, and `completed` is the longest string that the text ends with, if any. It stays as it
    is made: many texts may be searched with one.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the state of the longest proper ending that is a state
        self.depth = [0]
        self.completed: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._link()

    def follow(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _add(self, string: str) -> None:
        if not isinstance(string, str) or not string:
            raise RequestError(f"a stop string must be a string that is not empty, not {string!r}")
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.completed.append(None)
            state = self._next[state][character]
        self.completed[state] = string

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, longer in self._next[state].items():
                self._shorter[longer] = self.follow(self._shorter[state], character)
                if self.completed[longer] is None:
                    self.completed[longer] = self.completed[self._shorter[longer]]
                queue.append(longer)
