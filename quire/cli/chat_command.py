"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Any

import click

import quire
from quire.cli.options import load_from, model_options, sampling_from, sampling_options
from quire.errors import QuireError
from quire.types import Sampling

_HELP = """\
/rewind [n]   take back the last n exchanges (1)
/clear        start anew
/memory       what memory holds
/help         this
/quit         leave (or end the input)"""


class Conversation:
    """The messages so far, and the model they are with."""

    def __init__(self, llm: quire.LLM, sampling: Sampling, system: str | None) -> None:
        self.llm = llm
        self.sampling = sampling
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def say(self, text: str) -> None:
        """One exchange: the answer appears as it comes; a failed one leaves no trace."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self.llm.stream(self.llm.chat_tokens(self.messages), self.sampling):
                answer += piece
                click.echo(piece, nl=False)
        except QuireError:
            self.messages.pop()
            raise
        except KeyboardInterrupt:
            click.echo(" [interrupted]", nl=False)
        click.echo()
        self.messages.append({"role": "assistant", "content": answer})

    def command(self, line: str) -> bool:
        """Does what a line with a slash says; False ends the conversation."""
        name, _, argument = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/rewind":
                self._rewind(argument)
            case "/clear":
                self.messages = list(self._start)
            case "/memory":
                click.echo(str(self.llm.memory))
            case "/help":
                click.echo(_HELP)
            case _:
                click.echo(f"there is no {name}\n{_HELP}", err=True)
        return True

    def _rewind(self, argument: str) -> None:
        exchanges = (len(self.messages) - len(self._start)) // 2
        count = int(argument) if argument.strip().isdigit() else 1 if not argument else 0
        if not 1 <= count <= exchanges:
            click.echo(f"/rewind takes 1 to {exchanges} here, not {argument or 1}", err=True)
            return
        del self.messages[len(self.messages) - 2 * count :]
        click.echo(f"took back {count}; {exchanges - count} left")


@click.command("chat")
@model_options
@sampling_options
@click.option("--system", help="What the model is told at the start.")
def command(**options: Any) -> None:
    """Talk with a model; /help lists what else a line can be."""
    system = options.pop("system")
    sampling = sampling_from(options)
    person = sys.stdin.isatty()
    with load_from(options) as llm:
        conversation = Conversation(llm, sampling, system)
        if person:
            click.secho(f"{llm.path.name} on {llm.ops.name}. /help for commands.", dim=True)
        while True:
            try:
                line = input("> " if person else "").strip()
            except (EOFError, KeyboardInterrupt):
                break
            if line and not _turn(conversation, line):
                break


def _turn(conversation: Conversation, line: str) -> bool:
    try:
        if line.startswith("/"):
            return conversation.command(line)
        conversation.say(line)
    except QuireError as error:
        click.echo(f"quire: {error}", err=True)
    return True
