"""`quire quantize`: write a model as a GGUF file with fewer bits."""

from __future__ import annotations

from pathlib import Path

import click

from quire import config
from quire.cli.flags import Command
from quire.cli.list_command import told
from quire.cli.options import LoadBar, fetched
from quire.convert import FORMATS, convert
from quire.errors import RequestError
from quire.models.registry import open_weights

_FORMAT = click.Choice(list(FORMATS), case_sensitive=False)


@click.command("quantize", cls=Command)
@click.argument("model")
@click.argument("output", type=click.Path(path_type=Path))
@click.argument("kind", metavar="[FORMAT]", required=False, type=_FORMAT)
@click.option("--format", "form", type=_FORMAT, metavar="FORMAT", help="The same as FORMAT.")
@click.option("-t", "--threads", type=int, help="Threads that compute (one per core).")
def command(
    model: str, output: Path, kind: str | None, form: str | None, threads: int | None
) -> None:
    """Write MODEL (a folder of safetensors, a .gguf file, an alias) to OUTPUT as GGUF.

    FORMAT is what matrices become: q4_k_m (unless you say), q4_k_s, q4_0, q4_1, q5_k_m, q5_k_s,
    q5_0, q5_1, q6_k, q8_0, f16, bf16 or f32, in capitals or not. Embedding, output and delicate
    matrices get more bits. Rows that are not whole blocks of 256 weights get the next type of 32:
    Q4_1 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K. Metadata, vocabulary and chat template are kept.
    """
    if kind and form and kind != form:
        raise RequestError(f"there are two formats, {kind} and --format {form}; give one")
    form = kind or form or "q4_k_m"
    count = config.LoadConfig(threads=threads).thread_count()
    path = fetched(model)
    bar = LoadBar(least=0, text=f"quantizing to {form}")
    try:
        with open_weights(path) as file:
            made = convert(file, output, FORMATS[form], count, bar)
    finally:
        bar.close()
    if made.twice:
        click.echo(f"quire: {model} was quantized already, so its weights lost precision twice; "
                   "quantize from the original where you can", err=True)  # fmt: skip
    types = ", ".join(f"{name} {told(nbytes)}" for name, nbytes in made.types.items())
    click.echo(f"{made.path}: {told(made.before)} became {told(made.after)} ({types})")
