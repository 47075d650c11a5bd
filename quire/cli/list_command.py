"""`quire list`: the models that are here, and those that can be fetched by a short name."""

from __future__ import annotations

import json
import time

import click

from quire import config
from quire.cli.flags import Command
from quire.weights import catalog

_AGES = (("days", 86_400), ("hours", 3_600), ("minutes", 60))


@click.command("list", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(as_json: bool) -> None:
    """List the models in the cache with size and age, and the aliases that can be fetched."""
    here = catalog.kept_models(config.cache_folder())
    short = {alias.model: name for name, alias in catalog.HUB_ALIASES.items()}
    sizes = {name: alias.wheel_bytes for name, alias in catalog.ALIASES.items()}
    sizes |= {name: alias.nbytes for name, alias in catalog.HUB_ALIASES.items()}
    for kept in here:
        if kept.whole:
            sizes.pop(short.get(kept.name, kept.name), None)
    if as_json:
        click.echo(json.dumps({"models": [_object(k, short) for k in here], "aliases": sizes}))
        return
    rows = [_row(kept, short) for kept in here]
    width = max((len(row[0]) for row in rows), default=0)
    for name, size, age, note in rows:
        click.echo(f"{name:<{width}}  {size:>9}  {age:>14}  {note}".rstrip())
    if sizes:
        click.echo("\n" * bool(rows) + "`quire pull NAME` fetches any of these:")
        width = max(map(len, sizes))
        for alias, nbytes in sizes.items():
            model = catalog.HUB_ALIASES.get(alias)
            line = f"  {alias:<{width}}  {told(nbytes):>9}  {model.model if model else ''}"
            click.echo(line.rstrip())


def _row(kept: catalog.Kept, short: dict[str, str]) -> tuple[str, str, str, str]:
    note = f"alias {short[kept.name]}" if kept.name in short else ""
    if not kept.whole:
        note = f"not whole: {told(kept.nbytes)} are here; `quire pull {kept.name}` goes on"
    name = kept.name or str(kept.path)
    return name, told(kept.total), _age(time.time() - kept.since), note


def _object(kept: catalog.Kept, short: dict[str, str]) -> dict[str, object]:
    return {
        "name": kept.name, "alias": short.get(kept.name), "path": str(kept.path),
        "bytes": kept.total, "whole": kept.whole, "fetched": kept.since,
    }  # fmt: skip


def told(nbytes: int) -> str:
    """Bytes as people say them, in powers of ten as downloads are counted."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _age(seconds: float) -> str:
    for unit, size in _AGES:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
