"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from itertools import count as count_from
from typing import Any

import click

from quire.cli.conversation import Conversation
from quire.cli.options import (
    drafts_from,
    load_from,
    model_options,
    sampling_from,
    sampling_options,
)
from quire.errors import QuireError

_HELP = """\
/rewind [n]     take back the last n exchanges (1)
/fork [name]    go on in a new branch; the present one stays as it is
/switch name    go to another branch
/branches       list them
/save file      keep this branch, with what the model computed, in a file
/load file      go on from such a file
/clear          start anew
/memory         what memory holds
/help           this
/quit           leave (or end the input)"""


def obey(conversation: Conversation, line: str) -> bool:
    """Does what a line with a slash says; False ends the conversation."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    match name:
        case "/quit" | "/exit":
            return False
        case "/rewind":
            if argument and not (argument.isascii() and argument.isdigit()):
                click.echo(f"/rewind takes a number of exchanges, not {argument!r}", err=True)
                return True
            count = int(argument or 1)
            conversation.rewind(count)
            click.echo(f"took back {count}; {conversation.exchanges} left")
        case "/fork":
            names = (f"branch-{i}" for i in count_from(1))
            conversation.fork(argument or next(n for n in names if n not in conversation.branches))
            click.echo(f"now in {conversation.name}; the other stays as it is")
        case "/switch":
            conversation.switch(argument)
            click.echo(f"now in {conversation.name}, {conversation.exchanges} exchanges")
        case "/branches":
            for known in conversation.branches:
                click.echo(f"{'*' if known == conversation.name else ' '} {known}")
        case "/save" | "/load" if not argument:
            click.echo(f"{name} needs the name of a file", err=True)
        case "/save":
            conversation.save(argument)
            click.echo(f"saved {conversation.exchanges} exchanges")
        case "/load":
            conversation.load(argument)
            click.echo(f"loaded {conversation.exchanges} exchanges")
        case "/clear":
            conversation.clear()
        case "/memory":
            click.echo(str(conversation.llm.memory))
        case "/help":
            click.echo(_HELP)
        case _:
            click.echo(f"there is no {name}\n{_HELP}", err=True)
    return True


@click.command("chat")
@model_options
@sampling_options
@click.option("--system", help="What the model is told at the start.")
def command(**options: Any) -> None:
    """Talk with a model; /help lists what else a line can be."""
    system = options.pop("system")
    sampling, speculate = sampling_from(options), options.pop("speculate")
    person = sys.stdin.isatty()
    with load_from(options) as llm, drafts_from(speculate, llm) as drafts:
        conversation = Conversation(llm, sampling, system, drafts)
        if person:
            click.secho(f"{llm.path.name} on {llm.ops.name}. /help for commands.", dim=True)
        while True:
            try:
                line = input("> " if person else "").strip()
            except (EOFError, KeyboardInterrupt):
                break
            if line and not _turn(conversation, line):
                break
        conversation.close()


def _turn(conversation: Conversation, line: str) -> bool:
    try:
        if line.startswith("/"):
            return obey(conversation, line)
        for piece in conversation.say(line):
            click.echo(piece, nl=False)
        click.echo()
    except KeyboardInterrupt:
        click.echo(" [interrupted]")
    except QuireError as error:
        click.echo(f"quire: {error}", err=True)
    return True
