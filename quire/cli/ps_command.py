"""`quire ps`: what a running server holds."""

from __future__ import annotations

import json
from itertools import zip_longest
from typing import Any

import click

from quire.cli.flags import Command
from quire.cli.human import plural, size_text
from quire.cli.remote import URL, Remote, key_option


@click.command("ps", cls=Command)
@click.option("--url", default=URL, show_default=True, help="Where the server is.")
@key_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(url: str, api_key: str | None, as_json: bool) -> None:
    """Tell what a running server holds: models, memory, sessions."""
    server = Remote(url, api_key)
    models = server.ask("GET", "/v1/models")["data"]
    memory = {}
    for model in models:
        if model["loaded"]:
            memory[model["id"]] = server.ask("GET", f"/v1/memory?model={model['id']}")
    sessions = server.ask("GET", "/v1/sessions")["data"]
    if as_json:
        print(json.dumps({"models": models, "memory": memory, "sessions": sessions}))
        return
    _print(models, memory, sessions)


def _print(models: list[Any], memory: dict[str, Any], sessions: list[Any]) -> None:
    rows = [["model", "context", "held", "of", "cached prefixes"]]
    for model in models:
        told = memory.get(model["id"])
        if told is None:
            rows.append([model["id"], "", "not loaded"])
            continue
        used, limit = (size_text(told[name]) for name in ("used_bytes", "budget_bytes"))
        prefix = told["prefix"]
        cached = f"{prefix['entries']} ({plural(prefix['hits'], 'hit')})"
        rows.append([model["id"], f"{model['max_model_len']:,}", used, limit, cached])
    _columns(rows)
    click.echo()
    rows = [["session", "tokens", "bytes", "shared", "status", "model", "from", "marks"]]
    for one in sessions:
        held = one["memory"]
        sizes = [size_text(held["bytes"]), size_text(held["bytes_shared"])]
        marks = ", ".join(mark["name"] for mark in one["checkpoints"])
        rows.append(
            [one["id"], f"{one['position']:,}", *sizes, one["status"], one["model"],
             one["parent"] or "-", marks]
        )  # fmt: skip
    if sessions:
        _columns(rows)
    else:
        click.echo("no sessions")


def _columns(rows: list[list[str]]) -> None:
    """One line each: names are what one asks for next, so none is cut to fit a terminal."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    for row in rows:
        click.echo("  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=False)).rstrip())
