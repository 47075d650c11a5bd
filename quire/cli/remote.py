"""A running server instead of a model of one's own: the client's side of `--url`."""

from __future__ import annotations

import functools
import http.client
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import click

from quire.cli.options import sampling_from
from quire.cli.prompt import whole_prompt
from quire.errors import RequestError

URL = "http://127.0.0.1:8080"


class Remote:
    """A server, asked one thing at a time."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is none
            known = False
        if not known:
            raise RequestError(f"--url is like {URL}, not {url!r:.80}")
        self._parts = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What a request gives."""
        with self._heard(), self._sent(method, path, body) as answer:
            return json.loads(answer.read())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """What a stream gives, one object after the other."""
        with self._heard(), self._sent("POST", path, {**body, "stream": True}) as answer:
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: {"):
                    told = json.loads(line[6:])
                    if "error" in told:
                        raise RequestError(f"the server says: {told['error']['message']}")
                    yield told
            raise http.client.HTTPException("there is no end")

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """What comes has to be whole, and what a server of this kind says."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(
                f"the answer of {self._parts.geturl()} broke off: {error}; ask again"
            ) from error
        except ValueError as error:
            raise RequestError(
                f"what answers at {self._parts.geturl()} is no `quire serve`: it sends no JSON"
            ) from error

    def _sent(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        host, port = self._parts.hostname or "", self._parts.port
        kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
        if self._parts.scheme == "https":
            kind = http.client.HTTPSConnection
        data = None if body is None else json.dumps(body).encode()
        try:
            connection = kind(host, port, timeout=600)
            connection.request(method, self._base + path, data, self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(
                f"no server answers at {self._parts.geturl()}: {error}; start one with: quire serve"
            ) from error
        if answer.status >= 400:
            raise RequestError(f"the server says: {_reason(answer)}")
        return answer


def _reason(answer: http.client.HTTPResponse) -> str:
    try:
        return str(json.loads(answer.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status} {answer.reason}"


def or_remote(remote: Callable[..., None]) -> Callable[[Any], Any]:
    """Gives a command --url; with it, `remote(server, options)` does the work instead."""

    def wrap(function: Any) -> Any:
        @click.option("--url", help=f"Ask a running server, such as {URL}; loads nothing.")
        @click.option("--api-key", envvar="QUIRE_API_KEY", help="The key that it wants.")
        @functools.wraps(function)
        def command(*args: Any, url: str | None, api_key: str | None, **options: Any) -> Any:
            if url is None:
                return function(*args, **options)
            return remote(Remote(url, api_key), options)

        return command

    return wrap


def sampling_body(options: dict[str, Any]) -> dict[str, Any]:
    """The options of sampling that were given, as a server reads them."""
    body: dict[str, Any] = dict(sampling_from(dict(options)))
    source = click.get_current_context().get_parameter_source("model")
    if source is click.core.ParameterSource.COMMANDLINE:
        body["model"] = options["model"]
    return body


def run_remotely(server: Remote, options: dict[str, Any]) -> None:
    """`quire run --url`: the answer to a prompt, as it comes."""
    asked = options["prompt"] if options["asked"] is None else options["asked"]
    prompt = whole_prompt(asked, options["file"])
    body = sampling_body(options)
    if options.get("stop"):
        body["stop"] = list(options["stop"])
    if options.get("regex"):
        body["structured_outputs"] = {"regex": options["regex"]}
    for name in ("json_schema", "grammar", "grammar_file", "speculate"):
        if options.get(name):
            raise RequestError(f"--{name.replace('_', '-')} is not sent to a server; leave it out")
    if options.get("raw"):
        path, body["prompt"] = "/v1/completions", prompt
    else:
        told = [{"role": "system", "content": options["system"]}] if options.get("system") else []
        path = "/v1/chat/completions"
        body["messages"] = [*told, {"role": "user", "content": prompt}]
    if options.get("as_json"):
        told = server.ask("POST", path, body)
        text = "".join(pieces([told]))
        print(json.dumps({"text": text, **told}))
        return
    for piece in pieces(server.stream(path, body)):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def pieces(events: Iterable[Any]) -> Iterator[str]:
    """The text of answers of either kind, whole or streamed."""
    for told in events:
        for choice in told.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or {}
            yield choice.get("text") or said.get("content") or ""


def chat_remotely(server: Remote, options: dict[str, Any]) -> None:
    """`quire chat --url`: a conversation that lives in a session of the server."""
    session = server.ask("POST", "/v1/sessions", {})["id"]
    messages: list[dict[str, str]] = []
    if options.get("system"):
        messages.append({"role": "system", "content": options["system"]})
    first = len(messages)
    try:
        while (line := _line()) is not None and line.strip() not in ("/quit", "/exit"):
            try:
                _turn(server, session, messages, first, line, options)
            except RequestError as error:  # the conversation is as it was, and can go on
                click.echo(f"quire: {error}", err=True)
    finally:
        server.ask("DELETE", f"/v1/sessions/{session}")


def _turn(
    server: Remote, session: str, messages: list[dict[str, str]], first: int, line: str,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Does what a line says; the conversation's own messages begin with the `first`."""
    match line.split():
        case []:
            pass
        case ["/rewind"]:
            del messages[max(len(messages) - 2, first) :]
        case ["/save", name]:
            told = server.ask("POST", f"/v1/sessions/{session}/save", {"name": name})
            click.echo(f"saved {told['position']} tokens as {told['name']}", err=True)
        case ["/memory"]:
            told = server.ask("GET", f"/v1/sessions/{session}")["memory"]
            click.echo(json.dumps(told), err=True)
        case [command, *_] if command.startswith("/"):
            click.echo("/rewind, /save NAME, /memory, /quit", err=True)
        case _:
            _answer(server, session, messages, line, options)


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _answer(
    server: Remote, session: str, messages: list[dict[str, str]], line: str, options: dict[str, Any]
) -> None:
    asked = [*messages, {"role": "user", "content": line}]
    body = {**sampling_body(options), "messages": asked, "session_id": session}
    said = ""
    for piece in pieces(server.stream("/v1/chat/completions", body)):
        said += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    messages[:] = [*asked, {"role": "assistant", "content": said}]
