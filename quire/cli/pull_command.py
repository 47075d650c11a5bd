"""`quire pull`: fetch a model."""

from __future__ import annotations

import click

from quire import config
from quire.cli.options import LoadBar
from quire.weights import pull


@click.command("pull")
@click.argument("model", default="smollm2")
def command(model: str) -> None:
    """Fetch MODEL (an alias, or hf:owner/repo/file) into the cache and say where it lies."""
    bar = LoadBar(least=0, text=f"fetching {model}")
    try:
        path = pull.resolve(model, config.cache_folder(), bar)
    finally:
        bar.close()
    click.echo(path)
