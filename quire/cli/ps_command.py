"""`quire ps`: what a running server holds."""

from __future__ import annotations

import json
from typing import Any

import click

from quire.cli.flags import Command
from quire.cli.human import size_text
from quire.cli.remote import URL, Remote


@click.command("ps", cls=Command)
@click.option("--url", default=URL, show_default=True, help="Where the server is.")
@click.option("--api-key", envvar="QUIRE_API_KEY", help="The key that it wants.")
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
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("model", "context", "held", "of", "cached prefixes")
    for model in models:
        told = memory.get(model["id"])
        if told is None:
            table.add_row(model["id"], "", "not loaded", "", "")
            continue
        used, limit = (size_text(told[name]) for name in ("used_bytes", "budget_bytes"))
        prefix = told["prefix"]
        cached = f"{prefix['entries']} ({prefix['hits']} hits)"
        table.add_row(model["id"], f"{model['max_model_len']:,}", used, limit, cached)
    console.print(table)
    table = Table("session", "model", "tokens", "bytes", "shared", "status", "from", "marks")
    for one in sessions:
        held = one["memory"]
        table.add_row(
            one["id"], one["model"], f"{one['position']:,}", size_text(held["bytes"]),
            size_text(held["bytes_shared"]), one["status"], one["parent"] or "",
            ", ".join(mark["name"] for mark in one["checkpoints"]),
        )  # fmt: skip
    console.print(table if sessions else "no sessions")
