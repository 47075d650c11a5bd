"""Reads what a model answers: its text, its reasoning, and the tools that it calls.

    pieces ──feed──▶ AnswerReader ──▶ Answer   what is certain now; the parts add up to the whole
                     the marks are the style's (styles.py), the calls' words are calls.py's

However the text is cut into pieces, the same comes of it. What looks like a call and is none stays
text. White space between text and a mark is neither's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.text.calls import ReadCalls, Tools, Unfinished, tool_call
from quire.types import ToolCall

_PATIENCE = 64  # tries to read a call, of one answer, that came to nothing


@dataclass(frozen=True)
class Answer:
    """An answer, or a part of one."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: Answer) -> Answer:
        return Answer(
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
        )

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)

    @staticmethod
    def of(parts: Sequence[Answer]) -> Answer:
        """The whole of many parts; one by one, each would be copied as often as more follow."""
        return Answer(
            "".join(part.text for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(call for part in parts for call in part.tool_calls),
        )


@dataclass(frozen=True)
class CallMarks:
    """What stands before and behind calls (nothing: the answer's end), and how to read them."""

    spans: tuple[tuple[str, str], ...]
    read: ReadCalls
    bare: str = ""
    """What an answer begins with that is a call and has no mark."""


class _Part:
    """Text of one kind, without the white space next to marks; several parts are on lines."""

    def __init__(self, trimmed: bool) -> None:
        self.spoken = False  # whether any text came since the last mark
        self._new = ""
        self._trims = trimmed
        self._space = ""
        self._any = False

    def add(self, text: str) -> None:
        """More of it; white space waits for what follows."""
        if self._trims:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._new += self._space + body
            self._space = ""
            self.spoken = self._any = True
            self._trims = False
        if not self._trims:
            self._space += text[len(body) :]

    def mark(self) -> None:
        """A mark comes here."""
        self._space = "\n" if self._any else ""
        self._trims, self.spoken = True, False

    def end(self) -> None:
        """Nothing more comes."""
        if not self._trims:
            self._new += self._space
            self._space = ""

    def take(self) -> str:
        """What came since the last call."""
        new, self._new = self._new, ""
        return new


class AnswerReader:
    """Reads one answer as it comes."""

    def __init__(self, tools: Tools | None = None) -> None:
        self._tools = tools
        self._text = _Part(trimmed=False)
        self._reasoning = _Part(trimmed=True)
        self._calls: list[ToolCall] = []
        self._held = ""

    def feed(self, piece: str) -> Answer:
        """What is certain now that this piece has come."""
        self._held += piece
        self._read(final=False)
        return self._taken()

    def close(self) -> Answer:
        """The rest, at the end of the answer."""
        self._read(final=True)
        self._text.end()
        return self._taken()

    def parse(self, text: str) -> Answer:
        """A whole answer at once."""
        return self.feed(text) + self.close()

    def _read(self, final: bool) -> None:
        raise NotImplementedError

    def _take(self, count: int) -> str:
        """Takes the first characters out of what is held."""
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _taken(self) -> Answer:
        calls, self._calls = tuple(self._calls), []
        return Answer(self._text.take(), self._reasoning.take(), calls)

    def _certain(self, marks: tuple[str, ...], final: bool) -> int:
        """How much of what is held cannot be the beginning of a mark."""
        held = self._held
        if final:
            return len(held)
        longest = max(map(len, marks), default=1)
        for at in range(max(0, len(held) - longest + 1), len(held)):
            if any(mark.startswith(held[at:]) for mark in marks):
                return at
        return len(held)


class TagReader(AnswerReader):
    """For answers with reasoning and calls between marks."""

    def __init__(
        self, reasoning: tuple[str, str] | None, calls: CallMarks | None,
        tools: Tools | None = None, thinking: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(tools)
        self._think = reasoning
        self._marks = calls if tools is not None else None
        spans = self._marks.spans if self._marks else ()
        self._close = dict(spans)
        opens = [open for open, _ in spans] + ([reasoning[0]] if reasoning else [])
        self._opens = tuple(opens)
        self._find = re.compile("|".join(map(re.escape, opens))) if opens else _NOTHING
        self._thinking = thinking and reasoning is not None
        self._open: str | None = None  # the mark of the call that is being read
        self._seen = 0  # how far its end was looked for
        self._started = False
        self._patience = _PATIENCE

    def _read(self, final: bool) -> None:
        if not self._started and self._marks and self._marks.bare:
            start = self._held.lstrip()
            if not start and not final:
                return
            self._started = True
            if start.startswith(self._marks.bare):
                self._open = ""
        while self._next(final):
            pass

    def _next(self, final: bool) -> bool:
        """Goes on to the next mark; False where there is none yet."""
        if self._thinking:
            return self._read_reasoning(final)
        if self._open is not None:
            return self._read_call(self._open, final)
        return self._read_text(final)

    def _read_reasoning(self, final: bool) -> bool:
        assert self._think is not None
        close = self._think[1]
        at = self._held.find(close)
        if at < 0:
            self._reasoning.add(self._take(self._certain((close,), final)))
            return False
        self._reasoning.add(self._take(at))
        self._reasoning.mark()
        self._text.mark()
        self._take(len(close))
        self._thinking = False
        return True

    def _read_text(self, final: bool) -> bool:
        found = self._find.search(self._held)
        if found is None:
            self._text.add(self._take(self._certain(self._opens, final)))
            return False
        mark = found[0]
        self._text.add(self._take(found.start()))
        self._take(len(mark))
        if mark in self._close:
            self._open = mark
        elif self._text.spoken:  # reasoning comes first, or it is something else
            self._text.add(mark)
        else:
            self._thinking = True
        return True

    def _read_call(self, open: str, final: bool) -> bool:
        close = self._close.get(open, "")
        at = self._held.find(close, self._seen) if close else -1
        if at < 0:
            self._seen = max(0, len(self._held) - len(close) + 1)
            if not final:
                return False
        body = self._held if at < 0 else self._held[:at]
        try:
            calls = self._marks.read(body, self._tools) if self._marks and self._tools else None
        except Unfinished:
            calls = None
            if at >= 0 and self._patience > 1:
                self._patience -= 1
                self._seen = at + 1
                return True
        self._open, self._seen = None, 0
        if calls:
            self._calls += calls
            self._text.mark()
            self._take(len(body) + (len(close) if at >= 0 else 0))
        else:
            self._no_call(open)
        return True

    def _no_call(self, open: str) -> None:
        """It only looked like one: its mark is text, and what follows is read again."""
        self._text.add(open)
        self._patience -= 1
        if self._patience <= 0:
            self._opens, self._find = (), _NOTHING


class ChannelReader(AnswerReader):
    """For answers in messages, each with a head that says whom it is for (gpt-oss)."""

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._head: str | None = None  # of the message that is being read

    def _read(self, final: bool) -> None:
        while self._read_head(final) if self._head is None else self._read_body(final):
            pass

    def _read_head(self, final: bool) -> bool:
        at = self._held.find(_MESSAGE)
        if at < 0:
            if final:  # a head that has no message
                self._text.add(self._take(len(self._held)))
            return False
        self._head = self._take(at)
        self._take(len(_MESSAGE))
        self._text.mark()
        self._reasoning.mark()
        return True

    def _read_body(self, final: bool) -> bool:
        assert self._head is not None
        found = _MESSAGE_ENDS.search(self._held)
        name = _RECIPIENT.search(self._head)
        part = self._reasoning if "analysis" in self._head else self._text
        if found is None and not final:
            if name is None:
                part.add(self._take(self._certain(_ENDS, final)))
            return False
        body = self._take(found.start() if found else len(self._held))
        if found:
            self._take(len(found[0]) if found[0] not in _HEADS else 0)
        call = tool_call(name[1], body) if name and self._tools else None
        if call:
            self._calls.append(call)
        else:
            part.add(self._head + _MESSAGE + body if name else body)
        self._head = None
        return found is not None


_NOTHING = re.compile(r"(?!)")
_MESSAGE = "<|message|>"
_HEADS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", *_HEADS)
_MESSAGE_ENDS = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
