"""The sliding window: what is freed, when, and what can no longer be done after it."""

from __future__ import annotations

import pytest
from fake_kernel import GROUP, Single, attend, entry, history, make_attention
from fake_kinds import append, check_seq, snapshot, tokens_at, write

from quire.errors import RequestError
from quire.memory.groups.views import PageView


def make_window(
    window: int, page_tokens: int = 4, swa_full: bool = False, max_tokens: int | None = None
) -> Single:
    return make_attention(
        page_tokens, limit=1 << 22, max_tokens=max_tokens, window=window, swa_full=swa_full
    )


@pytest.mark.parametrize(
    ("window", "page_tokens"), [(1, 1), (1, 4), (2, 1), (6, 4), (16, 16), (33, 4)]
)
@pytest.mark.parametrize("step", [1, 3, 7])
def test_memory_is_bounded_by_the_window(window: int, page_tokens: int, step: int) -> None:
    memory = make_window(window, page_tokens)
    tokens: list[int] = []
    for at in range(0, 10 * max(window, 8), step):
        new = list(range(at, at + step))
        with memory.reserve([entry(0, *new)]) as lease:
            write(memory, lease.ubatch)
            tokens += new
            view = lease.views[GROUP]
            assert isinstance(view, PageView)
            seen = attend(memory.pool, view, 0)
            assert seen == tokens_at(*tokens)[-len(seen) :]
            assert len(seen) >= min(step + window - 1, len(tokens))
            assert view.first[0] == seen[0][1]
            lease.commit({0: step})
        # The window of the next token, and what shares a page with its ends.
        assert memory.pool.used * page_tokens <= max(window - 1, 1) + 2 * (page_tokens - 1)
        assert memory.seq_pos_min(0) == history(memory.group, memory.table(0))[0][1]
    memory.audit()
    assert memory.table(0).positions is None


def test_a_whole_context_fits_where_one_window_does() -> None:
    memory = make_window(16, 4, max_tokens=24)
    for token in range(400):
        append(memory, 0, token)
    assert memory.pool.max_pages == 6 and memory.seq_pos_max(0) == 399


def test_swa_full_keeps_everything() -> None:
    memory = make_window(6, swa_full=True)
    for token in range(60):
        append(memory, 0, token)
    assert history(memory.group, memory.table(0)) == tokens_at(*range(60))
    assert memory.seq_rm(0, 3, -1)
    check_seq(memory, 0, tokens_at(0, 1, 2))


def test_drafts_free_nothing_until_they_are_kept() -> None:
    memory = make_window(6)
    append(memory, 0, *range(6))
    was = snapshot(memory, bytes_too=False)
    with memory.reserve([entry(0, *range(100, 120))]) as lease:
        write(memory, lease.ubatch)
        view = lease.views[GROUP]
        assert isinstance(view, PageView) and view.first[0] == 0
    assert snapshot(memory, bytes_too=False) == was
    with memory.reserve([entry(0, *range(100, 120))]) as lease:
        write(memory, lease.ubatch)
        lease.commit({0: 1})  # seven tokens are there: positions 2 … 6 are seen by the next
    assert memory.seq_pos_min(0) == 0
    check_seq(memory, 0, tokens_at(*range(6), 100))
    with memory.reserve([entry(0, *range(101, 120))]) as lease:
        write(memory, lease.ubatch)
        lease.commit({0: 2})  # position 9 is next, and sees 4 … 9
    assert memory.seq_pos_min(0) == 4
    append(memory, 0, *range(200, 250), keep=0)
    assert memory.seq_pos_min(0) == 4


def test_a_rewind_is_possible_as_long_as_its_window_is_held() -> None:
    memory = make_window(6)
    append(memory, 0, *range(100, 117))  # 17 is next and sees 12 … 17: three pages are gone
    assert memory.seq_pos_min(0) == 12
    was = snapshot(memory)
    for q in range(1, 17):
        assert not memory.can_rm(0, q, -1) and not memory.seq_rm(0, q, -1)
        assert snapshot(memory) == was
    append(memory, 0, 117)  # 18 sees 13 … 18, and the page of 12 is still there
    assert memory.seq_rm(0, 17, -1)
    check_seq(memory, 0, tokens_at(*range(100, 117)))
    assert memory.seq_rm(0, 0, -1) and memory.seq_pos_max(0) == -1
    append(memory, 0, 1)
    check_seq(memory, 0, tokens_at(1))


