"""`quire show`: what a model file holds, and what its model takes."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import click

from quire import config
from quire.api.devices import device_of
from quire.cli.options import size_options
from quire.devices.budget import Budget
from quire.errors import QuireError
from quire.models.active import ActiveSize, truncated
from quire.models.registry import architectures, open_weights
from quire.ops import Ops
from quire.placement.blueprint import Blueprint, GroupBytes
from quire.text.hf import chat_template
from quire.weights import pull
from quire.weights.file import WeightFile
from quire.weights.gguf_format import quote


@click.command("show")
@click.argument("model", default="smollm2")
@size_options
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    model: str, page_tokens: int, cache_type_k: str, cache_type_v: str, moe_n_expert: int | None,
    n_layer_exit: int | None, tensors: bool, as_json: bool,
) -> None:  # fmt: skip
    """Tell what MODEL holds: sizes, formats, memory; and what this machine runs it with."""
    settings = config.LoadConfig(
        page_tokens=page_tokens, type_k=cache_type_k, type_v=cache_type_v,
        moe_n_expert=moe_n_expert, n_layer_exit=n_layer_exit,
    )  # fmt: skip
    with open_weights(pull.resolve(model, config.cache_folder())) as file:
        seen = truncated(file, n_layer_exit, moe_n_expert)
        facts = _facts(seen, settings)
        if tensors:
            facts["tensors"] = {
                name: f"{info.type.name} {list(info.shape)}" for name, info in seen.tensors.items()
            }
    if as_json:
        click.echo(json.dumps(facts))
        return
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        if isinstance(value, dict):
            click.echo(f"{key}:")
            for name, inner in value.items():
                click.echo(f"  {_plain(name)}: {_one_line(inner)}")
        else:
            click.echo(f"{key:<{width}}  {_plain(value)}")


def _one_line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return _plain(value)


def _plain(value: Any) -> str:
    """As it is, unless a terminal would take some of it for more than text."""
    text = str(value)
    return text if text.isprintable() else quote(text)


def _told(file: WeightFile, ops: Ops, settings: config.LoadConfig) -> dict[str, Any]:
    """What the model takes: its weights once loaded, and a sequence in each group of memory."""
    try:
        blueprint = Blueprint.read(file, ops, settings)
        memory = {name: _group(group) for name, group in blueprint.memory.items()}
    except QuireError as error:  # what else the file holds is still worth telling
        return {"memory": f"cannot be told: {str(error).splitlines()[0]}"}
    return {"loaded_bytes": blueprint.weight_bytes, "memory": memory}


def _group(group: GroupBytes) -> dict[str, Any]:
    """Only what there is of a group's kind."""
    return {name: value for name, value in vars(group).items() if value}


def _scalar(value: Any) -> Any:
    """JSON has no infinities and nothing that is not a number."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _facts(file: WeightFile, settings: config.LoadConfig) -> dict[str, Any]:
    arch = file.get_str("general.architecture")
    ops = device_of(settings, Budget(1)).ops  # nothing is taken of it
    formats: Counter[str] = Counter()
    parameters = 0
    for info in file.tensors.values():
        formats[info.type.name] += info.nbytes
        count = 1
        for size in info.shape:
            count *= size
        parameters += count
    small = {
        key: _scalar(value)
        for key, value in file.metadata.items()
        if isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) < 200)
    }
    return {
        "file": str(file.path),
        "bytes": sum(formats.values()),
        "architecture": arch if arch in architectures() else f"{arch} (not known to Quire)",
        "parameters": parameters,
        "layers": ActiveSize.of(file).layers if f"{arch}.block_count" in file.metadata else 0,
        "experts": {
            "count": file.get_int(f"{arch}.expert_count", default=0),
            "used": file.get_int(f"{arch}.expert_used_count", default=0),
        },
        "formats": ", ".join(f"{n} {b / 1e6:.1f} MB" for n, b in formats.most_common()),
        "chat_template": _has_template(file),
        **_told(file, ops, settings),
        "kernels": ops.name,
        "metadata": small,
    }


def _has_template(file: WeightFile) -> bool:
    if file.path.is_dir():
        return chat_template(file.path) is not None
    return "tokenizer.chat_template" in file.metadata
