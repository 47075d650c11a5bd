"""Networks of several experts, of which a router gives each token a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError
from quire.models.layers import Network, total_bytes
from quire.models.loader import DOWN, EXPERTS, NETWORK, Kit
from quire.models.sizes import DenseSizes
from quire.ops import SILU_MUL, Array, Ops
from quire.ops.batch import cross
from quire.weights.file import WeightFile

if TYPE_CHECKING:
    from quire.models.streaming import Streaming


@dataclass(frozen=True)
class Routing:
    """How many experts there are, how many a token uses, and how these are weighed."""

    count: int
    used: int
    normalize: bool
    scale: float

    @classmethod
    def read(cls, file: WeightFile, arch: str) -> Routing:
        """What a file says, each number within reason."""
        count = file.get_int(f"{arch}.expert_count", minimum=1, maximum=65536)
        used = file.get_int(f"{arch}.expert_used_count", minimum=1, maximum=65536)
        if used > count:
            raise ModelError(
                f"{file.path}: {arch}.expert_used_count is {used}, but there are {count} experts"
            )
        # Files for models that always normalise leave the first out; a scale of 0 stands for none.
        normalize = file.get_bool(f"{arch}.expert_weights_norm", default=True)
        scale = file.get_float(f"{arch}.expert_weights_scale", default=1.0, minimum=0, maximum=1e6)
        return cls(count, used, normalize, scale or 1.0)


class Experts:
    """One layer's experts with their router; the tensors have the experts as first axis.

    Their last matrix may be on another device: who is chosen, and what gate and up make, goes there
    and the sum comes back.
    """

    def __init__(
        self, kit: Kit, c: DenseSizes, layer: int, routing: Routing, *, norm: str = "ffn_norm"
    ) -> None:
        self._made: dict[str, Any] = {"c": c, "layer": layer, "routing": routing, "norm": norm}
        last = kit.at(DOWN, layer)
        kit = kit.at(EXPERTS, layer)
        self.ops, self._last = kit.ops, last.ops
        self.ops_within: Sequence[Ops] = (kit.ops, last.ops, kit.ops)
        self._eps, self._routing = c.eps, routing
        load, at, n = kit.load, f"blk.{layer}.", routing.count
        self._norm = load.vector((f"{at}{norm}.weight", c.width))
        self._router = load.matrix(c.width, (f"{at}ffn_gate_inp.weight", n), exact=True)
        names = ("ffn_gate_exps", "ffn_up_exps")
        gate_up = [(f"{at}{name}.weight", c.ffn_width) for name in names]
        fused = f"{at}ffn_gate_up_exps.weight"
        if load.has(fused):
            gate_up = [(fused, 2 * c.ffn_width)]
        self._gate_up = load.experts(n, c.width, *gate_up)
        self._down = last.load.experts(n, c.ffn_width, (f"{at}ffn_down_exps.weight", c.width))
        self.part_bytes: Mapping[str, int] = {
            EXPERTS: total_bytes((self._router, self._gate_up)), DOWN: total_bytes((self._down,))
        }  # fmt: skip

    def add_to(self, x: Array) -> Array:
        """x += what the experts make of it."""
        ops, last, routing = self.ops, self._last, self._routing
        enter = self._router, self._gate_up
        how: dict[str, Any] = {
            "norm": self._norm, "eps": self._eps, "normalize": routing.normalize,
            "scale": routing.scale,
        }  # fmt: skip
        if ops is last:
            return ops.experts(x, *enter, self._down, routing.used, into=x, **how)
        entered = ops.experts_in(x, *enter, routing.used, **how)
        chosen, middle, x = (cross(y, ops, last) for y in (*entered, x))
        return cross(last.experts_out(middle, chosen, routing.count, self._down, x), last, ops)

    def again(self, kit: Kit) -> Network:
        """The same made with another kit."""
        return Experts(kit, **self._made)

    def streamed(self, streaming: Streaming) -> Network:
        """The whole may be run on a GPU."""
        return streaming.wrap(self)


class SharedExperts:
    """Experts, and one more network that every token goes through, gated by a number per token.

    The experts may be on another device: x goes there and back.
    """

    def __init__(
        self, kit: Kit, c: DenseSizes, layer: int, routing: Routing, shared: int, *,
        norm: str = "ffn_norm",
    ) -> None:  # fmt: skip
        self._made: dict[str, Any] = {
            "c": c, "layer": layer, "routing": routing, "shared": shared, "norm": norm
        }  # fmt: skip
        self._experts: Network = Experts(kit, c, layer, routing, norm=norm)
        kit = kit.at(NETWORK, layer)
        self.ops, self._eps = kit.ops, c.eps
        load, at = kit.load, f"blk.{layer}."
        self._norm = load.vector((f"{at}{norm}.weight", c.width))
        gate_up = ((f"{at}ffn_gate_shexp.weight", shared), (f"{at}ffn_up_shexp.weight", shared))
        self._shared_gate_up = load.matrix(c.width, *gate_up)
        self._shared_down = load.matrix(shared, (f"{at}ffn_down_shexp.weight", c.width))
        self._share = load.matrix(c.width, (f"{at}ffn_gate_inp_shexp.weight", 1), exact=True)
        own = self._shared_gate_up, self._shared_down, self._share
        self.part_bytes: Mapping[str, int] = {
            NETWORK: total_bytes(own), **self._experts.part_bytes
        }  # fmt: skip
        self.ops_within: Sequence[Ops] = (kit.ops, *self._experts.ops_within, kit.ops)

    def add_to(self, x: Array) -> Array:
        """x + what the experts and the shared one make of it."""
        ops, there = self.ops, self._experts.ops
        moved = cross(x, ops, there)  # a GPU goes on here while experts on the host are busy
        weights = self._shared_gate_up, self._shared_down, self._norm
        y = ops.network(x, *weights, self._eps, SILU_MUL)
        share = ops.linear(x, self._share, self._norm, self._eps)
        x = cross(self._experts.add_to(moved), there, ops)
        ops.add_gated(x, y, share)
        return x

    def again(self, kit: Kit) -> Network:
        """The same made with another kit."""
        return SharedExperts(kit, **self._made)

    def streamed(self, streaming: Streaming) -> Network:
        """The whole may be run on a GPU, or the experts where they alone are on the host."""
        if self.ops is streaming.host:
            return streaming.wrap(self)
        self._experts = self._experts.streamed(streaming)
        return self
