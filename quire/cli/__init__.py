"""The command line: one file per command."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

import quire
from quire.cli import streams
from quire.cli.flags import in_flags
from quire.errors import QuireError

_COMMANDS = {
    "run": "Answer a prompt.",
    "chat": "Talk with a model.",
    "serve": "Serve models over HTTP.",
    "ps": "Tell what a running server holds.",
    "plan": "Tell what would be loaded where, and what fits.",
    "show": "Tell what a model file holds.",
    "list": "List the models that are here.",
    "pull": "Fetch a model.",
    "rm": "Delete a model that was fetched.",
    "quantize": "Write a model as a GGUF file with fewer bits.",
    "perplexity": "Tell how well a model predicts a text.",
    "bench": "Measure how fast a model runs here.",
}
_MEANT = {
    "ls": "list", "models": "list", "remove": "rm", "delete": "rm", "download": "pull",
    "fetch": "pull", "get": "pull", "server": "serve", "start": "serve", "generate": "run",
    "complete": "run", "ask": "run", "info": "show", "inspect": "show", "convert": "quantize",
    "ppl": "perplexity", "fit": "plan", "help": "--help",
}  # fmt: skip
"""What other programs call these."""


class _Lazy(click.Group):
    """Loads a command's file only when it is used, so that starting is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"quire.cli.{name}_command").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in _COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        like = _MEANT.get(name.lower()) or next(iter(get_close_matches(name, _COMMANDS, 1)), None)
        meant = f"; did you mean quire {like}?" if like else ""
        if " " in name.strip():
            meant = '; to answer a prompt: quire run "…"'
        raise click.UsageError(f"there is no command {name!r:.80}{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def main(self, *args: Any, **extra: Any) -> Any:
        streams.prepare()
        try:
            return super().main(*args, **extra)
        except OSError as error:  # --help to a full disk
            sys.exit(streams.status_of(error))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except QuireError as error:
            streams.note(f"quire: {in_flags(str(error))}")
            sys.exit(1)
        except KeyboardInterrupt:
            streams.note("")
            sys.exit(streams.INTERRUPTED)
        except OSError as error:
            sys.exit(streams.status_of(error))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(quire.__version__, prog_name="quire")
def main() -> None:
    """Run language models with memory you can branch, rewind and see."""
