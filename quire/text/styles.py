"""In which style a model answers, as its chat template says: reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from quire.text import calls
from quire.text.answers import AnswerReader, CallMarks, ChannelReader, TagReader
from quire.text.calls import Tools


@dataclass(frozen=True)
class Style:
    """How answers are written."""

    name: str
    """What the way to write calls is called; empty where it is not known."""
    reasoning: tuple[str, str] | None = None
    """The marks around it."""
    calls: CallMarks | None = None
    stop: tuple[str, ...] = ()
    """What a model goes on with when it should wait for what a tool says."""
    takes_tools: bool = False
    """Whether the template shows tools to the model."""

    @property
    def marks_calls(self) -> bool:
        """Whether a call can be told from an answer in JSON by how it begins."""
        return bool(self.name) and not (self.calls and self.calls.bare)

    def thinking(self, prompt: str) -> bool:
        """Whether a prompt ends with the beginning of the reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0].rstrip())

    def reasoned(self, prompt: str, pieces: Sequence[bytes]) -> int:
        """How many tokens of an answer, given as their bytes, are reasoning and its marks."""
        marks = _ANALYSIS if self.name == "gpt-oss" else self.reasoning
        if marks is None:
            return 0
        open, close = (mark.encode() for mark in marks)
        whole = b"".join(pieces)
        if not self.thinking(prompt) and not whole.lstrip().startswith(open):
            return 0
        end = whole.find(close)
        if end < 0:
            return len(pieces)
        begins = accumulate((len(piece) for piece in pieces[:-1]), initial=0)
        return sum(at < end + len(close) for at in begins)

    def reader(self, tools: Tools | None = None, prompt: str = "") -> AnswerReader:
        """A reader for the answer to a prompt; calls are looked for where there are tools."""
        if self.name == "gpt-oss":
            return ChannelReader(tools)
        return TagReader(self.reasoning, self.calls, tools, self.thinking(prompt))


_ANALYSIS = ("<|channel|>analysis", "<|end|>")
_TAGS = (("<tool_call>", "</tool_call>"),)
_XML = CallMarks((*_TAGS, ("<function=", "</function>")), calls.xml_calls)
_CALLS: dict[str, CallMarks | None] = {
    "gpt-oss": None,  # a message of its own kind
    "qwen-xml": _XML,
    "hermes": CallMarks((*_TAGS, ("<tool_calls>", "</tool_calls>")), calls.json_calls),
    "mistral": CallMarks((("[TOOL_CALLS]", ""),), calls.mistral_calls),
    "mistral-list": CallMarks((("[TOOL_CALLS]", ""),), calls.mistral_calls),
    "lfm2": CallMarks((("<|tool_call_start|>", "<|tool_call_end|>"),), calls.python_calls),
    "gemma": CallMarks((("<|tool_call>", "<tool_call|>"),), calls.gemma_calls('<|"|>')),
    "functiongemma": CallMarks(
        (("<start_function_call>", "<end_function_call>"),), calls.gemma_calls("<escape>")
    ),
    "llama3": CallMarks((("<|python_tag|>", ""),), calls.json_line, bare="{"),
    "nemotron": CallMarks((("<TOOLCALL>", "</TOOLCALL>"),), calls.json_calls),
}
_STOPS = {"gemma": ("<|tool_response>",), "functiongemma": ("<start_function_response>",)}
_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
)


def _has(*words: str) -> Callable[[str], bool]:
    return lambda template: all(word in template for word in words)


# In this order: templates quote each other's words.
_SIGNS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("gpt-oss", _has("<|channel|>", "<|message|>")),
    ("qwen-xml", _has("<tool_call>", "<function=")),
    ("", _has("<tool_call>", "<arg_key>")),
    ("", _has("<tool_call>", "<invoke")),
    ("nemotron", _has("<TOOLCALL>")),
    ("hermes", _has("<tool_call>", "</tool_call>", "arguments")),
    ("mistral", _has("[TOOL_CALLS]", "[ARGS]")),
    ("mistral-list", _has("[TOOL_CALLS]")),
    ("lfm2", _has("<|tool_call_start|>")),
    ("lfm2", _has("List of tools: ")),
    ("gemma", _has("<|tool_call>", '<|"|>')),
    ("functiongemma", _has("<start_function_call>")),
    ("llama3", lambda template: "<|python_tag|>" in template and "<function=" not in template),
    ("llama3", _has("<|start_header_id|>ipython", '"parameters": ')),
)


def style_of(template: str) -> Style:
    """The style of a chat template."""
    name = next((name for name, fits in _SIGNS if fits(template)), "")
    reasoning = next((pair for pair in _REASONING if pair[0] in template), None)
    if reasoning == _REASONING[-1] and "<channel|>" not in template:
        reasoning = None
    return Style(name, reasoning, _CALLS.get(name), _STOPS.get(name, ()), "tools" in template)
