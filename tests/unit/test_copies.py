"""What is there once is not copied; what is plain goes to other processes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

import quire
from quire.errors import BudgetError, DoesNotFit, RequestError

WAYS: list[Callable[[object], object]] = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("way", WAYS)
def test_what_holds_memory_is_not_copied(llm: quire.LLM, way: Callable[[object], object]) -> None:
    """A copy of a session went on without its pages once the session was closed."""
    with llm.session() as session, llm.stream([1, 2], max_tokens=3) as stream:
        session.append([1, 2, 3])
        for held, instead in (
            (llm, "quire.load"), (session, "fork"), (stream, "completion"),
            (llm.astream([1]), "completion"), (llm.memory, "as_dict"),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=instead):
                way(held)


def test_results_settings_and_errors_are(llm: quire.LLM) -> None:
    made = llm.generate([1, 2], max_tokens=3, logprobs=2)
    sampling = quire.Sampling(temperature=0.5, logit_bias={3: 1.0})
    for plain in (made, sampling, quire.Json({"type": "object"}), llm.memory.as_dict()):
        assert pickle.loads(pickle.dumps(plain)) == plain
    advice = ({"n_ctx": 512},)
    for error in (
        RequestError("no", "n"), BudgetError("no", 3), DoesNotFit("no", lambda: None, advice)
    ):  # fmt: skip
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error) and str(back) == "no"
    assert back.advice == advice and back.nearest is None
