"""Names of flags: what settings are called on the command line, and what llama.cpp's mean here."""

from __future__ import annotations

import re

import click

# Settings as `quire.load` and `quire.Sampling` call them, and so their errors.
_FLAGS = {
    "max_tokens": "-n", "temperature": "--temp", "top_k": "--top-k", "top_p": "--top-p",
    "min_p": "--min-p", "repetition_penalty": "--repeat-penalty",
    "presence_penalty": "--presence-penalty", "frequency_penalty": "--frequency-penalty",
    "typical_p": "--typical", "top_n_sigma": "--top-nsigma",
    "xtc_probability": "--xtc-probability", "xtc_threshold": "--xtc-threshold",
    "mirostat_tau": "--mirostat-ent", "mirostat_eta": "--mirostat-lr",
    "dry_multiplier": "--dry-multiplier", "dry_base": "--dry-base",
    "dry_allowed_length": "--dry-allowed-length", "dry_penalty_last_n": "--dry-penalty-last-n",
    "dry_sequence_breakers": "--dry-sequence-breaker", "logit_bias": "--logit-bias",
    "n_ctx": "-c", "n_gpu_layers": "-ngl", "memory_budget": "--memory-budget",
    "kv_cache_tokens": "--kv-cache-tokens", "kv_cache_demand_paged": "--kv-cache-demand-paged",
    "page_tokens": "--page-tokens", "type_k": "-ctk", "type_v": "-ctv", "swa_full": "--swa-full",
    "swap_space": "--swap-space", "moe_n_expert": "--moe-n-expert",
    "n_layer_exit": "--n-layer-exit", "exact_batches": "--exact-batches",
    "cache_salt": "--cache-salt",
}  # fmt: skip
_WORDS = {
    name: f"--{name}"
    for name in ("seed", "threads", "device", "activations", "quantize", "mirostat")
}
"""Names that are also words: they are settings where a message begins with them, or before =."""
_NAMED = re.compile(
    rf"(?:\b({'|'.join(_FLAGS)})\b|^({'|'.join(_WORDS)})\b|\b({'|'.join(_WORDS)})(?==))"
    r"(?:=('[^']*'|\w+))?"
)

_SAME = {
    "--predict": "-n", "--typical-p": "--typical", "--top-n-sigma": "--top-nsigma",
    "-l": "--logit-bias", "--temperature": "--temp",
    "-no-cnv": "--raw", "--no-conversation": "--raw",
    "-sys": "--system", "--system-prompt": "--system", "-r": "--stop", "--reverse-prompt": "--stop",
    "-hf": "-m", "--hf-repo": "-m", "-j": "--json-schema", "-jf": "--json-schema",
    "--json-schema-file": "--json-schema", "-ot": "--override-tensor", "-ts": "--tensor-split",
    "-mg": "--main-gpu", "-ncmoe": "--n-cpu-moe", "-cmoe": "--cpu-moe", "-nkvo": "--no-kv-offload",
}  # fmt: skip
"""Other spellings that llama.cpp has of what is here."""

_INSTEAD = {
    "quire chat is for conversations": "-cnv --conversation -i --interactive -if",
    "in quire chat, Alt-Enter begins another line": "-mli --multiline-input",
    "quire run answers once": "-st --single-turn",
    "quire serve is for that": "--host --port -np --parallel",
    "that is always so here": "-fa --flash-attn --jinja -kvu --kv-unified --no-display-prompt "
    "--simple-io --log-disable --warmup --no-warmup",
    "how many tokens are computed at once is found out by itself":
    "-b --batch-size -ub --ubatch-size",
    "-t is for prompts and answers alike": "-tb --threads-batch",
    "weights are packed into memory of their own, and the file is let go":
    "--mlock --mmap --no-mmap",
    "in quire chat, /save and /load keep what was computed": "--prompt-cache",
    "in quire chat, /forget makes room when the context is full":
    "--context-shift --no-context-shift --keep",
    "memory is taken in pages as it is used; see --kv-cache-tokens and --memory-budget":
    "-dkvc -dt --defrag-thold",
    "fetch it, and name the file with -m": "-mu --model-url",
    "the model's own template is used; --raw takes the text as it is":
    "--chat-template --chat-template-file",
    "adapters are not known here; merge it into the model": "--lora --lora-scaled",
    "models read text only here": "--mmproj -mm --image --audio",
    "drafts are made with --speculate MODEL": "-md --model-draft",
    "how much is drafted is found out by itself; see --speculate": 
    "--draft --draft-max --draft-min",
    "penalties look at all that was written": "--repeat-last-n",
    "the order is: bias, penalties, DRY, constraint, temperature, top-nsigma, top-k, typical, "
    "top-p, min-p, XTC, mirostat": "--samplers --sampling-seq",
    "timings come with every answer in a terminal, and with --json": "-v --verbose --perf",
    "texts are taken as they are; in most shells $'a\\nb' has a line end": "-e --escape",
    "colours are left to your terminal": "--color -co",
}  # fmt: skip
_NOT_HERE = {flag: told for told, flags in _INSTEAD.items() for flag in flags.split()}


def in_flags(message: str) -> str:
    """A message about settings, in the words of the command line."""
    return _NAMED.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    name, value = found[1] or found[2] or found[3], (found[4] or "").strip("'")
    flag = (_FLAGS | _WORDS)[name]
    if value in ("True", "False"):
        return flag if value == "True" else flag.replace("--", "--no-", 1)
    return f"{flag} {value}" if value else flag


class Command(click.Command):
    """A command that says what to do instead of flags that other programs have."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, self._ours(ctx, args))
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            told = f"{error.message}; what has spaces in it goes in quotes"
            raise click.UsageError(told, ctx) from error

    def _ours(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments in the spelling of this command; values stay as they are."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        valued = {name for option in options if not option.is_flag for name in option.opts}
        ours: list[str] = []
        left = iter(args)
        for typed in left:
            name, equals, value = typed.partition("=")
            if typed == "--":
                return [*ours, typed, *left]
            if name in _NOT_HERE and name not in known:
                raise click.UsageError(f"there is no {name}: {_NOT_HERE[name]}", ctx)
            if name not in known and _SAME.get(name) in known:
                typed = _SAME[name]
                ours += [typed, value] if equals else [typed]
            else:
                ours.append(typed)
            if typed in valued and not equals:
                ours += [value for value in (next(left, None),) if value is not None]
        return ours
