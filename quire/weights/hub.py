"""Fetches models from the Hugging Face Hub: GGUF files, split ones too, and folders of safetensors.

The Hub's own library knows addresses, tokens and connections. It throws away what came when a
transfer breaks off, so files are written here, and go on where they ended; each is held against the
size and the SHA-256 that the Hub tells of it before it gets its name.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from quire.errors import FetchError
from quire.weights.catalog import HubName, Kept, record
from quire.weights.hub_models import HubFile, choose

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_CHUNK: Final = 1 << 20
_CONNECT_SECONDS: Final = 1.5
_TRIES: Final = 5  # in a row that bring nothing
_PAUSE_SECONDS: Final = 1.0


def from_hub(name: HubName, cache: Path, progress: Progress | None) -> Path:
    """Fetches a model into the cache, or what is missing of it."""
    _check_reachable(_library(name, "constants").constants, name)  # before the rest is imported
    hub = _library(name, "errors", "utils")
    revision, files = _listing(hub, name)
    label, chosen = choose(name, files)
    try:
        kept = record(name, label, {file.name: file.nbytes for file in chosen}, cache)
        with _only_one(name, kept):
            _check_room(name, kept, cache)
            done = 0
            for file in chosen:
                part = _Part(progress, done, kept.total)
                _fetch_file(hub, name, revision, file, kept, part)
                done += file.nbytes
                part(file.nbytes)
    except OSError as error:
        reason = error.strerror or error
        raise FetchError(f"{name} cannot be kept in {cache}: {reason}") from error
    return kept.path


@contextmanager
def _only_one(name: HubName, kept: Kept) -> Iterator[None]:
    """Keeps others from adding to the same files meanwhile."""
    locks: Any = importlib.import_module("filelock")  # which the Hub's library brings
    assert kept.record is not None
    lock = locks.FileLock(kept.record.with_suffix(".lock"), timeout=0)
    try:
        lock.acquire()
    except locks.Timeout as error:
        raise FetchError(f"{name} is being fetched by another process; wait for it") from error
    try:
        yield
    finally:
        lock.release()


def _library(name: HubName, *parts: str) -> Any:
    """The Hub's library with these parts of it, which are not there until they are asked for."""
    try:
        for part in parts:
            importlib.import_module(f"huggingface_hub.{part}")
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise FetchError(
            f"{name} needs huggingface_hub: pip install 'quire[hf]', "
            "or pass the path of a .gguf file"
        ) from error


def _check_reachable(constants: Any, name: HubName) -> None:
    """Says quickly that there is no network: the Hub's library tries for a long while."""
    if constants.HF_HUB_OFFLINE:
        raise FetchError(f"{name} is not here, and HF_HUB_OFFLINE forbids to fetch it")
    url = urlsplit(constants.ENDPOINT)
    host = url.hostname or ""
    proxy = None if proxy_bypass(host) else getproxies().get(url.scheme)
    target = urlsplit(proxy) if proxy else url
    port = target.port or (443 if target.scheme == "https" else 80)
    failure: list[Exception] = [TimeoutError(f"no answer within {_CONNECT_SECONDS:g} s")]

    def connect() -> None:
        try:
            socket.create_connection((target.hostname or "", port), _CONNECT_SECONDS).close()
            failure.clear()
        except Exception as error:
            failure[:] = [error]

    # In a thread: asking for an address knows no time limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_SECONDS)
    for error in failure[:1]:
        raise FetchError(
            f"{name} is neither a file nor a folder nor a model that was fetched before, and "
            f"{target.hostname} cannot be reached: {error}; check the network, "
            "or pass the path of a .gguf file"
        )


def _listing(hub: Any, name: HubName) -> tuple[str, list[HubFile]]:
    """The revision that is fetched, and its files."""
    try:
        info = hub.HfApi().model_info(name.repo_id, files_metadata=True)
    except Exception as error:  # its errors come from several libraries and share no base class
        raise _explained(hub, name, error) from error
    files = []
    for file in info.siblings or []:
        lfs = getattr(file, "lfs", None)
        files.append(HubFile(str(file.rfilename), int(file.size or 0), lfs and lfs.sha256))
    return str(info.sha), files


