"""`quire perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from quire.api.perplexity import perplexity_by_chunk
from quire.cli.flags import Command
from quire.cli.options import load_from, model_options
from quire.errors import RequestError


@click.command("perplexity", cls=Command)
@click.argument("file")
@model_options
@click.option(
    "--chunk",
    type=int,
    help="Tokens of a chunk; those of its second half are predicted (512, or -c if that is less).",
)
@click.option("--chunks", type=int, help="Most chunks to read (all).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    file: str, chunk: int | None, chunks: int | None, as_json: bool, **options: Any
) -> None:
    """How well a model predicts the text in FILE (- for standard input): lower is better.

    Counted as llama.cpp does: chunks that are read by themselves, each token of a second half
    predicted from all before it. Compare only figures of the same text and chunk.
    """
    if chunks is not None and chunks < 1:
        raise RequestError(f"--chunks must be above 0, not {chunks}")
    text = _text(file)
    with load_from(options) as llm:
        started = time.perf_counter()
        chunk = min(512, llm.n_ctx) if chunk is None else chunk
        for told in perplexity_by_chunk(llm, text, chunk, chunks):
            if sys.stderr.isatty() and not as_json:
                left = (time.perf_counter() - started) / told.chunks * (told.of - told.chunks)
                line = f"{told.chunks}/{told.of} chunks, {told.perplexity:.4f}, {left:.0f} s left"
                click.echo(f"\r{line}\033[K", err=True, nl=False)
        if sys.stderr.isatty() and not as_json:
            click.echo("\r\033[K", err=True, nl=False)
        if as_json:
            seconds = time.perf_counter() - started
            click.echo(json.dumps({**told.as_dict(), "chunk": chunk, "seconds": seconds,
                                   "model": str(llm.path), "device": llm.ops.name}))  # fmt: skip
            return
        click.echo(
            f"perplexity {told.perplexity:.4f} ± {told.stderr:.4f} "
            f"({told.tokens} tokens in {told.chunks} chunks of {chunk})"
        )


def _text(file: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return raw.decode()
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: not UTF-8: {error}") from error
