"""`quire show`: what a model file holds."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import click

from quire import config
from quire.models.registry import architectures, open_weights
from quire.ops.cpu import CpuOps
from quire.text.hf import chat_template
from quire.weights import pull
from quire.weights.file import WeightFile


@click.command("show")
@click.argument("model", default="smollm2")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(model: str, tensors: bool, as_json: bool) -> None:
    """Tell what MODEL holds: sizes, formats, vocabulary; and what this machine runs it with."""
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
                click.echo(f"  {name}: {inner}")
        else:
            click.echo(f"{key:<{width}}  {value}")


def _experts(file: WeightFile, arch: str) -> str:
    count = file.get_int(f"{arch}.expert_count", default=0)
    used = file.get_int(f"{arch}.expert_used_count", default=0)
    return f"{count}, of which a token uses {used}" if count else "none"


def _facts(file: WeightFile) -> dict[str, Any]:
    arch = file.get_str("general.architecture")
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
        "kernels": CpuOps(threads=config.LoadConfig().thread_count()).name,
        "metadata": small,
    }


def _has_template(file: WeightFile) -> bool:
    if file.path.is_dir():
        return chat_template(file.path) is not None
    return "tokenizer.chat_template" in file.metadata
