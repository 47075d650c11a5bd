"""Which type each tensor of a model gets in a format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from quire.weights.file import TensorFacts
from quire.weights.quant import GGMLType

_LAYER: Final = re.compile(r"blk\.(\d+)\.")
# Tensors of more than one dimension that are no matrices, or too delicate to round.
_KEPT_EXACT: Final = (
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "conv1d.weight", "shortconv.conv.weight",
    "ssm_a", "ssm_d", "_norm.weight",
)  # fmt: skip
_DELICATE: Final = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight", "attn_qkv.weight")
_ENDS: Final = ("token_embd.weight", "output.weight")
# What a type becomes where rows are not whole blocks of 256: the next that kernels read alike.
_BY_32: Final = {
    GGMLType.Q4_K: GGMLType.Q4_1,
    GGMLType.Q5_K: GGMLType.Q5_1,
    GGMLType.Q6_K: GGMLType.Q8_0,
}


@dataclass(frozen=True)
class Recipe:
    """A format: the type of most matrices, and of those that lose most with few bits."""

    type: GGMLType
    file_type: int
    """What GGUF calls it in `general.file_type`."""
    ends: GGMLType
    """Of the embedding and the output."""
    delicate: GGMLType | None = None
    """Of the matrices that add to a layer's output, in about half of the layers."""

    def type_of(self, name: str, tensor: TensorFacts, n_layers: int) -> GGMLType:
        """The type a tensor will have."""
        if is_exact(name, tensor):
            return GGMLType.F32
        wanted = self.type
        if name in _ENDS:
            wanted = self.ends
        elif self.delicate and name.endswith(_DELICATE) and _needs_more(name, n_layers):
            wanted = self.delicate
        if tensor.shape[-1] % wanted.block_size:
            wanted = _BY_32.get(wanted, GGMLType.F16)
        return wanted if tensor.shape[-1] % wanted.block_size == 0 else GGMLType.F16


def is_exact(name: str, tensor: TensorFacts) -> bool:
    """Whether a tensor is kept in float32, whatever matrices become."""
    return len(tensor.shape) < 2 or name.endswith(_KEPT_EXACT)


def _needs_more(name: str, n_layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    found = _LAYER.match(name)
    layer = int(found[1]) if found else 0
    eighth = n_layers // 8
    return layer < eighth or layer >= n_layers - eighth or (layer - eighth) % 3 == 2


_T = GGMLType
FORMATS: Final[Mapping[str, Recipe]] = {
    "q4_k_m": Recipe(_T.Q4_K, 15, _T.Q6_K, _T.Q6_K),
    "q4_k_s": Recipe(_T.Q4_K, 14, _T.Q6_K),
    "q4_0": Recipe(_T.Q4_0, 2, _T.Q8_0),
    "q4_1": Recipe(_T.Q4_1, 3, _T.Q8_0),
    "q5_k_m": Recipe(_T.Q5_K, 17, _T.Q6_K, _T.Q6_K),
    "q5_k_s": Recipe(_T.Q5_K, 16, _T.Q6_K),
    "q5_0": Recipe(_T.Q5_0, 8, _T.Q8_0),
    "q5_1": Recipe(_T.Q5_1, 9, _T.Q8_0),
    "q6_k": Recipe(_T.Q6_K, 18, _T.Q6_K),
    "q8_0": Recipe(_T.Q8_0, 7, _T.Q8_0),
    "f16": Recipe(_T.F16, 1, _T.F16),
    "bf16": Recipe(_T.BF16, 32, _T.BF16),
    "f32": Recipe(_T.F32, 0, _T.F32),
}
"""By the names that GGUF files are known by."""
