"""The line that a person types in: any length, several lines, history, completion, a status."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_LEAVE = "Ctrl-D or /quit leaves"


class Editor:
    """Reads from a terminal. Enter ends a message, Alt-Enter a line; pastes come whole.

    Ctrl-C empties the line and nothing else: what was said so far stays.
    """

    def __init__(
        self, commands: Sequence[str], places: Callable[[str], Sequence[str]],
        status: Callable[[], str], history: Path,
    ) -> None:  # fmt: skip
        self._status = status
        self._hint = ""
        self._session: PromptSession[str] = PromptSession(
            "> ", history=_history(history), completer=_Commands(commands, places),
            complete_while_typing=True, bottom_toolbar=self._toolbar, key_bindings=self._keys(),
            prompt_continuation="  ", enable_history_search=False,
        )  # fmt: skip

    def read(self, begun: str = "") -> str:
        """What was typed, after what is there already; EOFError when the person leaves."""
        self._hint = ""
        return self._session.prompt(default=begun)

    def _toolbar(self) -> str:
        # The hint first: it is the newest, and a narrow terminal cuts the end.
        return f" {self._hint}{' · ' if self._hint else ''}{self._status()}"

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("c-c")
        @keys.add("<sigint>")
        def clear(event: KeyPressEvent) -> None:
            self._hint = "" if event.current_buffer.text else _LEAVE
            event.current_buffer.reset()

        @keys.add("escape", "enter")
        def another_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return keys


class _Commands(Completer):
    """Completes commands, names of files behind /save and /load, and what else they take."""

    def __init__(self, commands: Sequence[str], places: Callable[[str], Sequence[str]]) -> None:
        self._commands = commands
        self._places = places
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Any]:
        """What could be meant so far."""
        text = document.text_before_cursor
        command, space, argument = text.partition(" ")
        if not text.startswith("/"):
            return
        if space and command in ("/save", "/load"):
            yield from self._paths.get_completions(Document(argument), event)
            return
        for name in self._places(command) if space else self._commands:
            typed = argument if space else text
            if name.startswith(typed):
                yield Completion(name, start_position=-len(typed))


def _history(path: Path) -> History:
    """What was typed before, for its owner's eyes only; forgotten where it cannot be kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
