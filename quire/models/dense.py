"""The decoder that Llama, Qwen2 and Qwen3 share: attention, then a gated network, per layer.

An architecture's own file says what differs: how heads are rotated, whether q, k and v have
biases, whether q and k are normed per head, what takes the place of the gated network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from quire.errors import ModelError
from quire.memory.build import GroupKernels
from quire.models.loader import Loader
from quire.models.page_kernels import attention_kernels
from quire.models.rope import read_rope
from quire.models.windows import Windows
from quire.ops import SILU_MUL, Array, Heads, Matrix, Ops, Rope
from quire.ops.batch import Batch
from quire.weights.file import REQUIRED, Required, WeightFile

_MOST = 2**20  # no real model has more of anything that is counted here


@dataclass(frozen=True)
class DenseConfig:
    """The sizes of a dense decoder."""

    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_width: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    rope: Rope

    @classmethod
    def read(
        cls, file: WeightFile, arch: str, neox: bool, ffn: str = "feed_forward_length",
        kv_heads: int | None = None,
    ) -> DenseConfig:  # fmt: skip
        """The sizes a file gives, each within reason; `ffn` is the key of the network's.

        `kv_heads` is for files that count them layer by layer.
        """

        def count(key: str, most: int = _MOST, default: int | Required = REQUIRED) -> int:
            return file.get_int(f"{arch}.{key}", default=default, minimum=1, maximum=most)

        width = count("embedding_length")
        n_heads = count("attention.head_count", 4096)
        n_kv_heads = kv_heads or count("attention.head_count_kv", 4096, default=n_heads)
        if n_heads % n_kv_heads:
            raise ModelError(
                f"{file.path}: {arch}.attention.head_count is {n_heads}, which its "
                f"{n_kv_heads} key/value heads do not divide"
            )
        head_dim = count("attention.key_length", 8192, default=max(width // n_heads, 1))
        value_dim = count("attention.value_length", 8192, default=head_dim)
        if value_dim != head_dim:
            raise ModelError(
                f"{file.path}: keys of {head_dim} and values of {value_dim} dimensions; "
                f"{arch} needs them equal"
            )
        return cls(
            n_layers=count("block_count", 4096),
            width=width,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            ffn_width=count(ffn),
            n_vocab=vocabulary(file, arch),
            n_ctx_train=count("context_length", 2**31),
            eps=file.get_float(
                f"{arch}.attention.layer_norm_rms_epsilon", minimum=0.0, maximum=1.0
            ),
            rope=read_rope(file, arch, head_dim, neox),
        )


def vocabulary(file: WeightFile, arch: str) -> int:
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


class Network(Protocol):
    """What a layer does after its attention."""

    @property
    def nbytes(self) -> int:
        """Bytes that its matrices hold."""

    def add_to(self, x: Array) -> None:
        """x += network(norm(x))."""


class GatedNetwork:
    """down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(
        self, ops: Ops, config: DenseConfig, load: Loader, at: str, norm: str = "ffn_norm"
    ) -> None:
        self._ops, self._eps = ops, config.eps
        width, ffn = config.width, config.ffn_width
        self._norm = load.vector((f"{at}{norm}.weight", width))
        gate_up = ((f"{at}ffn_gate.weight", ffn), (f"{at}ffn_up.weight", ffn))
        self._gate_up = load.matrix(width, *gate_up)
        self._down = load.matrix(ffn, (f"{at}ffn_down.weight", width))

    @property
    def nbytes(self) -> int:
        """Bytes that its matrices hold."""
        return int(self._gate_up.nbytes + self._down.nbytes)

    def add_to(self, x: Array) -> None:
        """x += network(norm(x))."""
        gate_up = self._ops.linear(x, self._gate_up, self._norm, self._eps)
        self._ops.linear(gate_up, self._down, act=SILU_MUL, into=x)


@dataclass(frozen=True)
class Layer:
    """One layer's weights; q, k and v are one matrix.

    `place` is its number among the layers of its group.
    """

    group: str
    place: int
    attn_norm: Array
    qkv: Matrix
    qkv_bias: Array | None
    heads: Any
    out: Matrix
    network: Network


