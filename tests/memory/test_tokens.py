"""Token histories: whatever forks and rewinds share, each behaves like a list of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.memory.tokens import Tokens

OPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "extend", "truncate", "fork", "remove"]),
        st.integers(0, 1000),
        st.lists(st.integers(0, 99), max_size=90),
    ),
    max_size=40,
)


@given(OPS)
def test_forks_behave_like_lists_of_their_own(ops: list[tuple[str, int, list[int]]]) -> None:
    real, plain = [Tokens([1, 2, 3])], [[1, 2, 3]]
    seen: list[tuple[np.ndarray, list[int]]] = []
    for name, number, many in ops:
        at = number % len(real)
        tokens, model = real[at], plain[at]
        if name == "append":
            tokens.append(number)
            model.append(number)
        elif name == "extend":
            tokens.extend(many)
            model.extend(many)
        elif name == "truncate":
            n = number % (len(model) + 1)
            tokens.truncate(n)
            del model[n:]
        elif name == "fork":
            real.append(tokens.fork())
            plain.append(list(model))
        elif model:
            start = number % len(model)
            stop = min(start + 1 + len(many), len(model))
            tokens.remove(start, stop)
            del model[start:stop]
        seen.append((tokens.array(), list(model)))  # a view stays what it was
        assert [t[:] for t in real] == plain
        assert all(view.tolist() == then for view, then in seen)
    for tokens, model in zip(real, plain, strict=True):
        assert list(tokens) == model and len(tokens) == len(model)
        assert model == [] or (tokens[-1], tokens[0]) == (model[-1], model[0])
        with pytest.raises(IndexError):
            tokens[len(model)]


@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9))
def test_common_counts_equal_first_tokens(a: list[int], b: list[int]) -> None:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert Tokens(a).common(np.array(b, np.int32)) == n
    assert (Tokens(a) == Tokens(b)) == (a == b)


def test_a_fork_copies_nothing() -> None:
    tokens = Tokens(range(10_000))
    twin = tokens.fork()
    assert np.shares_memory(tokens.array(), twin.array())
    twin.append(5)  # the first to write goes on in place
    assert np.shares_memory(tokens.array(), twin.array())
    tokens.append(6)
    assert tokens[-1] == 6 and twin[-1] == 5
