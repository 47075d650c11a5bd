"""Grammars of calls, so that a model has to call a tool, and with arguments that fit its schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import RequestError
from quire.schema import plain
from quire.text.calls import Tools
from quire.text.styles import Style
from quire.types import Grammar

TokenId = Callable[[str], int | None]
"""The id of a control token by its text; None where it is plain text."""

_TEXT = "/(?s:.*)/"
_MOST_SCHEMAS = 256 << 10
"""Characters of schemas in one grammar: each parameter's has what the tool's parameters share."""
_TURN = "<|start|>assistant"
# As models were taught: one space after colons and commas, and none elsewhere.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_JSON_CALLS = {  # what stands before and behind a name and its arguments, and between two calls
    "hermes": ('<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>", "\n"),
    "llama3": ('{"name": %s, "parameters": ', "}", "; "),
    "nemotron": ('<TOOLCALL>[{"name": %s, "arguments": ', "}]</TOOLCALL>", "\n"),
}


def call_grammar(
    style: Style, tools: Tools, token_id: TokenId, thinking: bool = False, many: bool = False,
    held: bool = True,
) -> Grammar:  # fmt: skip
    """What a model that answers in a style must write to call one of these tools, or more.

    Held, arguments fit their schemas; else they are any. A schema may say what no grammar can.
    """
    if not style.name:
        raise RequestError(
            "tool_choice cannot be kept to: it is not known how this model writes calls; leave it "
            "at 'auto'"
        )
    return Grammar(_CallGrammar(style, tools, token_id, many, held).lark(thinking))


def before_answer(style: Style, prompt: str, token_id: TokenId) -> str:
    """What a model writes before its answer begins, as rules of which `before` is the first.

    Empty where the answer begins at once.
    """
    rules = _Rules(style, token_id)
    if style.name == "gpt-oss" and prompt.rstrip().endswith(_TURN):
        channel, message = rules.mark("<|channel|>"), rules.mark("<|message|>")
        return rules.beginning("before", f'{rules.analysis()}{channel} "final" {message}')
    return rules.beginning("before", rules.thought(True)) if style.thinking(prompt) else ""


class _Rules:
    """Rules in Lark's notation, as llguidance reads it."""

    def __init__(self, style: Style, token_id: TokenId) -> None:
        self._style = style
        self._token_id = token_id
        self._rules: list[str] = []

    def beginning(self, name: str, body: str) -> str:
        """All rules so far, behind one that they are for."""
        return "\n".join([f"{name}: {body}", *self._rules])

    def rule(self, body: str, options: str = "") -> str:
        """One more; its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def mark(self, text: str) -> str:
        """A control token, or the text that it is written as."""
        id = self._token_id(text)
        return json.dumps(text, ensure_ascii=False) if id is None else f"<[{id}]>"

    def until(self, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        if self._token_id(mark) is None:
            return self.rule(_TEXT, f"[suffix={json.dumps(mark, ensure_ascii=False)}]")
        return f"{_TEXT} {self.mark(mark)}"

    def thought(self, thinking: bool) -> str:
        """Reasoning, if there is any; where it has begun, the rest of it."""
        if self._style.reasoning is None:
            return ""
        open, close = self._style.reasoning
        thought = f"{self.until(close)} /\\s{{0,2}}/"
        return f"{thought} " if thinking else f"({self.mark(open)} {thought})? "

    def analysis(self) -> str:
        """A message to itself, if it writes one, and the beginning of the next."""
        channel, message = self.mark("<|channel|>"), self.mark("<|message|>")
        thought = f'{channel} "analysis" {message} {self.until("<|end|>")}'
        return f'({thought} {self.mark("<|start|>")} "assistant")? '


class _CallGrammar(_Rules):
    """A call of one of some tools, or more."""

    def __init__(
        self, style: Style, tools: Tools, token_id: TokenId, many: bool, held: bool
    ) -> None:
        super().__init__(style, token_id)
        self._tools = tools
        self._many = many
        self._held = held
        self._schemas = 0  # characters of them
        self._any_object = "" if held else self.rule(self._json_of({"type": "object"}))

    def lark(self, thinking: bool) -> str:
        """The whole grammar."""
        write: dict[str, Callable[[], str]] = {
            "qwen-xml": self._xml, "mistral": self._mistral, "mistral-list": self._mistral_list,
            "lfm2": self._python, "gemma": lambda: self._gemma('<|"|>'),
            "functiongemma": lambda: self._gemma("<escape>"), "gpt-oss": self._channels,
        }  # fmt: skip
        body = write.get(self._style.name, self._json)()
        return self.beginning("start", f"{self.thought(thinking)}{body}")

    def _each(self, call: Callable[[str, Mapping[str, Any]], str]) -> str:
        """One of the tools."""
        calls = [self.rule(call(name, schema)) for name, schema in self._tools.schemas.items()]
        return self.rule(" | ".join(calls))

    def _several(self, one: str, gap: str = "") -> str:
        """One of what was given or, where that may be, more."""
        return f"{one} ({gap} {one})*" if self._many else one

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        return self._any_object or self._json_of({"additionalProperties": False, **schema})

    def _json_of(self, schema: Mapping[str, Any]) -> str:
        """JSON that fits a schema."""
        text = json.dumps(plain({**schema, "x-guidance": _COMPACT}))
        self._schemas += len(text)
        if self._schemas > _MOST_SCHEMAS:
            raise RequestError("the tools' schemas are too long to hold calls to them", "tools")
        return f"%json {text}"

    def _json(self) -> str:
        before, behind, gap = _JSON_CALLS[self._style.name]
        one = self._each(
            lambda name, schema: " ".join(
                [_quoted(before % json.dumps(name)), self._arguments(schema), _quoted(behind)]
            )
        )
        return self._several(one, _quoted(gap))

    def _mistral(self) -> str:
        calls, args = self.mark("[TOOL_CALLS]"), self.mark("[ARGS]")
        one = self._each(
            lambda name, schema: f"{calls} {_quoted(name)} {args} {self._arguments(schema)}"
        )
        return self._several(one)

    def _mistral_list(self) -> str:
        one = self._each(
            lambda name, schema: " ".join(
                [
                    _quoted(f'{{"name": {json.dumps(name)}, "arguments": '),
                    self._arguments(schema),
                    '"}"',
                ]
            )
        )
        return f'{self.mark("[TOOL_CALLS]")} "[" {self._several(one, _quoted(", "))} "]"'

    def _channels(self) -> str:
        channel, message = self.mark("<|channel|>"), self.mark("<|message|>")
        one = self._each(
            lambda name, schema: (
                f"{channel} {_quoted(f'commentary to=functions.{name} ')} "
                f'{self.mark("<|constrain|>")} "json" {message} {self._arguments(schema)}'
            )
        )
        return self.analysis() + one

    # -- parameter by parameter -----------------------------------------------------------------

    def _xml(self) -> str:
        end = "\n</parameter>\n"

        def value(schema: Mapping[str, Any]) -> str:
            if (known := _choices(schema)) is not None:
                return f"{known} {_quoted(end)}"
            if schema.get("type") == "string":
                return self.until(end)
            return f"{self._json_of(schema)} {_quoted(end)}"

        def call(name: str, schema: Mapping[str, Any]) -> str:
            parts = [_quoted(f"<tool_call>\n<function={name}>\n")]
            if not self._held:
                parts.append(f'("<parameter=" /[^<>\\n]+/ ">\\n" {self.until(end)})*')
            for key, one, needed in _parameters(schema) if self._held else []:
                text = f"{_quoted(f'<parameter={key}>' + chr(10))} {value(one)}"
                parts.append(text if needed else f"({text})?")
            return " ".join([*parts, _quoted("</function>\n</tool_call>")])

        one = self._each(call)
        return self._several(one, _quoted("\n"))

    def _python(self) -> str:
        one = self._each(
            lambda name, schema: (
                f"{_quoted(name + '(')} "
                f'{self._listed(schema, "/[A-Za-z_][A-Za-z_0-9]*/", "=", ", ", self._json_of)} ")"'
            )
        )
        open, close = self.mark("<|tool_call_start|>"), self.mark("<|tool_call_end|>")
        return f'{open} "[" {self._several(one, _quoted(", "))} "]" {close}'

    def _gemma(self, quote: str) -> str:
        mark = self.mark(quote)
        text = f"{mark} {self.until(quote)}"
        any_value = self.rule("")  # it refers to itself
        number = int(any_value[1:])
        key = "/[^:{}\\[\\],]+/"
        pair = f'{key} ":" {any_value}'
        self._rules[number] = (
            f"{any_value}: {text} | /-?[0-9]+(\\.[0-9]+)?/ | /true|false|null/ "
            f'| "[" ({any_value} ("," {any_value})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
        )

        def value(schema: Mapping[str, Any]) -> str:
            if (known := _choices(schema)) is not None:
                return f"{mark} {known} {mark}"
            if schema.get("type") == "string":
                return text
            scalar = schema.get("type") in ("integer", "number", "boolean")
            return self._json_of(schema) if scalar else any_value

        one = self._each(
            lambda name, schema: (
                f'{_quoted(f"call:{name}{{")} {self._listed(schema, key, ":", ",", value)} "}}"'
            )
        )
        assert self._style.calls is not None
        open, close = self._style.calls.spans[0]
        return self._several(self.rule(f"{self.mark(open)} {one} {self.mark(close)}"))

    def _listed(
        self, schema: Mapping[str, Any], any_key: str, equals: str, comma: str,
        value: Callable[[Mapping[str, Any]], str],
    ) -> str:  # fmt: skip
        """Parameters in order, with commas between those that are there; or any, in any order."""
        if not self._held:
            pair = f"{any_key} {_quoted(equals)} {value({})}"
            return f"({pair} ({_quoted(comma)} {pair})*)?"
        first, rest = '""', '""'
        for key, one, needed in reversed(_parameters(schema)):
            pair = f"{_quoted(key + equals)} {value(one)}"
            optional = "" if needed else "?"
            here = f"{pair} {rest}"
            first = self.rule(here if needed else f"{here} | {first}")
            rest = self.rule(f"({_quoted(comma)} {pair}){optional} {rest}")
        return first


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _choices(schema: Mapping[str, Any]) -> str | None:
    """The texts that a parameter can have, if they are told."""
    known = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(known, list) or not all(isinstance(one, str) for one in known):
        return None
    return "(" + " | ".join(map(_quoted, known)) + ")"


def _parameters(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Each parameter with its own schema, and whether it must be there."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        (key, {**(one if isinstance(one, Mapping) else {}), **shared}, key in required)
        for key, one in properties.items()
    ]
