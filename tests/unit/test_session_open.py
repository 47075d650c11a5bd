"""Session files are read beside what everybody else does, whatever happens meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.api.opening import notes_in
from quire.engine import loop
from quire.errors import RequestError, SessionFileError
from quire.memory.saved.format import Tensor
from quire.memory.saved.read import Reading
from tests import tiny

PROMPT = "The quick brown fox jumps over the lazy dog"


class Gate:
    """Holds up whoever comes, until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self._open.wait(20), "nobody opens it"

    def open(self) -> None:
        self._open.set()

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def held(*given: Any) -> Any:
            self.wait()
            return real(*given)

        return held


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Reading stops before the first page."""
    made = Gate()
    monkeypatch.setattr(Reading, "fill", made.before(Reading.fill))
    yield made
    made.open()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=256, tied=False))
    return made


@pytest.fixture(scope="module")
def story(path: Path) -> Path:
    made = path.with_name("story.quire")
    with quire.load(path) as llm, llm.session() as session:
        session.append(PROMPT).checkpoint("here")
        session.append(" and on").save(made)
    return made


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def greedy(session: quire.Session, n: int = 12) -> list[int]:
    return list(session.generate(max_tokens=n, temperature=0, ignore_eos=True).token_ids)


def begun(aside: ThreadPoolExecutor, gate: Gate, llm: quire.LLM, file: Path) -> Future[Any]:
    opening = aside.submit(llm.open, file)
    assert gate.reached.wait(20)
    return opening


def test_everybody_goes_on_meanwhile(
    path: Path, story: Path, gate: Gate, aside: ThreadPoolExecutor
) -> None:
    with quire.load(path) as llm:
        expected = list(llm.generate(PROMPT + " and on", max_tokens=12, temperature=0).token_ids)
        opening = begun(aside, gate, llm, story)
        assert llm.generate("Something else", max_tokens=8, ignore_eos=True).token_ids
        llm.memory.audit()  # pages that are being filled are set aside
        uses = llm.engine.memory.memory_breakdown()[llm.device.name]
        assert any("set aside" in use for use in uses)
        gate.open()
        with opening.result(20) as session:
            assert greedy(session) == expected
            session.rewind(session.marks["here"])
        llm.forget()
        llm.memory.audit()
        assert llm.budget.passing == 0 and llm.engine.memory.seqs == []


def test_a_damaged_file_gives_its_pages_back(
    path: Path, story: Path, tmp_path: Path, gate: Gate, aside: ThreadPoolExecutor
) -> None:
    damaged = tmp_path / "damaged.quire"
    damaged.write_bytes(story.read_bytes()[:-1] + b"\x55")
    with quire.load(path) as llm:
        opening = begun(aside, gate, llm, damaged)
        assert llm.engine.memory.reserved
        gate.open()
        with pytest.raises(SessionFileError, match="checksum"):
            opening.result(20)
        assert not llm.engine.memory.reserved and llm.budget.passing == 0
        assert llm.engine.memory.stats()["attention"]["pages_used"] == 0
        llm.memory.audit()


def test_a_model_that_is_closed_meanwhile(
    path: Path, story: Path, gate: Gate, aside: ThreadPoolExecutor
) -> None:
    llm = quire.load(path)
    opening = begun(aside, gate, llm, story)
    llm.close()
    assert llm.budget.used == 0
    gate.open()
    with pytest.raises(RequestError, match="closed"):
        opening.result(20)
    assert llm.budget.passing == 0


def test_a_model_that_is_closed_before_its_last_page_was_summed_up(
    path: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are gone by then: that is nothing the file has done."""
    llm, pages = quire.load(path, threads=1), 0

    class Summed:
        def __init__(self, *given: Any, **size: Any) -> None:
            self._sum = blake2b(*given, **size)
            self.hexdigest = self._sum.hexdigest

        def update(self, chunk: bytes) -> None:
            nonlocal pages
            for _, ids in [all for one in llm.engine.memory.incoming for all in one.set_aside]:
                pages += 1
                if pages == len(ids):
                    llm.close()
            self._sum.update(chunk)

    monkeypatch.setattr("quire.memory.saved.format.blake2b", Summed)
    with pytest.raises(RequestError, match="closed"):
        llm.open(story)
    assert llm.budget.used == 0


def test_whoever_is_short_of_memory_waits(
    path: Path, story: Path, gate: Gate, aside: ThreadPoolExecutor
) -> None:
    """It fits alone, and once the session is there that gives way."""
    with quire.load(path, kv_cache_tokens=96, n_ctx=96) as llm:
        ids = llm.encode(PROMPT)[:40]
        expected = llm.generate(ids, max_tokens=40, temperature=0, ignore_eos=True).token_ids
        llm.forget()
        opening = begun(aside, gate, llm, story)
        asked = aside.submit(llm.generate, ids, max_tokens=40, temperature=0, ignore_eos=True)
        other = aside.submit(llm.open, story)  # neither do two of them fit together
        time.sleep(0.3)
        assert not asked.done() and not other.done()
        gate.open()
        first, second = opening.result(20), other.result(20)
        assert asked.result(20).token_ids == expected
        assert greedy(first) == greedy(second)
        llm.memory.audit()


def test_whoever_is_short_of_memory_waits_for_a_file_that_is_written_too(
    path: Path, story: Path, tmp_path: Path, aside: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gate = Gate()
    monkeypatch.setattr(Tensor, "write", gate.before(Tensor.write))
    with quire.load(path, kv_cache_tokens=96, n_ctx=96) as llm:
        ids = llm.encode(PROMPT)[:40]
        expected = llm.generate(ids, max_tokens=40, temperature=0, ignore_eos=True).token_ids
        llm.forget()
        session = llm.open(story)
        saving = aside.submit(session.save, tmp_path / "again.quire")
        assert gate.reached.wait(20)
        asked = aside.submit(llm.generate, ids, max_tokens=40, temperature=0, ignore_eos=True)
        time.sleep(0.2)
        assert not asked.done()
        gate.open()
        saving.result(20)
        assert asked.result(20).token_ids == expected
        assert (tmp_path / "again.quire").read_bytes() == story.read_bytes()


def test_nobody_waits_for_a_file_for_ever(
    path: Path, story: Path, gate: Gate, aside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PATIENCE_S", 0.2)
    with quire.load(path, kv_cache_tokens=96, n_ctx=96) as llm:
        opening = begun(aside, gate, llm, story)
        with pytest.raises(SessionFileError, match="does not fit"):
            llm.open(story)
        gate.open()
        opening.result(20).close()
        llm.open(story).close()  # there is room for it now
        assert llm.budget.passing == 0


def test_notes_are_read_without_a_model(path: Path, story: Path, tmp_path: Path) -> None:
    with quire.load(path) as llm, llm.open(story) as session:
        session.notes["a"] = [1.5, {"b": None}]
        session.save(tmp_path / "noted.quire")
    assert notes_in(tmp_path / "noted.quire") == {"a": [1.5, {"b": None}]}
    assert notes_in(story) == {}
    data = (tmp_path / "noted.quire").read_bytes()
    for wrong in (b"", data[:50], data[:99] + b"\x00" + data[100:]):
        (tmp_path / "wrong.quire").write_bytes(wrong)
        with pytest.raises(SessionFileError):
            notes_in(tmp_path / "wrong.quire")


def test_what_never_fits_does_not_wait_for_itself(path: Path, story: Path) -> None:
    with quire.load(path, kv_cache_tokens=32, n_ctx=32) as llm:
        with pytest.raises(SessionFileError):
            llm.open(story)
        assert llm.budget.passing == 0 and llm.engine.memory.seqs == []
