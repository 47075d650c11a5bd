"""Models of real sizes whose weights are made up in memory; all else is what users run.

4B-BF16  4B-Q8_0  4B-Q4_K_M  0.6B-BF16     Qwen3
hybrid-Q8_0 …                              Qwen3.5: three delta nets, then attention, 24 layers
tiny-Q8_0  tiny-hybrid-Q8_0                the same shapes in small, to try a script out
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import quire
from quire import config
from quire.api import llm, placing
from quire.models.loader import TensorLoader
from quire.weights.file import WeightFile
from quire.weights.quant import GGMLType
from quire.weights.strings import StringArray

DENSE = {
    "4B": (36, 2560, 32, 8, 9728, 151_936), "0.6B": (28, 1024, 16, 8, 3072, 151_936),
    "tiny": (4, 256, 4, 2, 512, 1024),
}  # fmt: skip
"""Layers, width, heads, KV heads, width of the network, tokens; heads have 128 dimensions."""
HYBRID = {
    "hybrid": (24, 2048, 16, 4, 6144, 151_936, 16, 32),
    "tiny-hybrid": (4, 256, 4, 2, 512, 1024, 2, 4),
}
"""The same, and the delta nets' heads of keys and of values."""
Shapes = dict[str, tuple[int, ...]]


class Facts(NamedTuple):
    """What is known of a made-up tensor."""

    type: GGMLType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in a file."""
        return self.type.nbytes(self.shape)


class MadeUp(WeightFile):
    """A model whose tensors are a block of random weights, again and again."""

    def __init__(self, name: str) -> None:
        size, _, mix = name.rpartition("-")
        self.path, self.asked = Path(f"{name}.gguf"), set()
        hybrid = size in HYBRID
        n, width, heads, kv_heads, ffn, vocab = (HYBRID if hybrid else DENSE)[size][:6]
        arch = "qwen35" if hybrid else "qwen3"
        self.metadata = _metadata(arch, n, width, heads, kv_heads, ffn, vocab)
        attention = {"attn_q": (heads * 128 * (2 if hybrid else 1), width),
                     "attn_k": (kv_heads * 128, width), "attn_v": (kv_heads * 128, width),
                     "attn_output": (width, heads * 128),
                     "attn_q_norm": (128,), "attn_k_norm": (128,)}  # fmt: skip
        delta: Shapes = {}
        if hybrid:
            self.metadata |= _delta_metadata(*HYBRID[size][6:])
            delta = _delta(width, *HYBRID[size][6:])
        rest = {"attn_norm": (width,), "post_attention_norm" if hybrid else "ffn_norm": (width,),
                "ffn_gate": (ffn, width), "ffn_up": (ffn, width),
                "ffn_down": (width, ffn)}  # fmt: skip
        self.tensors = {"output_norm.weight": Facts(GGMLType.F32, (width,))}
        self.tensors["token_embd.weight"] = Facts(_type(mix, "token_embd", 0, 1), (vocab, width))
        for i in range(n):
            mixer = delta if hybrid and (i + 1) % 4 else attention
            for tensor, shape in (mixer | rest).items():
                ending = "" if tensor in ("ssm_a", "ssm_dt.bias") else ".weight"
                plain = len(shape) == 1 or tensor == "ssm_conv1d"
                type = GGMLType.F32 if plain else _type(mix, tensor, i, n)
                self.tensors[f"blk.{i}.{tensor}{ending}"] = Facts(type, shape)

    def data(self, name: str) -> NDArray[np.uint8]:
        """Random bytes that make sense as weights."""
        type, shape = self.tensors[name]
        if type is GGMLType.F32:
            value = {"ssm_a": -1.0, "ssm_conv1d.weight": 0.25}.get(name.split(".", 2)[-1], 1.0)
            return np.full(shape, value, np.float32).view(np.uint8).ravel()
        most = max(facts.nbytes for facts in self.tensors.values() if facts.type is type)
        return _blocks(type, most)[: type.nbytes(shape)]

    def samples(self, name: str) -> Iterator[bytes]:
        """Nobody saves what such a model remembers."""
        yield name.encode()

    def close(self) -> None:
        """Nothing to do."""


def _metadata(
    arch: str, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> dict[str, Any]:
    sizes = {
        "block_count": layers, "embedding_length": width, "vocab_size": vocab,
        "context_length": 40_960, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "attention.key_length": 128, "attention.value_length": 128,
        "feed_forward_length": ffn, "rope.freq_base": 1e6,
    }  # fmt: skip
    return {"general.architecture": arch, **{f"{arch}.{key}": size for key, size in sizes.items()},
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": _strings([f"t{i}" for i in range(vocab)]),
            "tokenizer.ggml.token_type": np.ones(vocab, np.int32),
            "tokenizer.ggml.merges": _strings([]), "tokenizer.ggml.eos_token_id": 0}  # fmt: skip


def _delta_metadata(n_k: int, n_v: int) -> dict[str, Any]:
    sizes = {"group_count": n_k, "time_step_rank": n_v, "inner_size": n_v * 128,
             "state_size": 128, "conv_kernel": 4}  # fmt: skip
    return {f"qwen35.ssm.{key}": size for key, size in sizes.items()}


def _delta(width: int, n_k: int, n_v: int) -> Shapes:
    """The tensors of a delta net with heads of 128."""
    channels = (2 * n_k + n_v) * 128
    return {
        "attn_qkv": (channels, width), "attn_gate": (n_v * 128, width), "ssm_beta": (n_v, width),
        "ssm_alpha": (n_v, width), "ssm_conv1d": (channels, 4), "ssm_a": (n_v,),
        "ssm_dt.bias": (n_v,), "ssm_norm": (128,), "ssm_out": (width, n_v * 128),
    }  # fmt: skip


def _strings(texts: list[str]) -> StringArray:
    """Texts as a file holds them."""
    parts = [struct.pack("<Q", len(text)) + text.encode() for text in texts]
    starts = np.cumsum([0] + [len(part) for part in parts], dtype=np.int64)[:-1]
    return StringArray(np.frombuffer(b"".join(parts), np.uint8), starts)


def _type(mix: str, name: str, layer: int, layers: int) -> GGMLType:
    """The type of a tensor; of Q4_K_M as llama.cpp's tools choose it."""
    if mix != "Q4_K_M":
        return GGMLType[mix]
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    fine = name == "token_embd" or (name in ("attn_v", "ffn_down") and more)
    return GGMLType.Q6_K if fine else GGMLType.Q4_K


