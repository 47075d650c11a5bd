"""Qwen3.5 (text): Qwen3-Next's layers, with inputs of the delta net in tensors of their own.

Files have value heads "tiled": the first of each key head, then the second of each, and so on.
Folders have all those of the first key head first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.models import folder_names
from quire.models.decoder import Decoder
from quire.models.delta_folder import delta_shape, naming
from quire.models.delta_hybrid import build_hybrid
from quire.models.loader import Kit, Loader, Rows
from quire.models.recurrent_layers import DeltaShape
from quire.weights.file import WeightFile
from quire.weights.naming import SQUEEZE_CONV, Change, HFConfig, Naming, one


def build(file: WeightFile, kit: Kit, arch: str = "qwen35") -> Decoder:
    """The model, its tensors taken through the kit."""
    return build_hybrid(file, arch, kit, _inputs, tiled=True)


def _inputs(load: Loader, at: str, s: DeltaShape) -> tuple[list[Rows], list[Rows]]:
    sizes = {"attn_qkv": s.channels, "ssm_beta": s.n_v, "ssm_alpha": s.n_v}
    return (
        [(f"{at}{name}.weight", rows) for name, rows in sizes.items()],
        [(f"{at}attn_gate.weight", s.values)],
    )


def from_hf(config: HFConfig, arch: str = "qwen35") -> Naming:
    """How a folder is seen as a GGUF file."""
    s = delta_shape(folder_names.text_settings(config))
    tiled = _tiled(s)

    def behind_keys(x: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([x[: 2 * s.keys], tiled(x[2 * s.keys :])])

    inputs = {
        "attn_qkv.weight": one("linear_attn.in_proj_qkv.weight", Change(behind_keys)),
        "attn_gate.weight": one("linear_attn.in_proj_z.weight", Change(tiled)),
        "ssm_beta.weight": one("linear_attn.in_proj_b.weight", Change(tiled)),
        "ssm_alpha.weight": one("linear_attn.in_proj_a.weight", Change(tiled)),
    }
    conv = Change(lambda x: behind_keys(SQUEEZE_CONV.apply(x)), SQUEEZE_CONV.shape)
    changes = {
        "ssm_conv1d.weight": conv,
        "ssm_a": Change(lambda x: -np.exp(tiled(x)), values=True),
        "ssm_dt.bias": Change(tiled),
        "ssm_out.weight": Change(lambda x: np.ascontiguousarray(tiled(x.T).T)),
    }
    return naming(config, arch, inputs, changes)


def _tiled(s: DeltaShape) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Rows by key head and value head, as rows by value head and key head."""

    def apply(x: NDArray[Any]) -> NDArray[Any]:
        heads = x.reshape(s.n_k, s.n_v // s.n_k, -1, *x.shape[1:])
        return heads.swapaxes(0, 1).reshape(x.shape)

    return apply
