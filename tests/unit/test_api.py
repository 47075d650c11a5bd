"""The Python API over a tiny random model: what a caller may rely on."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.errors import ContextError, RequestError
from tests import tiny

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=256, tied=False))
    return made


def test_encode_and_decode(llm: quire.LLM) -> None:
    ids = llm.encode("héllo <|im_end|>")
    assert ids[-1] == 258
    assert llm.decode(llm.encode("héllo ✓")) == "héllo ✓"
    assert 258 not in llm.encode("<|im_end|>", parse_special=False)


def test_completion_tells_what_happened(llm: quire.LLM) -> None:
    done = llm.generate(PROMPT, max_tokens=12, ignore_eos=True, logprobs=3)
    assert len(done.token_ids) == 12 and done.finish_reason == "length"
    assert done.prompt_tokens == len(llm.encode(PROMPT)) and done.cached_tokens == 0
    assert done.timings.decoded_tokens == 11 and done.timings.first_token_s > 0
    assert done.logprobs is not None and len(done.logprobs) == 12
    for entry, token in zip(done.logprobs, done.token_ids, strict=True):
        assert entry.token_id == token == entry.top[0][0]
        assert entry.logprob == entry.top[0][1] <= 0
        assert [v for _, v in entry.top] == sorted((v for _, v in entry.top), reverse=True)


def test_logprobs_are_the_models_own(llm: quire.LLM) -> None:
    done = llm.generate(PROMPT, max_tokens=5, ignore_eos=True, logprobs=0, temperature=1.5, seed=3)
    ids = llm.encode(PROMPT) + done.token_ids
    logits = llm.logits(ids).astype(np.float64)
    assert done.logprobs is not None
    for i, entry in enumerate(done.logprobs):
        row = logits[len(ids) - 6 + i]
        expected = row[entry.token_id] - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert entry.logprob == pytest.approx(expected, abs=1e-4)


def test_stream_is_generate_in_pieces(llm: quire.LLM) -> None:
    whole = llm.generate(PROMPT, max_tokens=30, ignore_eos=True)
    stream = llm.stream(PROMPT, max_tokens=30, ignore_eos=True)
    pieces = list(stream)
    assert "".join(pieces) == whole.text and len(pieces) > 1
    assert stream.completion.token_ids == whole.token_ids


def test_streams_interleave(llm: quire.LLM) -> None:
    prompts = ["one", "two two", "three three three"]
    alone = [llm.generate(p, max_tokens=20, ignore_eos=True).text for p in prompts]
    streams = [iter(llm.stream(p, max_tokens=20, ignore_eos=True)) for p in prompts]
    texts = ["", "", ""]
    for _ in range(100):
        for i, stream in enumerate(streams):
            texts[i] += next(stream, "")
    assert texts == alone


def test_an_abandoned_stream_gives_its_pages_back(llm: quire.LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=50, ignore_eos=True)
    next(iter(stream))
    del stream
    llm.forget()
    assert llm.memory.as_dict()["stats"]["attention"]["pages_used"] == 0


def test_seeds_repeat_and_do_not_depend_on_the_batch(llm: quire.LLM) -> None:
    sampling = quire.Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=11, max_tokens=16)
    alone = llm.generate(PROMPT, sampling).token_ids
    assert llm.generate(PROMPT, sampling).token_ids == alone
    others = llm.generate([PROMPT, "other", PROMPT], sampling)
    assert others[0].token_ids == others[2].token_ids == alone
    assert llm.generate(PROMPT, sampling.replace(seed=12)).token_ids != alone


def test_stop_strings_end_and_are_left_out(llm: quire.LLM) -> None:
    text = llm.generate(PROMPT, max_tokens=40, ignore_eos=True).text
    stop = text[10:13]
    done = llm.generate(PROMPT, max_tokens=40, ignore_eos=True, stop=[stop, "never there"])
    assert done.text == text[: text.index(stop)] and done.finish_reason == "stop"


def test_penalties_and_bias(llm: quire.LLM) -> None:
    first = llm.generate(PROMPT, max_tokens=1).token_ids[0]
    banned = llm.generate(PROMPT, max_tokens=30, ignore_eos=True, logit_bias={first: -1000})
    assert first not in banned.token_ids
    forced = llm.generate(PROMPT, max_tokens=5, ignore_eos=True, logit_bias={65: 1000})
    assert forced.text == "AAAAA"
    fresh = llm.generate(PROMPT, max_tokens=60, ignore_eos=True, presence_penalty=100)
    assert len(set(fresh.token_ids)) == 60
    other = llm.generate(PROMPT, max_tokens=20, ignore_eos=True, repetition_penalty=1000)
    assert not set(other.token_ids) & set(llm.encode(PROMPT))


def test_constraints_hold(llm: quire.LLM) -> None:
    digits = llm.generate(PROMPT, max_tokens=40, constraint=quire.Regex("[0-9]{4}-[a-c]+x"))
    assert re.fullmatch("[0-9]{4}-[a-c]*x?", digits.text)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    made = llm.generate(
        PROMPT, max_tokens=200, constraint=quire.Json(schema), temperature=1, seed=1
    )
    assert made.finish_reason == "stop" and set(json.loads(made.text)) == {"a", "b"}
    lark = quire.Grammar('start: "yes" | "no"')
    both = llm.generate([PROMPT, "b"], max_tokens=10, constraint=lark)
    assert {c.text for c in both} <= {"yes", "no"}


@pytest.mark.parametrize(
    "constraint",
    [
        quire.Regex("(unclosed"),
        quire.Json({"type": "no such type"}),
        quire.Json("not json"),
        quire.Grammar("start: nowhere"),
    ],
)
def test_bad_constraints_are_refused(llm: quire.LLM, constraint: quire.Regex) -> None:
    with pytest.raises(RequestError, match="constraint"):
        llm.generate(PROMPT, max_tokens=5, constraint=constraint)


def test_costly_patterns_have_a_deadline(llm: quire.LLM) -> None:
    for pattern in ("(a+)+b", "(a{1,1000}){1,1000000}", "(a|aa)*" * 50):
        started = time.monotonic()
        try:
            llm.generate(PROMPT, max_tokens=5, constraint=quire.Regex(pattern))
        except RequestError as error:
            assert "constraint" in str(error)
        assert time.monotonic() - started < 5


def test_too_long_is_refused_and_never_truncated(llm: quire.LLM) -> None:
    with pytest.raises(ContextError, match=r"300.*256"):
        llm.generate([5] * 300)
    full = llm.generate([5] * 250, max_tokens=100, ignore_eos=True)
    assert full.finish_reason == "length" and len(full.token_ids) == 6


@pytest.mark.parametrize("ids", [[259], [-1], [10**9], []])
def test_bad_tokens_are_refused(llm: quire.LLM, ids: list[int]) -> None:
    with pytest.raises(RequestError):
        llm.generate(ids)


def test_one_bad_request_of_a_batch_leaves_nothing_behind(llm: quire.LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate([PROMPT, [1000]])
    assert not llm.engine.scheduler.active


def test_weights_beyond_the_budget_are_refused_before_they_are_loaded(path: Path) -> None:
    seen: list[int] = []
    with pytest.raises(quire.errors.BudgetError, match="weights"):
        quire.load(path, memory_budget=100_000, progress=lambda done, _: seen.append(done))
    assert not seen


def test_unknown_settings_are_refused(path: Path) -> None:
    with pytest.raises(RequestError, match="n_ctxx"):
        quire.load(path, n_ctxx=5)


def test_unknown_arguments_are_told_with_all_that_are_known(llm: quire.LLM) -> None:
    for ask in (llm.generate, llm.stream, lambda prompt, **how: llm.session().generate(**how)):
        with pytest.raises(RequestError, match=r"unknown argument stops; .*\bstop\b.*max_tokens"):
            ask("a", stops="b")  # type: ignore[operator]


def test_chat_uses_the_files_template(llm: quire.LLM) -> None:
    tokens = llm.chat_tokens([{"role": "user", "content": "hi"}])
    assert llm.decode(tokens) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.chat([{"role": "user", "content": "hi"}], max_tokens=4, ignore_eos=True).token_ids


def test_small_budgets_preempt_and_finish(path: Path) -> None:
    prompts = [[i] * (20 + i) for i in range(12)]
    with quire.load(path) as roomy:
        expected = [c.token_ids for c in roomy.generate(prompts, max_tokens=40, ignore_eos=True)]
    with quire.load(path, kv_cache_tokens=160) as tight:
        got = tight.generate(prompts, max_tokens=40, ignore_eos=True)
        assert [c.token_ids for c in got] == expected
        tight.memory.audit()


def test_a_sequence_beyond_the_budget_fails_with_the_reason(path: Path) -> None:
    with quire.load(path, kv_cache_tokens=64) as tight:
        assert tight.n_ctx == 64
        with pytest.raises(ContextError, match="64"):
            tight.generate([1] * 100)
    with quire.load(path, kv_cache_tokens=64, n_ctx=256) as tight:
        with pytest.raises(quire.errors.OutOfMemory, match="kv_cache_tokens"):
            tight.generate([1] * 100)
        assert len(tight.generate([1] * 10, max_tokens=5, ignore_eos=True).token_ids) == 5


def test_sessions_branch_and_rewind(llm: quire.LLM) -> None:
    ids = llm.encode("Once upon a time there was")
    expected = llm.generate(ids, max_tokens=24, ignore_eos=True).token_ids
    with llm.session() as s:
        s.append("Once upon a time").append(" there was")
        assert s.tokens == ids and s.position == len(ids)
        assert np.array_equal(s.logits(), llm.logits(ids)[-1])
        a, b = s.fork(), s.fork()
        mark = a.checkpoint()
        assert a.generate(max_tokens=24, ignore_eos=True).token_ids == expected
        b.append("!")
        a.rewind(mark)
        assert a.tokens == ids
        assert a.generate(max_tokens=24, ignore_eos=True).token_ids == expected
        a.rewind(-24)
        assert np.array_equal(a.logits(), s.logits())
        assert a.generate(max_tokens=24, ignore_eos=True).token_ids == expected
        assert s.generate(max_tokens=24, ignore_eos=True).token_ids == expected
        for session in (a, b):
            session.close()
    with pytest.raises(RequestError, match="closed"):
        s.append("x")


def test_rewinds_that_cannot_be_are_refused(llm: quire.LLM) -> None:
    with llm.session() as s:
        s.append("abc")
        for bad in (-4, 0, 3):
            with pytest.raises(RequestError):
                s.rewind(bad)
        assert s.position == 3
        with pytest.raises(RequestError):
            llm.session().logits()


def test_memory_prints_and_adds_up(llm: quire.LLM) -> None:
    with llm.session() as s:
        s.append("x" * 100)
        stats = llm.memory.as_dict()
        assert stats["stats"]["attention"]["tokens_used"] == 100
        assert sum(stats["breakdown"].values()) == stats["used_bytes"] <= stats["budget_bytes"]
        assert llm.memory.breakdown == stats["breakdown"] and llm.memory.stats == stats["stats"]
        assert "weights" in str(llm.memory)


def test_a_prompt_is_computed_once(llm: quire.LLM) -> None:
    prompt = [int(i) for i in np.random.default_rng(1).integers(0, 256, 100)]
    cold = llm.generate(prompt, max_tokens=20, ignore_eos=True)
    again = llm.generate(prompt, max_tokens=20, ignore_eos=True)
    assert (cold.cached_tokens, again.cached_tokens) == (0, 99)
    assert again.token_ids == cold.token_ids
    longer = prompt + cold.token_ids + [7, 8]
    turn = llm.generate(longer, max_tokens=5, ignore_eos=True)
    assert turn.cached_tokens == 119
    llm.forget()
    assert llm.generate(longer, max_tokens=5, ignore_eos=True).token_ids == turn.token_ids
    part = llm.generate([*prompt[:37], 1, 2, 3], max_tokens=5, ignore_eos=True)
    assert part.cached_tokens == 37
    llm.forget()
    cold = llm.generate([*prompt[:37], 1, 2, 3], max_tokens=5, ignore_eos=True)
    assert cold.cached_tokens == 0 and cold.token_ids == part.token_ids


def test_pinned_places_outlive_what_is_evicted(path: Path) -> None:
    with quire.load(path, kv_cache_tokens=160) as llm:
        system = list(range(40))
        with llm.session() as s:
            s.append(system).keep(pin=True)
        for other in range(60, 66):
            llm.generate([other] * 90, max_tokens=2)
        stats = llm.memory.as_dict()["prefix"]
        assert stats["pinned"] == 1 and stats["evictions"] > 0
        groups = llm.memory.as_dict()["stats"]["attention"]
        assert groups["pages_used"] >= groups["pages_cached"] >= groups["pages_pinned"] == 3
        assert llm.generate([*system, 7, 8], max_tokens=1).cached_tokens == 40
        with llm.session() as s:
            with pytest.raises(RequestError, match="nothing to keep"):
                s.keep()
            with pytest.raises(RequestError, match="ttl_s"):
                s.append([1]).keep(ttl_s=5)
        llm.forget()
        assert llm.generate([*system, 7, 8], max_tokens=1).cached_tokens == 0


def test_salts_never_share(llm: quire.LLM) -> None:
    prompt = [5] * 60
    llm.generate(prompt, max_tokens=2, cache_salt="a")
    assert llm.generate(prompt, max_tokens=2, cache_salt="b").cached_tokens == 0
    assert llm.generate(prompt, max_tokens=2).cached_tokens == 0
    assert llm.generate(prompt, max_tokens=2, cache_salt="a").cached_tokens == 59
    both = llm.memory.as_dict()["prefix"]
    assert both["hits"] == 1 and both["misses"]["salt"] == 2


def test_requests_that_come_together_share_their_beginning(llm: quire.LLM) -> None:
    common = [int(i) for i in np.random.default_rng(2).integers(0, 256, 80)]
    prompts = [[*common, i, i + 1] for i in range(8)]
    alone = [llm.generate(p, max_tokens=9, ignore_eos=True).token_ids for p in prompts]
    llm.forget()
    together = llm.generate(prompts, max_tokens=9, ignore_eos=True)
    assert [c.token_ids for c in together] == alone
    assert [c.cached_tokens for c in together] == [0] + [80] * 7


def test_sessions_give_their_past_to_others(llm: quire.LLM) -> None:
    with llm.session() as s:
        s.append("a long story about a small model")
        other = llm.generate("a long story about a small horse", max_tokens=3)
        assert other.cached_tokens == len("a long story about a small ")


def test_what_is_shared_is_what_was_said(llm: quire.LLM) -> None:
    """Whatever a session does, another request that shares its past computes the same."""
    rng = np.random.default_rng(4)
    with llm.session() as s:
        s.append([int(i) for i in rng.integers(0, 256, 40)])
        for round in range(12):
            match round % 4:
                case 0:
                    s.generate(max_tokens=5, ignore_eos=True)
                case 1:
                    s.rewind(-int(rng.integers(1, 20)))
                case 2:
                    s.generate(max_tokens=3, ignore_eos=True)
                case 3:
                    s.append([int(i) for i in rng.integers(0, 256, 7)])
            asked = [*s.tokens, 1]
            shared = llm.generate(asked, max_tokens=4, ignore_eos=True, logprobs=0)
            assert shared.cached_tokens >= s.position - 1
            fresh = llm.generate(asked, max_tokens=4, ignore_eos=True, logprobs=0, cache_salt="new")
            assert shared.token_ids == fresh.token_ids and shared.logprobs == fresh.logprobs
            llm.forget()


@pytest.mark.parametrize("as_text", [False, True])
def test_json_has_no_endless_white_space(llm: quire.LLM, as_text: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "maxItems": 2,
                       "items": {"type": "boolean"}}},
        "required": ["a", "b"], "additionalProperties": False,
    }  # fmt: skip
    spaces = {ord(c): 100.0 for c in " \n\t\r"}
    constraint = quire.Json(json.dumps(schema) if as_text else schema)
    done = llm.generate("x", constraint=constraint, logit_bias=spaces, max_tokens=60)
    assert done.finish_reason == "stop" and set(json.loads(done.text)) == {"a", "b"}
    free = {**schema, "x-guidance": {"whitespace_flexible": True}}
    done = llm.generate("x", constraint=quire.Json(free), logit_bias=spaces, max_tokens=60)
    assert done.finish_reason == "length"  # who asks for it gets it


def test_a_prompt_shorter_than_a_page_is_found_again(llm: quire.LLM) -> None:
    prompt = list(range(40, 52))
    first = llm.generate(prompt, max_tokens=5, ignore_eos=True)
    before = llm.engine.runner.tokens_run
    again = llm.generate(prompt, max_tokens=5, ignore_eos=True)
    assert (first.cached_tokens, again.cached_tokens) == (0, 11)
    assert llm.engine.runner.tokens_run - before == 5  # its last token, and four of the answer
    assert again.token_ids == first.token_ids
    other = llm.generate([*prompt[:6], 99, *prompt[7:]], max_tokens=5, ignore_eos=True)
    assert other.cached_tokens == 6
