"""The sizes of a decoder as its file gives them, each within reason."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ModelError
from quire.models.rope import read_rope
from quire.ops import Rope
from quire.weights.file import REQUIRED, Required, WeightFile

MOST = 2**20
"""No real model has more of anything that is counted."""
MAX_LAYERS = 4096


@dataclass(frozen=True)
class Sizes:
    """What every decoder has."""

    n_layers: int
    width: int
    n_vocab: int
    n_ctx_train: int
    eps: float

    @classmethod
    def read(cls, file: WeightFile, arch: str) -> Sizes:
        """The sizes a file gives; its last blocks may guess tokens ahead, which are not run."""
        blocks = file.get_int(f"{arch}.block_count", minimum=1, maximum=MAX_LAYERS)
        key = f"{arch}.nextn_predict_layers"
        return cls(
            n_layers=blocks - file.get_int(key, default=0, minimum=0, maximum=blocks - 1),
            width=file.get_int(f"{arch}.embedding_length", minimum=1, maximum=MOST),
            n_vocab=_vocabulary(file, arch),
            n_ctx_train=file.get_int(f"{arch}.context_length", minimum=1, maximum=2**31),
            eps=file.get_float(
                f"{arch}.attention.layer_norm_rms_epsilon", minimum=0.0, maximum=1.0
            ),
        )


@dataclass(frozen=True)
class DenseSizes(Sizes):
    """What a decoder with attention and gated networks has."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_width: int
    rope: Rope

    @classmethod
    def read(
        cls, file: WeightFile, arch: str, neox: bool = True, ffn: str = "feed_forward_length",
        kv_heads: int | None = None,
    ) -> DenseSizes:  # fmt: skip
        """The sizes a file gives; `ffn` is the key of the network's.

        `kv_heads` is for files that count them layer by layer.
        """

        def count(key: str, most: int = MOST, default: int | Required = REQUIRED) -> int:
            return file.get_int(f"{arch}.{key}", default=default, minimum=1, maximum=most)

        base = Sizes.read(file, arch)
        n_heads = count("attention.head_count", 4096)
        n_kv_heads = kv_heads or count("attention.head_count_kv", 4096, default=n_heads)
        if n_heads % n_kv_heads:
            raise ModelError(
                f"{file.path}: {arch}.attention.head_count is {n_heads}, which its "
                f"{n_kv_heads} key/value heads do not divide"
            )
        head_dim = count("attention.key_length", 8192, default=max(base.width // n_heads, 1))
        value_dim = count("attention.value_length", 8192, default=head_dim)
        if value_dim != head_dim:
            raise ModelError(
                f"{file.path}: keys of {head_dim} and values of {value_dim} dimensions; "
                f"{arch} needs them equal"
            )
        return cls(
            **vars(base),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            ffn_width=count(ffn),
            rope=read_rope(file, arch, head_dim, neox),
        )


def _vocabulary(file: WeightFile, arch: str) -> int:
    """Rows of the embedding, which must be the size of the vocabulary."""
    embedding = file.tensors.get("token_embd.weight")
    if "tokenizer.ggml.tokens" in file.metadata:
        n_tokens = len(file.get_array("tokenizer.ggml.tokens"))
    else:
        n_tokens = file.get_int(f"{arch}.vocab_size", minimum=1)
    if embedding is not None and embedding.shape[:1] != (n_tokens,):
        raise ModelError(
            f"{file.path}: token_embd.weight is {list(embedding.shape)}, "
            f"the vocabulary has {n_tokens} tokens"
        )
    return n_tokens
