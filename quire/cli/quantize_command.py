"""`quire quantize`: write a model as a GGUF file with fewer bits."""

from __future__ import annotations

from pathlib import Path

import click

from quire import config
from quire.cli.list_command import told
from quire.cli.options import LoadBar, fetched
from quire.convert import FORMATS, convert
from quire.models.registry import open_weights


@click.command("quantize")
@click.argument("model")
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    default="q4_k_m",
    show_default=True,
    type=click.Choice(list(FORMATS), case_sensitive=False),
    help="What matrices become; embedding, output and delicate ones get more bits.",
)
@click.option("-t", "--threads", type=int, help="Threads that compute (one per core).")
def command(model: str, output: Path, form: str, threads: int | None) -> None:  # fmt: skip
    """Write MODEL (a folder of safetensors, a .gguf file, an alias) to OUTPUT as GGUF.

    Rows that are not whole blocks of 256 weights get the next type of 32: Q4_1 for Q4_K, Q5_1 for
    Q5_K, Q8_0 for Q6_K. Metadata, vocabulary and chat template are kept.
    """
    count = config.LoadConfig(threads=threads).thread_count()
    path = fetched(model)
    bar = LoadBar(least=0, text=f"quantizing to {form}")
    try:
        with open_weights(path) as file:
            made = convert(file, output, FORMATS[form.lower()], count, bar)
    finally:
        bar.close()
    if made.twice:
        click.echo(f"quire: {model} was quantized already, so its weights lost precision twice; "
                   "quantize from the original where you can", err=True)  # fmt: skip
    types = ", ".join(f"{name} {told(nbytes)}" for name, nbytes in made.types.items())
    click.echo(f"{made.path}: {told(made.before)} became {told(made.after)} ({types})")
