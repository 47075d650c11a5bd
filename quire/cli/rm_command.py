"""`quire rm`: delete models that were fetched."""

from __future__ import annotations

import click

from quire import config
from quire.cli.flags import Command
from quire.cli.list_command import told
from quire.weights import catalog


@click.command("rm", cls=Command)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
def command(models: tuple[str, ...]) -> None:
    """Delete MODEL from the cache, by the name that `quire list` shows or by its alias."""
    for model in models:
        kept = catalog.remove(model, config.cache_folder())
        click.echo(f"removed {kept.name or kept.path} ({told(kept.total)})")
