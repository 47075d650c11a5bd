"""Qwen3-Next: gated delta nets and gated attention, with experts or a plain network.

Files order all heads of a kind together, except b and a, which lie together by key head; in
folders q, k, v and z do so as well.
"""

from __future__ import annotations

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
from quire.weights.naming import MINUS_EXP, SQUEEZE_CONV, HFConfig, Naming, one, take_rows

ARCH = "qwen3next"


def build(file: WeightFile, kit: Kit) -> Decoder:
    """The model, its tensors taken through the kit."""
    return build_hybrid(file, ARCH, kit, _inputs, tiled=False)


def _inputs(load: Loader, at: str, s: DeltaShape) -> tuple[list[Rows], list[Rows]]:
    rows = np.arange(2 * s.n_v).reshape(s.n_k, 2, -1)
    b, a = ((f"{at}ssm_ba.weight", 2 * s.n_v, rows[:, i].ravel()) for i in (0, 1))
    old = f"{at}ssm_in.weight"
    if load.has(old):  # files of the first months left q, k, v and z together by key head
        whole = np.arange(s.channels + s.values)
        size = len(whole)
        return [(old, size, _qkv(whole, s)), b, a], [(old, size, _z(whole, s))]
    qkv, z = (f"{at}attn_qkv.weight", s.channels), (f"{at}attn_gate.weight", s.values)
    return [qkv, b, a], [z]


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file."""
    s = delta_shape(folder_names.text_settings(config))
    together = "linear_attn.in_proj_qkvz.weight"
    rows = np.arange(s.channels + s.values)
    inputs = {
        "attn_qkv.weight": one(together, take_rows(_qkv(rows, s), len(rows))),
        "attn_gate.weight": one(together, take_rows(_z(rows, s), len(rows))),
        "ssm_ba.weight": one("linear_attn.in_proj_ba.weight"),
    }
    return naming(config, ARCH, inputs, {"ssm_a": MINUS_EXP, "ssm_conv1d.weight": SQUEEZE_CONV})


def _qkv(x: NDArray[Any], s: DeltaShape) -> NDArray[Any]:
    """All q, then all k, then all v, out of q, k, v and z by key head."""
    q, k, v, _ = _by_key_head(x, s)
    return np.concatenate([q, k, v])


def _z(x: NDArray[Any], s: DeltaShape) -> NDArray[Any]:
    return _by_key_head(x, s)[3]


def _by_key_head(x: NDArray[Any], s: DeltaShape) -> list[NDArray[Any]]:
    ends = np.cumsum([s.dk, s.dk, s.values // s.n_k])
    heads = np.split(x.reshape(s.n_k, -1, *x.shape[1:]), ends, axis=1)
    return [part.reshape(-1, *x.shape[1:]) for part in heads]
