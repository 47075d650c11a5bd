"""Prompts of texts and token ids in turn, as llama.cpp takes them."""

from __future__ import annotations

from typing import Any

from quire.api.llm import LLM
from quire.server.asking import check_ids
from quire.server.errors import ApiError

MOST_PROMPTS = 2048


def prompts_of(llm: LLM, given: Any, behind: int = 0, param: str = "prompt") -> list[list[int]]:
    """Token ids of one prompt or several; ids and texts side by side are one."""
    several = given if isinstance(given, list) and not _is_one(given) else [given]
    if not 1 <= len(several) <= MOST_PROMPTS:
        raise ApiError(400, f"{param} is 1 to {MOST_PROMPTS} prompts", param=param)
    return [_prompt(llm, one, behind, param) for one in several]


def _is_one(given: list[Any]) -> bool:
    return any(type(part) is int for part in given)  # true and false are none


def _prompt(llm: LLM, given: Any, behind: int, param: str) -> list[int]:
    match given:
        case str(text):
            return llm.tokens_of(text, behind)
        case {"prompt_string": str(text), **rest} if not rest.get("multimodal_data"):
            return llm.tokens_of(text, behind)
        case {"content": [_, *_] as parts}:
            return llm.tokens_of("".join(_text(part, param) for part in parts), behind)
        case list(parts):
            ids: list[int] = []
            for part in parts:
                if isinstance(part, str):
                    ids += llm.tokens_of(part, behind + len(ids))
                elif type(part) is int:
                    ids += check_ids(llm, [part], param)
                else:
                    raise ApiError(400, f"{param} is of texts and token ids", param=param)
            return ids
    raise ApiError(
        400, f"{param} is a text, token ids, {{'prompt_string': text}}, or a list of those; this "
        "model reads text only", param=param,
    )  # fmt: skip


def _text(part: Any, param: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ApiError(400, f"{param} has a part that is no text; this model reads text", param=param)
