"""Renders chat templates in a process of its own, with limits that the system enforces.

Templates come from model files and are not trusted. The engine bounds the number of steps, but a
single step can still double a string, join an endless list or overflow the stack, and none of
these can be stopped from within the process. This file is run as a script, without the package.

It reads one JSON object per line: first the settings and the template, then one context for each
rendering; it answers each line with one, {"text": ...} or {"error": ..., "kind": ...}.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from functools import cache
from typing import Any

_NEWLINE = re.compile(r"\r\n?")  # Jinja reads every kind of line end as one
# Marks the model's own words for training; here it is like no tag at all.
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# Texts, which stay as they are, or tests that Jinja answers with yes for what is not defined. The
# engine shows our answers no difference between that and none, for which they are no.
_TAG = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_TEST = re.compile(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\bis(?=\s+(?:not\s+)?(?:iterable|sequence)\b)""",
    re.DOTALL,
)


def main() -> None:
    """Serves one template until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the parent
    settings = json.loads(sys.stdin.readline())
    sys.path.append(settings["library"])
    environment = make_environment(settings["fuel"])
    limit_memory(settings["memory"])
    answer({"text": ""})
    for line in sys.stdin:
        limit_time(settings["cpu_s"])
        answer(render(environment, settings["template"], json.loads(line), settings["output"]))
        limit_time(0)


def answer(value: dict[str, Any]) -> None:
    """Writes one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def limit_time(seconds: float) -> None:
    """Ends the process once it has computed for so long; waiting for others does not count."""
    if hasattr(signal, "setitimer"):  # not on Windows, where only who waits has a limit
        signal.setitimer(signal.ITIMER_PROF, seconds)


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
        filters={
            "tojson": to_json, "indent": indent, "length": length, "count": length,
            "int": to_int, "float": to_float,
        },
        tests={"iterable": is_iterable, "sequence": is_sequence},
        globals={"raise_exception": raise_exception, "strftime_now": time.strftime},
    )  # fmt: skip


class RaisedByTemplateError(Exception):
    """A template refused the conversation."""


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise RaisedByTemplateError(message)


def to_json(value: Any, **options: Any) -> str:
    """JSON as Python writes it, which is what models saw in training."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


@cache
def for_engine(source: str) -> str:
    """A template as the engine has to be given it to render it as Jinja does."""
    source = _GENERATION_TAG.sub(_plain_tag, _NEWLINE.sub("\n", source))
    return _TAG.sub(lambda tag: _TEST.sub(_defined_first, tag[0]), source)


def _defined_first(found: re.Match[str]) -> str:
    return "|default('') is" if found[0] == "is" else found[0]


def _plain_tag(tag: re.Match[str]) -> str:
    before, end, after = tag.groups()
    return f"{{%{before} {'endif' if end else 'if true'} {after}%}}"


# Where the engine is not like Jinja. It hands over None both for none and for what is not defined.


def is_iterable(value: Any) -> bool:
    """Templates ask `tools is iterable and tools | length > 0`: none is not, a text is."""
    return hasattr(value, "__iter__")


def is_sequence(value: Any) -> bool:
    """Whatever has a length and items; texts and mappings too."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def length(value: Any) -> int:
    """The number of items; none of what is not defined."""
    return 0 if value is None else len(value)


def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Every line but the first moved to the right; a newline at the end stays."""
    before = width if isinstance(width, str) else " " * width
    lines = f"{text}\n".splitlines()
    rest = [before + line if line or blank else line for line in lines[1:]]
    return "\n".join([before + lines[0] if first else lines[0], *rest])


def to_int(value: Any, default: int = 0, base: int = 10) -> int:
    """A whole number, or the default where there is none in it."""
    try:
        return int(value, base) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        return int(to_float(value, default))


def to_float(value: Any, default: float = 0.0) -> float:
    """A number, or the default where there is none in it."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return default


def render(environment: Any, template: str, context: dict[str, Any], most: int) -> dict[str, Any]:
    """One rendering, or what went wrong."""
    from minijinja import TemplateError

    try:
        text = environment.render_str(for_engine(template), "chat template", **context)
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
