"""A session is written while everybody goes on: what the file has is what was there when asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import BinaryIO

import pytest

import quire
from quire.errors import RequestError
from quire.memory.saved.write import Image
from tests import tiny
from tests.model_folders import RANDOM, TRAINED, model_folder

TEXT = (Path(__file__).parents[1] / "data" / "models" / "validation.txt").read_text()
SOON_S = 60


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=256, tied=False))
    return made


def greedy(session: quire.Session, n: int = 24) -> list[int]:
    return list(session.generate(max_tokens=n, temperature=0, ignore_eos=True).token_ids)


class Deed(Thread):
    """Does something in a thread of its own."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._do = do
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._do()
        except BaseException as error:
            self.error = error


class Writing(Deed):
    """Saves a session."""

    def __init__(self, session: quire.Session, where: Path) -> None:
        super().__init__(lambda: session.save(where))


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """Whoever writes says so, and waits in the middle until it may go on."""
    begun, go_on = Event(), Event()
    write = Image.write

    def slowly(self: Image, io: BinaryIO) -> None:
        begun.set()
        assert go_on.wait(SOON_S)
        write(self, io)

    monkeypatch.setattr(Image, "write", slowly)
    yield begun, go_on
    go_on.set()


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_everybody_goes_on_while_a_session_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "story.quire"
    with quire.load(model_folder(name, tmp_path)) as llm:
        tokens = llm.encode(TEXT)
        with llm.session() as session, llm.session() as other:
            session.append(tokens[:90])
            mark = session.checkpoint("there")
            greedy(session, 11)
            held, expected = session.tokens, greedy(session.fork(), 40)
            other.append(tokens[200:260])
            wanted = greedy(other.fork())
            with slow_disk(monkeypatch) as (begun, go_on):
                writing = Writing(session, where)
                writing.start()
                assert begun.wait(SOON_S)
                assert greedy(other) == wanted  # on the loop that would wait for the disk
                greedy(session, 30)  # its last page fills up
                session.rewind(mark)
                session.drop(mark)
                session.append(tokens[300:350])
                session.close()
                other.append(tokens[400:480])  # takes pages that are free
                llm.memory.audit()
                go_on.set()
                writing.join(SOON_S)
            assert writing.error is None
        kept = llm.engine.memory.checkpoints.by_name.values()
        assert all(one.cached for one in kept) and not llm.engine.room.held
        with llm.open(where) as again:
            assert again.tokens == held
            assert greedy(again, 40) == expected
            again.rewind("there")
            assert again.tokens == held[:90]
        llm.memory.audit()


