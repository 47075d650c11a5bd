"""`quire bench`: how fast a model runs here, and what it takes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import quire
from quire.cli.flags import Command
from quire.cli.measure import Bench, Figure, Sizes
from quire.cli.options import load_from, model_options
from quire.errors import RequestError


@click.command("bench", cls=Command)
@model_options
@click.option("--prompt", type=int, default=512, show_default=True, help="Tokens of a prompt.")
@click.option("-n", "--n-predict", type=int, default=128, show_default=True,
              help="Tokens to generate.")  # fmt: skip
@click.option("--sequences", type=int, default=16, show_default=True,
              help="Sequences that are decoded together.")  # fmt: skip
@click.option("--repeat", type=int, default=3, show_default=True,
              help="Looks at each figure; the median is told.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object, to keep and compare with.")
@click.option("--compare", type=click.Path(path_type=Path),
              help="Show figures beside those of an earlier --json.")  # fmt: skip
def command(
    prompt: int, n_predict: int, sequences: int, repeat: int, as_json: bool,
    compare: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Measure prefill, decoding, batches, known prompts, checkpoints, drafts and memory."""
    sizes = Sizes(prompt, n_predict, sequences, repeat)
    for name, value in asdict(sizes).items():
        if value < (2 if name == "decode" else 1):
            raise RequestError(f"--{name} is {value}, which leaves nothing to measure")
    before = None if compare is None else _read(compare)
    with load_from(options) as llm:
        if max(prompt + 1, n_predict + 256) > llm.n_ctx:
            raise RequestError(
                f"{prompt} tokens of prompt and {n_predict} generated do not fit the context of "
                f"{llm.n_ctx} tokens; pass smaller --prompt and -n, or a larger -c"
            )
        figures = _watched(Bench(llm, sizes))
        made = {"model": llm.path.name, "device": llm.ops.name, "quire": quire.__version__,
                "sizes": asdict(sizes), "figures": list(map(asdict, figures))}  # fmt: skip
    if as_json:
        click.echo(json.dumps(made))
    else:
        _print(made, figures, before)


def _watched(bench: Bench) -> list[Figure]:
    """All figures; a person sees each come."""
    found = []
    for figure in bench.figures():
        found.append(figure)
        if sys.stderr.isatty():
            click.echo(f"\r{figure.name}: {_told(figure.value)} {figure.unit}\033[K",
                       err=True, nl=False)  # fmt: skip
    if sys.stderr.isatty():
        click.echo("\r\033[K", err=True, nl=False)
    return found


def _read(path: Path) -> dict[str, Any]:
    """An earlier run; refused where it is none."""
    try:
        before = json.loads(path.read_text())
        figures = {one["name"]: float(one["value"]) for one in before["figures"]}
        return {"model": str(before["model"]), "figures": figures}
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path}: not what `quire bench --json` writes") from error


def _print(made: dict[str, Any], figures: list[Figure], before: dict[str, Any] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", title=f"{made['model']} on {made['device']}", title_justify="left")
    for column in ("now", *(("before", "gain") if before else ()), ""):
        table.add_column(column, justify="left" if not column else "right")
    for figure in figures:
        row = [figure.name, _told(figure.value)]
        if before:
            old = before["figures"].get(figure.name)
            row += ["", ""] if old is None else [_told(old), _gain(figure, old)]
        table.add_row(*row, figure.unit)
    Console().print(table)


def _told(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _gain(figure: Figure, old: float) -> str:
    """How many times better it is now."""
    if not (figure.value and old):
        return ""
    return f"{figure.value / old if figure.more_is_better else old / figure.value:.2f}×"