def test_a_checkpoint_brings_back_what_the_window_has_passed() -> None:
    memory = make_window(6)
    append(memory, 0, *range(100, 110))
    memory.checkpoint_save(0, "here")
    memory.seq_cp(0, 1)
    for token in range(110, 150):
        append(memory, 0, token)
    assert not memory.can_rm(0, 10, -1)
    held = memory.pool.used
    memory.checkpoint_restore(0, "here")
    check_seq(memory, 0, tokens_at(*range(100, 110)))
    append(memory, 0, 7)
    append(memory, 1, 8)
    check_seq(memory, 0, tokens_at(*range(100, 110), 7))
    check_seq(memory, 1, tokens_at(*range(100, 110), 8))
    memory.seq_free(1)
    memory.checkpoint_delete("here")
    assert memory.pool.used < held
    memory.audit()


def test_positions_the_user_removed_are_not_missed() -> None:
    memory = make_window(6)
    append(memory, 0, *range(100, 105))
    memory.seq_rm(0, 0, 3)
    assert memory.seq_rm(0, 4, -1)  # sees nothing before 3, because nothing is there
    check_seq(memory, 0, [(103, 3)])
    append(memory, 0, *range(200, 220))
    assert not memory.can_rm(0, 10, -1)
    memory.seq_rm(0, 0, 16)  # what was lost is now removed
    assert memory.can_rm(0, 19, -1) and memory.seq_rm(0, 19, -1)
    assert memory.seq_pos_min(0) >= 16 and memory.seq_pos_max(0) == 18


def test_what_would_see_lost_positions_is_refused() -> None:
    memory = make_window(6)
    append(memory, 0, *range(100, 130))
    low = memory.seq_pos_min(0)
    was = snapshot(memory)
    with pytest.raises(RequestError, match="window of 6 has passed"):
        memory.seq_cp(0, 1, -1, low + 2)
    with pytest.raises(RequestError, match="window of 6 has passed"):
        memory.seq_add(0, low + 2, -1, -2 * low // 3)  # closes up to what was lost
    with pytest.raises(RequestError, match="would start at"):
        memory.seq_add(0, 0, -1, -low)
    append(memory, 2, 1, 2)
    with pytest.raises(RequestError, match="positions of its own"):
        memory.seq_cp(0, 2)
    memory.seq_free(2)
    assert snapshot(memory) == was
    memory.seq_add(0, 0, -1, 4)
    memory.init_update().apply()
    check_seq(memory, 0, tokens_at(*range(100, 130), start=4))
    memory.seq_cp(0, 1, low + 4, -1)
    assert memory.seq_rm(1, low + 5, -1)  # the copy never had what came before
    check_seq(memory, 1, [(100 + low, low + 4)])


def test_pages_in_the_middle_are_freed_too() -> None:
    """After positions moved, pages are not in the order of their positions."""
    memory = make_window(6)
    append(memory, 0, *range(100, 108))
    append(memory, 1, *range(200, 204))
    memory.seq_add(1, 0, -1, 20)
    memory.init_update().apply()
    memory.seq_cp(1, 0)  # pages of 0 … 7, then one of 20 … 23
    memory.seq_cp(0, 2, 4, 8)
    memory.seq_add(2, 0, -1, 40)
    memory.init_update().apply()
    append(memory, 0, *range(300, 308))
    expected = [*tokens_at(*range(100, 108)), *tokens_at(*range(200, 204), start=20)]
    check_seq(memory, 0, expected + tokens_at(*range(300, 308), start=24))
    assert memory.seq_pos_min(0) >= 24
    memory.audit()
