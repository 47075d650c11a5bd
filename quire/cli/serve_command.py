"""`quire serve`: models over HTTP."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from quire.cli.drafts import served_drafts
from quire.cli.flags import Command
from quire.cli.options import fetched, load_options, load_settings
from quire.errors import RequestError


@click.command("serve", cls=Command)
@click.option("-m", "--model", "models", multiple=True, default=("smollm2",), show_default=True,
              help="Alias, .gguf file, folder of safetensors, or a model of the Hugging Face Hub: "
              "owner/repo or owner/repo:quant; given more than once, each is loaded when it is "
              "first used.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535))
@click.option("--api-key", "api_keys", multiple=True, envvar="QUIRE_API_KEY",
              help="A key that clients must send; may be given several times.")  # fmt: skip
@click.option("--no-api-key", is_flag=True, help="Let everybody in, on any address.")
@click.option("--allow-origin", "origins", multiple=True, metavar="ORIGIN",
              help="A page that may ask from a browser, such as https://chat.example, or * for "
              "all (none but its own); may be given several times.")  # fmt: skip
@click.option("--max-running", default=64, show_default=True, type=click.IntRange(1),
              help="Most answers that are made at the same time.")  # fmt: skip
@click.option("--max-queue", default=256, show_default=True, type=click.IntRange(0),
              help="Most requests that wait for that; more are refused.")  # fmt: skip
@click.option("--session-dir", type=click.Path(file_okay=False, path_type=Path),
              help="Where sessions are saved (the user's cache folder).")  # fmt: skip
@click.option("--save-sessions", default="never", show_default=True,
              type=click.Choice(["turn", "drain", "never"]),
              help="Save sessions after every turn, or when the server ends.")  # fmt: skip
@click.option("--keep-alive", default=300.0, show_default=True, type=click.FloatRange(0),
              help="Seconds after which one of several models is given back, unused.")  # fmt: skip
@click.option("--max-body", default="32MiB", show_default=True, help="Most bytes of a request.")
@click.option("--drain", default=30.0, show_default=True, type=click.FloatRange(0),
              help="Seconds that running requests get to end after SIGTERM.")  # fmt: skip
@click.option("--speculate", metavar="HOW",
              help="Draft tokens ahead: ngram, ngram:CACHEFILE, lookahead, early-exit or "
              "early-exit:LAYERS; several joined by +. The output stays the same.")  # fmt: skip
@click.option("--log-text", is_flag=True, help="Log what is asked and answered, too.")
@load_options
def command(**options: Any) -> None:
    """Serve models over HTTP: OpenAI's API, sessions as resources, and what memory holds.

    Only this machine can reach it unless --host says otherwise, which needs --api-key.
    """
    needed = ("starlette", "uvicorn", "msgspec", "prometheus_client")
    missing = [name for name in needed if not find_spec(name)]
    if missing:
        raise RequestError(
            f"the server needs {', '.join(missing)}; install them with: pip install 'quire[serve]'"
        )
    from quire.config import parse_bytes
    from quire.server.serving import serve
    from quire.server.settings import ServeSettings

    load = load_settings(options)
    settings = ServeSettings(
        keep_alive_s=options.pop("keep_alive"), drain_s=options.pop("drain"),
        max_body=parse_bytes(options.pop("max_body")), load=load,
        speculate=served_drafts(options.pop("speculate")), **options,
    )  # fmt: skip
    settings.check_folder()
    # The first process of a container that handles no SIGTERM would not hear it while it fetches.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for model in settings.models:  # all of them, so that a wrong name is told now
        fetched(model)
    serve(settings, _tell)


def _tell(url: str) -> None:
    """Says where it serves; a log that cannot be written is no reason to end."""
    with suppress(OSError):
        click.echo(f"serving at {url}", err=True)
