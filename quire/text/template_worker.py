"""Renders chat templates in a process of its own, with limits that the system enforces.

Templates come from model files and are not trusted. The engine bounds the number of steps, but a
single step can still double a string, join an endless list or overflow the stack, and none of
these can be stopped from within the process. This file is run as a script, without the package.

It reads one JSON object per line: first the settings and the template, then one context for each
rendering; it answers each line with one, {"text": ...} or {"error": ..., "kind": ...}.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any


def main() -> None:
    """Serves one template until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the parent
    settings = json.loads(sys.stdin.readline())
    sys.path.append(settings["library"])
    environment = make_environment(settings["fuel"])
    limit_memory(settings["memory"])
    answer({"text": ""})
    for line in sys.stdin:
        answer(render(environment, settings["template"], json.loads(line), settings["output"]))


def answer(value: dict[str, Any]) -> None:
    """Writes one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def limit_memory(limit: int) -> None:
    """Makes allocations fail beyond a limit, where the system can do that."""
    try:
        import resource
    except ImportError:  # not on Windows; the time limit remains
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def make_environment(fuel: int) -> Any:
    """The engine, set up as Hugging Face renders chat templates."""
    from minijinja import Environment

    return Environment(
        fuel=fuel,
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
        debug=False,
        filters={"tojson": to_json},
        globals={"raise_exception": raise_exception, "strftime_now": time.strftime},
    )


class RaisedByTemplateError(Exception):
    """A template refused the conversation."""


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise RaisedByTemplateError(message)


def to_json(value: Any, **options: Any) -> str:
    """JSON as Python writes it, which is what models saw in training."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def render(environment: Any, template: str, context: dict[str, Any], most: int) -> dict[str, Any]:
    """One rendering, or what went wrong."""
    from minijinja import TemplateError

    try:
        text = environment.render_str(template, "chat template", **context)
    except RaisedByTemplateError as error:
        return {"error": str(error), "kind": "raised"}
    except TemplateError as error:
        return {"error": error.message, "kind": error.kind}
    except (MemoryError, RecursionError) as error:
        return {"error": type(error).__name__, "kind": "OutOfFuel"}
    except Exception as error:  # whatever a function of ours makes of a template's arguments
        return {"error": f"{type(error).__name__}: {error}", "kind": "other"}
    if len(text) > most:
        return {"error": f"it gave {len(text)} characters of text", "kind": "OutOfFuel"}
    return {"text": text}


if __name__ == "__main__":
    main()
