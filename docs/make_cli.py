"""Writes docs/cli.md from the commands themselves; a test checks that the two agree."""

from __future__ import annotations

from pathlib import Path

import click

from quire.cli import main

PAGE = Path(__file__).parent / "cli.md"


def render() -> str:
    """Every command's --help, as one page."""
    wide = {"terminal_width": 90, "max_content_width": 90}
    top = click.Context(main, info_name="quire", **wide, **main.context_settings)
    parts = ["# Command line\n\nMade by `python docs/make_cli.py`.\n", _block("quire", main, top)]
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        assert command is not None
        context = click.Context(command, top, name, **wide)
        parts.append(_block(f"quire {name}", command, context))
    return "\n".join(parts)


def _block(title: str, command: click.Command, context: click.Context) -> str:
    return f"## {title}\n\n```\n{command.get_help(context)}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(render())
