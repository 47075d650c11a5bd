"""Quire runs language models with memory you can branch, rewind and see."""

from __future__ import annotations

from quire import errors, speculate
from quire.api.llm import LLM
from quire.api.load import load
from quire.api.plan import plan
from quire.api.report import MemoryReport
from quire.api.session import Session
from quire.api.stream import AsyncStream, Stream
from quire.engine.sequence import Mark
from quire.placement.plan import Plan
from quire.text.tokenizer import Tokenizer
from quire.types import (
    Completion,
    Grammar,
    Json,
    Regex,
    Sampling,
    Speculation,
    StepOutput,
    Timings,
    TokenLogprob,
    ToolCall,
)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncStream",
    "Completion",
    "Grammar",
    "Json",
    "Mark",
    "MemoryReport",
    "Plan",
    "Regex",
    "Sampling",
    "Session",
    "Speculation",
    "StepOutput",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
    "errors",
    "load",
    "plan",
    "speculate",
]
