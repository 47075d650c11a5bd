"""What a user asks of a plan, and what of it cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import RequestError
from quire.placement.described import Described
from quire.placement.facts import ModelFacts

FLOOR = 4096
"""A context is not made smaller than this before parts of the model leave the GPUs."""


@dataclass(frozen=True)
class Wanted:
    """What the user asks for; None is left open."""

    n_ctx: int | None = None
    sequences: int = 1
    checkpoints: int = 0
    n_gpu_layers: int | None = None
    """Layers on GPUs, the output counted as one of them."""
    n_cpu_moe: int | None = None
    """So many first layers have their experts on the host."""
    tensor_split: tuple[float, ...] | None = None
    """How layers are shared out among GPUs."""
    main_gpu: int | None = None
    """The GPU that has the output: that with the most room, unless it is said."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Patterns of tensors' names, and the devices these go to."""
    kv_offload: bool = True
    """Whether K and V, and so what reads them, may leave the host."""
    streams: bool = False
    """Whether weights of the host may pass through a GPU for long prompts."""
    floor: int = FLOOR
    fit: bool = True
    """Whether anything may be changed at all."""


def in_order(gpus: Sequence[Described], main: int | None) -> list[int]:
    """The GPUs as layers go through them: the last one, with the output, has the most room."""
    order = sorted(range(len(gpus)), key=lambda at: gpus[at].limit)
    if main is not None and main in order:
        order.remove(main)
        order.append(main)
    return order


def by_share(first: int, end: int, shares: Sequence[float]) -> list[int]:
    """Where each GPU begins when layers are shared out in these proportions."""
    starts, done = [], 0.0
    for share in shares:
        starts.append(first + round((end - first) * done / sum(shares)))
        done += share
    return starts


def number_of(devices: Sequence[Described], name: str) -> int:
    """A device by its name, as people write it: cpu, cuda:0, CUDA0."""
    plain = name.lower().replace(":", "")
    for at, device in enumerate(devices):
        if plain in (device.name.replace(":", ""), device.name.removesuffix(":0")):
            return at
    known = ", ".join(device.name for device in devices)
    raise RequestError(f"override_tensor names device {name!r:.80}; there are {known}")


def check(wanted: Wanted, model: ModelFacts, gpus: int) -> None:
    """Refuses what makes no sense for this model and so many GPUs."""
    if wanted.n_cpu_moe and not model.has_experts:
        raise RequestError(
            f"n_cpu_moe is {wanted.n_cpu_moe}, but {model.name} has no experts; leave it out"
        )
    if wanted.tensor_split and gpus > 1 and len(wanted.tensor_split) != gpus:
        raise RequestError(
            f"tensor_split has {len(wanted.tensor_split)} numbers for {gpus} GPUs; give each one"
        )
    if wanted.main_gpu is not None and gpus and wanted.main_gpu >= gpus:
        raise RequestError(f"main_gpu is {wanted.main_gpu}; there are {gpus} GPUs, from 0 on")


def moot(wanted: Wanted, devices: Sequence[Described]) -> list[str]:
    """What is asked for of GPUs that are not there, a line each."""
    *gpus, host = devices
    if gpus:
        alone = wanted.tensor_split and len(gpus) == 1
        return [f"tensor_split: there is one GPU, {gpus[0].name}, which has all"] if alone else []
    asked = {
        "n_gpu_layers": wanted.n_gpu_layers,
        "n_cpu_moe": wanted.n_cpu_moe is not None,
        "tensor_split": wanted.tensor_split,
        "main_gpu": wanted.main_gpu is not None,
        "override_tensor": wanted.overrides,
        "kv_offload=False": not wanted.kv_offload,
    }
    why = "no GPU is used" if host.kind != "cuda" else "there is one device"
    told = f"{why}, so all layers are on {_called(host)}"
    return [f"{name}: {told}" for name, given in asked.items() if given]


def _called(host: Described) -> str:
    return "the CPU" if host.kind == "cpu" else host.name
