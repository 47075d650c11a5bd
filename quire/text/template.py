"""Chat templates: how a model wants a conversation to be written."""

from __future__ import annotations

import json
import re
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError, TemplateError

if TYPE_CHECKING:
    import subprocess

_LONGEST_S = 20.0  # of waiting, to start or to render, on a machine that has others to serve
_SETTINGS = {"cpu_s": 0.5, "fuel": 10_000_000, "memory": 256 << 20, "output": 16 << 20}

# What the engine says when something is too much, besides running out of fuel.
_TOO_MUCH = re.compile("too large|too many|recursion limit")


class ChatTemplate:
    """A Jinja template from a model file. The file is not trusted, so it runs apart, with limits.

    Rendering takes place in a small process that starts on first use and lives as long as this
    object: keep one per model. It is stopped when a template takes too long or too much memory.
    """

    def __init__(
        self,
        source: object,
        bos_token: str = "",
        eos_token: str = "",
        name: str = "the model",
    ) -> None:
        if not source:
            raise TemplateError(
                f"{name} has no chat template; write the prompt yourself and use generate, "
                "or take a model made for chat"
            )
        if not isinstance(source, str):
            raise TemplateError(
                f"the chat template of {name} must be a string, not {type(source).__name__}"
            )
        self.source = source
        self.name = name
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def warm(self) -> None:
        """Starts the process that renders, so that the first rendering need not wait for it."""
        with self._lock:
            self._running()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The conversation as text, by default up to where the model's answer begins."""
        context = {
            **self._tokens,
            "documents": None,
            **extra,
            "messages": checked_messages(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else list(tools),
        }
        try:
            line = json.dumps(context, ensure_ascii=False)
            line.encode()  # lone surrogates
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages and tools must be plain JSON values: {error}") from None
        with self._lock:
            answer = self._running().ask(line, _LONGEST_S)
            if answer is None:
                self._worker = None
        return self._text(answer)

    def _running(self) -> Worker:
        if self._worker is None or self._worker.has_ended():
            self._worker = Worker({**_SETTINGS, "template": self.source})
        return self._worker

    def _text(self, answer: dict[str, str] | None) -> str:
        which = f"the chat template of {self.name}"
        if answer is None:
            raise TemplateError(f"{which}: template exceeded its limit of time or memory")
        if "text" in answer:
            return answer["text"]
        error = answer["error"]
        if answer["kind"] == "raised":
            raise TemplateError(f"{which} refuses this conversation: {error}")
        if answer["kind"] == "OutOfFuel" or _TOO_MUCH.search(error):
            raise TemplateError(f"{which}: template exceeded its limit: {error}")
        raise TemplateError(f"{which} cannot be rendered: {error}")


class Worker:
    """The process that renders one template; it ends with this object."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import subprocess

        library = find_spec("minijinja")
        if library is None or library.origin is None or not sys.executable:
            raise TemplateError(
                "chat templates need the package minijinja and a Python interpreter; "
                f"found {library and library.origin!r} and {sys.executable!r}"
            )
        script = Path(__file__).with_name("template_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        weakref.finalize(self, _end, self._process)
        first = json.dumps({**settings, "library": str(Path(library.origin).parent.parent)})
        if self.ask(first, _LONGEST_S) is None:
            raise TemplateError(
                f"the process that renders chat templates did not start: {sys.executable} {script}"
            )

    def has_ended(self) -> bool:
        """Whether something ended the process; it does not end by itself."""
        return self._process.poll() is not None

    def ask(self, line: str, seconds: float) -> dict[str, str] | None:
        """Sends a line and returns the answer, or None if there was none in time: it has ended."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:  # it ended while being written to
            reply = ""
        finally:
            timer.cancel()
        if not reply.endswith("\n"):
            _end(process)
            return None
        answer: dict[str, str] = json.loads(reply)
        return answer


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as plain dictionaries, each with a role and a content of a known form."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise _wrong(f"messages must be a list of at least one message, not {messages!r:.80}")
    return [_checked(message, number) for number, message in enumerate(messages)]


def _checked(message: object, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(f"messages[{number}] must be an object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"messages[{number}] must have a role, such as 'user'; it is {role!r}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise _wrong(f"messages[{number}] must have content: a text or a list of parts")
    if content is not None and not isinstance(content, (str, list)):
        raise _wrong(
            f"the content of messages[{number}] must be a text or a list of parts, "
            f"not {type(content).__name__}"
        )
    return dict(message)


def _wrong(why: str) -> RequestError:
    return RequestError(why, "messages")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:  # what was still to be written has nowhere to go
                continue
    process.wait()
