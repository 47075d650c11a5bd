"""Options that several commands share, under the names people know."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, cast

import click

import quire
from quire import config
from quire.cli.flags import in_flags
from quire.cli.streams import note
from quire.config import KV_TYPES
from quire.errors import RequestError
from quire.types import Sampling, SamplingFields
from quire.weights import pull

_ALL_LAYERS = 1 << 20
ENDLESS = 2**31 - 1
"""Tokens to generate when there is no limit; the context is one."""
_BAR_FROM = 256 * 1024**2  # a smaller file is loaded before a bar could be read


def check_size(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuses, under the name of the flag, what is no number of bytes."""
    try:
        if value is not None and value != "0":
            config.parse_bytes(value)
    except RequestError as error:
        raise click.BadParameter(str(error), ctx, param) from error
    return value


def device_names(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Devices as they are called here: CUDA0 is cuda:0."""
    return re.sub(r"\bcuda(?=\d)", "cuda:", value.lower())


_PAGES = [
    click.option("--page-tokens", type=int, default=16, show_default=True,
                 help="Tokens in a page of memory."),
    click.option("-ctk", "--cache-type-k", default="f16", show_default=True,
                 type=click.Choice(KV_TYPES, case_sensitive=False), help="How K is stored."),
    click.option("-ctv", "--cache-type-v", default="f16", show_default=True,
                 type=click.Choice(KV_TYPES, case_sensitive=False), help="How V is stored."),
]  # fmt: skip

_LESS = [
    click.option("--moe-n-expert", type=int,
                 help="Use fewer experts than the model was made with."),
    click.option("--n-layer-exit", type=int, help="Stop after this many layers."),
]  # fmt: skip

_PLACES = [
    click.option("-ngl", "--n-gpu-layers", default="auto", show_default=True, metavar="N|auto|all",
                 help="Layers on GPUs: first the output, then layers from the last on."),
    click.option("--n-cpu-moe", type=int, metavar="N",
                 help="Keep the experts of the first N layers on the host."),
    click.option("--cpu-moe", is_flag=True, help="Keep all experts on the host."),
    click.option("--tensor-split", metavar="N,N,…", help="Shares of several GPUs."),
    click.option("--main-gpu", type=int, help="The GPU that has the output (that with most room)."),
    click.option("--override-tensor", multiple=True, metavar="PATTERN=DEVICE",
                 help="Put matrices with such names on a device."),
    click.option("--kv-offload/--no-kv-offload", default=True,
                 help="Let K and V leave the host, or keep them there."),
    click.option("--fit/--no-fit", default=True,
                 help="Change what is left open until it fits (on), or refuse (off)."),
]  # fmt: skip

_DEVICE = [
    click.option("--device", default="auto", show_default=True, callback=device_names,
                 help="auto (GPUs where there are any), cpu, cuda, cuda:1 …, or reference (NumPy, "
                 "slow); several separated by commas."),
]  # fmt: skip

_LOAD = [
    click.option("-c", "--ctx-size", type=int, help="Tokens of context (the model's own)."),
    click.option("-t", "--threads", type=int, help="Threads that compute (one per core)."),
    *_PLACES,
    click.option("--memory-budget", callback=check_size,
                 help="Most memory to use, such as 4GiB (what is free)."),
    click.option("--kv-cache-tokens", type=int, help="Most tokens that K and V are kept for."),
    click.option("--kv-cache-demand-paged/--no-kv-cache-demand-paged", default=True,
                 help="Take memory for K and V as it is used, or all of --kv-cache-tokens (or of "
                 "the context) at the start."),
    *_PAGES,
    click.option("--swa-full", is_flag=True,
                 help="Keep what sliding windows have passed, for rewinds to any place."),
    click.option("--swap-space", callback=check_size, default="4GiB", show_default=True,
                 help="Most disk for sequences that make room for others; 0 for none."),
    *_LESS,
    click.option("--activations", default="int8", show_default=True,
                 type=click.Choice(["int8", "f32"]), help="f32 is exact and slower, on the CPU."),
    click.option("--quantize", type=click.Choice(["q8_0", "q4_0"], case_sensitive=False),
                 help="Turn matrices of 16 or 32 bits into these blocks while loading."),
    click.option("--exact-batches/--no-exact-batches", default=True, show_default=True,
                 help="Bits that depend on nothing but the tokens; without, GPUs compute prompts "
                 "faster."),
]  # fmt: skip

_MODEL = [
    click.option("-m", "--model", default="smollm2", show_default=True,
                 help="Alias, .gguf file, folder of safetensors, or a model of the Hugging Face "
                 "Hub: owner/repo or owner/repo:quant."),
    *_DEVICE,
    *_LOAD,
]  # fmt: skip

_SAMPLING = [
    click.option("-n", "--n-predict", type=int, default=256, show_default=True,
                 help="Most tokens to generate; -1 for as many as the context holds."),
    click.option("--temp", type=float,
                 help="Temperature; 0 always takes the likeliest token (run: 0; chat, here and "
                 "below: as the model's makers want it)."),
    click.option("--top-k", type=int, help="Keep the k likeliest tokens (0: all)."),
    click.option("--top-p", type=float, help="Keep the likeliest, to this sum."),
    click.option("--min-p", type=float, help="Drop what is less likely than this share of the "
                 "likeliest."),
    click.option("--typical", type=float, help="Keep what surprises about as much as expected."),
    click.option("--top-nsigma", type=float, help="Keep what is within so many deviations of the "
                 "likeliest."),
    click.option("--xtc-probability", type=float, help="How often the likeliest are left out."),
    click.option("--xtc-threshold", type=float, help="Those of at least this probability."),
    click.option("--mirostat", type=int, help="2: steer the surprise of the text; 0: off."),
    click.option("--mirostat-ent", type=float, help="The surprise to aim at, in bits."),
    click.option("--mirostat-lr", type=float, help="How fast that is learnt."),
    click.option("--repeat-penalty", type=float, help="Above 1: repeat less."),
    click.option("--presence-penalty", type=float,
                 help="Above 0: say less again of what was said."),
    click.option("--frequency-penalty", type=float,
                 help="Above 0: the less, the oftener it was said."),
    click.option("--dry-multiplier", type=float, help="Above 0: repeat fewer sequences."),
    click.option("--dry-base", type=float, help="How much more for each token of length."),
    click.option("--dry-allowed-length", type=int, help="Repetitions that cost nothing."),
    click.option("--dry-penalty-last-n", type=int, help="Tokens to look at (-1: all)."),
    click.option("--dry-sequence-breaker", multiple=True, help="What ends a repetition; may be "
                 "given several times."),
    click.option("--logit-bias", multiple=True, metavar="ID+BIAS",
                 help="Make a token likelier (15043+1) or less likely (15043-1)."),
    click.option("-s", "--seed", type=int, help="Makes sampling repeatable; -1 for another each "
                 "time."),
    click.option("--ignore-eos", is_flag=True, help="Go on when the model ends."),
    click.option("--speculate", metavar="HOW",
                 help="Draft tokens ahead: ngram, ngram:CACHEFILE, lookahead, early-exit, "
                 "early-exit:LAYERS, or a smaller model of the same vocabulary (as for --model); "
                 "several joined by +. The output stays the same."),
]  # fmt: skip
_FIELDS = {
    "temp": "temperature", "typical": "typical_p", "top_nsigma": "top_n_sigma",
    "mirostat_ent": "mirostat_tau", "mirostat_lr": "mirostat_eta",
    "repeat_penalty": "repetition_penalty",
    "dry_sequence_breaker": "dry_sequence_breakers",
    **{name: name for name in (
        "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "mirostat",
        "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
        "dry_allowed_length", "dry_penalty_last_n",
    )},
}  # fmt: skip
"""Options, and the fields of `Sampling` that they set where they are given."""


def _apply(options: list[Any]) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return wrap


model_options = _apply(_MODEL)
load_options = _apply([*_DEVICE, *_LOAD])
"""How to load a model, whichever it is."""
plan_options = _apply(_LOAD)
"""How it would be loaded, whatever the device."""
size_options = _apply([*_PAGES, *_LESS])
"""Those that what a model takes depends on."""
sampling_options = _apply(_SAMPLING)


def places_from(options: dict[str, Any]) -> dict[str, Any]:
    """The settings that say what goes where; takes their options out."""
    layers = {"all": str(_ALL_LAYERS), "-1": "auto"}.get(n := options.pop("n_gpu_layers"), n)
    moe = options.pop("n_cpu_moe")
    return {
        "n_gpu_layers": int(layers) if layers.isdecimal() else layers,
        "n_cpu_moe": _ALL_LAYERS if options.pop("cpu_moe") else moe,
        "tensor_split": options.pop("tensor_split"),
        "main_gpu": options.pop("main_gpu"),
        "override_tensor": list(options.pop("override_tensor")) or None,
        "kv_offload": options.pop("kv_offload"),
        "fit": options.pop("fit"),
    }


def load_from(options: dict[str, Any]) -> quire.LLM:
    """Loads the model that these options name; takes its own options out of them."""
    model = fetched(options.pop("model"))
    bar = LoadBar()
    try:
        llm = quire.load(model, **load_settings(options), progress=bar)
    finally:
        bar.close()
    for line in llm.notes:
        note(f"quire: {in_flags(line)}")
    if llm.n_ctx > llm.model.n_ctx_train:
        note(
            f"quire: the model was made for {llm.model.n_ctx_train:,} tokens of context; with -c "
            f"{llm.n_ctx} what comes after them may make no sense"
        )
    return llm


def fetched(model: str) -> str:
    """The path of a model, which is fetched with a bar if need be."""
    bar = LoadBar(least=0, text=f"fetching {model}")
    try:
        return str(pull.resolve(model, config.cache_folder(), bar))
    finally:
        bar.close()


def load_settings(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of `quire.load` that these options describe; takes them out of them."""
    options["ctx_size"] = options["ctx_size"] or None  # 0 is the model's own, as in llama.cpp
    if options["threads"] == -1:
        options["threads"] = None
    renamed = {"n_ctx": "ctx_size", "type_k": "cache_type_k", "type_v": "cache_type_v"}
    same = (
        "threads", "device", "memory_budget", "kv_cache_tokens", "kv_cache_demand_paged",
        "page_tokens", "swa_full", "swap_space", "moe_n_expert", "n_layer_exit", "activations",
        "quantize", "exact_batches",
    )  # fmt: skip
    found = {name: options.pop(renamed.get(name, name)) for name in (*renamed, *same)}
    return found | places_from(options)


def sampling_from(options: dict[str, Any]) -> SamplingFields:
    """The fields of `Sampling` that were given, checked; takes their options out of them."""
    tokens, seed = options.pop("n_predict"), options.pop("seed")
    given = {field: options.pop(name) for name, field in _FIELDS.items()}
    fields: Any = {field: value for field, value in given.items() if value not in (None, ())}
    if biases := options.pop("logit_bias"):
        fields["logit_bias"] = dict(map(_bias, biases))
    if seed is not None and seed != -1:
        fields["seed"] = seed
    if tokens in (-1, -2):  # as llama.cpp has it: endless, or until the context is full
        tokens = ENDLESS
    fields |= {"max_tokens": tokens, "ignore_eos": options.pop("ignore_eos")}
    Sampling(**fields)  # refuses what cannot be
    return cast(SamplingFields, fields)


def _bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"(\d{1,10})([+-]\d+(?:\.\d+)?)", text)
    if not found:
        raise RequestError(f"--logit-bias is like 15043+1 or 15043-1.5, not {text!r}")
    return int(found[1]), float(found[2])


class LoadBar:
    """A progress bar on standard error, drawn only for a person and for work that takes a while."""

    def __init__(self, least: int = _BAR_FROM, text: str = "loading") -> None:
        self._least = least
        self._text = text
        self._bar: Any = None
        self._said = False

    def __call__(self, done: int, total: int) -> None:
        if total < self._least or not sys.stderr.isatty():
            return
        if config.plain_terminal():
            if not self._said:
                note(f"{self._text} …")
            self._said = True
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            console = Console(stderr=True)
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(self._text, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
