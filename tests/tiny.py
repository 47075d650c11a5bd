"""Small random models as GGUF files, and what they must compute, in plain float64 NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.weights.quant import GGMLType, dequantize
from quire.weights.quantize import quantize
from tests.gguf_writer import Typed, ValueType, write_gguf

Floats = NDArray[np.float64]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Tiny:
    """The sizes of a small random model."""

    arch: str = "llama"
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    context: int = 512
    base: float = 10000.0
    eps: float = 1e-5
    quantized: bool = False
    tied: bool = True
    rope_factors: bool = False
    scaling: str = "none"
    seed: int = 0
    experts: int = 0
    used: int = 0
    normalize: bool = True
    window: int = 0
    """Tokens that layers with a window see, themselves included; 0 for no windows."""
    sliding: tuple[bool, ...] = ()
    """Which layers have the window, if not all."""
    reads: tuple[tuple[int, int], ...] = ()
    """Layers without keys and values of their own, and whose they look at: (reader, owner)."""

    @property
    def qk_norm(self) -> bool:
        """Whether q and k are normed per head."""
        return self.arch.startswith("qwen3")


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def vocabulary() -> dict[str, Any]:
    """A tokenizer of bytes and three control tokens."""
    tokens = [*byte_tokens(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(ValueType.INT32, [1] * 256 + [3] * 3),
        "tokenizer.ggml.merges": Typed(ValueType.STRING, []),
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


N_VOCAB = 259


def weights(t: Tiny) -> dict[str, NDArray[np.float32]]:
    """Random weights, scaled so that logits spread over several units."""
    rng = np.random.default_rng(t.seed)

    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, cols)) * 1.2 / np.sqrt(cols)).astype(np.float32)

    def norm(size: int) -> NDArray[np.float32]:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    q, kv = t.heads * t.head_dim, t.kv_heads * t.head_dim
    out = {"token_embd.weight": matrix(N_VOCAB, t.width) * 8, "output_norm.weight": norm(t.width)}
    if not t.tied:
        out["output.weight"] = matrix(N_VOCAB, t.width) * 3
    if t.rope_factors:
        out["rope_freqs.weight"] = np.linspace(1, 4, t.head_dim // 2).astype(np.float32)
    for i in range(t.layers):
        at = f"blk.{i}."
        out |= {
            f"{at}attn_norm.weight": norm(t.width),
            f"{at}attn_q.weight": matrix(q, t.width) * 2,
            f"{at}attn_k.weight": matrix(kv, t.width) * 2,
            f"{at}attn_v.weight": matrix(kv, t.width),
            f"{at}attn_output.weight": matrix(t.width, q),
            f"{at}ffn_norm.weight": norm(t.width),
        }
        shapes = {"gate": (t.ffn, t.width), "up": (t.ffn, t.width), "down": (t.width, t.ffn)}
        if t.experts:
            out[f"{at}ffn_gate_inp.weight"] = matrix(t.experts, t.width)
            for name, shape in shapes.items():
                stack = np.stack([matrix(*shape) for _ in range(t.experts)])
                out[f"{at}ffn_{name}_exps.weight"] = stack
        else:
            out |= {f"{at}ffn_{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        if t.arch == "qwen2":
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                bias = rng.standard_normal(rows).astype(np.float32) * 0.3
                out[f"{at}attn_{name}.bias"] = bias
        if t.qk_norm:
            out[f"{at}attn_q_norm.weight"] = norm(t.head_dim)
            out[f"{at}attn_k_norm.weight"] = norm(t.head_dim)
    for reader, _ in t.reads:
        for name in ("k.weight", "v.weight", "k.bias", "v.bias", "k_norm.weight"):
            out.pop(f"blk.{reader}.attn_{name}", None)
    return out


def metadata(t: Tiny) -> dict[str, Any]:
    """What a converter would write about the model."""
    out: dict[str, Any] = {
        "general.architecture": t.arch,
        f"{t.arch}.block_count": t.layers,
        f"{t.arch}.context_length": t.context,
        f"{t.arch}.embedding_length": t.width,
        f"{t.arch}.feed_forward_length": t.ffn,
        f"{t.arch}.attention.head_count": t.heads,
        f"{t.arch}.attention.head_count_kv": t.kv_heads,
        f"{t.arch}.attention.key_length": t.head_dim,
        f"{t.arch}.attention.value_length": t.head_dim,
        f"{t.arch}.attention.layer_norm_rms_epsilon": t.eps,
        f"{t.arch}.rope.freq_base": t.base,
        f"{t.arch}.rope.dimension_count": t.head_dim,
    }
    if t.experts:
        out[f"{t.arch}.expert_count"] = t.experts
        out[f"{t.arch}.expert_used_count"] = t.used
        out[f"{t.arch}.expert_feed_forward_length"] = t.ffn
        if not t.normalize:
            out[f"{t.arch}.expert_weights_norm"] = False
    if t.window:
        out[f"{t.arch}.attention.sliding_window"] = t.window
    if t.sliding:
        flags = Typed(ValueType.BOOL, list(t.sliding))
        out[f"{t.arch}.attention.sliding_window_pattern"] = flags
    if t.scaling != "none":
        out[f"{t.arch}.rope.scaling.type"] = t.scaling
        out[f"{t.arch}.rope.scaling.factor"] = 4.0
        out[f"{t.arch}.rope.scaling.original_context_length"] = 128
    return out | vocabulary()


def write(
    path: Path, t: Tiny, more: Mapping[str, Any] | None = None
) -> dict[str, NDArray[np.float32]]:
    """Writes the model, with more metadata; returns its weights as the file holds them."""
    exact = weights(t)
    tensors: dict[str, Any] = {}
    for name, value in exact.items():
        if t.quantized and value.ndim > 1:
            raw = np.frombuffer(quantize(value, GGMLType.Q8_0).tobytes(), np.uint8)
            tensors[name] = (GGMLType.Q8_0, raw, value.shape)
            exact[name] = dequantize(raw, GGMLType.Q8_0, value.shape)
        else:
            tensors[name] = value
    write_gguf(path, {**metadata(t), **(more or {})}, tensors)
    return exact


def forward(t: Tiny, w: dict[str, NDArray[np.float32]], ids: list[int]) -> Floats:
    """Logits after each token, written down as the papers have it."""

    def weight(name: str) -> Floats:
        return w[name].astype(np.float64)

    def norm(x: Floats, name: str) -> Floats:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + t.eps) * weight(name)

    n = len(ids)
    cos, sin = _angles(t, w, n)
    everything = np.triu(np.full((n, n), -np.inf), 1)
    windowed = everything + np.tril(np.full((n, n), -np.inf), -t.window)
    sliding = t.sliding or (bool(t.window),) * t.layers
    owners, stored = dict(t.reads), dict[int, tuple[Floats, Floats]]()
    x = weight("token_embd.weight")[ids]
    for i in range(t.layers):
        at, mask = f"blk.{i}.", windowed if sliding[i] else everything
        h = norm(x, at + "attn_norm.weight")
        made = {}
        for p in "q" if i in owners else "qkv":
            y = h @ weight(f"{at}attn_{p}.weight").T
            if t.arch == "qwen2":
                y = y + weight(f"{at}attn_{p}.bias")
            y = y.reshape(n, -1, t.head_dim)
            if t.qk_norm and p != "v":
                y = norm(y, f"{at}attn_{p}_norm.weight")
            made[p] = y if p == "v" else _rotate(y, cos, sin, neox=t.arch != "llama")
        stored[i] = stored[owners[i]] if i in owners else (made["k"], made["v"])
        q, (k, v) = made["q"], (np.repeat(y, t.heads // t.kv_heads, axis=1) for y in stored[i])
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(t.head_dim) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        heads = np.einsum("hqk,khd->qhd", scores, v).reshape(n, -1)
        x = x + heads @ weight(at + "attn_output.weight").T
        h = norm(x, at + "ffn_norm.weight")
        if t.experts:
            x = x + _experts(t, {n: weight(f"{at}ffn_{n}.weight") for n in _EXPERTS}, h)
        else:
            x = x + _gated(h, *(weight(f"{at}ffn_{n}.weight") for n in ("gate", "up", "down")))
    output = "token_embd.weight" if t.tied else "output.weight"
    return norm(x, "output_norm.weight") @ weight(output).T


_EXPERTS = ("gate_inp", "gate_exps", "up_exps", "down_exps")


def _gated(h: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    y = h @ gate.T
    return (y / (1 + np.exp(-y)) * (h @ up.T)) @ down.T


def _experts(t: Tiny, w: dict[str, Floats], h: Floats) -> Floats:
    """Each token on its own: softmax over all experts, then the likeliest."""
    out = np.zeros_like(h)
    for i, logits in enumerate(h @ w["gate_inp"].T):
        p = np.exp(logits - logits.max())
        p /= p.sum()
        chosen = np.argsort(-p, kind="stable")[: t.used]
        total = p[chosen].sum() if t.normalize else 1.0
        for e in chosen:
            parts = (w[name][e] for name in _EXPERTS[1:])
            out[i] += p[e] / total * _gated(h[i : i + 1], *parts)[0]
    return out


def _angles(t: Tiny, w: dict[str, Any], n: int) -> tuple[Floats, Floats]:
    freqs = t.base ** (-np.arange(0, t.head_dim, 2) / t.head_dim)
    mscale = 1.0
    if t.rope_factors:
        freqs = freqs / w["rope_freqs.weight"].astype(np.float64)
    if t.scaling == "linear":
        freqs = freqs / 4.0
    if t.scaling == "yarn":  # wavelengths against the trained 128 positions, betas 32 and 1
        half = t.head_dim // 2
        dims = [t.head_dim * np.log(128 / (b * 2 * np.pi)) / (2 * np.log(t.base)) for b in (32, 1)]
        low, high = max(np.floor(dims[0]), 0), min(np.ceil(dims[1]), t.head_dim - 1)
        stretch = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
        freqs = freqs * (1 - stretch) + freqs / 4.0 * stretch
        mscale = 1.0 + 0.1 * np.log(4.0)
    angles = np.arange(n)[:, None] * freqs
    return np.cos(angles) * mscale, np.sin(angles) * mscale


def _rotate(x: Floats, cos: Floats, sin: Floats, neox: bool) -> Floats:
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    a = (slice(0, half), slice(half, None)) if neox else (slice(0, None, 2), slice(1, None, 2))
    one, two = x[..., a[0]], x[..., a[1]]
    c, s = cos[:, None, :], sin[:, None, :]
    out[..., a[0]], out[..., a[1]] = one * c - two * s, one * s + two * c
    return out


VARIANTS = {
    "llama": Tiny(),
    "llama-untied": Tiny(tied=False, heads=3, kv_heads=1, head_dim=40, width=96, ffn=160, seed=1),
    "llama-factors": Tiny(rope_factors=True, seed=2),
    "llama-linear": Tiny(scaling="linear", seed=3),
    "llama-yarn": Tiny(scaling="yarn", head_dim=32, seed=4),
    "llama-q8_0": Tiny(quantized=True, heads=9, kv_heads=3, head_dim=32, seed=5),
    "qwen2": Tiny(arch="qwen2", heads=7, kv_heads=1, head_dim=16, seed=6),
    "qwen3": Tiny(arch="qwen3", heads=6, kv_heads=3, head_dim=24, seed=7),
    "qwen3-q8_0": replace(Tiny(arch="qwen3"), quantized=True, tied=False, seed=8),
    "llama-window": Tiny(window=24, seed=13),
    "qwen2-windows": Tiny(arch="qwen2", layers=3, window=17, sliding=(True, False, True), seed=14),
    "moe": Tiny(arch="qwen3moe", experts=7, used=3, ffn=40, heads=6, kv_heads=3, seed=9),
    "moe-one": Tiny(arch="qwen3moe", experts=1, used=1, seed=10),
    "moe-all": Tiny(arch="qwen3moe", experts=5, used=5, ffn=17, normalize=False, seed=11),
    "moe-q8_0": Tiny(arch="qwen3moe", experts=6, used=2, quantized=True, seed=12),
}
