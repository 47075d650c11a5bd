"""Quire runs language models with memory you can branch, rewind and see."""

from __future__ import annotations

from quire import errors, speculate
from quire.engine.sequence import Mark
from quire.llm import LLM, load
from quire.report import MemoryReport
from quire.session import Session
from quire.stream import Stream
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
)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "Grammar",
    "Json",
    "Mark",
    "MemoryReport",
    "Regex",
    "Sampling",
    "Session",
    "Speculation",
    "StepOutput",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tokenizer",
    "errors",
    "load",
    "speculate",
]
