"""Loading a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Never

from quire import config
from quire.api.llm import LLM
from quire.devices.budget import Share
from quire.errors import RequestError
from quire.models.loader import ProgressFn
from quire.weights import pull


def load(
    model: str | Path = "smollm2",
    *,
    n_ctx: int | None = None,
    threads: int | None = None,
    device: str = "auto",
    n_gpu_layers: int | Literal["auto"] = "auto",
    n_cpu_moe: int | None = None,
    tensor_split: Sequence[float] | str | None = None,
    main_gpu: int | None = None,
    override_tensor: Sequence[str] | str | None = None,
    kv_offload: bool = True,
    fit: bool = True,
    n_parallel: int = 1,
    memory_budget: int | str | Mapping[str, int | str] | None = None,
    kv_cache_tokens: int | None = None,
    kv_cache_demand_paged: bool = True,
    page_tokens: int = 16,
    type_k: str = "f16",
    type_v: str = "f16",
    swa_full: bool = False,
    swap_space: int | str = "4GiB",
    moe_n_expert: int | None = None,
    n_layer_exit: int | None = None,
    activations: Literal["int8", "f32"] = "int8",
    quantize: Literal["q8_0", "q4_0"] | None = None,
    exact_batches: bool = True,
    progress: ProgressFn | None = None,
    beside: LLM | None = None,
    **unknown: Never,
) -> LLM:
    """Loads a model: an alias, a .gguf file, a folder, or `owner/repo:quant` of the Hub.

    n_ctx: tokens of the longest context; by default what the model was trained for, or what fits.
    threads: how many compute; by default one for each core that the process may use.
    device: "auto" (GPUs where there are any), "cpu", "cuda", "cuda:1" and so on, or "reference"
        (NumPy, slow); several separated by commas.
    n_gpu_layers: how many layers are on GPUs, the output counted as one and first of all; "auto"
        takes the best plan that fits, see docs/placement.md.
    n_cpu_moe: so many first layers have their experts on the host.
    tensor_split: how layers are shared out among GPUs, such as "3,1".
    main_gpu: the GPU that has the output; by default that with the most room.
    override_tensor: "PATTERN=DEVICE" puts matrices with such names there.
    kv_offload: whether K and V, and so the attention that reads them, may leave the host.
    fit: whether what is left open is changed until it fits; False refuses instead. What cannot fit
        is a `quire.errors.DoesNotFit`, which tells what would.
    n_parallel: sequences that there is to be room for at once when places are planned.
    memory_budget: the most that weights, pages and arrays may take together, on each device: bytes,
        or a text such as "4GiB", or a mapping of devices' names to these. By default what is free,
        less a margin; a container's limit counts.
    kv_cache_tokens: tokens that memory holds at most; by default as many as the budget allows.
    kv_cache_demand_paged: take memory when it is needed; False takes all of it at once.
    page_tokens: tokens of a page, a multiple of 16.
    type_k, type_v: how keys and values are stored: f32, f16, bf16, q8_0 or q4_0.
    swa_full: layers with a sliding window keep all tokens, so that every position can be restored.
    swap_space: disk for sequences that make room for others; 0 computes them again instead.
    moe_n_expert: use fewer experts than the model was made with.
    n_layer_exit: stop after so many layers.
    activations: "f32" computes exactly and more slowly, on the CPU.
    quantize: turns 16-bit and 32-bit matrices into "q8_0" or "q4_0" while they are loaded.
    exact_batches: bits depend on nothing but the tokens, whoever is computed beside them; False
        lets GPUs compute prompts faster, those of layers on the host among them, and
        `Completion.exact_batches` says so.
    progress: called with the bytes that are loaded and all bytes.
    beside: a loaded model; this one takes its memory from the same budget, and may draft for it.
    """
    if unknown:
        known = ", ".join(config.LoadConfig.__dataclass_fields__)
        raise RequestError(f"load has no {', '.join(unknown)}; there are {known}")
    if beside is not None and not isinstance(beside, LLM):
        raise RequestError(f"beside takes a loaded model, not {beside!r:.80}")
    if progress is not None and not callable(progress):
        raise RequestError(f"progress takes a function of two numbers, not {progress!r:.80}")
    if beside and memory_budget is not None:
        raise RequestError("beside takes another model's budget; leave memory_budget out")
    if beside:
        beside.loop.seat.check_process()
    chosen = config.LoadConfig(
        n_ctx=n_ctx, threads=threads, device=device, n_gpu_layers=n_gpu_layers,
        n_cpu_moe=n_cpu_moe, tensor_split=tensor_split, main_gpu=main_gpu,
        override_tensor=override_tensor, kv_offload=kv_offload, fit=fit, n_parallel=n_parallel,
        memory_budget=memory_budget, kv_cache_tokens=kv_cache_tokens,
        kv_cache_demand_paged=kv_cache_demand_paged, page_tokens=page_tokens, type_k=type_k,
        type_v=type_v, swa_full=swa_full, swap_space=swap_space, moe_n_expert=moe_n_expert,
        n_layer_exit=n_layer_exit, activations=activations, quantize=quantize,
        exact_batches=exact_batches,
    )  # fmt: skip
    path = pull.resolve(str(model), config.cache_folder(), progress)
    budget = Share(beside.budget.whole, path.name) if beside else None
    return LLM(path, chosen, budget, progress, beside)
