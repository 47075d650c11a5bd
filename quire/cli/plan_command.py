"""`quire plan`: what would be loaded where, before anything is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import click

import quire
from quire.cli.flags import Command, in_flags
from quire.cli.options import load_settings, plan_options
from quire.errors import RequestError


@click.command("plan", cls=Command)
@click.argument("model", default="smollm2")
@click.option("--device", "devices", multiple=True, metavar="KIND:SIZE",
              help="A device that need not be here, such as cuda:24GiB or cpu:64GiB; may be given "
              "several times. Without it, or by name (cuda:0), those that are here.")  # fmt: skip
@click.option("--parallel", type=int, default=1, show_default=True,
              help="Sequences that there is to be room for at once.")  # fmt: skip
@click.option("--checkpoints", type=int, default=0, help="Marks that there is to be room for.")
@click.option("--draft", metavar="MODEL", help="A model that drafts for this one.")
@plan_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(model: str, as_json: bool, **options: Any) -> None:
    """Tell what of MODEL would go where, byte by byte, and what room that leaves.

    Nothing is loaded: a file's header is enough, and devices may be described.
    """
    devices = _devices(",".join(options.pop("devices")))
    options["device"] = "auto"
    settings = load_settings(options) | devices
    settings["n_parallel"] = options.pop("parallel")
    try:
        found = quire.plan(model, **settings, **options)
    except RequestError as error:
        if error.param != "device":
            raise
        # cuda:24 is the GPU of that number.
        more = "--device cuda:24GiB describes one that is not here"
        raise RequestError(f"{error}; {more}") from error
    found = replace(found, notes=tuple(map(in_flags, found.notes)))
    click.echo(json.dumps(found.as_dict()) if as_json else str(found), nl=as_json)


def _devices(texts: str) -> dict[str, Any]:
    """Devices that are here by their names, others by what they have."""
    if not texts:
        return {}
    here = all(re.fullmatch(r"auto|(cpu|cuda|reference)(:\d{1,3})?", t) for t in texts.split(","))
    return {"device": texts} if here else {"devices": texts.split(",")}
