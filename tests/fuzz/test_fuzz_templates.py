"""Damaged chat templates, and conversations of any kind: text or a refusal, in a second or so."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.errors import QuireError
from quire.text.template import ChatTemplate
from tests.fuzz.bounds import attempt
from tests.fuzz.mutate import ODD, mutate_json, mutate_text

CORPUS = Path(__file__).parent / "corpus" / "templates"
SEEDS = {path.stem: path.read_text() for path in sorted(CORPUS.glob("*.jinja"))}
WORDS = [
    "{%", "%}", "{{", "}}", "{#", "for i in range(10**9)", "'a' * 3e8", "messages", "loop.index",
    ".__class__.__mro__", "|tojson", "|join", "namespace()", "raise_exception('x')", "[::-1]",
    "{% for x in messages %}", "{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "\0", "\u2028", "9" * 400, "|indent(10000000)", "{% include 'x' %}", "{% set x = x ~ x %}",
]  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
SECONDS = 5  # of a second for rendering, and the start of a process on a busy machine


def run(name: str, seeds: range) -> None:
    for seed in seeds:
        source = mutate_text(Random(seed), SEEDS[name], WORDS)
        start = time.perf_counter()
        attempt(lambda source=source: ChatTemplate(source, "<s>", "</s>").render(MESSAGES))
        assert time.perf_counter() - start < SECONDS, seed


@pytest.mark.parametrize("name", SEEDS)
def test_damaged_templates(name: str) -> None:
    assert ChatTemplate(SEEDS[name], "<s>", "</s>").render(MESSAGES)
    run(name, range(12))


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_damaged_templates_at_length(name: str) -> None:
    run(name, range(12, 400))


def test_any_conversation() -> None:
    template = ChatTemplate(next(iter(SEEDS.values())), "<s>", "</s>")
    for seed in range(150):
        rng = Random(seed)
        messages = mutate_json(rng, MESSAGES)
        attempt(lambda messages=messages: template.render(messages))
    for odd in ODD:
        with pytest.raises(QuireError):
            ChatTemplate("{{ messages }}").render(odd)
