"""`quire plan`: what would be loaded where, before anything is."""

from __future__ import annotations

import json
from typing import Any

import click

import quire
from quire.cli.options import check_size, place_options, places_from, size_options


@click.command("plan")
@click.argument("model", default="smollm2")
@click.option("--device", "devices", multiple=True, metavar="KIND:SIZE",
              help="A device that need not be here, such as cuda:24GiB or cpu:64GiB; may be given "
              "several times. Without it, the devices that are here.")  # fmt: skip
@click.option("-c", "--ctx-size", type=int, help="Tokens of context (the model's own).")
@click.option(
    "--memory-budget", callback=check_size, help="Most memory to use on each device, such as 4GiB."
)
@click.option("--kv-cache-tokens", type=int, help="Most tokens that K and V are kept for.")
@click.option("--parallel", type=int, default=1, show_default=True,
              help="Sequences that there is to be room for at once.")  # fmt: skip
@click.option("--checkpoints", type=int, default=0, help="Marks that there is to be room for.")
@click.option("--draft", metavar="MODEL", help="A model that drafts for this one.")
@place_options
@size_options
@click.option("--swa-full", is_flag=True, help="Keep what sliding windows have passed.")
@click.option("-t", "--threads", type=int, help="Threads that compute (one per core).")
@click.option("--quantize", type=click.Choice(["q8_0", "q4_0"]),
              help="Turn matrices of 16 or 32 bits into these blocks while loading.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(model: str, as_json: bool, **options: Any) -> None:
    """Tell what of MODEL would go where, byte by byte, and what room that leaves.

    Nothing is loaded: a file's header is enough, and devices may be described.
    """
    devices = list(options.pop("devices")) or None
    settings = places_from(options)
    found = quire.plan(
        model,
        devices=devices,
        n_ctx=options.pop("ctx_size") or None,
        n_parallel=options.pop("parallel"),
        type_k=options.pop("cache_type_k"),
        type_v=options.pop("cache_type_v"),
        **settings,
        **options,
    )
    click.echo(json.dumps(found.as_dict()) if as_json else str(found), nl=as_json)
