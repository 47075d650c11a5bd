"""A conversation and its branches: messages for people, a session for the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import quire
from quire.api.requests import Speculate
from quire.cli.human import plural, size_text
from quire.cli.streams import cut
from quire.errors import ContextError, QuireError, RequestError
from quire.text.detokenize import Detokenizer
from quire.types import Completion, Sampling

Message = dict[str, str]


@dataclass
class Branch:
    """One course of the conversation; the session holds what the model has seen of it."""

    messages: list[Message]
    session: quire.Session
    seen: str = ""
    """The session's tokens as text, answers as they were generated."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Where the last exchanges end in the session and in that text, as far as it only grew."""

    @property
    def n_start(self) -> int:
        """Messages that come before the first exchange."""
        return int(self.messages[:1] != [] and self.messages[0]["role"] == "system")


class Talk(Protocol):
    """What a person at a terminal talks with: a model that is loaded here, or a server."""

    name: str
    """The branch where the conversation is."""

    @property
    def branches(self) -> Iterable[str]: ...
    @property
    def title(self) -> str: ...
    @property
    def exchanges(self) -> int: ...
    @property
    def full(self) -> bool: ...
    def say(self, text: str, /) -> Iterator[str]: ...
    def cut(self) -> str | None: ...
    def rewind(self, count: int, /) -> None: ...
    def forget(self, count: int, /) -> None: ...
    def clear(self) -> None: ...
    def fork(self, name: str, /) -> None: ...
    def switch(self, name: str, /) -> None: ...
    def save(self, path: str, /) -> None: ...
    def load(self, path: str, /) -> None: ...
    def status(self) -> str: ...
    def memory(self) -> str: ...
    def close(self) -> None: ...


