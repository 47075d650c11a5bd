"""Damaged tokenizer.json files and the files beside them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.text.tokenizer import Tokenizer
from tests.fuzz.bounds import attempt, within
from tests.fuzz.mutate import json_bytes, mutate_json

CORPUS = Path(__file__).parent / "corpus" / "tokenizers"
SEEDS = {path.stem: json.loads(path.read_text()) for path in sorted(CORPUS.glob("*.json"))}
TEXTS = ["", "Hello, it's 12345 \n\n  <s>\u4e16\u754c e\u0301\U0001f642", "a" * 3000, " " * 3000]


def use(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, special, special)
            assert all(0 <= id < tokenizer.n_vocab for id in ids)
            assert tokenizer.encode(text, special, special) == ids  # the same every time
            tokenizer.decode(ids)
            with within(1, 50):
                attempt(lambda text=text: tokenizer.encode(text, max_tokens=100))
    for id in range(min(tokenizer.n_vocab, 300)):
        tokenizer.token_bytes(id), tokenizer.token_text(id), tokenizer.is_special(id)


def run(folder: Path, name: str, seeds: range) -> int:
    accepted = 0
    for seed in seeds:
        rng = Random(seed)
        file: Any = mutate_json(rng, SEEDS[name])
        (folder / "tokenizer.json").write_bytes(json_bytes(rng, file))
        beside = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "x"}
        settings = mutate_json(rng, beside) if rng.random() < 0.3 else beside
        (folder / "tokenizer_config.json").write_bytes(json_bytes(rng, settings))
        with within(2, 60):
            accepted += attempt(lambda: use(folder))
    return accepted


def test_the_seeds_are_sound(tmp_path: Path) -> None:
    assert len(SEEDS) >= 4
    for seed in SEEDS.values():
        (tmp_path / "tokenizer.json").write_text(json.dumps(seed))
        use(tmp_path)


@pytest.mark.parametrize("name", SEEDS)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    assert 0 < run(tmp_path, name, range(60)) < 60  # some are harmless, most are not


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_damaged_files_at_length(name: str, tmp_path: Path) -> None:
    run(tmp_path, name, range(60, 1500))
