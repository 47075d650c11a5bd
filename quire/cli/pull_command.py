"""`quire pull`: fetch a model."""

from __future__ import annotations

import click

from quire.cli.flags import Command
from quire.cli.options import fetched


@click.command("pull", cls=Command)
@click.argument("model", default="smollm2")
def command(model: str) -> None:
    """Fetch MODEL into the cache and say where it lies; what broke off goes on.

    MODEL is an alias (`quire list` shows them), owner/repository of the Hugging Face Hub, such as
    Qwen/Qwen3-4B-GGUF, with a quantization if you like, such as Qwen/Qwen3-4B-GGUF:Q8_0, or
    hf:owner/repository/file.
    """
    click.echo(fetched(model))
