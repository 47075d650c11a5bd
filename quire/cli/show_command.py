"""`quire show`: what a model file holds, and what its model takes."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import Any

import click

from quire import config
from quire.api.devices import device_of
from quire.cli.flags import Command
from quire.cli.human import decimal_text, size_text
from quire.cli.options import size_options
from quire.devices import cuda
from quire.devices.budget import Budget
from quire.errors import QuireError
from quire.models.active import ActiveSize, truncated
from quire.models.registry import architectures, open_weights
from quire.ops import Ops
from quire.placement.blueprint import Blueprint, GroupBytes
from quire.placement.cuda_sizes import DescribedCuda
from quire.placement.described import Described
from quire.text.hf import chat_template
from quire.weights import pull
from quire.weights.file import WeightFile
from quire.weights.gguf_format import quote


@click.command("show", cls=Command)
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
    for key, value in _lines(facts):
        click.echo(f"{key:<14}{_plain(value)}")
    for title in ("metadata", "tensors"):
        if title in facts:
            click.echo(f"{title}:")
            for name, value in facts[title].items():
                click.echo(f"  {_plain(name)}: {_plain(value)}")


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What people want to know first, in words."""
    yield "file", f"{facts['file']} ({decimal_text(facts['bytes'])}B)"
    size = f"{decimal_text(facts['parameters'])} parameters, {facts['layers']} layers"
    yield "architecture", f"{facts['architecture']}, {size}"
    if experts := facts["experts"]["count"]:
        yield "experts", f"{experts} in a layer, {facts['experts']['used']} used for a token"
    if context := facts["context"]:
        yield "context", f"{context:,} tokens"
    yield "formats", facts["formats"]
    yield "chat template", "yes" if facts["chat_template"] else "no"
    if "loaded_bytes" in facts:
        yield "loaded", f"{size_text(facts['loaded_bytes'])} of weights"
    if isinstance(facts["memory"], str):
        yield "memory", facts["memory"]
    else:
        for name, group in facts["memory"].items():
            yield "memory", f"{name}: {_group_text(group)}"
    yield "kernels", facts["kernels"]


def _group_text(group: dict[str, Any]) -> str:
    parts = [f"{group['layers']} layers"]
    if window := group.get("window"):
        parts.append(f"a window of {window:,} tokens")
    if n_bytes := group.get("bytes_per_token"):
        parts.append(f"{size_text(n_bytes)} a token")
    if n_bytes := group.get("bytes_per_sequence"):
        parts.append(f"at most {size_text(n_bytes)} a sequence")
    return ", ".join(parts)


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
    host = Described("cpu", "cpu", 1)
    ops = device_of(host, settings, Budget(1)).ops  # nothing is taken of it
    on_gpu = cuda.gpu_count() > 0  # packing and logs are others there
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
        "bytes": _file_bytes(file.path),
        "tensor_bytes": sum(formats.values()),
        "architecture": arch if arch in architectures() else f"{arch} (not known to Quire)",
        "parameters": parameters,
        "layers": ActiveSize.of(file).layers if f"{arch}.block_count" in file.metadata else 0,
        "context": file.get_int(f"{arch}.context_length", default=0),
        "experts": {
            "count": file.get_int(f"{arch}.expert_count", default=0),
            "used": file.get_int(f"{arch}.expert_used_count", default=0),
        },
        "formats": ", ".join(f"{n} {b / 1e6:.1f} MB" for n, b in formats.most_common()),
        "chat_template": _has_template(file),
        **_told(file, DescribedCuda(1) if on_gpu else ops, settings),
        "kernels": f"cuda, and on the host {ops.name}" if on_gpu else ops.name,
        "metadata": small,
    }


def _file_bytes(path: Path) -> int:
    """What a model takes on the disk: its file, all parts of it, or the weights in its folder."""
    files = path.glob("*.safetensors") if path.is_dir() else iter([path])
    if part := re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", path.name):
        files = path.parent.glob(f"{escape(part[1])}-?????{part[2]}")
    return sum(file.stat().st_size for file in files)


def _has_template(file: WeightFile) -> bool:
    if file.path.is_dir():
        return chat_template(file.path) is not None
    return "tokenizer.chat_template" in file.metadata
