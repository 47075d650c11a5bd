"""Several answers to one prompt, and how chats sample where nobody says."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.errors import ModelError, RequestError
from quire.types import Sampling
from tests import tiny
from tests.gguf_writer import Typed, ValueType

PROMPT = "The quick brown fox jumps over the lazy dog, and over the fence as well."
WILD = {"temperature": 20.0, "seed": 11, "max_tokens": 12, "ignore_eos": True}


def test_the_prompt_is_computed_once(llm: quire.LLM) -> None:
    tokens = len(llm.encode(PROMPT))
    before = llm.engine.runner.tokens_run
    answers = llm.generate(PROMPT, n=5, **WILD)
    computed = llm.engine.runner.tokens_run - before
    assert computed <= tokens + 5 * 12
    assert len(answers) == 5 and len({a.text for a in answers}) == 5
    assert all(a.prompt_tokens == tokens and a.cached_tokens == 0 for a in answers)
    assert all(a.timings.first_token_s > 0 and len(a.token_ids) == 12 for a in answers)


def test_each_answer_is_what_its_seed_gives_alone(llm: quire.LLM) -> None:
    answers = llm.generate(PROMPT, n=3, **WILD)
    for i, answer in enumerate(answers):
        assert llm.generate(PROMPT, **{**WILD, "seed": 11 + i}).token_ids == answer.token_ids
    again = asyncio.run(llm.agenerate(PROMPT, n=3, **WILD))
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]
    assert [a.token_ids for a in llm.generate(PROMPT, n=1, **WILD)] == [answers[0].token_ids]


def test_prompts_with_several_answers_each(llm: quire.LLM) -> None:
    both = llm.generate([PROMPT, "xyz"], n=2, **WILD)
    assert [[a.token_ids for a in some] for some in both] == [
        [a.token_ids for a in llm.generate(p, n=2, **WILD)] for p in (PROMPT, "xyz")
    ]


def test_the_best_are_the_likeliest(llm: quire.LLM) -> None:
    every = llm.generate(PROMPT, n=6, logprobs=0, **WILD)

    def mean(answer: quire.Completion) -> float:
        assert answer.logprobs is not None
        return float(np.mean([token.logprob for token in answer.logprobs]))

    expected = [a.token_ids for a in sorted(every, key=mean, reverse=True)]
    best = llm.generate(PROMPT, n=2, best_of=6, **WILD)
    assert [a.token_ids for a in best] == expected[:2] and best[0].logprobs is None
    one = llm.generate(PROMPT, best_of=6, **WILD)
    assert isinstance(one, quire.Completion) and one.token_ids == expected[0]


def test_constraints_and_stops_hold_for_each(llm: quire.LLM) -> None:
    answers = llm.generate(PROMPT, n=4, constraint=quire.Regex("[a-z]{6}"), temperature=1.0, seed=1)
    assert all(len(a.text) == 6 and a.text.isalpha() for a in answers)
    stopped = llm.generate(PROMPT, n=4, stop=["e"], constraint=quire.Regex("[a-e]{1,50}"),
                           temperature=1.0, seed=1, max_tokens=60)  # fmt: skip
    assert all("e" not in a.text for a in stopped)


def test_chats_have_several_answers_too(llm: quire.LLM) -> None:
    answers = llm.chat([{"role": "user", "content": "hi"}], n=2, **WILD)
    assert len(answers) == 2 and answers[0].token_ids != answers[1].token_ids
    assert len(asyncio.run(llm.achat([{"role": "user", "content": "hi"}], n=2, **WILD))) == 2


@pytest.mark.parametrize("odd", [{"n": 0}, {"n": 2000}, {"n": True}, {"best_of": 0},
                                 {"n": 3, "best_of": 2}])  # fmt: skip
def test_odd_numbers_are_refused(llm: quire.LLM, odd: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"\bn\b|best_of"):
        llm.generate("a", **odd)


def test_one_that_cannot_go_on_takes_nothing_with_it(path: Path) -> None:
    with quire.load(path, kv_cache_tokens=96) as tight:
        answers = tight.generate("x" * 60, n=8, **WILD)  # they take turns
        assert [a.token_ids for a in answers] == [
            tight.generate("x" * 60, **{**WILD, "seed": 11 + i}).token_ids for i in range(8)
        ]
        with pytest.raises(RequestError):
            tight.generate("x" * 60, n=3, logit_bias={1000: 1.0})
        tight.memory.audit()


# -- how chats sample ---------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]
DENSE = Path(__file__).parent.parent / "data" / "models" / "tiny-dense"


def test_chats_are_not_greedy_and_prompts_are(llm: quire.LLM) -> None:
    assert llm.chat_sampling.temperature > 0
    some = {"max_tokens": 24, "ignore_eos": True}
    assert len({llm.chat(HI, seed=i, **some).text for i in range(3)}) > 1
    greedy = llm.generate(llm.chat_tokens(HI), **some).text
    assert llm.generate(llm.chat_tokens(HI), **some).text == greedy
    assert llm.chat(HI, temperature=0, **some).text == greedy
    assert llm.chat(HI, Sampling(**some)).text == greedy


def test_a_files_own_sampling(tmp_path: Path) -> None:
    made = tmp_path / "tiny.gguf"
    f32 = ValueType.FLOAT32
    keys = {
        "general.sampling.temp": Typed(f32, 0.5),
        "general.sampling.top_k": 7,
        "general.sampling.penalty_repeat": Typed(f32, 1.25),
    }
    tiny.write(made, tiny.Tiny(), keys)
    with quire.load(made) as loaded:
        assert loaded.chat_sampling == Sampling(temperature=0.5, top_k=7, repetition_penalty=1.25)
    tiny.write(made, tiny.Tiny(), {"general.sampling.temp": Typed(f32, -3.0)})
    with pytest.raises(ModelError, match="temperature"):
        quire.load(made)


@pytest.mark.parametrize(("config", "expected"), [
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 0},
     Sampling(temperature=0.6, top_p=0.9)),
    ({"do_sample": False, "temperature": 0.6}, Sampling()),
    ({"top_k": 20}, Sampling(temperature=1.0, top_k=20)),
])  # fmt: skip
def test_a_folders_own_sampling(tmp_path: Path, config: dict, expected: Sampling) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DENSE, folder)
    (folder / "generation_config.json").write_text(json.dumps(config))
    with quire.load(folder) as loaded:
        assert loaded.chat_sampling == expected
