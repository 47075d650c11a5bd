"""The blocks of an answer in Anthropic's form: in a list, and as events."""

from __future__ import annotations

import json
from typing import Any

from quire.server.wire import event
from quire.text.answers import Answer
from quire.types import ToolCall

_SIGNED = {"thinking": {"signature": ""}}


def add_to(content: list[dict[str, Any]], answer: Answer) -> None:
    """More of an answer, in the order in which it came."""
    for kind, text in (("thinking", answer.reasoning), ("text", answer.text)):
        if text and (not content or content[-1]["type"] != kind):
            content.append({"type": kind, kind: "", **_SIGNED.get(kind, {})})
        if text:
            content[-1][kind] += text
    for call in answer.tool_calls:
        content.append({**_call_block(call), "input": json.loads(call.arguments)})


class Blocks:
    """The blocks of an answer as events: one is open at a time."""

    def __init__(self) -> None:
        self._kind = ""
        self._number = -1

    def add(self, answer: Answer) -> list[bytes]:
        """What came."""
        made: list[bytes] = []
        for kind, text in (("thinking", answer.reasoning), ("text", answer.text)):
            if text:
                made += self._open(kind, {"type": kind, kind: "", **_SIGNED.get(kind, {})})
                made.append(self._delta({"type": f"{kind}_delta", kind: text}))
        for call in answer.tool_calls:
            made += self.close()
            made += self._open("tool_use", {**_call_block(call), "input": {}})
            made.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return made

    def close(self) -> list[bytes]:
        """Ends the block that is open."""
        if not self._kind:
            return []
        # Anthropic signs thoughts at their end, and clients wait for it; here it says nothing.
        signed = _SIGNED.get(self._kind)
        made = [self._delta({"type": "signature_delta", **signed})] if signed else []
        self._kind = ""
        return [*made, event_of("content_block_stop", index=self._number)]

    def _open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if kind == self._kind:
            return []
        before = self.close()
        self._kind, self._number = kind, self._number + 1
        return [*before, event_of("content_block_start", index=self._number, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event_of("content_block_delta", index=self._number, delta=delta)


def _call_block(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def event_of(name: str, **fields: Any) -> bytes:
    """An event that says its name twice."""
    return event({"type": name, **fields}, name)
