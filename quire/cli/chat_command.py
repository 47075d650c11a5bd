"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import count as count_from
from typing import Any

import click

from quire import config
from quire.cli.conversation import Conversation, Talk
from quire.cli.drafts import drafts_from
from quire.cli.flags import Command, in_flags
from quire.cli.human import plural
from quire.cli.options import (
    load_from,
    model_options,
    sampling_from,
    sampling_options,
)
from quire.cli.remote import Remote, model_asked, or_remote, sampling_body
from quire.cli.remote_conversation import RemoteConversation
from quire.cli.streams import note, write
from quire.errors import ContextError, QuireError, RequestError

_COMMANDS = {
    "/rewind": "[n]     take back the last n exchanges (1)",
    "/forget": "[n]     drop the oldest n exchanges (half of them), to make room",
    "/fork": "[name]    go on in a new branch; the present one stays as it is",
    "/switch": "name    go to another branch",
    "/branches": "      list them",
    "/save": "file      keep this branch, with what the model computed, in a file",
    "/load": "file      go on from such a file",
    "/clear": "         start anew",
    "/memory": "        what memory holds",
    "/help": "          this",
    "/quit": "          leave (or Ctrl-D)",
}
_HELP = "\n".join(f"{name} {told}" for name, told in _COMMANDS.items())
_KEYS = "Enter sends, Alt-Enter begins a new line, Ctrl-C empties the line or ends an answer."
_SHORT = 500  # characters of a message that do not push everything else off the screen
_FULL = "/forget drops the oldest exchanges, /rewind the last, /clear all"


def obey(conversation: Talk, line: str) -> bool:
    """Does what a line with a slash says; False ends the conversation."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    match name:
        case "/quit" | "/exit":
            return False
        case "/rewind":
            number = _number(name, argument, 1)
            conversation.rewind(number)
            click.echo(f"took back {number}; {conversation.exchanges} left")
        case "/forget":
            number = _number(name, argument, max(conversation.exchanges // 2, 1))
            conversation.forget(number)
            click.echo(f"forgot the first {number}; {conversation.exchanges} left")
        case "/fork":
            names = (f"branch-{i}" for i in count_from(1))
            conversation.fork(argument or next(n for n in names if n not in conversation.branches))
            click.echo(f"now in {conversation.name}; the other stays as it is")
        case "/switch" if not argument:
            known = ", ".join(conversation.branches)
            note(f"/switch needs the name of a branch; there are {known}")
        case "/switch":
            conversation.switch(argument)
            click.echo(f"now in {conversation.name}, {plural(conversation.exchanges, 'exchange')}")
        case "/branches":
            for known in conversation.branches:
                click.echo(f"{'*' if known == conversation.name else ' '} {known}")
        case "/save" | "/load" if not argument:
            note(f"{name} needs the name of a file")
        case "/save":
            conversation.save(argument)
            click.echo(f"saved {plural(conversation.exchanges, 'exchange')}")
        case "/load":
            conversation.load(argument)
            click.echo(f"loaded {plural(conversation.exchanges, 'exchange')}")
        case "/clear":
            dropped = plural(conversation.exchanges, "exchange")
            conversation.clear()
            click.echo(f"cleared; forgot {dropped}")
        case "/memory":
            click.echo(conversation.memory())
        case "/help":
            click.echo(f"{_HELP}\n{_KEYS}")
        case _:
            note(f"there is no {name}\n{_HELP}")
    return True


def _number(name: str, argument: str, default: int) -> int:
    if argument and not (argument.isascii() and argument.isdigit()):
        raise RequestError(f"{name} takes a number of exchanges, not {argument!r}")
    return int(argument or default)


def _remotely(server: Remote, options: dict[str, Any]) -> None:
    """`quire chat --url`."""
    model, system = model_asked(options), options["system"]
    _talk(RemoteConversation(server, sampling_body(options), model, system))


@click.command("chat", cls=Command)
@model_options
@sampling_options
@click.option("--system", help="What the model is told at the start.")
@or_remote(_remotely)
def command(**options: Any) -> None:
    """Talk with a model; /help lists what else a line can be.

    In a terminal, several lines are pasted as they are or typed with Alt-Enter, and what was typed
    before comes back with the arrow keys. Otherwise every line of standard input is a message.
    """
    system = options.pop("system")
    fields, speculate = sampling_from(options), options.pop("speculate")
    with load_from(options) as llm, drafts_from(speculate, llm) as drafts:
        if not llm.has_template:
            raise RequestError(
                f"{llm.path.name} has no chat template, so it was not made for conversations; "
                'quire run --raw "Once upon a time" goes on with a text'
            )
        sampling = llm.chat_sampling.replace(**fields)
        _talk(Conversation(llm, sampling, system, drafts))


def _talk(conversation: Talk) -> None:
    """A conversation from its first line to its last."""
    try:
        if sys.stdin and sys.stdin.isatty() and sys.stdout.isatty():
            _with_person(conversation)
        else:
            _with_lines(conversation)
    finally:
        conversation.close()


def _with_lines(conversation: Talk) -> None:
    """Every line is a message; an interrupt ends it all."""
    for line in sys.stdin or ():  # it may be closed
        if line.strip() and _turn(conversation, line.strip()) is None:
            return


def _with_person(conversation: Talk) -> None:
    read, begun = _reader(conversation), ""
    note(f"{conversation.title}. /help for commands, Ctrl-D to leave.", dim=True)
    while True:
        try:
            line = read(begun).strip()
            begun = ""
            answered = _turn(conversation, line) if line else True
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo(" [interrupted]")
            continue
        if answered is None:
            return
        if answered or line.startswith("/"):
            continue
        if len(line) <= _SHORT:
            begun = line  # not lost: it can be sent again once there is room
        else:
            note("your message is an arrow up")


def _reader(conversation: Talk) -> Callable[[str], str]:
    """What reads a message, given how it begins."""
    if config.dumb_terminal():
        return lambda begun: input("> ")
    from quire.cli.editor import Editor

    def places(command: str) -> Sequence[str]:
        return list(conversation.branches) if command == "/switch" else ()

    history = config.cache_folder() / "chat_history"
    return Editor(list(_COMMANDS), places, conversation.status, history).read


def _turn(conversation: Talk, line: str) -> bool | None:
    """One line of a person: whether it was answered; None ends the conversation."""
    try:
        if line.startswith("/"):
            return obey(conversation, line) or None
        write(conversation.say(line))
    except ContextError as error:
        note(f"quire: {in_flags(str(error))}\n{_FULL}")
        return False
    except QuireError as error:
        note(f"quire: {in_flags(str(error))}")
        return False
    if told := conversation.cut():
        note(f"quire: {told}")
        if conversation.full:
            note(_FULL)
    return True
