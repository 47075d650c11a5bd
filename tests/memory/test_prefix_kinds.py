"""The prefix index over every real kind of memory: what is adopted is what was computed."""

from __future__ import annotations

import pytest
from fake_kinds import KINDS, TAIL, append, by_position, check_seq, empty, make_kind, tokens_at
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.memory.memory import Memory
from quire.memory.prefix.index import PrefixIndex
from quire.memory.tokens import Tokens

CHUNK = 7
PROMPT = st.lists(st.integers(1, 2), min_size=1, max_size=40)


def compute(memory: Memory, index: PrefixIndex, seq: int, prompt: list[int]) -> int:
    """Adopts what is known, computes the rest in chunks, and keeps the end of each."""
    start = index.adopt(seq, prompt[:-1]) if prompt[:-1] else 0
    check_seq(memory, seq, tokens_at(*prompt[:start]))
    for at in range(start, len(prompt), CHUNK):
        if not memory.fits([(seq, CHUNK)]):
            break
        append(memory, seq, *prompt[at : at + CHUNK])
        index.insert(seq, prompt[: at + CHUNK])
    check_seq(memory, seq, tokens_at(*prompt[: memory.seq_pos_max(seq) + 1]))
    return start


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=20, deadline=None)
@given(prompts=st.lists(PROMPT, min_size=1, max_size=8), room=st.sampled_from([1 << 15, 1 << 20]))
def test_what_is_adopted_was_computed(kind: str, prompts: list[list[int]], room: int) -> None:
    memory = make_kind(kind, limit=room)
    index = PrefixIndex(memory, page_tokens=4)
    for prompt in prompts:
        seq = memory.seq_new()
        compute(memory, index, seq, prompt)
        index.track(seq, Tokens(prompt))
        memory.audit()
        while not memory.fits([(seq + 1, CHUNK)]) and index.evict_one():
            memory.audit()
        if seq > 2:
            index.untrack(seq)
            memory.seq_free(seq)
    for seq in list(memory.seqs):
        index.untrack(seq)
        memory.seq_free(seq)
    index.close()
    assert empty(memory)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_prompt_that_comes_again_starts_where_a_state_is(kind: str) -> None:
    memory = make_kind(kind)
    index = PrefixIndex(memory, page_tokens=4)
    prompt = list(range(1, 40))
    assert compute(memory, index, memory.seq_new(), prompt) == 0
    again = compute(memory, index, memory.seq_new(), prompt)
    # A state is at the end of a chunk; up to a log's length behind one, any place will do.
    assert again >= len(prompt) - 1 - CHUNK
    if kind.startswith("attention") and "recurrent" not in kind:
        assert again == len(prompt) - 1
    assert index.matched == len(prompt) - 1
    index.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_position_is_given_exactly_or_not_at_all(kind: str) -> None:
    memory = make_kind(kind)
    index = PrefixIndex(memory, page_tokens=4)
    source = memory.seq_new()
    tokens = list(range(1, 31))
    append(memory, source, *tokens[:20])
    index.insert(source, tokens[:20])
    for token in tokens[20:]:
        append(memory, source, token)
    index.insert(source, tokens)
    given = []
    for n in range(1, 31):
        seq = memory.seq_new()
        got = index.adopt(seq, [*tokens[:n], 99])
        check_seq(memory, seq, tokens_at(*tokens[:got]))
        memory.audit()
        assert got <= n
        given.append(got == n)
        memory.seq_free(seq)
    assert given[19] and given[29]
    if "recurrent" in kind:
        assert not any(given[: 14 if by_position(kind) else 19 - TAIL])
    if "recurrent" in kind and "window" not in kind:
        assert all(given[memory.seq_pos_min(source) :])
