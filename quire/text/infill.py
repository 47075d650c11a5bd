"""Prompts for models that were trained to fill a gap in a text.

<repo> … <file> name \n text …  <prefix> before <suffix> behind <middle> ──▶ what was between
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import RequestError
from quire.text.tokenizer import Tokenizer

_REPOSITORY, _FILE = "myproject", "filename"
"""What is said where nobody says it: the names that such models are usually shown."""


def infill_tokens(
    tokenizer: Tokenizer, before: str, behind: str, files: Iterable[tuple[str | None, str]] = (),
    max_tokens: int | None = None,
) -> list[int]:  # fmt: skip
    """Token ids that ask for what is missing between two texts, beside other files: name and text.

    Texts are plain: control tokens that are written out in them are none.
    """
    fill = tokenizer.fill
    missing = [role for role in ("fim_pre", "fim_suf", "fim_mid") if role not in fill]
    if missing:
        raise RequestError(
            f"this model cannot fill gaps: its vocabulary has no tokens for {', '.join(missing)}; "
            "use one that was trained for it, as most models for code are"
        )

    def text(part: str) -> list[int]:
        return tokenizer.encode(part, False, False, max_tokens=max_tokens)

    ids = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    others = list(files)
    if others and "fim_rep" in fill:
        ids += [fill["fim_rep"], *text(f"{_REPOSITORY}\n")]
    for name, content in others:
        if "fim_sep" in fill:
            ids += [fill["fim_sep"], *text(f"{name or _FILE}\n")]
        ids += text(content)
    if others and "fim_sep" in fill:
        ids += [fill["fim_sep"], *text(f"{_FILE}\n")]
    gap = [fill["fim_pre"], *text(before), fill["fim_suf"], *text(behind), fill["fim_mid"]]
    return ids + gap