class Conversation:
    """What was said so far with a model, in one or more branches that share their past."""

    def __init__(
        self, llm: quire.LLM, sampling: Sampling, system: str | None = None,
        speculate: Speculate = None,
    ) -> None:  # fmt: skip
        self.llm = llm
        self.sampling = sampling
        self.speculate = speculate
        self._last: Completion | None = None  # what the last answer came to
        start = [{"role": "system", "content": system}] if system else []
        self.branches = {"main": Branch(start, llm.session())}
        self.name = "main"

    @property
    def title(self) -> str:
        """Who answers."""
        return f"{self.llm.path.name} on {self.llm.ops.name}"

    @property
    def branch(self) -> Branch:
        """Where the conversation is."""
        return self.branches[self.name]

    @property
    def exchanges(self) -> int:
        """How many questions were answered."""
        return (len(self.branch.messages) - self.branch.n_start) // 2

    @property
    def full(self) -> bool:
        """Whether the context has no room left."""
        return self.branch.session.position >= self.llm.n_ctx

    def cut(self) -> str | None:
        """Why the last answer has no end, if it has none."""
        if self._last is None or self._last.finish_reason != "length":
            return None
        return cut(len(self._last.token_ids), self.sampling.max_tokens)

    def status(self) -> str:
        """What the conversation takes, in one line."""
        llm, last = self.llm, self._last
        parts = [
            f"{self.branch.session.position:,} of {llm.n_ctx:,} tokens",
            size_text(llm.budget.used),
        ]
        if last is not None and last.timings.decoded_tokens:
            parts.append(f"{last.timings.decode_tokens_per_s:.0f} tokens/s")
        if len(self.branches) > 1:
            parts.append(f"in {self.name}")
        return " · ".join(parts)

    def memory(self) -> str:
        """What memory holds."""
        return str(self.llm.memory)

    def say(self, text: str) -> Iterator[str]:
        """One exchange, the answer piece by piece; a failed one leaves no trace.

        An answer that is not heard to its end counts as far as it went.
        """
        messages = self.branch.messages
        messages.append({"role": "user", "content": text})
        answer, start = "", None
        try:
            self._show(self.llm.chat_text(messages))
            start = self.branch.session.position
            with self.branch.session.stream(self.sampling, speculate=self.speculate) as stream:
                for piece in stream:
                    answer += piece
                    yield piece
            self._last = stream.completion
            self.branch.seen += answer + self._end()
        except QuireError:
            messages.pop()
            self._lose_track()  # the session may have part of an answer
            raise
        except (KeyboardInterrupt, GeneratorExit):
            messages.append({"role": "assistant", "content": answer})
            self._cut_off(answer, start)
            raise
        messages.append({"role": "assistant", "content": answer})
        self._mark_end()

    def _cut_off(self, answer: str, start: int | None) -> None:
        """Takes down what was heard; what the session has beyond it was made, and not heard."""
        branch = self.branch
        seen, branch.seen = branch.seen, ""
        if not seen or start is None:  # the question may not be there as a whole
            return
        made = branch.session.tokens[start:]
        heard = len(made)
        while len(said := self._text(made[:heard])) > len(answer):
            heard -= 1
        if said == answer:  # else the next message is compared, token by token
            if heard < len(made):
                branch.session.rewind(heard - len(made))
            branch.seen = seen + answer
            self._mark_end()

    def _text(self, tokens: list[int]) -> str:
        """What a listener hears of these tokens of an answer."""
        text = Detokenizer(self.llm.tokenizer, continuation=True)
        return "".join(map(text.push, tokens)) + text.flush()

    def _mark_end(self) -> None:
        self.branch.ends.append((self.branch.session.position, len(self.branch.seen)))

    def _lose_track(self) -> None:
        """Has the next message compared with the session, token by token."""
        self.branch.seen = ""
        self.branch.ends.clear()

    def _end(self) -> str:
        """What the model ended its turn with."""
        last = self.branch.session.tokens[-1]
        ends = self.llm.tokenizer.eog_ids
        return self.llm.tokenizer.token_text(last) if last in ends else ""

    def _show(self, text: str) -> None:
        """Lets the session hold this text; what it has seen already is not computed again."""
        branch = self.branch
        if branch.seen and text.startswith(branch.seen):
            new = self.llm.encode(text[len(branch.seen) :], add_special=False)
        else:
            branch.ends.clear()
            new = self._from_common(self.llm.text_tokens(text))
        branch.seen = ""  # until it is there: an interrupt may come between the two
        branch.session.append(new)
        branch.seen = text

    def _from_common(self, tokens: list[int]) -> list[int]:
        """Goes back to where the session's tokens differ from these; returns what is left."""
        branch = self.branch
        known = branch.session.tokens
        both = min(len(known), len(tokens) - 1)
        same = next((i for i in range(both) if known[i] != tokens[i]), both)
        if same < len(known):
            branch.session.rewind(same - len(known))
        return tokens[same:]

    def rewind(self, count: int) -> None:
        """Takes back the last exchanges."""
        check_count(count, self.exchanges, "taken back")
        here = self.branch
        if not here.seen or len(here.ends) <= count:
            return self._keep(here.messages[: -2 * count])
        position, length = here.ends[-count - 1]
        seen, here.seen = here.seen[:length], ""
        if position < here.session.position:
            here.session.rewind(position - here.session.position)
        here.seen = seen
        del here.ends[-count:], here.messages[-2 * count :]

    def forget(self, count: int) -> None:
        """Drops the oldest exchanges, which makes room; what follows is computed again."""
        check_count(count, self.exchanges, "forgotten")
        messages, start = self.branch.messages, self.branch.n_start
        self._keep(messages[:start] + messages[start + 2 * count :])

    def _keep(self, messages: list[Message]) -> None:
        """Holds these messages and no others: what only the rest needs leaves the session too."""
        self._lose_track()
        with suppress(ContextError):  # nearly full: then it is the next message that goes back
            text = self.llm.chat_text([*messages, {"role": "user", "content": ""}])
            self._from_common(self.llm.text_tokens(text))
        self.branch.messages = messages

    def clear(self) -> None:
        """Starts anew in this branch."""
        here = self.branch
        del here.messages[here.n_start :]
        if here.session.position:
            here.session.rewind(-here.session.position)
        self._lose_track()

    def fork(self, name: str) -> None:
        """Goes on in a new branch; the present one stays as it is."""
        check_new(name, self.branches)
        here = self.branch
        messages = [dict(message) for message in here.messages]
        self.branches[name] = Branch(messages, here.session.fork(), here.seen, [*here.ends])
        self.name = name

    def switch(self, name: str) -> None:
        """Goes to another branch."""
        check_known(name, self.branches)
        self.name = name

    def save(self, path: str) -> None:
        """Writes this branch to a file."""
        here = self.branch
        here.session.notes.update(messages=here.messages, seen=here.seen)
        here.session.save(path)

    def load(self, path: str) -> None:
        """Goes on from a file, in this branch."""
        session = self.llm.open(path)
        messages, seen = _messages(session.notes.get("messages")), session.notes.get("seen")
        if messages is None or not isinstance(seen, str):
            session.close()
            raise RequestError(f"{path}: the session was not saved by a conversation")
        self.branch.session.close()
        self.branches[self.name] = Branch(messages, session, seen)

    def close(self) -> None:
        """Gives all pages back."""
        for branch in self.branches.values():
            branch.session.close()


def check_count(count: int, exchanges: int, what: str) -> None:
    """Refuses more exchanges than there are."""
    if not 1 <= count <= exchanges:
        had = plural(exchanges, "exchange")
        raise RequestError(f"{count} cannot be {what}: the conversation has {had}")


def check_new(name: str, branches: Iterable[str]) -> None:
    """Refuses the name of a branch that there is."""
    if name in branches:
        raise RequestError(f"there is a branch {name!r} already; choose another name")


def check_known(name: str, branches: Iterable[str]) -> None:
    """Refuses the name of a branch that there is not."""
    if name not in branches:
        raise RequestError(f"there is no branch {name!r}; there are {', '.join(branches)}")


def _messages(noted: Any) -> list[Message] | None:
    """What a session's notes say of a conversation, if they do."""
    fields = {"role", "content"}
    if not isinstance(noted, list):
        return None
    for message in noted:
        if not isinstance(message, dict) or message.keys() != fields:
            return None
        if not all(isinstance(text, str) for text in message.values()):
            return None
    return noted
