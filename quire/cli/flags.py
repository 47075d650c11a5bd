"""Names of flags: what settings are called on the command line, and what llama.cpp's mean here."""

from __future__ import annotations

import re
from difflib import get_close_matches

import click

from quire.weights.catalog import ALIASES, HUB_ALIASES

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
    "cache_salt": "--cache-salt", "n_parallel": "--parallel", "n_cpu_moe": "--n-cpu-moe",
    "tensor_split": "--tensor-split", "main_gpu": "--main-gpu",
    "override_tensor": "--override-tensor", "kv_offload": "--kv-offload",
}  # fmt: skip
_WORDS = {
    name: f"--{name}"
    for name in (
        "seed",
        "threads",
        "device",
        "activations",
        "quantize",
        "mirostat",
        "fit",
        "checkpoints",
    )
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
    "-kvo": "--kv-offload", "--gpu-layers": "-ngl", "-dev": "--device", "-fit": "--fit",
    "--ctx": "-c", "--n-ctx": "-c", "--context": "-c", "--num-ctx": "-c", "--max-model-len": "-c",
    "--max-tokens": "-n", "--max-new-tokens": "-n", "--num-predict": "-n",
}  # fmt: skip
"""Other spellings, most of them llama.cpp's, some vLLM's or Ollama's, of what is here."""
_PARALLEL = {"plan": "--parallel", "serve": "--max-running"}
_MODEL = ("-m", "--model", "-hf", "--hf-repo")
_ON_OFF = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}

_INSTEAD = {
    "quire chat is for conversations": "-cnv --conversation -i --interactive -if",
    "in quire chat, Alt-Enter begins another line": "-mli --multiline-input",
    "quire run answers once": "-st --single-turn",
    "quire serve is for that": "--host --port -np --parallel",
    "that is always so here": "-fa --flash-attn --jinja -kvu --kv-unified --no-display-prompt "
    "--simple-io --log-disable --warmup --no-warmup --metrics --slots --props --embedding "
    "--embeddings --webui -cb --cont-batching",
    "a server's models have the names of their files, or their aliases":
    "-a --alias --served-model-name",
    "the page is part of every server": "--no-webui",
    "reasoning comes apart, as reasoning_content": "--reasoning-format",
    "how many tokens are computed at once is found out by itself":
    "-b --batch-size -ub --ubatch-size",
    "-t is for prompts and answers alike": "-tb --threads-batch",
    "see --memory-budget, which is a size": "--gpu-memory-utilization",
    "see --tensor-split and --device": "-tp --tensor-parallel-size",
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
_MODELS = {*ALIASES, *HUB_ALIASES}


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
            return super().parse_args(ctx, _Words(self, ctx).ours(args))
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            model = next((word for word in args if word in _MODELS or word.endswith(".gguf")), None)
            told = ""
            if any(isinstance(parameter, click.Argument) for parameter in self.params):
                told = "; what has spaces in it goes in quotes"
            if model and any("-m" in parameter.opts for parameter in self.params):
                told = f"; a model is named with -m: -m {model}"
            raise click.UsageError(error.message + told, ctx) from error


class _Words:
    """What was typed, in the spelling of a command; values stay as they are."""

    def __init__(self, command: click.Command, ctx: click.Context) -> None:
        self._ctx, self._name = ctx, command.name or ""
        parameters = command.get_params(ctx)
        options = [p for p in parameters if isinstance(p, click.Option)]
        self._known = {name for o in options for name in (*o.opts, *o.secondary_opts)}
        self._valued = {name for o in options if not o.is_flag for name in o.opts}
        self._pairs = {name: o for o in options if o.secondary_opts for name in o.opts}
        self._model = any(p.name == "model" for p in parameters if isinstance(p, click.Argument))

    def ours(self, args: list[str]) -> list[str]:
        """The arguments as this command takes them."""
        ours: list[str] = []
        left = list(reversed(args))
        while left:
            typed = left.pop()
            if typed == "--":
                return [*ours, typed, *reversed(left)]
            if not typed.startswith("-"):
                ours.append(typed)
                continue
            name, equals, value = typed.partition("=")
            name = self._known_as(name)
            if name in _MODEL and self._model and (equals or left):  # an argument here
                ours.append(value if equals else left.pop())
            elif name in self._pairs:
                ours.append(self._switched(name, equals + value, left))
            elif equals:
                ours += [name, value] if name in self._valued else [typed]
            else:
                ours.append(name)
                ours += [left.pop()] if name in self._valued and left else []
        return ours

    def _switched(self, name: str, value: str, left: list[str]) -> str:
        """A flag that is on or off, as behind an = or, of --fit, in the next word."""
        if not value and name == "--fit" and left and left[-1].lower() in _ON_OFF:
            value = f"={left.pop()}"
        on = _ON_OFF.get(value[1:].lower())
        if on is None:
            return name + value
        return name if on else self._pairs[name].secondary_opts[0]

    def _known_as(self, name: str) -> str:
        """A flag as it is called here; one that there is none of is told with what there is."""
        if name in self._known or not name.startswith("-") or len(name) < 2:
            return name
        if name in ("-np", "--parallel", "--n-parallel") and (same := _PARALLEL.get(self._name)):
            return same
        if name in _NOT_HERE:
            raise click.UsageError(f"there is no {name}: {_NOT_HERE[name]}", self._ctx)
        if _SAME.get(name) in self._known:
            return _SAME[name]
        if len(name) == 2 or name[1] == "-" or (name in _MODEL and self._model):
            return name  # click tells what is like it
        valued = name[:2] in self._known  # -c4096, unless it is nearly another one
        like = get_close_matches(name, self._known, 1, 0.75 if valued else 0.5)
        if valued and not like:
            return name
        meant = f"; did you mean {like[0]}?" if like else ""
        raise click.UsageError(f"there is no {name}{meant}", self._ctx)
