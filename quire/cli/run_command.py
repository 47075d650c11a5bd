"""`quire run`: continue a prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

import quire
from quire.cli.options import (
    drafts_from,
    load_from,
    model_options,
    sampling_from,
    sampling_options,
)
from quire.errors import RequestError
from quire.types import Completion, Constraint, Json, Regex


@click.command("run")
@click.argument("prompt", required=False)
@model_options
@sampling_options
@click.option("--raw", is_flag=True, help="Continue the text itself instead of answering it.")
@click.option("--system", help="What the model is told before the prompt.")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option(
    "--json-schema",
    type=click.Path(exists=True, dir_okay=False),
    help="Answer in JSON that fits the schema in this file.",
)
@click.option("--regex", help="Answer in text that this regular expression matches.")
@click.option("--json", "as_json", is_flag=True,
              help="One JSON object: text, token_ids, timings, speculation, memory.")  # fmt: skip
def command(prompt: str | None, **options: Any) -> None:
    """Answer PROMPT, or standard input, to standard output as it comes.

    A model with a chat template answers the prompt as a user's message; --raw, and a model
    without a template, continue the text as it stands.
    """
    text = _prompt(prompt)
    constraint = _constraint(options.pop("json_schema"), options.pop("regex"))
    as_json, raw, system = options.pop("as_json"), options.pop("raw"), options.pop("system")
    stop = options.pop("stop")
    sampling, speculate = sampling_from(options), options.pop("speculate")
    with load_from(options) as llm, drafts_from(speculate, llm) as drafts:
        tokens = _tokens(llm, text, raw, system)
        stream = llm.stream(tokens, sampling, stop=stop, constraint=constraint, speculate=drafts)
        for piece in stream:
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if as_json:
            print(json.dumps(_object(stream.completion, llm)))
        else:
            sys.stdout.write("\n")
            _summary(stream.completion)


def _prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise RequestError('there is no prompt; give one, as in: quire run "Why is the sky blue?"')
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8: {error}") from error


def _tokens(llm: quire.LLM, text: str, raw: bool, system: str | None) -> list[int]:
    if raw or not llm.has_template:
        if system:
            raise RequestError("--system needs a chat template, and is not used with --raw")
        return llm.encode(text)
    messages = [{"role": "system", "content": system}] if system else []
    return llm.chat_tokens([*messages, {"role": "user", "content": text}])


def _constraint(schema: str | None, regex: str | None) -> Constraint | None:
    if schema and regex:
        raise RequestError("--json-schema and --regex exclude each other; give one")
    if schema:
        return Json(Path(schema).read_text())
    return Regex(regex) if regex else None


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
    click.secho(
        f"{t.prompt_tokens} prompt tokens at {t.prefill_tokens_per_s:.0f}/s, "
        f"{len(completion.token_ids)} generated at {t.decode_tokens_per_s:.0f}/s, "
        f"loaded in {t.load_s:.2f} s ({completion.finish_reason})",
        err=True, dim=True,
    )  # fmt: skip
    if s := completion.speculation:
        click.secho(
            f"{s.accepted} of {s.drafted} drafted tokens accepted in {s.rounds} rounds, "
            f"{s.mean_accepted:.1f} each; {s.draft_s:.2f} s to draft, "
            f"{s.verify_s:.2f} s to verify, {s.rollback_s * 1e3:.1f} ms to roll back",
            err=True, dim=True,
        )  # fmt: skip
