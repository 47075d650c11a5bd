"""A running server instead of a model of one's own: the client's side of `--url`."""

from __future__ import annotations

import functools
import http.client
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import click

from quire.cli.constraints import constraint_from, structured_outputs
from quire.cli.options import sampling_from
from quire.cli.prompt import RAW_SYSTEM, whole_prompt
from quire.cli.streams import cut, note, write
from quire.errors import RequestError

URL = "http://127.0.0.1:8080"
LARGER = "quire serve -c"
"""What makes its context larger."""
_SENT = {
    "model", "prompt", "asked", "file", "raw", "system", "stop", "json_schema", "grammar",
    "grammar_file", "regex", "as_json", "n_predict", "temp", "top_k", "top_p", "min_p",
    "repeat_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "ignore_eos",
}  # fmt: skip
"""Options that a server is told of; what else there is to say is said when it starts."""
_STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


class Missing(RequestError):
    """What was asked for is not there."""


class Remote:
    """A server, asked one thing at a time."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # an address or a port that is none
            known = False
        if not known:
            raise RequestError(f"--url is like {URL}, not {url!r:.80}")
        self._parts = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}".encode()

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What a request gives."""
        with self._heard(), self._sent(method, path, body) as answer:
            return json.loads(answer.read())

    def stream(self, path: str, body: dict[str, Any]) -> Generator[Any]:
        """What a stream gives, one object after the other."""
        with self._heard(), self._sent("POST", path, {**body, **_STREAM}) as answer:
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: {"):
                    told = json.loads(line[6:])
                    if "error" in told:
                        raise RequestError(f"the server says: {told['error']['message']}")
                    yield told
            raise http.client.HTTPException("there is no end")

    @property
    def url(self) -> str:
        """Where it is."""
        return self._parts.geturl()

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """What comes has to be whole, and what a server of this kind says."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"the answer of {self.url} broke off: {error}; ask again") from error
        except ValueError as error:
            raise RequestError(
                f"what answers at {self.url} is no `quire serve`: it sends no JSON"
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
                f"no server answers at {self.url}: {error}; start one with: quire serve"
            ) from error
        if answer.status >= 400:
            wrong = Missing if answer.status == 404 else RequestError
            hint = "; it is given with --api-key" if answer.status == 401 else ""
            raise wrong(f"the server says: {_reason(answer)}{hint}")
        return answer


def _reason(answer: http.client.HTTPResponse) -> str:
    try:
        return str(json.loads(answer.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status} {answer.reason}"


class _FirstKey(click.Option):
    """Servers take several keys from the environment; a client needs one of them."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        keys = super().resolve_envvar_value(ctx) or ""
        return next(iter(keys.split()), None)


key_option = click.option(
    "--api-key", cls=_FirstKey, envvar="QUIRE_API_KEY", help="The key that it wants."
)


def or_remote(remote: Callable[..., None]) -> Callable[[Any], Any]:
    """Gives a command --url; with it, `remote(server, options)` does the work instead."""

    def wrap(function: Any) -> Any:
        @click.option("--url", help=f"Ask a running server, such as {URL}; loads nothing.")
        @key_option
        @functools.wraps(function)
        def command(*args: Any, url: str | None, api_key: str | None, **options: Any) -> Any:
            if url is None:
                return function(*args, **options)
            _check_sent()
            return remote(Remote(url, api_key), options)

        return command

    return wrap


def _check_sent() -> None:
    """Refuses what was asked for and would not be done."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and name not in {*_SENT, "url", "api_key"}:
            flag = max(parameter.opts, key=len)
            raise RequestError(f"{flag} is not sent to a server; leave it out")


def sampling_body(options: dict[str, Any]) -> dict[str, Any]:
    """The options of sampling that were given, as a server reads them."""
    return dict(sampling_from(dict(options)))


def model_asked(options: dict[str, Any]) -> dict[str, Any]:
    """The model, where one was named: a server has a default of its own."""
    source = click.get_current_context().get_parameter_source("model")
    return {"model": options["model"]} if source is click.core.ParameterSource.COMMANDLINE else {}


def run_remotely(server: Remote, options: dict[str, Any]) -> None:
    """`quire run --url`: the answer to a prompt, as it comes."""
    prompt = whole_prompt(options["prompt"], options["asked"], options["file"])
    constraint = constraint_from(options)
    body = {"temperature": 0.0, **sampling_body(options), **model_asked(options)}
    if options["stop"]:
        body["stop"] = list(options["stop"])
    if constraint is not None:
        body["structured_outputs"] = structured_outputs(constraint)
    if options["raw"]:
        if options["system"]:
            raise RequestError(RAW_SYSTEM)
        path, body["prompt"] = "/v1/completions", prompt
    else:
        told = [{"role": "system", "content": options["system"]}] if options["system"] else []
        path = "/v1/chat/completions"
        body["messages"] = [*told, {"role": "user", "content": prompt}]
    answer = Answer()
    if options["as_json"]:
        made = server.ask("POST", path, body)
        text = "".join(answer.pieces([made]))
        print(json.dumps({"text": text, **made}))
    else:
        write(answer.pieces(server.stream(path, body)))
    if answer.reason == "length":
        note(f"quire: {cut(answer.tokens, body['max_tokens'], LARGER)}")
        if constraint is not None:
            sys.exit(1)


class Answer:
    """What comes of a request, of either kind, whole or streamed."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why it ended."""
        self.tokens = 0

    def pieces(self, events: Iterable[Any]) -> Iterator[str]:
        """Its text."""
        for told in events:
            self.tokens = (told.get("usage") or {}).get("completion_tokens", self.tokens)
            for choice in told.get("choices", ()):
                self.reason = choice.get("finish_reason") or self.reason
                said = choice.get("delta") or choice.get("message") or {}
                yield choice.get("text") or said.get("content") or ""
