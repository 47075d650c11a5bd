"""What JSON schemas and regular expressions let a model write."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.constrain import Constrainer
from quire.errors import RequestError
from quire.text.tokenizer import Tokenizer
from quire.types import Behind, Constraint, Grammar, Json, Regex
from tests.model_folders import MODELS

CONSTRAINER = Constrainer(Tokenizer(MODELS / "tiny-dense"))


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether a text as a whole fits."""
    matcher: Any = CONSTRAINER.compile(constraint)._matcher
    tokens = CONSTRAINER.vocabulary.encode(text, add_special=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


A = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (A, '{"a": null%s}'),
        ({"type": "array", "items": A}, '[{"a": null%s}]'),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, '{"a": null%s}'),
        ({"properties": {"allOf": A, "anyOf": B}}, '{"anyOf": {"b": null%s}}'),
        ({"anyOf": [A, B]}, '{"b": null%s}'),
    ],
)
def test_objects_have_the_members_that_are_named(schema: dict[str, Any], text: str) -> None:
    """Else small models make up more of them without end."""
    assert accepts(Json(schema), text % "")
    assert not accepts(Json(schema), text % ', "more": 1')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**A, "additionalProperties": True}, '{"a": null, "more": 1}'),
        ({**A, "additionalProperties": {"type": "integer"}}, '{"a": null, "more": 1}'),
        ({**A, "patternProperties": {"^m": {}}}, '{"a": null, "more": 1}'),
        ({"properties": {"a": {}}, "required": ["more"]}, '{"more": 1}'),
        ({**A, "minProperties": 2}, '{"a": null, "more": 1}'),
        ({"allOf": [A, B]}, '{"a": null, "b": null}'),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, '{"a": null, "b": null}'),
        ({**A, "anyOf": [B]}, '{"a": null, "b": null}'),
        ({"type": "object"}, '{"more": 1}'),
    ],
)
def test_objects_have_others_where_a_schema_says_so(schema: dict[str, Any], text: str) -> None:
    assert accepts(Json(schema), text)


@pytest.mark.parametrize("name", ["path", "password", "uuid4", "uri-reference"])
def test_formats_that_nobody_knows_are_notes(name: str) -> None:
    """That is what JSON Schema says of them, and pydantic has many."""
    text = {"type": "string", "format": name}
    schema = {"properties": {"format": text}, "required": ["format"]}
    assert accepts(Json(schema), '{"format": "x/y"}')
    assert schema["properties"] == {"format": {"type": "string", "format": name}}
    assert not accepts(Json({"const": {"format": name}}), "{}")
    assert not accepts(Json({"type": "string", "format": "date"}), '"x/y"')


def test_what_is_wrong_is_told_without_a_stack() -> None:
    with pytest.raises(RequestError, match="cannot be compiled") as refused:
        CONSTRAINER.compile(Json({"required": "é" * 50}))
    assert "backtrace" not in str(refused.value)


@pytest.mark.parametrize("constraint", [Json({"$ref": "#"}), Grammar("start: start")])
def test_what_no_text_fits_is_refused_in_a_few_words(constraint: Json | Grammar) -> None:
    with pytest.raises(RequestError, match=r"^the constraint failed: no text fits it$"):
        CONSTRAINER.compile(constraint).warm()


def test_a_schema_is_not_changed() -> None:
    assert accepts(Json(A), '{"a": null}') and "additionalProperties" not in A


@pytest.mark.parametrize("pattern", [r"\d", r"[\d-]", r"[a-z\d]", r"(?:\d)"])
def test_digits_are_0_to_9(pattern: str) -> None:
    """Those of other scripts are digits too, and what reads a number takes none of them."""
    assert accepts(Regex(pattern), "3")
    assert not accepts(Regex(pattern), "٣") and not accepts(Regex(pattern), "\U0001fbf8")


def test_an_escaped_backslash_is_no_digit() -> None:
    assert accepts(Regex(r"\\d"), r"\d") and not accepts(Regex(r"\\d"), "\\3")


def chain(rule: str, last: str, n: int) -> Grammar:
    """Rules each of which leads on to the next."""
    rules = [f"start: {rule}0", *(f'{rule}{i}: "a" {rule}{i + 1}' for i in range(n))]
    return Grammar("\n".join([*rules, f"{rule}{n}: {last}"]))


@pytest.mark.parametrize(
    "deep",
    [
        chain("r", '"b"', 14_000),
        chain("T", '"b"', 14_000),
        Json({
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(6000)}
            | {"6000": {"type": "null"}},
        }),
    ],
    ids=["rules", "terminals", "references"],
)  # fmt: skip
def test_deep_grammars_do_not_end_the_process(deep: Constraint) -> None:
    """They are compiled by code that recurses, and has no bound of its own."""
    CONSTRAINER.compile(deep).warm()


def test_a_grammar_has_a_bound() -> None:
    many = Grammar("start: " + "|".join(f'"{i}"' for i in range(60_000)))
    with pytest.raises(RequestError, match=r"too complex.*262,144"):
        CONSTRAINER.compile(many)


@pytest.mark.parametrize("thought", ["", "hm</think>"])
def test_something_else_may_come_instead(thought: str) -> None:
    """A call, for which reasoning may go ahead as it does for an answer."""
    rule = '\nr0[suffix="</think>"]: /(?s:.*)/' if thought else ""
    before, call = f"before: r0{rule}", f'start: {"r0 " if thought else ""}"<call>"{rule}'
    form = Behind(before if thought else "", Json(A), Grammar(call))
    assert accepts(form, thought + '{"a": null}') and accepts(form, thought + "<call>")
    assert not accepts(form, thought + "other") and not accepts(form, thought + "<call>{")
