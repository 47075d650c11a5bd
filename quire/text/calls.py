"""How models write the calls of tools, and how they are read.

Each reader takes what stands between the marks of a call, and gives the calls, or None where it is
not one. `Unfinished` says that the mark behind it was part of a value.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from quire.errors import RequestError
from quire.types import ToolCall

ReadCalls = Callable[[str, "Tools"], list[ToolCall] | None]
ToolChoice = str | Mapping[str, Any]
"""auto, none, required, or a tool: by its name, or as OpenAI has it, whatever its name is."""
_DEEPEST = 64  # values within values


class Unfinished(Exception):
    """More text belongs to this call."""


@dataclass(frozen=True)
class Tools:
    """The tools that a model may call: their parameters' JSON schema by name."""

    schemas: Mapping[str, Mapping[str, Any]]

    def named(self, name: str) -> Tools:
        """Only the one with this name."""
        if name not in self.schemas:
            known = ", ".join(self.schemas) or "none"
            raise RequestError(
                f"tool_choice names {name!r:.80}; the tools are: {known}", "tool_choice"
            )
        return Tools({name: self.schemas[name]})

    def is_text(self, tool: str, parameter: str) -> bool:
        """Whether a parameter takes a text, and so nothing but that."""
        one = (self.schemas.get(tool, {}).get("properties") or {}).get(parameter)
        return isinstance(one, Mapping) and one.get("type") == "string"


def chosen_tool(choice: ToolChoice) -> tuple[str, str | None]:
    """Whether tools are called (auto, none, required), and which one if it is one."""
    match choice:
        case str() if choice in ("auto", "none", "required"):
            return choice, None
        case str(name) | {"function": {"name": str(name)}}:
            return "required", name
    raise RequestError(
        "tool_choice is 'auto', 'none', 'required', the name of a tool, or {'type': 'function', "
        f"'function': {{'name': …}}}}, not {choice!r:.80}", "tool_choice",
    )  # fmt: skip


def tools_of(tools: object) -> tuple[list[dict[str, Any]], Tools]:
    """Tools as templates want them, and by name; an odd one is refused."""
    try:
        given = None if isinstance(tools, (str, bytes, Mapping)) else list(tools)  # type: ignore[call-overload]
    except TypeError:  # an array without an axis, too
        given = None
    if given is None:
        raise RequestError(
            f"tools is a list of functions with their schemas, not {tools!r:.80}", "tools"
        )
    listed: list[dict[str, Any]] = []
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(given):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError(
                f"tools[{number}] must be a function with a name, such as {{'type': 'function', "
                f"'function': {{'name': 'add', 'parameters': {{…}}}}}}, not {tool!r:.80}",
                "tools",
            )
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping) or name in schemas:
            raise RequestError(
                f"tools[{number}], {name!r:.80}, comes twice or has no JSON schema", "tools"
            )
        if not _is_of_parameters(parameters):
            raise RequestError(
                f"the parameters of tools[{number}], {name!r:.80}, are no JSON schema: "
                "'properties' has a schema for each name, and 'required' is a list of names",
                "tools",
            )  # fmt: skip
        schemas[name] = parameters
        listed.append({"type": "function", "function": dict(function)})
    return listed, Tools(schemas)


def _is_of_parameters(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    return (
        isinstance(properties, Mapping)
        and all(isinstance(one, (Mapping, bool, NoneType)) for one in properties.values())
        and isinstance(required, (list, tuple))
        and all(isinstance(name, str) for name in required)
    )


def tool_call(name: object, arguments: object, id: object = None) -> ToolCall | None:
    """A call with its arguments as JSON, if it is one."""
    if isinstance(arguments, str):
        try:
            arguments = _json(arguments)
        except (ValueError, Unfinished):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    # Some templates take no ids but those of nine letters and digits.
    return ToolCall(id if isinstance(id, str) and id else secrets.token_hex(5)[:9], name, text)


def _all(calls: list[ToolCall | None]) -> list[ToolCall] | None:
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


# -- JSON ---------------------------------------------------------------------------------------


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)


def _json(text: str) -> Any:
    try:
        return _DECODER.decode(text.strip())
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise Unfinished from None
        raise
    except RecursionError:
        raise ValueError("too deep") from None


def _json_call(value: object) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return tool_call(value.get("name"), arguments, value.get("id"))


def json_calls(body: str, tools: Tools) -> list[ToolCall] | None:
    """`{"name": …, "arguments": {…}}`, one or a list of them."""
    try:
        value = _json(body)
    except ValueError:
        return None
    return _all([_json_call(one) for one in (value if isinstance(value, list) else [value])])


_GAP = re.compile(r"[;\s]*")