class DenseModel:
    """A dense decoder on one device."""

    def __init__(
        self, config: DenseConfig, windows: Windows, load: Loader, ops: Ops,
        type_k: str, type_v: str, qkv_bias: bool = False, qk_norm: bool = False,
        network: Callable[[str], Network] | None = None,
    ) -> None:  # fmt: skip
        self.ops = ops
        self.config = config
        self.n_layers = config.n_layers
        self.n_vocab = config.n_vocab
        self.n_ctx_train = config.n_ctx_train
        self._windows = windows
        self.groups = windows.groups(config.n_kv_heads, config.head_dim)
        self._rope = ops.rope(config.rope)
        network = network or (lambda at: GatedNetwork(ops, config, load, at))
        self.embedding = load.matrix(config.width, ("token_embd.weight", config.n_vocab))
        self.layers = [
            self._layer(i, load, type_k, type_v, qkv_bias, qk_norm, network)
            for i in range(config.n_layers)
        ]
        self.final_norm = load.vector(("output_norm.weight", config.width))
        self.output = self.embedding
        if load.has("output.weight"):
            self.output = load.matrix(config.width, ("output.weight", config.n_vocab))

    def _layer(
        self, i: int, load: Loader, type_k: str, type_v: str, qkv_bias: bool, qk_norm: bool,
        network: Callable[[str], Network],
    ) -> Layer:  # fmt: skip
        c, at, windows = self.config, f"blk.{i}.", self._windows
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        qkv = [("attn_q", q), ("attn_k", kv), ("attn_v", kv)]

        def norm(name: str, size: int) -> Array:
            return load.vector((f"{at}{name}.weight", size))

        q_norm = norm("attn_q_norm", c.head_dim) if qk_norm else None
        k_norm = norm("attn_k_norm", c.head_dim) if qk_norm else None
        sizes = c.n_heads, c.n_kv_heads, c.head_dim, c.head_dim
        shape = Heads(*sizes, c.head_dim**-0.5, windows.of(i))
        return Layer(
            group=windows.group(i),
            place=windows.place(i),
            attn_norm=norm("attn_norm", c.width),
            qkv=load.matrix(c.width, *((f"{at}{n}.weight", rows) for n, rows in qkv)),
            qkv_bias=load.vector(*((f"{at}{n}.bias", rows) for n, rows in qkv))
            if qkv_bias
            else None,
            heads=self.ops.heads(shape, type_k, type_v, q_norm, k_norm, c.eps),
            out=load.matrix(q, (f"{at}attn_output.weight", c.width)),
            network=network(at),
        )

    @property
    def kernels(self) -> dict[str, GroupKernels]:
        """What the device can do with pages, by group."""
        return {x.group: attention_kernels(self.ops, x.heads, self._rope) for x in self.layers}

    @property
    def weight_bytes(self) -> int:
        """Bytes that all matrices hold."""
        matrices = [m for x in self.layers for m in (x.qkv, x.out, x.network)]
        matrices += [self.embedding] + ([self.output] if self.output is not self.embedding else [])
        return sum(m.nbytes for m in matrices)

    def embed(self, batch: Batch) -> Array:
        """The batch's tokens as rows of the model's width."""
        return self.ops.embed(self.embedding, batch.tokens)

    def run(self, x: Array, batch: Batch, start: int, stop: int) -> None:
        """Layers start … stop-1, in place on x."""
        ops, eps = self.ops, self.config.eps
        rope = ops.rope_table(self._rope, batch.positions)
        for layer in self.layers[start:stop]:
            memory = batch.groups[layer.group]
            k, v = memory.offsets[layer.place]
            qkv = ops.linear(x, layer.qkv, layer.attn_norm, eps, 0, layer.qkv_bias)
            heads = ops.attention(qkv, layer.heads, memory.pages, rope, k, v)
            ops.linear(heads, layer.out, into=x)
            layer.network.add_to(x)

    def logits(self, x: Array) -> Array:
        """The output of rows that went through the layers."""
        return self.ops.linear_fine(x, self.output, self.final_norm, self.config.eps)
