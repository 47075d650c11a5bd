"""Conversations as clients send them, made ready for a model, and its answers taken apart."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from quire.api.arguments import with_text
from quire.api.llm import LLM
from quire.api.texts import ChatPrompt
from quire.errors import ContextError
from quire.server.errors import ApiError
from quire.server.run import Run
from quire.text.answers import Answer
from quire.text.calls import ToolChoice
from quire.types import TokenLogprob

_MOST_READ = 1 << 18
"""Tokens of a text that nobody generates from: it is held whole while it is cut up."""
_OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "documents"}


def most_read(llm: LLM) -> int:
    """Tokens of the longest text that is cut up or counted, and not answered."""
    return max(llm.n_ctx, _MOST_READ)


def chat_prompt(
    llm: LLM, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
    tool_choice: str | dict[str, Any] | None = None, extra: dict[str, Any] | None = None,
    add_generation_prompt: bool | None = None, continue_final: bool | None = None,
    one_call: bool = False, answered: bool = True,
) -> ChatPrompt:  # fmt: skip
    """A conversation up to where the model goes on, and how to read its answer.

    A last message of the assistant is gone on with, unless the client says otherwise. What is not
    to be `answered` may have more tokens than the context.
    """
    most = llm.n_ctx if answered else most_read(llm)
    if len(messages) > most:  # each takes a token at least, and time before it is counted
        raise ContextError(f"{len(messages)} messages do not fit in {most} tokens; send fewer")
    ready = [plain_message(message, number) for number, message in enumerate(messages)]
    if not ready:
        raise ApiError(400, "messages is empty; there is nothing to answer", param="messages")
    extra = dict(extra or {})
    if taken := _OURS & extra.keys():
        names, param = ", ".join(sorted(taken)), "chat_template_kwargs"
        raise ApiError(400, f"{param} cannot set {names}", param=param)
    if continue_final and add_generation_prompt:
        raise ApiError(400, "continue_final_message and add_generation_prompt exclude each other")
    tools, tool_choice = _allowed(tools, tool_choice)
    choice = _choice(tool_choice)
    said = ready[-1].get("content") if ready[-1].get("role") == "assistant" else None
    if said and isinstance(said, str) and continue_final is not False:
        return _continued(llm, ready, tools or None, choice, extra, one_call, most)
    if continue_final:  # nothing to go on with
        raise ApiError(
            400, "continue_final_message needs a last message of the assistant, with a content",
            param="continue_final_message",
        )  # fmt: skip
    extra["add_generation_prompt"] = add_generation_prompt is not False
    return llm.chat_prompt(ready, tools or None, choice, extra, one_call=one_call, most_tokens=most)


read_prompt = partial(chat_prompt, answered=False)
"""A conversation that is only shown or counted."""


def _continued(
    llm: LLM, ready: list[dict[str, Any]], tools: list[dict[str, Any]] | None, choice: ToolChoice,
    extra: dict[str, Any], one_call: bool, most: int,
) -> ChatPrompt:  # fmt: skip
    """Up to the end of the last message; a mark shows where the template puts that."""
    mark = f"\u2063{secrets.token_hex(8)}\u2063"
    last = {**ready[-1], "content": ready[-1]["content"] + mark}
    extra = {**extra, "add_generation_prompt": False}
    return llm.chat_prompt([*ready[:-1], last], tools, choice, extra, mark, one_call, most)


def _allowed(
    tools: list[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """The tools that may be called, and whether one must be, where a choice names some of them.

    The model is not shown the others: what it does not know it cannot call.
    """
    if not isinstance(tool_choice, dict) or tool_choice.get("type") != "allowed_tools":
        return tools, tool_choice
    said: Any = tool_choice.get("allowed_tools", tool_choice)
    listed = said.get("tools") if isinstance(said, dict) else None
    mode = said.get("mode", "auto") if isinstance(said, dict) else None
    if not isinstance(listed, list) or not listed or mode not in ("auto", "required"):
        raise _no_choice()
    names = {_name(one): None for one in listed}  # in their order: many are looked up in many
    known = {_name(tool) for tool in tools or []}
    if unknown := [name for name in names if name is None or name not in known]:
        raise ApiError(
            400, f"tool_choice allows {unknown[0]!r:.80}, which is none of the tools",
            param="tool_choice",
        )  # fmt: skip
    return [one for one in tools or [] if _name(one) in names], mode


def _name(tool: Any) -> str | None:
    """The name of a tool, in either of OpenAI's forms."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _choice(tool_choice: str | dict[str, Any] | None) -> ToolChoice:
    """auto, none, required, or a tool, which may be called one of these."""
    match tool_choice:
        case None:
            return "auto"
        case "auto" | "none" | "required":
            return str(tool_choice)
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise _no_choice()


def _no_choice() -> ApiError:
    return ApiError(
        400, "tool_choice is 'none', 'auto', 'required', {'type': 'function', 'function': {'name': "
        "…}}, or {'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', "
        "'tools': […]}}", param="tool_choice",
    )  # fmt: skip


def plain_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A message whose content is text, with roles that templates know."""
    made = with_text(message, number)
    if made.get("function_call"):
        raise ApiError(
            400, f"messages[{number}] has a function_call, which is not read any more: send it as "
            "tool_calls", param="messages",
        )  # fmt: skip
    if made.get("role") == "developer":
        made["role"] = "system"
    if made.get("content") is None and made.get("role") in ("assistant", "tool"):
        made["content"] = ""
    return made


class Spoken(NamedTuple):
    """What came of an answer, taken apart."""

    choice: int
    answer: Answer
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    """stop, length, tool_calls or abort."""


async def spoken(run: Run, one_call: bool = False) -> AsyncIterator[Spoken]:
    """The answers of a run as they come: text, reasoning and calls; of calls, all or one."""
    prompt = run.ask.chat
    assert prompt is not None
    readers = [prompt.reader() for _ in range(run.choices)]
    called = [0] * len(readers)
    async for delta in run.deltas():
        answer = readers[delta.choice].feed(delta.text)
        finish = delta.finish_reason
        if finish:
            answer += readers[delta.choice].close()
        if one_call:
            answer = replace(answer, tool_calls=answer.tool_calls[: 1 - called[delta.choice]])
        called[delta.choice] += len(answer.tool_calls)
        if called[delta.choice] and finish == "stop":
            finish = "tool_calls"
        if answer or delta.logprobs or finish:
            yield Spoken(delta.choice, answer, delta.logprobs, finish)
