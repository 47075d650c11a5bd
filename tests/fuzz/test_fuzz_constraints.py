"""Damaged JSON schemas, regular expressions and grammars: a matcher, or a refusal in time."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from quire.engine.constrain import Constrainer
from quire.errors import RequestError
from quire.text.tokenizer import Tokenizer
from quire.types import Constraint, Grammar, Json, Regex
from tests.fuzz.bounds import attempt, within
from tests.fuzz.mutate import mutate_json, mutate_text
from tests.model_folders import MODELS

CORPUS = Path(__file__).parent / "corpus" / "constraints"
SCHEMAS: list[Any] = json.loads((CORPUS / "schemas.json").read_text())
REGEXES: list[str] = (CORPUS / "regexes.txt").read_text().splitlines()
GRAMMARS = [path.read_text() for path in sorted(CORPUS.glob("*.lark"))]
WORDS = ["(", ")", "(a+)+", "{1,1000000}", "|", "[", "]", "\\", "$ref", ": ", "start", "\n", "/",
         '"', "\0", "\U0001f642", "*", "(?=", "(?<!", "\\p{L}", "%json {}",
         "<[99999]>"]  # fmt: skip
TOKENIZER = Tokenizer(MODELS / "tiny-dense")
CONSTRAINER = Constrainer(TOKENIZER)


def use(constraint: Constraint) -> None:
    """Compiles it and follows it for a few tokens."""
    matcher = CONSTRAINER.compile(constraint)
    mask = np.zeros((TOKENIZER.n_vocab + 31) // 32, np.uint32)
    for _ in range(4):
        if matcher.finished:
            return
        matcher.mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return
        matcher.consume(int(allowed[len(allowed) // 2]))


def run(kind: str, seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        constraint: Constraint
        if kind == "schema":
            schema = mutate_json(rng, rng.choice(SCHEMAS))
            constraint = Json(json.dumps(schema) if rng.random() < 0.5 else schema)
        elif kind == "regex":
            constraint = Regex(mutate_text(rng, rng.choice(REGEXES), WORDS))
        else:
            constraint = Grammar(mutate_text(rng, rng.choice(GRAMMARS), WORDS))
        with within(5, 100):
            attempt(lambda constraint=constraint: use(constraint))


def test_the_seeds_are_sound() -> None:
    for constraint in [*map(Json, SCHEMAS), *map(Regex, REGEXES), *map(Grammar, GRAMMARS)]:
        use(constraint)


@pytest.mark.parametrize("kind", ["schema", "regex", "grammar"])
def test_damaged_constraints(kind: str) -> None:
    run(kind, range(80))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["schema", "regex", "grammar"])
def test_damaged_constraints_at_length(kind: str) -> None:
    run(kind, range(80, 3000))


def test_schemas_that_are_too_deep_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"properties": {"a": schema}}
    deep = '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000
    for constraint in (
        Json(schema),
        Json(deep),
        Regex("(" * 50_000),
        Grammar("start: " + "(" * 50_000),
    ):
        with within(5, 100), pytest.raises(RequestError):
            use(constraint)
