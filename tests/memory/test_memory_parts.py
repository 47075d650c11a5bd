"""Micro-batches computed part by part, with tokens that become known on the way."""

from __future__ import annotations

import numpy as np
import pytest
from fake_kinds import (
    KINDS,
    LOG_TOKENS,
    append,
    check_seq,
    check_view,
    make_kind,
    tokens_at,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.memory.batch import SeqTokens

SEQUENCES = st.lists(
    st.tuples(
        st.integers(0, 3 * LOG_TOKENS),  # tokens before
        st.integers(1, LOG_TOKENS // 2),  # new ones that are known
        st.integers(0, LOG_TOKENS // 2),  # places behind them
        st.integers(0, LOG_TOKENS),  # what is kept, at most
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=30, deadline=None)
@given(sequences=SEQUENCES)
def test_parts_see_what_came_before(kind: str, sequences: list[tuple[int, int, int, int]]) -> None:
    """Each part sees exactly the tokens before it, whoever else is in it; any number is kept."""
    memory = make_kind(kind)
    tokens: list[list[int]] = []
    for seq, (before, new, places, _) in enumerate(sequences):
        tokens.append([100 * seq + i for i in range(before + new + places)])
        for token in tokens[seq][:before]:
            append(memory, seq, token)
    known = [np.array([*t[b : b + n], *[0] * p], np.int32)
             for t, (b, n, p, _) in zip(tokens, sequences, strict=True)]  # fmt: skip
    with memory.reserve([SeqTokens(seq, t) for seq, t in enumerate(known)]) as lease:
        whole = lease.ubatch
        memory.run(whole.work)
        seqs = np.arange(len(sequences), dtype=np.int32)
        counts = np.array([n for _, n, _, _ in sequences], np.int32)
        part = whole.part(seqs, np.zeros_like(counts), counts)
        for step in range(LOG_TOKENS):
            write(memory, part)
            for row, seq in enumerate(part.seqs):
                before, new, _, _ = sequences[seq]
                check_view(memory, part, row, tokens_at(*tokens[seq][: before + new + step]))
            going = [s for s, (_, _, places, _) in enumerate(sequences) if step < places]
            if not going:
                break
            for seq in going:
                before, new, _, _ = sequences[seq]
                first = int(np.flatnonzero(whole.seq_rows == seq)[0])
                whole.tokens[first + new + step] = tokens[seq][before + new + step]
            rows = np.array(going, np.int32)
            part = whole.part(rows, counts[rows] + step, np.ones_like(rows))
        kept = {seq: min(most, n + p) for seq, (_, n, p, most) in enumerate(sequences)}
        lease.commit(kept)
    for seq, (before, _, _, _) in enumerate(sequences):
        if before + kept[seq]:
            check_seq(memory, seq, tokens_at(*tokens[seq][: before + kept[seq]]))
    memory.audit()
