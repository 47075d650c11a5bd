"""Writes what comes in the form of OpenAI's responses: items, their parts, and events for each."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from quire.server.chat_routes import ChatBody
from quire.server.conversation import spoken
from quire.server.dialect import new_id
from quire.server.errors import ApiError
from quire.server.progress import Watched
from quire.server.turn import Turn
from quire.server.wire import event
from quire.text.answers import Answer
from quire.types import ToolCall


def refused(error: ApiError) -> bytes:
    """How a stream ends that cannot be answered."""
    told = {"code": error.code or error.type, "message": error.message, "param": error.param}
    return event({"type": "error", "sequence_number": 0, **told}, "error")


class ResponseWriter:
    """One response: `whole` as an object, `events` as it comes."""

    def __init__(self, turn: Turn, head: dict[str, Any], body: ChatBody) -> None:
        self._state = turn.state
        self._run = turn.run
        self._head = {"id": new_id("resp_"), "object": "response", **head}
        self._one_call = body.one_call
        self._watched = Watched(turn.run, body.return_progress, body.timings_per_token)
        self._output: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._finish = "stop"
        self._sent = -1

    async def whole(self) -> dict[str, Any]:
        """The object that is there at the end."""
        async for part in spoken(self._run, self._one_call):
            self._take(part.answer)
            self._finish = part.finish_reason or self._finish
        self._close(self._status)
        return self._ended()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each with its name and number."""
        try:
            yield self._event("created", response=self._told("in_progress"))
            yield self._event("in_progress", response=self._told("in_progress"))
            async for progress in self._watched.prompt():
                yield self._event("in_progress", response=self._told("in_progress"), **progress)
            async for part in spoken(self._run, self._one_call):
                self._finish = part.finish_reason or self._finish
                for kind, fields in self._take(part.answer):
                    yield self._event(kind, **fields, **self._watched.token(0))
            for kind, fields in self._close(self._status):
                yield self._event(kind, **fields)
            ended = self._ended()
            yield self._event(ended["status"], response=ended, **self._watched.token(0))
        except Exception as error:
            told = self._state.told(error)
            failure = {"code": told.code or told.type, "message": told.message}
            yield self._event("failed", response={**self._told("failed"), "error": failure})

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": self._sent, **fields}, name)

    # -- items ----------------------------------------------------------------------------------

    def _take(self, answer: Answer) -> list[_Told]:
        """What came, as events."""
        told: list[_Told] = []
        for form, text in ((_Reasoning, answer.reasoning), (_Message, answer.text)):
            if text:
                if not isinstance(self._open, form):
                    told += self._close()
                    self._open = form(len(self._output))
                    told += self._open.begin()
                told += self._open.add(text)
        for call in answer.tool_calls:
            told += self._close() + self._call(call)
        return told

    def _close(self, status: str = "completed") -> list[_Told]:
        if self._open is None:
            return []
        told, item = self._open.end(status)
        self._output.append(item)
        self._open = None
        return told

    def _call(self, call: ToolCall) -> list[_Told]:
        at, id = len(self._output), new_id("fc_")
        item = {
            "id": id, "type": "function_call", "status": "completed", "call_id": call.id,
            "name": call.name, "arguments": call.arguments,
        }  # fmt: skip
        self._output.append(item)
        where = {"item_id": id, "output_index": at}
        begun = {**item, "status": "in_progress", "arguments": ""}
        return [
            ("output_item.added", {"output_index": at, "item": begun}),
            ("function_call_arguments.delta", {**where, "delta": call.arguments}),
            ("function_call_arguments.done",
             {**where, "arguments": call.arguments, "name": call.name}),
            ("output_item.done", {"output_index": at, "item": item}),
        ]  # fmt: skip

    # -- the whole ------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _told(self, status: str, **more: Any) -> dict[str, Any]:
        end = {"output": self._output, "usage": None, "error": None, "incomplete_details": None}
        return {**self._head, "status": status, **end, **more}

    def _ended(self) -> dict[str, Any]:
        usage: Any = self._run.usage()
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        more = {"usage": counts, "timings": self._run.timings(), "memory": self._run.memory()}
        why = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return self._told(self._status, **more, incomplete_details=why)


_Told = tuple[str, dict[str, Any]]
"""The kind of an event, and what it says."""


class _Item:
    """An item whose text comes piece by piece."""

    prefix = ""
    event = ""

    def __init__(self, at: int) -> None:
        self.id = new_id(self.prefix)
        self.at = at
        self.text = ""

    @property
    def where(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.at, "content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        """The only part that it has."""
        raise NotImplementedError

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """All of it."""
        raise NotImplementedError

    def begin(self) -> list[_Told]:
        """It is there, and empty."""
        item = self.item("in_progress", [])
        return [
            ("output_item.added", {"output_index": self.at, "item": item}),
            ("content_part.added", {**self.where, "part": self.part("")}),
        ]

    def add(self, text: str) -> list[_Told]:
        """More of its text."""
        self.text += text
        return [(f"{self.event}.delta", {**self.where, "delta": text, "logprobs": []})]

    def end(self, status: str) -> tuple[list[_Told], dict[str, Any]]:
        """No more of it comes."""
        item = self.item(status, [self.part(self.text)])
        return [
            (f"{self.event}.done", {**self.where, "text": self.text, "logprobs": []}),
            ("content_part.done", {**self.where, "part": self.part(self.text)}),
            ("output_item.done", {"output_index": self.at, "item": item}),
        ], item


class _Message(_Item):
    """What is said."""

    prefix = "msg_"
    event = "output_text"

    def part(self, text: str) -> dict[str, Any]:
        """Its text."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """A message."""
        head = {"id": self.id, "type": "message", "status": status}
        return {**head, "role": "assistant", "content": content}


class _Reasoning(_Item):
    """What is thought before."""

    prefix = "rs_"
    event = "reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        """Its text."""
        return {"type": "reasoning_text", "text": text}

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Reasoning, with no summary of it."""
        head = {"id": self.id, "type": "reasoning", "status": status}
        return {**head, "summary": [], "content": content}
