"""A conversation that lives in sessions of a server, one for each branch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from quire.cli.conversation import Message, check_count, check_known, check_new
from quire.cli.human import plural, size_text
from quire.cli.remote import LARGER, Answer, Missing, Remote
from quire.cli.streams import cut
from quire.errors import RequestError

_ENDS_S, _NAP_S = 10.0, 0.02
"""How long an answer that was interrupted may take to end, and how often that is asked for."""


@dataclass
class _Branch:
    """One course of the conversation, and the session that holds it."""

    id: str
    messages: list[Message]
    ends: list[int] = field(default_factory=list)
    """Where the last exchanges end in the session."""


class RemoteConversation:
    """What was said so far; the server computes only what is new, and goes back by itself."""

    def __init__(
        self, server: Remote, sampling: dict[str, Any], model: dict[str, Any],
        system: str | None = None,
    ) -> None:  # fmt: skip
        self._server, self._sampling = server, sampling
        self._start = [{"role": "system", "content": system}] if system else []
        self._here = server.ask("POST", "/v1/sessions", model)  # the session as it was last seen
        self._model = self._here["model"]
        told = server.ask("GET", "/v1/models")["data"]
        self._n_ctx = next(one["max_model_len"] for one in told if one["id"] == self._model)
        self.branches = {"main": _Branch(self._here["id"], [*self._start])}
        self.name = "main"
        self._last = Answer()

    @property
    def title(self) -> str:
        """Who answers."""
        return f"{self._model} at {self._server.url}"

    @property
    def branch(self) -> _Branch:
        """Where the conversation is."""
        return self.branches[self.name]

    @property
    def exchanges(self) -> int:
        """How many questions were answered."""
        return (len(self.branch.messages) - len(self._start)) // 2

    @property
    def full(self) -> bool:
        """Whether the context has no room left."""
        return bool(self._here["position"] >= self._n_ctx)

    def say(self, text: str) -> Iterator[str]:
        """One exchange, the answer piece by piece; a failed one leaves no trace."""
        self._look()
        here, self._last, said = self.branch, Answer(), ""
        asked = [*here.messages, {"role": "user", "content": text}]
        body = {**self._sampling, "model": self._model, "messages": asked, "session_id": here.id}
        try:
            with closing(self._server.stream("/v1/chat/completions", body)) as events:
                for piece in self._last.pieces(events):
                    said += piece
                    yield piece
        except (KeyboardInterrupt, GeneratorExit):
            here.messages = [*asked, {"role": "assistant", "content": said}]
            here.ends.clear()  # it may still have been under way
            with suppress(RequestError):  # the status tells what the session holds now
                self._look()
            raise
        here.messages = [*asked, {"role": "assistant", "content": said}]
        self._look()
        here.ends.append(self._here["position"])

    def cut(self) -> str | None:
        """Why the last answer has no end, if it has none."""
        if self._last.reason != "length":
            return None
        return cut(self._last.tokens, self._sampling["max_tokens"], LARGER)

    def rewind(self, count: int) -> None:
        """Takes back the last exchanges."""
        check_count(count, self.exchanges, "taken back")
        here = self.branch
        self._look()
        if count == self.exchanges:
            self._back(0)
        elif len(here.ends) > count:
            self._back(here.ends[-count - 1])
        del here.ends[-count:], here.messages[-2 * count :]

    def forget(self, count: int) -> None:
        """Drops the oldest exchanges; what follows is computed again."""
        check_count(count, self.exchanges, "forgotten")
        start = len(self._start)
        self._look()
        self._back(0)
        self.branch.ends.clear()
        del self.branch.messages[start : start + 2 * count]

    def clear(self) -> None:
        """Starts anew in this branch."""
        self._look()
        self._back(0)
        self.branch.ends.clear()
        self.branch.messages = [*self._start]

    def fork(self, name: str) -> None:
        """Goes on in a new branch; the present one stays as it is."""
        check_new(name, self.branches)
        self._look()
        here = self.branch
        self._here = self._server.ask("POST", f"/v1/sessions/{here.id}/fork", {})
        self.branches[name] = _Branch(self._here["id"], [*here.messages], [*here.ends])
        self.name = name

    def switch(self, name: str) -> None:
        """Goes to another branch."""
        check_known(name, self.branches)
        self.name = name
        self._look()

    def save(self, name: str) -> None:
        """Has the server write this branch to a file of its own."""
        self._look()
        self._server.ask("POST", f"/v1/sessions/{self.branch.id}/save", {"name": name})

    def load(self, name: str) -> None:
        """A server's files hold a context, and not who said what."""
        raise RequestError(
            f"a server's conversations are not loaded here; POST /v1/sessions opens {name!r:.80}"
        )

    def status(self) -> str:
        """What the conversation takes, in one line."""
        parts = [
            f"{self._here['position']:,} of {self._n_ctx:,} tokens",
            size_text(self._here["memory"]["bytes"]),
        ]
        return " · ".join([*parts, f"in {self.name}"] if len(self.branches) > 1 else parts)

    def memory(self) -> str:
        """What the branch holds."""
        self._look()
        held = self._here["memory"]
        shared = f"{size_text(held['bytes_shared'])} in {held['pages_shared']} of them"
        return (
            f"{plural(self._here['position'], 'token')} in {plural(held['pages'], 'page')}, "
            f"{size_text(held['bytes'])}; shared: {shared}\n"
            f"quire ps --url {self._server.url} tells what the whole server holds"
        )

    def close(self) -> None:
        """Gives all pages back; a server that is gone holds none."""
        for branch in self.branches.values():
            with suppress(RequestError):
                self._seen(branch.id)
                self._server.ask("DELETE", f"/v1/sessions/{branch.id}")

    def _look(self) -> None:
        """What the session holds; a server that was started anew gets another one."""
        here = self.branch
        try:
            self._here = self._seen(here.id)
        except Missing:
            self._here = self._server.ask("POST", "/v1/sessions", {"model": self._model})
            here.id = self._here["id"]
            here.ends.clear()

    def _seen(self, id: str) -> Any:
        """What a session holds once nothing runs there: until then it is refused to go on."""
        until = time.monotonic() + _ENDS_S
        while (seen := self._server.ask("GET", f"/v1/sessions/{id}"))["status"] == "generating":
            if time.monotonic() >= until:
                break
            time.sleep(_NAP_S)
        return seen

    def _back(self, position: int) -> None:
        """Lets the session go back at once, so that what is unsaid is held no longer."""
        if (tokens := self._here["position"] - position) > 0:
            path = f"/v1/sessions/{self.branch.id}/rewind"
            self._here = self._server.ask("POST", path, {"tokens": tokens})
