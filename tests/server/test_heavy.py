"""Requests that are quickly written and would be much work: refused, or done as quickly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.server import asking, logprobs
from quire.server.conversation import _allowed
from quire.server.run import Run
from quire.server.wire import encode
from tests.server.rig import Rig, serving

COMPLETE = "/v1/completions"
PLACES = 4


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with serving(tmp_path_factory.mktemp("sessions"), max_running=PLACES) as running:
        yield running


def test_a_schema_in_a_text_is_not_read_if_it_is_long(
    few: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body's values are counted before they are made, and a text is one of them."""
    few.complete("a", structured_outputs={"json": '{"type": "integer"}'})
    monkeypatch.setattr(asking, "json", None)
    for many in ("[],", '"a",'):
        schema = '{"a": [' + many * 100_000 + "1]}"
        error = few.refused(400, COMPLETE, prompt="a", structured_outputs={"json": schema})
        assert error["param"] == "structured_outputs" and "262,144" in error["message"]


@pytest.mark.parametrize("fields", [["a/b"] * 257, ["/" * 257]])
def test_fields_of_an_answer_are_few(few: Rig, fields: list[str]) -> None:
    """Each is looked for in each of up to 2,048 answers."""
    asked = {"prompt": ["a"] * 8, "n_predict": 1, "response_fields": fields}
    assert few.refused(400, "/completion", **asked)["param"] == "response_fields"


def test_each_of_many_answers_says_what_it_took_itself(few: Rig) -> None:
    made = few.post("/completion", prompt=["a", "b c"] * PLACES, n_predict=3, ignore_eos=True)
    for one in made:
        assert one["timings"]["predicted_n"] == one["tokens_predicted"] == 3
        read = one["timings"]["prompt_n"] + one["timings"]["cache_n"]
        assert read == one["tokens_evaluated"] and one["memory"]["pages"] == 1


def test_a_prompt_is_written_once_for_all_its_answers(
    few: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    decode = few.llm.decode

    def counted(*args: Any, **more: Any) -> Any:
        written.append(threading.current_thread().name)
        return decode(*args, **more)

    monkeypatch.setattr(few.llm, "decode", counted)
    before = few.complete(["a b", "c"], 2, n=6, echo=True)["choices"]
    assert len(written) == 2 and all(name.startswith("quire") for name in written)
    assert [one["text"][:1] for one in before] == ["a"] * 6 + ["c"] * 6


def test_answers_that_ended_are_not_looked_at_again(
    few: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked at every token of each of them how many run."""
    looked: list[int] = []
    going: Any = Run._going

    def counted(run: Run) -> int:
        found: int = going.fget(run)
        looked.append(len(run._live))
        return found

    monkeypatch.setattr(Run, "_going", property(counted))
    made = few.complete([[300 + i] for i in range(40)], 3)
    assert len(made["choices"]) == 40 and max(looked) <= PLACES


def test_many_tools_of_which_many_are_allowed() -> None:
    names = [f"tool_{i}" for i in range(10_000)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    begun = time.process_time()
    some, mode = _allowed(tools, {"type": "allowed_tools", "mode": "auto", "tools": tools[1:]})
    assert some == tools[1:] and mode == "auto"
    assert time.process_time() - begun < 0.5


def test_log_probabilities_are_written_off_the_event_loop(
    few: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of many answers are a million values, which nobody else is to wait for."""
    written: list[str] = []

    def counted(value: Any) -> bytes:
        written.append(threading.current_thread().name)
        return encode(value)

    monkeypatch.setattr(logprobs, "encode", counted)
    asked = {"n": 2, "max_tokens": 40, "ignore_eos": True, "logprobs": True, "top_logprobs": 100}
    made = few.chat("a", **asked)["choices"]
    assert len(written) == 80 and all(name.startswith("quire") for name in written)
    for choice in made:
        assert [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]] == [100] * 40
