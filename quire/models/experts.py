"""A layer's mixture of experts in place of its one gated network."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ModelError
from quire.models.loader import Loader
from quire.ops import SILU_MUL, Array, Ops
from quire.weights.file import WeightFile


@dataclass(frozen=True)
class ExpertsConfig:
    """How many experts there are, how many a token uses, and how these are weighed."""

    count: int
    used: int
    normalize: bool
    scale: float

    @classmethod
    def read(cls, file: WeightFile, arch: str) -> ExpertsConfig:
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


class ExpertNetwork:
    """One layer's experts with their router; the tensors have the experts as first axis."""

    def __init__(
        self, ops: Ops, config: ExpertsConfig, load: Loader, at: str,
        width: int, ffn: int, eps: float, norm: str = "ffn_norm",
    ) -> None:  # fmt: skip
        self._ops, self._config, self._eps = ops, config, eps
        n = config.count
        self._norm = load.vector((f"{at}{norm}.weight", width))
        self._router = load.matrix(width, (f"{at}ffn_gate_inp.weight", n), exact=True)
        fused = f"{at}ffn_gate_up_exps.weight"
        if load.has(fused):
            self._gate_up = load.experts(n, width, (fused, 2 * ffn))
        else:
            gate_up = ((f"{at}ffn_gate_exps.weight", ffn), (f"{at}ffn_up_exps.weight", ffn))
            self._gate_up = load.experts(n, width, *gate_up)
        self._down = load.experts(n, ffn, (f"{at}ffn_down_exps.weight", width))

    @property
    def nbytes(self) -> int:
        """Bytes that the matrices hold."""
        return sum(m.nbytes for m in (self._router, self._gate_up, self._down))

    def add_to(self, x: Array) -> None:
        """x += what the experts make of it."""
        c = self._config
        self._ops.experts(
            x, self._router, self._gate_up, self._down, c.used, norm=self._norm, eps=self._eps,
            normalize=c.normalize, scale=c.scale, into=x,
        )  # fmt: skip


class SharedExpertNetwork(ExpertNetwork):
    """Experts, and one more network that every token goes through, gated by a number per token."""

    def __init__(
        self, ops: Ops, config: ExpertsConfig, load: Loader, at: str,
        width: int, ffn: int, eps: float, shared: int, norm: str = "ffn_norm",
    ) -> None:  # fmt: skip
        super().__init__(ops, config, load, at, width, ffn, eps, norm)
        gate_up = ((f"{at}ffn_gate_shexp.weight", shared), (f"{at}ffn_up_shexp.weight", shared))
        self._shared_gate_up = load.matrix(width, *gate_up)
        self._shared_down = load.matrix(shared, (f"{at}ffn_down_shexp.weight", width))
        self._share = load.matrix(width, (f"{at}ffn_gate_inp_shexp.weight", 1), exact=True)

    @property
    def nbytes(self) -> int:
        """Bytes that the matrices hold."""
        own = (self._shared_gate_up, self._shared_down, self._share)
        return super().nbytes + int(sum(m.nbytes for m in own))

    def add_to(self, x: Array) -> None:
        """x += what the experts and the shared one make of it."""
        ops = self._ops
        gate_up = ops.linear(x, self._shared_gate_up, self._norm, self._eps)
        y = ops.linear(gate_up, self._shared_down, act=SILU_MUL)
        share = ops.linear(x, self._share, self._norm, self._eps)
        super().add_to(x)
        ops.add_gated(x, y, share)
