"""What --speculate says: who drafts tokens ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import quire
from quire.api.requests import Speculate
from quire.cli.options import fetched
from quire.engine.drafter import Speculator
from quire.errors import FetchError, RequestError
from quire.speculate import NAMES, EarlyExit, FirstOf, Ngram, NgramCache


@contextmanager
def drafts_from(speculate: str | None, llm: quire.LLM) -> Iterator[Speculate]:
    """Who drafts for a model; a draft model is loaded beside it."""
    if speculate is None:
        yield None
        return
    parts = [speculate] if os.path.exists(speculate) else speculate.split("+")
    with ExitStack() as stack:
        ways = [_way(part, llm, stack) for part in parts]
        yield ways[0] if len(ways) == 1 else FirstOf(*ways)


def _way(how: str, llm: quire.LLM, stack: ExitStack) -> Speculator | quire.LLM:
    """One part of --speculate."""
    if plain := _plain_way(how):
        return plain
    try:
        return stack.enter_context(
            quire.load(fetched(how), beside=llm, threads=llm.settings.threads)
        )
    except FetchError as error:
        if how.startswith("hf:") or "/" in how:  # a model of the Hub: it was told why there is none
            raise
        raise RequestError(
            f"--speculate has {how!r}, which is neither one of {', '.join(NAMES)}, "
            "ngram:CACHEFILE, early-exit:LAYERS, nor a model: no file, folder or alias has this "
            "name; several ways are joined by +"
        ) from error


def _plain_way(how: str) -> Speculator | None:
    """A part of --speculate that needs no model, if it is one."""
    if how in NAMES:
        return NAMES[how]
    name, colon, setting = how.partition(":")
    if colon and name == "ngram":
        return Ngram(cache=NgramCache.load(setting))
    if colon and name == "early-exit":
        if not setting.isdecimal():
            raise RequestError(f"--speculate {how}: {setting!r} is no number of layers")
        return EarlyExit(int(setting))
    return None


def served_drafts(speculate: str | None) -> Speculator | None:
    """Who drafts for all models of a server."""
    if speculate is None:
        return None
    ways = []
    for how in speculate.split("+"):
        way = _plain_way(how)
        if way is None:
            raise RequestError(
                f"--speculate has {how!r}; a server drafts by {', '.join(NAMES)}, ngram:CACHEFILE "
                "or early-exit:LAYERS, several joined by +, and with no model of its own"
            )
        ways.append(way)
    return ways[0] if len(ways) == 1 else FirstOf(*ways)
