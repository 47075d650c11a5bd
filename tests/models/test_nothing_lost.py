"""What an attack found, one by one, as whoever uses sessions would meet it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.api.perplexity import perplexity
from quire.engine.loop import Loop
from quire.engine.sequence import PARKED
from quire.engine.way_back import WayBack
from quire.errors import OutOfMemory, QuireError, RequestError, SessionFileError, TierError
from quire.memory.lease import Lease
from quire.ops import Refused, cpu
from tests import session_kinds, tiny
from tests.models.test_session_oracle import surroundings as surroundings  # a fixture
from tests.ops.devices import ISAS
from tests.unit.test_session_save import forged

GO: dict[str, Any] = {"ignore_eos": True}
STORY = list(range(10, 110))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=512))
    return made


@pytest.fixture(scope="module")
def roomy(path: Path) -> Iterator[quire.LLM]:
    with quire.load(path, n_ctx=400, threads=1) as llm:
        yield llm


def counts(llm: quire.LLM) -> dict[str, int]:
    found: dict[str, int] = llm.memory.as_dict()["preemption"]
    return found


def same(session: quire.Session, roomy: quire.LLM) -> None:
    """It holds what its tokens say."""
    assert np.array_equal(session.logits(), roomy.logits(session.tokens)[-1])


# -- interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", [None, "ngram"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_around_a_commit(
    path: Path, roomy: quire.LLM, monkeypatch: pytest.MonkeyPatch, when: str, speculate: str | None
) -> None:
    """Sequence and memory stay in step, and the next request goes on from there."""
    real, left = Lease.commit, [0]

    def commit(lease: Lease, accepted: dict[int, int]) -> None:
        left[0] -= 1
        if left[0] == 0 and when == "before":
            signal.raise_signal(signal.SIGINT)
        real(lease, accepted)
        if left[0] == 0 and when == "after":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Lease, "commit", commit)
    with quire.load(path, n_ctx=400, threads=1) as llm, llm.session() as s:
        s.append(STORY[:20])
        for left[0] in range(1, 3):
            before = s.tokens
            interrupted = False
            try:
                s.generate(max_tokens=60, speculate=speculate, **GO)
            except KeyboardInterrupt:
                interrupted = True
            assert interrupted == (left[0] <= 0)  # drafts may come to the end in fewer steps
            left[0] = 0  # whatever comes now is not interrupted
            made = s.tokens[len(before) :]
            assert made == roomy.generate(before, max_tokens=60, **GO).token_ids[: len(made)]
            same(s, roomy)
            llm.memory.audit()


def test_an_interrupted_append_leaves_nothing(
    path: Path, roomy: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Loop.step

    def step(loop: Loop) -> None:
        real(loop)
        signal.raise_signal(signal.SIGINT)

    with quire.load(path, n_ctx=400, threads=1) as llm, llm.session() as s:
        s.append(STORY)
        with monkeypatch.context() as patch:
            patch.setattr(Loop, "step", step)
            with pytest.raises(KeyboardInterrupt):
                s.append([5] * 20)
        assert s.tokens == STORY
        same(s, roomy)


# -- sessions under pressure ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", session_kinds.TIGHT)
def test_append_pressure_generate(kind: str, tmp_path: Path) -> None:
    """A session that was parked goes on with its next token, once."""
    model = session_kinds.write(kind, tmp_path)
    with quire.load(model, n_ctx=160, threads=1) as roomy:
        wanted = roomy.generate(STORY[:60], max_tokens=9, **GO).token_ids
        more = {"kv_cache_tokens": 176}
        if kind in ("hybrid", "recurrent"):
            more = {"memory_budget": roomy.model.weight_bytes + 2_000_000}
        with quire.load(model, n_ctx=160, threads=1, **more) as llm, llm.session() as s:
            llm.engine.room._seconds_per_token = lambda: 1e6
            s.append(STORY[:60])
            assert llm.loop.call(lambda: llm.engine.room.park(s.sequence))
            assert s.sequence.status is PARKED
            assert s.generate(max_tokens=9, **GO).token_ids == wanted
            assert s.tokens == STORY[:60] + wanted
            assert np.array_equal(s.logits(), roomy.logits(s.tokens)[-1])


def test_removing_from_the_start_with_no_page_free(path: Path, roomy: quire.LLM) -> None:
    """It works or is refused; whoever else is in the step goes on."""
    with quire.load(path, kv_cache_tokens=128, n_ctx=128, threads=1, swap_space=0) as llm:
        s, other = llm.session().append(STORY[:64]), llm.session().append([7] * 46)
        llm.forget()
        assert llm.memory.as_dict()["stats"]["attention"]["pages_free"] <= 1
        wanted = roomy.generate([7] * 46, max_tokens=9, **GO).token_ids
        stream = other.stream(max_tokens=9, **GO)
        try:
            s.remove(0, 20)
            assert s.tokens == STORY[20:64]
        except OutOfMemory:
            assert s.tokens == STORY[:64]
        text = "".join(stream)
        assert stream.completion.token_ids == wanted and text == stream.completion.text
        llm.memory.audit()


@pytest.mark.parametrize("swap", [0, "1GiB"])
@pytest.mark.parametrize("kind", ["dense", "window"])
def test_an_edited_session_after_an_append_that_fails(
    kind: str, swap: int | str, tmp_path: Path
) -> None:
    """Parked or not, it has its tokens and its bits, or says that it cannot have them."""
    model = session_kinds.write(kind, tmp_path)
    with (
        quire.load(model, n_ctx=160, threads=1) as roomy,
        roomy.session() as twin,
        quire.load(model, n_ctx=300, kv_cache_tokens=160, threads=1, swap_space=swap) as llm,
        llm.session() as s,
        llm.session() as hog,
    ):
        twin.append(STORY[:40]).remove(0, 9)
        s.append(STORY[:40]).remove(0, 9)
        hog.append([5] * 50).remove(1, 3)
        hog.checkpoint()
        with pytest.raises(QuireError):
            s.append([9] * 150)
        assert s.tokens == STORY[9:40]
        llm.memory.audit()
        hog.close()
        assert np.array_equal(s.logits(), twin.logits())
        assert (
            s.generate(max_tokens=5, **GO).token_ids == twin.generate(max_tokens=5, **GO).token_ids
        )


@pytest.mark.host
def test_a_turn_that_leaves_most_of_an_edited_session_needs_no_room_for_it(path: Path) -> None:
    """Only its beginning is computed; undone, all of it is there, in its tier, as it was."""
    with (
        quire.load(path, kv_cache_tokens=160, n_ctx=160, threads=1, swap_space="1GiB") as llm,
        llm.session() as s, llm.session() as hog,
    ):  # fmt: skip
        beginning = llm.logits(STORY[:40])[-1]
        llm.forget()
        s.append(STORY[:100]).remove(60, 70)
        before, tokens = s.logits(), s.tokens
        hog.append([6] * 100).checkpoint()
        assert s.sequence.status is PARKED
        llm.engine.tiers.tiers[0].limit = llm.engine.tiers.tiers[0].used  # the mark has to stay
        with pytest.raises(OutOfMemory):
            s.logits()

        def turn() -> WayBack:
            way_back = WayBack(llm.engine.history, s.sequence, 40)
            llm.engine.history.truncate(s.sequence, 40)
            return way_back

        for undone in (True, False):
            way_back = llm.loop.call(turn)
            assert np.array_equal(s.logits(), beginning)
            llm.memory.audit()
            llm.loop.call(way_back.go if undone else way_back.drop)
            assert s.tokens == (tokens if undone else tokens[:40])
            llm.memory.audit()
            if undone:
                fork = hog.fork()  # which shares all there is
                hog.close()
                fork.close()
                assert np.array_equal(s.logits(), before)
                llm.loop.call(lambda: llm.engine.room.park(s.sequence))
        assert llm.engine.tiers.tiers[0].used == 0


@pytest.mark.parametrize("kind", ["dense", "window"])
def test_an_edited_session_is_whole_again_before_what_was_taken_out(
    kind: str, tmp_path: Path
) -> None:
    """Its tokens say what it holds: others may share it, and it may be computed again."""
    model = session_kinds.write(kind, tmp_path)
    with quire.load(model, n_ctx=160, threads=1) as llm, llm.session("mine") as s:
        s.append(STORY[:20]).remove(10, 12).append(STORY[20:90])
        with pytest.raises(RequestError, match="taken out"):
            s.keep()
        s.rewind(8 - s.position)  # a window has passed it
        assert np.array_equal(s.logits(), llm.logits(STORY[:8])[-1])
        s.append(STORY[8:24]).keep()
        made = llm.generate(STORY[:25], max_tokens=1, cache_salt="mine", **GO)
        assert made.cached_tokens == 24
        s.remove(15, 23)  # what is behind it is computed anew in any case
        assert np.array_equal(s.logits(), llm.logits([*STORY[:15], STORY[23]])[-1])
        s.keep()
        llm.memory.audit()


@pytest.mark.host
def test_an_edited_session_that_is_parked_drops_what_failed(path: Path) -> None:
    """There is no room for it to come back to, and it has none of the tokens all the same."""
    with quire.load(path, kv_cache_tokens=128, n_ctx=128, threads=1) as llm, llm.session() as s:
        s.append(STORY[:60]).remove(10, 20)
        wanted = s.logits()
        assert llm.loop.call(lambda: llm.engine.room.park(s.sequence))
        with llm.session() as hog:
            hog.append([5] * 60).remove(0, 1).append([6] * 45)
            llm.engine.tiers.tiers[0].limit = llm.engine.tiers.tiers[0].used
            # Now the other one can be neither parked nor computed again.
            with pytest.raises(OutOfMemory):
                s.append([9] * 30)
            assert s.tokens == STORY[:10] + STORY[20:60]
        assert np.array_equal(s.logits(), wanted)


@pytest.mark.host
def test_a_rewind_does_without_what_a_tier_cannot_read(tmp_path: Path) -> None:
    """Neither a cached place nor a mark that is in a tier is needed: it is computed again."""
    model = session_kinds.write("recurrent", tmp_path)
    with quire.load(model, n_ctx=160, threads=1) as llm, llm.session() as s:
        s.append(STORY[:30])
        s.keep()
        s.checkpoint()
        s.append([5] * 40)
        memory, room = llm.engine.memory, llm.engine.room
        for name in list(memory.checkpoints.by_name):
            room.park_checkpoint(name)
            together = memory.leavers([*memory.checkpoints.by_name])
            room.park_checkpoint(name, together)
        (disk,) = llm.engine.tiers.tiers
        assert disk.used

        def load(*_: object) -> None:
            raise TierError("injected")

        disk.load = load
        assert s.rewind(-36).tokens == STORY[:30] + [5] * 4
        assert np.array_equal(s.logits(), llm.logits(s.tokens)[-1])
        del disk.load
        llm.memory.audit()


@pytest.mark.host
def test_a_way_back_leads_to_a_tier_that_cannot_be_read_just_now(path: Path) -> None:
    """What an edited session was stays there, and comes once it can be read."""
    with quire.load(path, n_ctx=400, threads=1) as llm, llm.session() as s:
        s.append(STORY[:60]).remove(5, 12)
        llm.forget()
        before, tokens = s.logits(), s.tokens
        history, memory = llm.engine.history, llm.engine.memory
        way_back = WayBack(history, s.sequence, 10)
        (name,) = memory.checkpoints.by_name
        history.truncate(s.sequence, 10)
        assert llm.engine.room.park_checkpoint(name)
        (disk,) = llm.engine.tiers.tiers
        way_back.go()
        assert s.tokens == tokens and not memory.checkpoints.by_name
        with pytest.MonkeyPatch.context() as patch:

            def load(*_: object) -> None:
                raise TierError("injected")

            patch.setattr(disk, "load", load)
            with pytest.raises(TierError, match="could not be read"):
                s.logits()
        llm.memory.audit()
        assert np.array_equal(s.logits(), before) and disk.used == 0


# -- taking tokens out ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(40, 80, 3))
def test_a_window_that_lets_tokens_go_can_go_on(n: int, tmp_path: Path) -> None:
    """Or it refuses, and has not changed."""
    model = session_kinds.write("window", tmp_path)
    with quire.load(model, n_ctx=160, threads=1) as llm, llm.session() as s:
        s.append(STORY[:n])
        before = s.logits()
        try:
            s.remove(5, 12)
        except RequestError:
            assert s.tokens == STORY[:n]
            assert np.array_equal(s.logits(), before)
        assert len(s.generate(max_tokens=4, **GO).token_ids) == 4


def test_bits_do_not_depend_on_who_asked_for_logits(roomy: quire.LLM) -> None:
    """The last token sees what is left, whether its logits are wanted or not."""
    a, b = roomy.session().append(STORY), roomy.session().append(STORY)
    a.remove(10, 40).logits()
    b.remove(10, 40)
    assert np.array_equal(a.append([3, 4]).logits(), b.append([3, 4]).logits())
    a.rewind(-12).logits()
    b.rewind(-12)
    assert np.array_equal(a.append([3]).logits(), b.append([3]).logits())
    a.close(), b.close()


@pytest.mark.parametrize("free", range(5))
def test_removing_without_room_gives_the_same_bits(free: int, path: Path, roomy: quire.LLM) -> None:
    """Or it is refused, whatever is free."""
    with quire.load(path, kv_cache_tokens=192, n_ctx=192, threads=1, swap_space=0) as llm:
        s, twin = llm.session().append(STORY), roomy.session().append(STORY)
        mark = s.checkpoint()
        hogs = [llm.session().append([9] * 16) for _ in range(5 - free)]
        for hog in hogs:
            hog.checkpoint()
        llm.forget()
        with llm.session() as clone:
            clone.rewind(mark)
            try:
                s.remove(20, 45)
                assert np.array_equal(s.logits(), twin.remove(20, 45).logits())
            except OutOfMemory:
                pass
            assert clone.tokens == STORY
        twin.close()
        llm.memory.audit()


def test_a_device_that_fails_while_tokens_move(path: Path, roomy: quire.LLM) -> None:
    """They are all there, or the session says that it cannot be used."""
    for swap, crowd in ((0, 0), (0, 5), ("1GiB", 5)):
        with quire.load(path, kv_cache_tokens=176, n_ctx=176, threads=1, swap_space=swap) as llm:
            s = llm.session().append(STORY)
            crowded = [llm.session().append([9] * 12).remove(1, 2) for _ in range(crowd)]
            llm.forget()
            real = llm.device.run

            def run(work: Any, real: Callable[..., None] = real) -> None:
                real(work)
                raise Refused("injected")

            llm.device.run = run  # type: ignore[method-assign]
            with pytest.raises(QuireError):
                s.remove(20, 45)
            del llm.device.run
            assert s.tokens == STORY
            for one in crowded:
                one.close()
            same(s, roomy)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.skipif(len(ISAS) < 2, reason="this machine runs one instruction set only")
@pytest.mark.host
def test_files_of_other_arithmetic(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, again = tmp_path / "story.quire", tmp_path / "again.quire"
    with quire.load(path, threads=1) as llm, llm.session() as s:
        s.append(STORY).save(saved)
        assert s.exact and llm.open(saved, strict=True).exact
    monkeypatch.setattr(cpu, "CpuOps", partial(cpu.CpuOps, isa="portable"))
    with quire.load(path, threads=1) as other:
        assert other.ops.arithmetic != llm.ops.arithmetic
        with pytest.raises(SessionFileError, match="arithmetic"):
            other.open(saved, strict=True)
        opened = other.open(saved, share=True)
        assert not opened.exact and not opened.fork().exact
        opened.append([3]).checkpoint()
        other.forget()
        assert other.generate(STORY, max_tokens=1).cached_tokens == 0
        opened.save(again)
        opened.close()
        assert not other.open(again).exact
        with pytest.raises(SessionFileError, match="arithmetic"):
            other.open(again, strict=True)


def test_marks_keep_their_salts_in_files(path: Path, tmp_path: Path) -> None:
    """A session that went to a mark of another salt has its own marks of the salt before."""
    saved = tmp_path / "salts.quire"
    with quire.load(path, n_ctx=400, threads=1) as llm:
        theirs = llm.session("theirs").append([9] * 64)
        ours = llm.session("ours").append([8] * 64)
        ours.checkpoint("ours")
        ours.rewind(theirs.checkpoint()).save(saved)
    with quire.load(path, n_ctx=400, threads=1) as llm:
        opened = llm.open(saved, share=True).rewind("ours")
        opened.append([8] * 8)

        def cached(salt: str) -> int:
            return llm.generate([8] * 72, max_tokens=1, cache_salt=salt, **GO).cached_tokens

        assert cached("theirs") == 0 and cached("ours") > 60


@pytest.mark.host
def test_marks_keep_in_files_what_arithmetic_they_are_of(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, again = tmp_path / "there.quire", tmp_path / "here.quire"
    with quire.load(path, threads=1) as llm:
        llm.session().append(STORY).save(saved)
    monkeypatch.setattr(cpu, "CpuOps", partial(cpu.CpuOps, isa="portable"))
    with quire.load(path, threads=1) as other:
        opened = other.open(saved)
        opened.checkpoint("there")
        here = other.session().append([5] * 20)
        assert opened.rewind(here.checkpoint()).exact
        opened.save(again)
        with pytest.raises(SessionFileError, match="'there' was computed with other arithmetic"):
            other.open(again, strict=True)
        opened = other.open(again)
        assert opened.exact and not opened.rewind("there").exact


def test_a_forged_file_serves_nobody_else(path: Path, roomy: quire.LLM, tmp_path: Path) -> None:
    """It chose its salt and what its pages hold; others compute their own."""
    saved = tmp_path / "forged.quire"
    with roomy.session("theirs") as s:
        s.append([9] * 64).save(saved)

    def victim(_: dict[str, Any], facts: dict[str, Any]) -> None:
        facts["salt"] = "victim"

    saved.write_bytes(forged(saved.read_bytes(), victim))
    wanted = roomy.generate([9] * 70, max_tokens=8, **GO).token_ids
    with quire.load(path, n_ctx=400, threads=1) as llm:
        opened = llm.open(saved)
        used = [
            lambda: opened.append([4]), opened.fork, opened.checkpoint,
            lambda: opened.generate(max_tokens=3, **GO), opened.close,
        ]  # fmt: skip
        for use in used:
            use()
            done = llm.generate([9] * 70, max_tokens=8, cache_salt="victim", **GO)
            assert done.cached_tokens == 0 and done.token_ids == wanted
            llm.forget()


def test_a_shape_of_nothing_by_everything(path: Path, roomy: quire.LLM, tmp_path: Path) -> None:
    saved = tmp_path / "shape.quire"
    with roomy.session() as s:
        s.append(STORY).save(saved)
    data = saved.read_bytes()
    for name in ("pages attention", "extra tokens", "extra logits"):
        for shape in ([0, 2**62], [2**62, 0], [2**63, 2], [2**64], [-1, 4]):

            def change(
                header: dict[str, Any], _: Any, name: str = name, shape: list[int] = shape
            ) -> None:
                header[next(n for n in header if n.endswith(name))]["shape"] = shape

            saved.write_bytes(forged(data, change))
            with pytest.raises(SessionFileError):
                roomy.open(saved)


def test_a_file_larger_than_the_pool_evicts_nobody(
    path: Path, roomy: quire.LLM, tmp_path: Path
) -> None:
    saved = tmp_path / "large.quire"
    with roomy.session() as s:
        s.append([3] * 300).save(saved)
    with quire.load(path, kv_cache_tokens=128, n_ctx=400, threads=1) as llm:
        resting = llm.session().append(STORY[:40])
        llm.generate([7] * 40, max_tokens=2, **GO)
        before = counts(llm), llm.memory.as_dict()["stats"], llm.memory.as_dict()["prefix"]
        with pytest.raises(SessionFileError):
            llm.open(saved)
        after = counts(llm), llm.memory.as_dict()["stats"], llm.memory.as_dict()["prefix"]
        assert after == before and resting.sequence.status is not PARKED


def test_a_mark_that_is_gone_is_not_another_of_its_name(
    path: Path, roomy: quire.LLM, tmp_path: Path
) -> None:
    """Files bring names of their own."""
    saved = tmp_path / "marks.quire"
    with roomy.session() as s:
        s.append(STORY)
        names = {s.checkpoint().checkpoint for _ in range(8)}
        s.save(saved)
    with quire.load(path, n_ctx=400, threads=1) as llm, llm.session() as s:
        s.append([5] * 20)
        marks = [s.checkpoint() for _ in range(12)]
        for mark in marks:
            s.drop(mark)
        with llm.open(saved) as opened:
            assert names & {mark.checkpoint for mark in opened.marks.values()}
            for mark in marks:
                with pytest.raises(RequestError, match="gone"):
                    s.rewind(mark)


# -- room -----------------------------------------------------------------------------------------


class Crowd:
    """Sessions, marks, pins and cached prefixes of others, and what they must come back to."""

    def __init__(self, llm: quire.LLM, seed: int) -> None:
        rng = random.Random(seed)
        self.llm = llm
        self.sessions: list[quire.Session] = []
        self.wanted: list[tuple[quire.Session, Any, list[int]]] = []
        for i in range(4):
            s = llm.session(f"tenant {i % 2}")
            self.sessions.append(s)
            s.append([rng.randrange(3, 250) for _ in range(24)])
            self.wanted.append((s, s.checkpoint(), s.tokens))
            s.append([i + 3] * 12)
            s.keep(pin=True)
            self.wanted.append((s, s.checkpoint(), s.tokens))  # two marks share their beginning
            if i == 1:
                self.sessions.append(s.fork())
            if i == 2:
                s.rewind(-20).append([8] * 9)
            llm.generate([i + 100] * 20, max_tokens=2, **GO)

    def check(self, roomy: quire.LLM) -> None:
        for session in self.sessions:
            same(session, roomy)
        for session, mark, tokens in self.wanted:
            assert session.rewind(mark).tokens == tokens
            same(session, roomy)
        self.llm.memory.audit()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", session_kinds.TIGHT)
def test_what_fits_alone_finishes_beside_whatever_others_hold(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """With room to swap, all that others hold moves out of the way, and comes back."""
    model = session_kinds.write(kind, tmp_path)
    with quire.load(model, n_ctx=160, threads=1) as roomy:
        room: dict[str, Any] = {"kv_cache_tokens": 160}
        if kind == "recurrent":
            room = {"memory_budget": roomy.model.weight_bytes + 1_400_000}
        with quire.load(model, n_ctx=160, threads=1, **room) as llm:
            crowd = Crowd(llm, seed)
            prompt = [(11 * i + seed) % 240 + 3 for i in range(120)]
            wanted = roomy.generate(prompt, max_tokens=24, **GO).token_ids
            assert llm.generate(prompt, max_tokens=24, **GO).token_ids == wanted
            assert counts(llm)["marks and prefixes parked"] > 0
            with llm.session() as s:
                assert s.append(prompt).generate(max_tokens=24, **GO).token_ids == wanted
                same(s, roomy)
            crowd.check(roomy)
            for session in crowd.sessions:
                session.close()
            llm.forget()
            assert {g["pages_used"] for g in llm.memory.as_dict()["stats"].values()} == {0}
            assert {tier["used"] for tier in llm.memory.as_dict()["tiers"].values()} == {0}


def test_edited_sessions_and_their_marks_give_way_too(path: Path, roomy: quire.LLM) -> None:
    """They cannot be computed again, and share all they hold."""
    with quire.load(path, kv_cache_tokens=160, n_ctx=160, threads=1) as llm:
        sessions = [llm.session().append(STORY[:50]).remove(3, 9 + i) for i in range(2)]
        twins = [roomy.session().append(STORY[:50]).remove(3, 9 + i) for i in range(2)]
        marks = [[s.checkpoint(), s.checkpoint()] for s in sessions]
        prompt = [77] * 130
        wanted = roomy.generate(prompt, max_tokens=20, **GO).token_ids
        assert llm.generate(prompt, max_tokens=20, **GO).token_ids == wanted
        for s, twin, (one, two) in zip(sessions, twins, marks, strict=True):
            assert np.array_equal(s.append([4]).logits(), twin.append([4]).logits())
            for mark in (one, two):
                assert np.array_equal(s.rewind(mark).append([4]).logits(), twin.logits())
            twin.close()
        llm.memory.audit()


def test_a_mark_comes_back_in_place_of_what_holds_its_room(path: Path, roomy: quire.LLM) -> None:
    with quire.load(path, kv_cache_tokens=160, n_ctx=160, threads=1) as llm, llm.session() as s:
        mark = s.append(STORY).checkpoint()
        s.rewind(-len(STORY)).append([9] * 130)
        llm.forget()
        same(s, roomy)
        assert s.rewind(mark).tokens == STORY
        same(s, roomy)


def test_a_pinned_prefix_that_is_parked_is_no_trap(path: Path, roomy: quire.LLM) -> None:
    """What it shared with a session that is gone moves out as well."""
    with quire.load(path, kv_cache_tokens=128, n_ctx=128, threads=1) as llm:
        s = llm.session().append(STORY[:40]).keep(pin=True)
        s.append([5] * 8).keep(pin=True)
        name, *_ = llm.engine.prefix.index.pinned_names
        llm.loop.call(lambda: llm.engine.room.park_checkpoint(name))
        s.close()
        wanted = roomy.generate([7] * 100, max_tokens=20, **GO).token_ids
        assert llm.generate([7] * 100, max_tokens=20, **GO).token_ids == wanted


def test_reading_gives_way_and_fails_nobody(tmp_path: Path) -> None:
    """Logits and perplexities of long texts beside long answers; there is room for one of them."""
    tiny.write(tmp_path / "long.gguf", tiny.Tiny(context=1088))
    ids, text = [3 + 7 * i % 240 for i in range(1000)], "abcdefgh" * 125
    with quire.load(tmp_path / "long.gguf", kv_cache_tokens=1104, threads=1) as llm:

        def answer(salt: str) -> list[int]:
            return llm.generate(ids[:700], max_tokens=99, cache_salt=salt, **GO).token_ids

        ways: list[Callable[[], Any]] = [
            lambda: llm.logits(ids).tobytes(), lambda: perplexity(llm, text, 900).perplexity,
        ]  # fmt: skip
        ways = [*ways, *ways, partial(answer, "a"), partial(answer, "b")]
        wanted = [way() for way in ways]
        llm.forget()
        with ThreadPoolExecutor(len(ways)) as pool:
            assert [one.result() for one in [pool.submit(way) for way in ways]] == wanted
        llm.forget()
        llm.memory.audit()
        assert llm.memory.as_dict()["stats"]["attention"]["pages_used"] == 0