def _block(type: GGMLType) -> NDArray[np.uint8]:
    rng = np.random.default_rng(0)
    if type is GGMLType.BF16:
        values = (rng.standard_normal(1 << 20) * 0.02).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, (1 << 14, type.type_size)).astype(np.uint8)
    at = {GGMLType.Q4_K: (0, 2), GGMLType.Q6_K: (208,)}.get(type, (0,))
    for start in at:
        scale = rng.uniform(1e-5, 1e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8)
    return blocks.ravel()


@cache
def _blocks(type: GGMLType, most: int) -> NDArray[np.uint8]:
    """So many bytes of blocks, to read: as a file lies in memory."""
    found = np.resize(_block(type), most)
    found.flags.writeable = False
    return found


def known(name: str) -> bool:
    """Whether a name is that of a made-up model."""
    size, _, mix = name.rpartition("-")
    return size in DENSE | HYBRID and (mix == "Q4_K_M" or mix in GGMLType.__members__)


def load(name: str, **settings: Any) -> quire.LLM:
    """A model by its path, or a made-up one by its name."""
    if not known(name):
        return quire.load(name, **settings)
    chosen = config.settings_of(settings)
    for module in (llm, placing):  # the plan of a model is made when it is asked for
        if not isinstance(module.open_weights, mock.Mock):
            opens = mock.Mock(side_effect=lambda path: MadeUp(Path(path).stem))
            mock.patch.object(module, "open_weights", opens).start()
    return quire.LLM(Path(f"{name}.gguf"), chosen)


class Shared:
    """Matrices that stay between loads of one model, so that another split costs no packing.

    All of them, or those of devices of one name.
    """

    def __init__(self, of: str = "") -> None:
        self._of, self._kept = of, dict[object, Any]()

    def __enter__(self) -> Shared:
        self._patches = [
            mock.patch.object(TensorLoader, name, self._keeping(getattr(TensorLoader, name)))
            for name in ("matrix", "experts")
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()
        self._kept.clear()

    def _keeping(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def kept(loader: TensorLoader, *sizes: Any, **how: Any) -> Any:
            parts = [tuple(_key(each) for each in part) if isinstance(part, tuple) else part
                     for part in sizes]  # fmt: skip
            if not loader._ops.name.startswith(self._of):
                return real(loader, *sizes, **how)
            key = loader._ops.name, real.__name__, *parts
            if key not in self._kept:
                self._kept[key] = real(loader, *sizes, **how)
            return self._kept[key]

        return kept


def _key(part: object) -> object:
    return part.tobytes() if isinstance(part, np.ndarray) else part