def test_pages_that_are_written_stay_when_memory_is_short(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "story.quire"
    with quire.load(path, kv_cache_tokens=192, n_ctx=192, swap_space="8MiB") as llm:
        tokens = llm.encode(TEXT)
        session = llm.session().append(tokens[:64])
        session.checkpoint("there")
        session.append(tokens[64:96])
        expected = greedy(session.fork(), 20)
        with slow_disk(monkeypatch) as (begun, go_on):
            writing = Writing(session, where)
            writing.start()
            assert begun.wait(SOON_S)
            session.close()
            with llm.session() as other:  # all that is left; more than that waits for the disk
                other.append(tokens[200:290])
                more = Thread(target=other.append, args=(tokens[290:380],), daemon=True)
                more.start()
                more.join(0.2)
                assert more.is_alive()
                go_on.set()
                writing.join(SOON_S)
                more.join(SOON_S)
                assert not more.is_alive() and other.tokens == tokens[200:380]
                llm.memory.audit()
        assert writing.error is None
        with llm.session() as other:  # what was held is free again
            other.append(tokens[200:380])
        with llm.open(where) as again:
            assert greedy(again, 20) == expected
        llm.memory.audit()


@pytest.mark.parametrize("what", ["rewind", "checkpoint", "fork", "remove", "save"])
def test_who_lacks_what_is_written_waits_for_it(
    what: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are in a tier, and those of the other cannot go there before they are written."""
    deeds: dict[str, Callable[[quire.Session], object]] = {
        "rewind": lambda one: one.rewind("there"), "checkpoint": lambda one: one.checkpoint("here"),
        "fork": lambda one: one.fork().close(), "remove": lambda one: one.remove(2, 3),
        "save": lambda one: one.save(tmp_path / "other.quire"),
    }  # fmt: skip
    with quire.load(path, kv_cache_tokens=192, n_ctx=192, swap_space="8MiB") as llm:
        tokens = llm.encode(TEXT)
        with llm.session() as other, llm.session() as session:
            other.append(tokens[:110]).remove(4, 8)
            other.checkpoint("there")
            session.append(tokens[200:360])
            with slow_disk(monkeypatch) as (begun, go_on):
                writing = Writing(session, tmp_path / "story.quire")
                writing.start()
                assert begun.wait(SOON_S)
                waits = Deed(lambda: deeds[what](other))
                waits.start()
                waits.join(0.2)
                assert waits.is_alive()
                go_on.set()
                waits.join(SOON_S)
                writing.join(SOON_S)
            assert waits.error is None and writing.error is None
            llm.memory.audit()


def test_a_fork_of_what_is_written_waits_and_computes_nothing_meanwhile(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages would go to a tier, find no way back, and be computed again, over and over."""
    with quire.load(path, kv_cache_tokens=192, n_ctx=192, swap_space="8MiB") as llm:
        with llm.session() as session:
            session.append(llm.encode(TEXT)[:160]).logits()
            with session.fork() as fork, slow_disk(monkeypatch) as (begun, go_on):
                writing = Writing(session, tmp_path / "story.quire")
                writing.start()
                assert begun.wait(SOON_S)
                waits = Deed(lambda: fork.remove(4, 8))
                waits.start()
                waits.join(0.2)
                assert waits.is_alive() and not any(llm.engine.room.counts.values())
                go_on.set()
                waits.join(SOON_S)
                writing.join(SOON_S)
                assert waits.error is None and writing.error is None
                assert fork.position == 156
        llm.memory.audit()


def test_a_model_that_is_closed_meanwhile_leaves_the_old_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "story.quire"
    with quire.load(path) as llm:
        session = llm.session().append("The old one")
        session.save(where)
        before = where.read_bytes()
        session.append(" and more")
        with slow_disk(monkeypatch) as (begun, go_on):
            writing = Writing(session, where)
            writing.start()
            assert begun.wait(SOON_S)
            llm.close()
            go_on.set()
            writing.join(SOON_S)
    assert isinstance(writing.error, RequestError) and "closed" in str(writing.error)
    assert where.read_bytes() == before
    assert list(tmp_path.iterdir()) == [where]


def test_of_two_that_save_the_later_one_stays(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "story.quire"
    with quire.load(path) as llm, llm.session() as session:
        session.append("one")
        with slow_disk(monkeypatch) as (begun, go_on):
            first = Writing(session, where)
            first.start()
            assert begun.wait(SOON_S)
            session.append(" two")
            second = Writing(session, where)
            second.start()
            go_on.set()
            first.join(SOON_S)
            second.join(SOON_S)
        assert first.error is None and second.error is None
        with llm.open(where) as again:
            assert again.tokens == session.tokens


@pytest.mark.parametrize("linked", [False, True])
def test_of_two_sessions_under_one_name_the_later_one_stays(
    linked: bool, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a link as well; and under other names nobody waits."""
    where, name = tmp_path / "story.quire", tmp_path / "name.quire"
    if linked:
        name.symlink_to(where)
    with quire.load(path) as llm, llm.session().append("one") as one:
        with llm.session().append("two") as two, slow_disk(monkeypatch) as (begun, go_on):
            first = Writing(one, where)
            first.start()
            assert begun.wait(SOON_S)
            monkeypatch.undo()  # whoever comes now is quick
            one.save(tmp_path / "elsewhere.quire")
            second = Writing(two, name if linked else where)
            second.start()
            second.join(0.2)
            go_on.set()
            first.join(SOON_S)
            second.join(SOON_S)
            assert first.error is None and second.error is None
            with llm.open(where) as again:
                assert again.tokens == two.tokens
        llm.memory.audit()


def test_a_child_is_told_although_its_parent_was_saving(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quire.load(path, threads=1) as llm, llm.session().append("one") as session:
        with slow_disk(monkeypatch) as (begun, _):
            first = Writing(session, tmp_path / "story.quire")
            first.start()
            assert begun.wait(SOON_S)
            child = os.fork()
            if child == 0:
                try:
                    session.save(tmp_path / "story.quire")
                except RequestError:
                    os._exit(0)
                os._exit(1)
            until = time.monotonic() + 20
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > until:
                    os.kill(child, 9)
                time.sleep(0.01)
        first.join(SOON_S)
        assert ended[1] == 0 and first.error is None
