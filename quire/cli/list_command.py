"""`quire list`: the models that are here."""

from __future__ import annotations

import click

from quire import config
from quire.weights import pull


@click.command("list")
def command() -> None:
    """List the models in the cache, and the aliases that can be fetched."""
    here = pull.cached_models(config.cache_folder())
    for model in here:
        click.echo(f"{model.alias:<12} {model.nbytes / 1e6:8.1f} MB  {model.path}")
    for alias in sorted(set(pull.ALIASES) - {model.alias for model in here}):
        click.echo(f"{alias:<12} not fetched; quire pull {alias}")
