"""`quire show`: what a model file holds."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import click

from quire import config
from quire.errors import QuireError
from quire.memory.build import attention_layout
from quire.memory.layout import GroupSpec
from quire.memory.state_layout import RecurrentSpec, StateLayout
from quire.models.registry import architectures, declared_groups, open_weights
from quire.ops.cpu import CpuOps
from quire.text.hf import chat_template
from quire.weights import pull
from quire.weights.file import WeightFile


@click.command("show")
@click.argument("model", default="smollm2")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(model: str, tensors: bool, as_json: bool) -> None:
    """Tell what MODEL holds: sizes, formats, memory; and what this machine runs it with."""
    with open_weights(pull.resolve(model, config.cache_folder())) as file:
        facts = _facts(file)
        if tensors:
            facts["tensors"] = {
                name: f"{info.type.name} {list(info.shape)}" for name, info in file.tensors.items()
            }
    if as_json:
        click.echo(json.dumps(facts))
        return
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        if isinstance(value, dict):
            click.echo(f"{key}:")
            for name, inner in value.items():
                click.echo(f"  {name}: {_one_line(inner)}")
        else:
            click.echo(f"{key:<{width}}  {value}")


def _one_line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return str(value)


def _memory(file: WeightFile, ops: CpuOps) -> dict[str, dict[str, Any]] | str:
    """What a sequence takes in each group, by the layouts that memory is made with."""
    settings = config.LoadConfig()
    try:
        groups = declared_groups(file, ops)
    except QuireError as error:  # what else the file holds is still worth telling
        return f"cannot be told: {str(error).splitlines()[0]}"
    return {group.name: _group(group, settings) for group in groups}


def _group(group: GroupSpec | RecurrentSpec, settings: config.LoadConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": group.kind, "layers": len(group.layers)}
    if group.kind == "recurrent":
        state = StateLayout(group)
        sizes = {"state_bytes": state.state_page_bytes, "log_bytes": state.log_page_bytes}
        return facts | {"bytes_per_sequence": sum(sizes.values()), **sizes}
    facts["bytes_per_token"] = attention_layout(group, settings).bytes_per_token
    return facts | ({"window": group.window} if group.window else {})


def _experts(file: WeightFile, arch: str) -> str:
    count = file.get_int(f"{arch}.expert_count", default=0)
    used = file.get_int(f"{arch}.expert_used_count", default=0)
    return f"{count}, of which a token uses {used}" if count else "none"


def _facts(file: WeightFile) -> dict[str, Any]:
    arch = file.get_str("general.architecture")
    ops = CpuOps(threads=config.LoadConfig().thread_count())
    formats: Counter[str] = Counter()
    parameters = 0
    for info in file.tensors.values():
        formats[info.type.name] += info.nbytes
        count = 1
        for size in info.shape:
            count *= size
        parameters += count
    small = {
        key: value
        for key, value in file.metadata.items()
        if isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) < 200)
    }
    return {
        "file": str(file.path),
        "bytes": sum(formats.values()),
        "architecture": arch if arch in architectures() else f"{arch} (not known to Quire)",
        "parameters": parameters,
        "layers": file.get_int(f"{arch}.block_count", default=0),
        "experts": _experts(file, arch),
        "formats": ", ".join(f"{n} {b / 1e6:.1f} MB" for n, b in formats.most_common()),
        "chat_template": _has_template(file),
        "memory": _memory(file, ops),
        "kernels": ops.name,
        "metadata": small,
    }


def _has_template(file: WeightFile) -> bool:
    if file.path.is_dir():
        return chat_template(file.path) is not None
    return "tokenizer.chat_template" in file.metadata
