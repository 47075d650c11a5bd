"""What Qwen3-Next and Qwen3.5 share: three layers with a gated delta net, then one with attention.

A delta net keeps a state of one size, however long the context; attention keeps every token. The
output of both is gated, and a layer ends in a gated network or in experts with a shared one:

    delta       q k v b a, z = in(norm(x))    out(norm(recur(q k v b a)) · silu(z))
    attention   q k v, gate = in(norm(x))     out(attend(q k v) · sigmoid(gate))

An architecture's own file says how its tensors make up these inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.models.decoder import Decoder
from quire.models.experts import Routing, SharedExperts
from quire.models.layers import GatedAttention, GatedNetwork, Mixer, Network
from quire.models.loader import Kit
from quire.models.recurrent_layers import DeltaInputs, DeltaKind, DeltaNet, DeltaShape
from quire.models.sizes import DenseSizes
from quire.weights.file import WeightFile

INTERVAL = 4
"""Every so many layers there is one with attention, where a file does not say otherwise."""
MAX_HEADS, MAX_DIM, MAX_TAPS, MAX_COLUMNS = 4096, 4096, 16, 2**20
_NORM = "post_attention_norm"  # what these files call the norm before the network


def build_hybrid(
    file: WeightFile, arch: str, kit: Kit, inputs: DeltaInputs, tiled: bool
) -> Decoder:
    """The model; `inputs` says which tensors make the inputs of a delta net."""
    c = _sizes(file, arch)
    kind = DeltaKind(file.path, _delta_shape(file, arch), inputs, tiled)
    recurrent = recurrent_layers(file, arch, c.n_layers)
    network = _networks(file, arch, kit, c)

    def mixer(i: int) -> Mixer:
        return DeltaNet(kit, c, i, kind) if recurrent[i] else GatedAttention(kit, c, i, c.rope)

    return Decoder(kit, c, [(mixer(i), network(i)) for i in range(c.n_layers)])


def _delta_shape(file: WeightFile, arch: str) -> DeltaShape:
    """The sizes of the delta nets, each within reason."""

    def count(key: str, most: int) -> int:
        return file.get_int(f"{arch}.ssm.{key}", minimum=1, maximum=most)

    n_k, n_v = count("group_count", MAX_HEADS), count("time_step_rank", MAX_HEADS)
    inner, dk = count("inner_size", MAX_COLUMNS), count("state_size", MAX_DIM)
    if inner % n_v or n_v % n_k or n_k * dk > MAX_COLUMNS or inner // n_v > MAX_DIM:
        raise ModelError(
            f"{file.path}: {arch}.ssm has {inner} columns in {n_v} value heads over {n_k} key "
            f"heads of {dk}; each of the first three must divide the one before"
        )
    return DeltaShape(n_k, n_v, dk, inner // n_v, count("conv_kernel", MAX_TAPS))


def _sizes(file: WeightFile, arch: str) -> DenseSizes:
    """The sizes of all but the delta nets."""
    experts = file.get_int(f"{arch}.expert_count", default=0, minimum=0)
    ffn = "expert_feed_forward_length" if experts else "feed_forward_length"
    c = DenseSizes.read(file, arch, ffn=ffn)
    if c.n_heads * c.head_dim > MAX_COLUMNS:
        raise ModelError(
            f"{file.path}: {c.n_heads} heads of {c.head_dim} dimensions are more than the "
            f"{MAX_COLUMNS} columns that any known model has"
        )
    return c


def recurrent_layers(file: WeightFile, arch: str, n_layers: int) -> NDArray[np.bool_]:
    """Which layers are delta nets: by a flag for each, or all but every so many."""
    key = f"{arch}.attention.recurrent_layers"
    flags = file.get_array(key, default=None)
    if flags is None:
        key = f"{arch}.full_attention_interval"
        interval = file.get_int(key, default=INTERVAL, minimum=1, maximum=2**31 - 1)
        return all_but_every(interval, n_layers)
    if not isinstance(flags, np.ndarray) or len(flags) < n_layers:
        raise ModelError(f"{file.path}: {key} must have a flag for each of {n_layers} layers")
    return np.asarray(flags[:n_layers], np.bool_)


def all_but_every(interval: int, n_layers: int) -> NDArray[np.bool_]:
    """Delta nets in all layers but the last of each interval."""
    return np.asarray(np.arange(1, n_layers + 1) % interval != 0)


def _networks(file: WeightFile, arch: str, kit: Kit, c: DenseSizes) -> Callable[[int], Network]:
    """What makes the network of a layer."""
    if not file.get_int(f"{arch}.expert_count", default=0, minimum=0):
        return lambda i: GatedNetwork(kit, c, i, norm=_NORM)
    routing = Routing.read(file, arch)
    key = f"{arch}.expert_shared_feed_forward_length"
    shared = file.get_int(key, minimum=1, maximum=MAX_COLUMNS)
    return lambda i: SharedExperts(kit, c, i, routing, shared, norm=_NORM)
