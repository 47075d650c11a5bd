"""Names of flags: what settings are called on the command line, and what llama.cpp's mean here."""

from __future__ import annotations

import re
from typing import Any

import click

# Settings as `quire.load` and `quire.Sampling` call them, and so their errors.
_FLAGS = {
    "max_tokens": "-n", "temperature": "--temp", "top_k": "--top-k", "top_p": "--top-p",
    "min_p": "--min-p", "repetition_penalty": "--repeat-penalty",
    "presence_penalty": "--presence-penalty", "frequency_penalty": "--frequency-penalty",
    "n_ctx": "-c", "n_gpu_layers": "-ngl", "memory_budget": "--memory-budget",
    "kv_cache_tokens": "--kv-cache-tokens", "kv_cache_demand_paged": "--kv-cache-demand-paged",
    "page_tokens": "--page-tokens", "type_k": "-ctk", "type_v": "-ctv", "swa_full": "--swa-full",
    "swap_space": "--swap-space", "moe_n_expert": "--moe-n-expert",
    "n_layer_exit": "--n-layer-exit", "cache_salt": "--cache-salt",
}  # fmt: skip
_WORDS = {name: f"--{name}" for name in ("seed", "threads", "device", "activations", "quantize")}
"""Names that are also words: they are settings where a message begins with them, or before =."""
_NAMED = re.compile(
    rf"\b({'|'.join(_FLAGS)})\b(?:=('[^']*'|\w+))?|(?:^|\b)({'|'.join(_WORDS)})(?:=('[^']*'|\w+))"
)
_FIRST = re.compile(rf"^({'|'.join(_WORDS)})\b")

_CHAT, _SERVE = "quire chat is for conversations", "quire serve is for that"
_ALWAYS = "that is always so here"
_PAGES = "memory is taken in pages as it is used; see --kv-cache-tokens and --memory-budget"
_NOT_HERE = {
    "-cnv": _CHAT, "--conversation": _CHAT, "-i": _CHAT, "--interactive": _CHAT,
    "-if": _CHAT, "--interactive-first": _CHAT, "-mli": "quire chat takes several lines: Alt-Enter",
    "-st": "quire run answers once", "--single-turn": "quire run answers once",
    "--host": _SERVE, "--port": _SERVE, "-np": _SERVE, "--parallel": _SERVE,
    "-fa": _ALWAYS, "--flash-attn": _ALWAYS, "--jinja": _ALWAYS, "-kvu": _ALWAYS,
    "--no-display-prompt": _ALWAYS, "--simple-io": _ALWAYS, "--log-disable": _ALWAYS,
    "--no-warmup": _ALWAYS, "--warmup": _ALWAYS, "--kv-unified": _ALWAYS,
    "-b": "how many tokens are computed at once is found out by itself",
    "--batch-size": "how many tokens are computed at once is found out by itself",
    "-ub": "how many tokens are computed at once is found out by itself",
    "--ubatch-size": "how many tokens are computed at once is found out by itself",
    "-tb": "-t is for prompts and answers alike", "--threads-batch": "-t is for prompts and answers",
    "--mlock": "weights are packed into memory of their own; there is nothing to lock",
    "--no-mmap": "weights are packed into memory of their own; the file is not mapped after that",
    "--mmap": "weights are packed into memory of their own; the file is not mapped after that",
    "--prompt-cache": "in quire chat, /save and /load keep what was computed",
    "--context-shift": "in quire chat, /forget makes room when the context is full",
    "--keep": "in quire chat, /forget makes room when the context is full",
    "-dkvc": _PAGES, "-nkvo": _PAGES, "--no-kv-offload": _PAGES, "--defrag-thold": _PAGES,
    "-mu": "fetch it, and name the file with -m", "--model-url": "fetch it, and name the file with -m",
    "--chat-template": "the model's own template is used; --raw takes the text as it is",
    "--chat-template-file": "the model's own template is used; --raw takes the text as it is",
    "--lora": "adapters are not known here; merge it into the model",
    "--mmproj": "models read text only here", "--image": "models read text only here",
    "-md": "drafts are made with --speculate MODEL",
    "--model-draft": "drafts are made with --speculate MODEL",
    "--draft-max": "how much is drafted is found out by itself; see --speculate",
    "--draft": "how much is drafted is found out by itself; see --speculate",
    "--repeat-last-n": "penalties look at all that was written",
    "--samplers": "the order is: penalties, constraint, temperature, top-k, top-p, min-p",
    "--verbose": "timings come with every answer in a terminal, and with --json", 
    "-v": "timings come with every answer in a terminal, and with --json",
    "-e": "texts are taken as they are; in most shells $'a\\nb' has a line end",
    "--escape": "texts are taken as they are; in most shells $'a\\nb' has a line end",
    "--color": "colours are left to your terminal", "-co": "colours are left to your terminal",
}  # fmt: skip


def in_flags(message: str) -> str:
    """A message about settings, in the words of the command line."""
    message = _FIRST.sub(lambda found: _WORDS[found[1]], message)
    return _NAMED.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    flag = _FLAGS.get(found[1]) or _WORDS[found[3]]
    value = (found[2] or found[4] or "").strip("'")
    if value in ("True", "False"):
        return flag if value == "True" else flag.replace("--", "--no-", 1)
    return f"{flag} {value}" if value else flag


class Command(click.Command):
    """A command that says what to do instead of flags that other programs have."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        valued = {name for option in options if not option.is_flag for name in option.opts}
        left = iter(args)
        for typed in left:
            name = typed.partition("=")[0]
            if typed == "--":
                break
            if typed in valued:
                next(left, None)
            elif name in _NOT_HERE and name not in known:
                raise click.UsageError(f"there is no {name}: {_NOT_HERE[name]}", ctx)
        return super().parse_args(ctx, args)


def command(name: str, **settings: Any) -> Any:
    """`click.command` for such commands."""
    return click.command(name, cls=Command, **settings)
