"""The blocks of code in documents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block, in the language that it says."""

    path: Path
    language: str
    text: str


def documents() -> list[Path]:
    """README and the pages of docs; cli.md is made by the commands themselves."""
    pages = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "cli.md"]
    return [ROOT / "README.md", *pages]


def blocks(path: Path, *languages: str) -> list[Block]:
    """The blocks of these languages, in their order."""
    found = _BLOCK.findall(path.read_text())
    return [Block(path, language, text) for language, text in found if language in languages]
