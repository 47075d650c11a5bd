"""`quire run`: answer a prompt."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

import quire
from quire.cli.constraints import constraint_from
from quire.cli.drafts import drafts_from
from quire.cli.flags import Command
from quire.cli.options import (
    load_from,
    model_options,
    sampling_from,
    sampling_options,
)
from quire.cli.prompt import RAW_SYSTEM, whole_prompt
from quire.cli.remote import or_remote, run_remotely
from quire.cli.streams import cut, note, write
from quire.errors import RequestError
from quire.types import Completion, Sampling


@click.command("run", cls=Command)
@click.argument("prompt", required=False)
@click.option("-p", "--prompt", "asked", help="The prompt, as PROMPT is.")
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    help="A prompt in a file, behind PROMPT if there is one; - is standard input.",
)
@model_options
@sampling_options
@click.option("--raw", is_flag=True, help="Continue the text itself instead of answering it.")
@click.option("--system", help="What the model is told before the prompt.")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option(
    "--json-schema",
    metavar="SCHEMA",
    help="Answer in JSON that fits this schema, or the one in this file.",
)
@click.option("--grammar", metavar="GBNF", help="Answer in what this grammar of llama.cpp fits.")
@click.option("--grammar-file", metavar="FILE", help="The same, with the grammar in a file.")
@click.option("--regex", help="Answer in text that this regular expression matches.")
@click.option("--json", "as_json", is_flag=True,
              help="One JSON object: text, token_ids, timings, speculation, memory; with --url, "
              "text and what the server says.")  # fmt: skip
@or_remote(run_remotely)
def command(prompt: str | None, asked: str | None, file: str | None, **options: Any) -> None:
    """Answer PROMPT, with what comes on standard input behind it, as it comes.

    A model with a chat template answers the prompt as a user's message; --raw, and a model
    without a template, continue the text as it stands. An answer that is cut is told on standard
    error; one that had to fit a schema, grammar or expression ends with status 1 then.
    """
    constraint = constraint_from(options)
    as_json, raw, system = options.pop("as_json"), options.pop("raw"), options.pop("system")
    stop = options.pop("stop")
    sampling, speculate = Sampling(**sampling_from(options)), options.pop("speculate")
    text = whole_prompt(prompt, asked, file)
    with load_from(options) as llm, drafts_from(speculate, llm) as drafts:
        tokens = _tokens(llm, text, raw, system)
        stream = llm.stream(tokens, sampling, stop=stop, constraint=constraint, speculate=drafts)
        if as_json:
            for _ in stream:
                pass
            print(json.dumps(_object(stream.completion, llm)))
        else:
            write(stream)
            _summary(stream.completion)
        completion = stream.completion
    if completion.finish_reason == "length":
        note(f"quire: {cut(len(completion.token_ids), sampling.max_tokens)}")
        if constraint is not None:
            sys.exit(1)


def _tokens(llm: quire.LLM, text: str, raw: bool, system: str | None) -> list[int]:
    if raw or not llm.has_template:
        if system:
            raise RequestError(RAW_SYSTEM)
        return llm.encode(text)
    messages = [{"role": "system", "content": system}] if system else []
    return llm.chat_tokens([*messages, {"role": "user", "content": text}])


def _object(completion: Completion, llm: quire.LLM) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        "timings": completion.timings.as_dict(),
        "speculation": completion.speculation.as_dict() if completion.speculation else None,
        "memory": llm.memory.as_dict(),
        "model": str(llm.path),
        "device": llm.ops.name,
    }


def _summary(completion: Completion) -> None:
    if not sys.stderr.isatty():
        return
    t = completion.timings
    note(
        f"{t.prompt_tokens} prompt tokens at {t.prefill_tokens_per_s:.0f}/s, "
        f"{len(completion.token_ids)} generated at {t.decode_tokens_per_s:.0f}/s, "
        f"loaded in {t.load_s:.2f} s ({completion.finish_reason})",
        dim=True,
    )
    if s := completion.speculation:
        note(
            f"{s.accepted} of {s.drafted} drafted tokens accepted in {s.rounds} rounds, "
            f"{s.mean_accepted:.1f} each; {s.draft_s:.2f} s to draft, "
            f"{s.verify_s:.2f} s to verify, {s.rollback_s * 1e3:.1f} ms to roll back",
            dim=True,
        )
