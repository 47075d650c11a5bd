"""`quire show`: what a model file holds."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import click

from quire import config
from quire.cli.options import size_options
from quire.errors import QuireError
from quire.memory.build import attention_layout
from quire.memory.layout import GroupSpec
from quire.memory.state_layout import RecurrentSpec, StateLayout
from quire.models.extent import Extent, limited
from quire.models.registry import architectures, declared_groups, open_weights
from quire.models.settings import check_settings
from quire.ops.cpu import CpuOps
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
        seen = limited(file, n_layer_exit, moe_n_expert) if n_layer_exit or moe_n_expert else file
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


def _memory(
    file: WeightFile, ops: CpuOps, settings: config.LoadConfig
) -> dict[str, dict[str, Any]] | str:
    """What a sequence takes in each group, by the layouts that memory is made with."""
    try:
        groups = declared_groups(file, ops)
        check_settings(file.path, groups, settings)
    except QuireError as error:  # what else the file holds is still worth telling
        return f"cannot be told: {str(error).splitlines()[0]}"
    return {group.name: _group(group, settings) for group in groups}


def _group(group: GroupSpec | RecurrentSpec, settings: config.LoadConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": group.kind, "layers": len(group.layers)}
    if group.kind == "recurrent":
        state = StateLayout(group)
        sizes = {"state_bytes": state.state_page_bytes, "log_bytes": state.log_page_bytes}
        return facts | {"bytes_per_sequence": sum(sizes.values()), **sizes}
    layout = attention_layout(group, settings)
    facts["bytes_per_token"] = layout.bytes_per_token
    if not group.window:
        return facts
    most = layout.pages_for(group.window + layout.page_tokens) * layout.page_bytes
    return facts | {"window": group.window, "bytes_per_sequence": most}


def _scalar(value: Any) -> Any:
    """JSON has no infinities and nothing that is not a number."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _facts(file: WeightFile, settings: config.LoadConfig) -> dict[str, Any]:
    arch = file.get_str("general.architecture")
    ops = CpuOps(settings.thread_count())
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
        "layers": Extent.of(file).layers if f"{arch}.block_count" in file.metadata else 0,
        "experts": {
            "count": file.get_int(f"{arch}.expert_count", default=0),
            "used": file.get_int(f"{arch}.expert_used_count", default=0),
        },
        "formats": ", ".join(f"{n} {b / 1e6:.1f} MB" for n, b in formats.most_common()),
        "chat_template": _has_template(file),
        "memory": _memory(file, ops, settings),
        "kernels": ops.name,
        "metadata": small,
    }


def _has_template(file: WeightFile) -> bool:
    if file.path.is_dir():
        return chat_template(file.path) is not None
    return "tokenizer.chat_template" in file.metadata