def json_line(body: str, tools: Tools) -> list[ToolCall] | None:
    """The same one after the other, of tools that are known: the text has no marks."""
    calls: list[ToolCall | None] = []
    at = _GAP.match(body).end()  # type: ignore[union-attr]  # it matches nothing, too
    try:
        while at < len(body):
            value, at = _DECODER.raw_decode(body, at)
            calls.append(_json_call(value))
            at = _GAP.match(body, at).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return None
    found = _all(calls)
    return found if found and all(call.name in tools.schemas for call in found) else None


_MISTRAL = re.compile(
    r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]+))?(?:\[ARGS\])?\s*(\{.*)", re.S
)


def mistral_calls(body: str, tools: Tools) -> list[ToolCall] | None:
    """A list in JSON, or `name[ARGS]{…}` one after the other."""
    if body.lstrip().startswith("["):
        return json_calls(body, tools)
    parts = [_MISTRAL.fullmatch(part) for part in body.split("[TOOL_CALLS]")]
    try:
        return _all([tool_call(p[1], _json(p[3]), p[2]) if p else None for p in parts])
    except ValueError:
        return None


# -- XML ----------------------------------------------------------------------------------------

_PARAMETER = re.compile(
    r"\s*<parameter=([^<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.S
)


def xml_calls(body: str, tools: Tools) -> list[ToolCall] | None:
    """`<function=name><parameter=key>value</parameter></function>`; values are not quoted."""
    text = body.strip()
    if text.startswith("<function=") and not text.endswith("</function>"):
        raise Unfinished
    name, _, rest = text.removeprefix("<function=").removesuffix("</function>").partition(">")
    rest = rest.rstrip()
    arguments: dict[str, Any] = {}
    at = 0
    while parameter := _PARAMETER.match(rest, at):
        arguments[parameter[1]] = _plain(parameter[2], tools.is_text(name, parameter[1]))
        at = parameter.end()
    if rest[at:].strip() or not re.fullmatch(r"[^<>\s]+", name):
        return None
    call = tool_call(name, arguments)
    return [call] if call else None


def _plain(text: str, is_text: bool) -> Any:
    """A value without quotes: what its JSON says, or a text."""
    if is_text:
        return text
    try:
        return _json(text)
    except (ValueError, Unfinished):
        return text


# -- Python -------------------------------------------------------------------------------------

_NAMES = {"true": True, "false": False, "null": None}


def python_calls(body: str, tools: Tools) -> list[ToolCall] | None:
    """`[name(key=value), …]`."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return _all([_python_call(node) for node in nodes])
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {word.arg: _python_value(word.value) for word in node.keywords}
    return None if None in arguments else tool_call(ast.unparse(node.func), arguments)


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List):
        return [_python_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key else None for key in node.keys]
        return dict(zip(keys, (_python_value(one) for one in node.values), strict=True))
    return ast.literal_eval(node)


# -- Gemma --------------------------------------------------------------------------------------


def gemma_calls(quote: str) -> ReadCalls:
    """`call:name{key:value}`, texts between marks of their own."""

    def read(body: str, tools: Tools) -> list[ToolCall] | None:
        head = re.match(r"\s*call:([^\s{}]+)", body)
        if head is None:
            return None
        try:
            value, at = _GemmaValues(body, quote).value(head.end(), 0)
        except ValueError:
            return None
        call = tool_call(head[1], value) if not body[at:].strip() else None
        return [call] if call else None

    return read


class _GemmaValues:
    """Values in JSON's shape, with bare keys and another quotation mark."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._bare = re.compile(r"[^,{}\[\]]*")

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins here, and where it ends."""
        text = self._text
        if depth > _DEEPEST:
            raise ValueError("too deep")
        if text.startswith(self._quote, at):
            start = at + len(self._quote)
            end = text.index(self._quote, start)
            return text[start:end], end + len(self._quote)
        if text.startswith("{", at):
            pairs, at = self._several(at + 1, "}", depth, keys=True)
            return dict(pairs), at
        if text.startswith("[", at):
            pairs, at = self._several(at + 1, "]", depth, keys=False)
            return [value for _, value in pairs], at
        bare = self._bare.match(text, at)
        assert bare is not None
        return _plain(bare[0].strip(), is_text=False), bare.end()

    def _several(
        self, at: int, end: str, depth: int, keys: bool
    ) -> tuple[list[tuple[str, Any]], int]:
        found: list[tuple[str, Any]] = []
        at = self._skip(at)
        while not self._text.startswith(end, at):
            key = ""
            if keys:
                stop = self._text.index(":", at)
                key = self._text[at:stop].strip().removeprefix(self._quote)
                key, at = key.removesuffix(self._quote), self._skip(stop + 1)
            value, at = self.value(at, depth + 1)
            found.append((key, value))
            at = self._skip(at)
            if self._text.startswith(",", at):
                at = self._skip(at + 1)
            elif not self._text.startswith(end, at):
                raise ValueError("a value is not followed by another, or by an end")
        return found, at + 1

    def _skip(self, at: int) -> int:
        while self._text[at : at + 1].isspace():
            at += 1
        return at
