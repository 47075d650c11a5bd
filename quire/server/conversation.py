"""Conversations as clients send them, made ready for a model's template."""

from __future__ import annotations

import secrets
from typing import Any

from quire.api.llm import LLM
from quire.server.errors import ApiError

_OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "documents"}


def chat_text(
    llm: LLM, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
    extra: dict[str, Any] | None = None, add_generation_prompt: bool | None = None,
    continue_final: bool | None = None,
) -> str:  # fmt: skip
    """The text of a conversation, up to where the model goes on.

    A last message of the assistant is gone on with, unless the client says otherwise.
    """
    ready = [plain_message(message, number) for number, message in enumerate(messages)]
    if not ready:
        raise ApiError(400, "messages is empty; there is nothing to answer", param="messages")
    extra = extra or {}
    if taken := _OURS & extra.keys():
        names = ", ".join(sorted(taken))
        raise ApiError(
            400, f"chat_template_kwargs cannot set {names}", param="chat_template_kwargs"
        )
    last = ready[-1]
    if last["role"] == "assistant" and last.get("content") and continue_final is not False:
        return _continued(llm, ready, tools, extra)
    if continue_final:
        raise ApiError(
            400, "continue_final_message needs a last message of the assistant, with a content",
            param="continue_final_message",
        )  # fmt: skip
    return llm.template.render(ready, add_generation_prompt is not False, tools, **extra)


def _continued(
    llm: LLM, ready: list[dict[str, Any]], tools: list[dict[str, Any]] | None, extra: dict[str, Any]
) -> str:
    """Up to the end of the last message; a mark shows where the template puts that."""
    mark = f"\u2063{secrets.token_hex(8)}\u2063"
    last = {**ready[-1], "content": ready[-1]["content"] + mark}
    text = llm.template.render([*ready[:-1], last], False, tools, **extra)
    before, found, _ = text.rpartition(mark)
    if not found:
        raise ApiError(400, "this model's template cannot go on with a message", param="messages")
    return before


def plain_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A message whose content is text, with roles that templates know."""
    made = dict(message)
    if made.get("role") == "developer":
        made["role"] = "system"
    content = made.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ApiError(
                    400, f"messages[{number}] has a part of type {kind!r:.80}; this model reads "
                    "text only", param="messages",
                )  # fmt: skip
            texts.append(part["text"])
        made["content"] = "".join(texts)
    return made