def _explained(hub: Any, name: HubName, error: Exception) -> FetchError:
    kinds = hub.errors
    if isinstance(error, kinds.GatedRepoError):
        return FetchError(
            f"{name} is only for those who accepted its licence: do so on its page, "
            "then log in with `hf auth login`"
        )
    if isinstance(error, kinds.RepositoryNotFoundError):
        return FetchError(
            f"{name}: no file or folder has this name, and the Hub has no repository "
            f"{name.repo_id} that you may read; check the name, or log in with `hf auth login`"
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return FetchError(f"{name} could not be fetched: {reason}; run it again to go on")


def _check_room(name: HubName, kept: Kept, cache: Path) -> None:
    missing = kept.total - kept.nbytes
    free = shutil.disk_usage(cache).free
    if missing > free:
        raise FetchError(
            f"{name} takes {missing:,} more bytes, the disk of {cache} has {free:,} left; "
            "make room there (quire list, quire rm)"
        )


class _Part:
    """Reports one file's progress as part of all."""

    def __init__(self, progress: Progress | None, before: int, total: int) -> None:
        self._progress = progress
        self._before = before
        self._total = total

    def __call__(self, done: int) -> None:
        if self._progress is not None:
            self._progress(min(self._before + done, self._total), self._total)


def _fetch_file(
    hub: Any, name: HubName, revision: str, file: HubFile, kept: Kept, part: _Part
) -> None:
    """One file, unless it is there already; a partial one is gone on with."""
    target = kept.folder / file.name
    if target.is_file() and target.stat().st_size == file.nbytes:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = part_path(target, file.sha256)
    if not file.sha256:  # nothing tells whether what is here is of the same file
        unfinished.unlink(missing_ok=True)
    url = hub.hf_hub_url(name.repo_id, file.name, revision=revision)
    with unfinished.open("ab") as out:
        left = _TRIES
        while out.tell() < file.nbytes:
            before = out.tell()
            try:
                _transfer(hub, url, out, file.nbytes, part)
            except OSError:
                raise
            except Exception as error:  # those of the Hub's own libraries share no base class
                left = _TRIES if out.tell() > before else left - 1
                if not left or isinstance(error, hub.errors.HfHubHTTPError):
                    raise _explained(hub, name, error) from error
                time.sleep(_PAUSE_SECONDS)
    _check_file(name, file, unfinished)
    os.replace(unfinished, target)


def _transfer(hub: Any, url: str, out: BinaryIO, nbytes: int, part: _Part) -> None:
    """Appends what is missing of a file, as far as the connection lasts."""
    headers = {**hub.utils.build_hf_headers(), "Accept-Encoding": "identity"}
    if out.tell():
        headers["Range"] = f"bytes={out.tell()}-"
    seconds = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    session = hub.utils.get_session()
    part(out.tell())
    with session.stream(
        "GET", url, headers=headers, follow_redirects=True, timeout=seconds
    ) as answer:
        hub.utils.hf_raise_for_status(answer)
        if out.tell() and answer.status_code != 206:  # it begins anew, so we do
            out.truncate(0)
        for chunk in answer.iter_raw(_CHUNK):
            out.write(chunk[: nbytes - out.tell()])
            part(out.tell())


def part_path(target: Path, sha256: str | None) -> Path:
    """Where a file is until it is whole; that of another version has another name."""
    return target.with_name(f".{target.name}.{(sha256 or '')[:12]}.part")


def _check_file(name: HubName, file: HubFile, path: Path) -> None:
    """Makes sure that a file is the one the Hub told of; another is not kept."""
    digest = hashlib.sha256()
    if file.sha256:
        with path.open("rb") as data:
            while chunk := data.read(_CHUNK):
                digest.update(chunk)
    size = path.stat().st_size
    if size != file.nbytes or (file.sha256 and digest.hexdigest() != file.sha256):
        path.unlink()
        raise FetchError(
            f"{file.name} of {name.repo_id} came damaged, with {size} bytes of {file.nbytes}; "
            "it was not kept; fetch it again"
        )
