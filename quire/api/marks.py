"""The marks of a session: places to come back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from quire.api.arguments import whole_number
from quire.engine.engine import Engine
from quire.engine.loop import Loop
from quire.engine.sequence import Mark, Sequence
from quire.errors import ClosedError, RequestError


class Marked:
    """A sequence of the engine that is marked and rewound."""

    def __init__(self, loop: Loop, sequence: Sequence, marks: Mapping[str, Mark]) -> None:
        self._loop = loop
        self._engine: Engine = loop.engine
        self._sequence = sequence
        self._marks: dict[str, Mark] = dict(marks)
        sequence.use_marks(self._marks)
        self._open = True

    @property
    def marks(self) -> dict[str, Mark]:
        """The marks made in this session, by name."""
        return dict(self._marks)

    def checkpoint(self, name: str | None = None) -> Mark:
        """A mark of this place, under a name of this session; moves no bytes."""
        return self._loop.call_with_room(lambda: self._mark(name))

    def _mark(self, name: str | None) -> Mark:
        if name is None:
            number = len(self._marks) + 1  # free, unless some were dropped or named so
            while f"mark-{number}" in self._marks:
                number += 1
            name = f"mark-{number}"
        elif not isinstance(name, str) or not name or name in self._marks:
            raise RequestError(
                f"a mark needs a name that this session has not yet, not {name!r:.80}"
            )
        self._marks[name] = mark = self._engine.history.mark(self._live(), name)
        return mark

    def drop(self, mark: Mark | str) -> Self:
        """Gives up a mark of this session, or one by its name, and the pages that only it holds."""

        def drop() -> None:
            self._live()
            if not isinstance(mark, (Mark, str)):
                raise RequestError(f"drop takes a mark of this session, not {mark!r:.80}")
            one = self._marked(mark) if isinstance(mark, str) else mark
            if self._marks.get(one.name) is not one:
                raise self._no_mark(one.name)
            self._engine.history.drop(self._marks.pop(one.name))

        self._loop.call(drop)
        return self

    def _marked(self, name: str) -> Mark:
        if name not in self._marks:
            raise self._no_mark(name)
        return self._marks[name]

    def _no_mark(self, name: str) -> RequestError:
        return RequestError(f"mark {name!r:.80} is none of this session; it has {[*self._marks]}")

    def rewind(self, to: Mark | str | int) -> Self:
        """Back to a mark, to one by its name, or by a negative number of tokens."""
        self._loop.call_with_room(lambda: self._rewind(to))
        return self

    def _rewind(self, to: Mark | str | int) -> None:
        sequence, history = self._resting(), self._engine.history
        n = sequence.length
        if isinstance(to, (Mark, str)):
            history.restore(sequence, self._marked(to) if isinstance(to, str) else to)
        elif (by := whole_number(to)) is not None and -n <= by < 0:
            history.truncate(sequence, n + by)
        else:
            ways = f"a mark, its name, or -1 to -{n} tokens" if n else "a mark or its name"
            raise RequestError(f"rewind takes {ways} here, not {to!r:.80}")

    def _live(self) -> Sequence:
        if not self._open:
            raise ClosedError("this session is closed; open another with llm.session()")
        self._engine.check_open()
        return self._sequence

    def _resting(self) -> Sequence:
        """The sequence, while nothing runs on it."""
        self._loop.check_idle(self._live())
        return self._sequence
