"""Mixture of experts: it follows the reference, and a token never notices its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from quire.ops import _cpu
from quire.ops.reference import experts as reference
from quire.weights.quant import GGMLType, dequantize
from tests.ops.test_matmul import Floats, bits, part, random_bytes

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """A layer of experts with random weights."""

    experts: int
    used: int
    width: int
    ffn: int
    gate: GGMLType = GGMLType.F32
    up: GGMLType = GGMLType.F32
    down: GGMLType = GGMLType.F32
    router: GGMLType = GGMLType.F32
    normalize: bool = True
    scale: float = 1.0
    fused: bool = False


class Layer:
    """The same weights packed for a CPU and as arrays."""

    def __init__(self, cpu: Any, shape: Shape) -> None:
        self.cpu, self.shape = cpu, shape
        s, rng = shape, np.random.default_rng(shape.experts)
        self.gate_up_parts: list[Any] = []
        values = {}
        for name, kind in (("gate", s.gate), ("up", s.up)):
            values[name] = self._stack(rng, kind, s.ffn, s.width, self.gate_up_parts)
        if s.fused:  # gate and up of an expert are rows of one tensor
            n = s.experts
            halves = zip(self.gate_up_parts[:n], self.gate_up_parts[n:], strict=True)
            self.gate_up_parts = [
                part(s.gate, 2 * s.ffn, s.width, np.concatenate([a[3], b[3]])) for a, b in halves
            ]
        down_parts: list[Any] = []
        self.down_values = self._stack(rng, s.down, s.width, s.ffn, down_parts)
        self.gate_up_values = np.concatenate([values["gate"], values["up"]], axis=1)
        data = random_bytes(rng, s.router, s.experts, s.width)
        self.router_values = dequantize(data, s.router, (s.experts, s.width))
        self.router = cpu.pack([part(s.router, s.experts, s.width, data)])
        self.gate_up, self.down = cpu.pack(self.gate_up_parts), cpu.pack(down_parts)
        # Gates of about 1, where silu bends.
        size = np.sqrt(s.width) * values["gate"].std()
        self.norm = ((1 + 0.3 * rng.standard_normal(s.width)) / size).astype(np.float32)

    def _stack(self, rng: Any, kind: GGMLType, rows: int, cols: int, parts: list[Any]) -> Floats:
        values = []
        for _ in range(self.shape.experts):
            data = random_bytes(rng, kind, rows, cols)
            parts.append(part(kind, rows, cols, data))
            values.append(dequantize(data, kind, (rows, cols)))
        return np.stack(values)

    def run(self, x: Floats, into: Floats) -> Floats:
        s, cpu = self.shape, self.cpu
        out = cpu.array(into)
        result = cpu.experts(
            cpu.array(x), self.router, self.gate_up, self.down, s.used,
            norm=cpu.array(self.norm[None]), eps=EPS,
            normalize=s.normalize, scale=s.scale, into=out,
        )  # fmt: skip
        assert result is out
        values: Floats = out.numpy().copy()
        return values

    def run_halves(self, x: Floats, into: Floats) -> Floats:
        """The same in two operations."""
        s, cpu = self.shape, self.cpu
        chosen, middle = cpu.experts_in(
            cpu.array(x), self.router, self.gate_up, s.used, norm=cpu.array(self.norm[None]),
            eps=EPS, normalize=s.normalize, scale=s.scale,
        )  # fmt: skip
        out = cpu.array(into)
        cpu.experts_out(middle, chosen, s.experts, self.down, out)
        values: Floats = out.numpy().copy()
        return values

    def want(self, x: Floats, into: Floats) -> Floats:
        s = self.shape
        return reference.experts(
            x, self.router_values, self.gate_up_values, self.down_values, s.used, self.norm, EPS,
            s.normalize, s.scale, into, self.cpu.exact,
        )  # fmt: skip


def inputs(n: int, width: int, seed: int = 0) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    x, into = rng.standard_normal((2, n, width)).astype(np.float32)
    return x, into


DENSE = Shape(8, 3, 64, 40)
Q8_0, Q4_0 = GGMLType.Q8_0, GGMLType.Q4_0
FLOATS = {
    "plain": DENSE,
    "one expert": Shape(1, 1, 33, 7),
    "all experts": Shape(5, 5, 48, 17),
    "most experts idle": Shape(64, 1, 32, 9),
    "shares as they are": replace(DENSE, normalize=False),
    "scaled": replace(DENSE, scale=2.5),
    "fused": replace(DENSE, fused=True),
    "f16, bf16": replace(DENSE, gate=GGMLType.F16, up=GGMLType.BF16, down=GGMLType.F16),
}
QUANTISED = {
    "q8_0": Shape(6, 2, 96, 32, Q8_0, Q8_0, Q8_0),
    "q4_0": Shape(6, 2, 64, 96, Q4_0, Q4_0, Q4_0),
    "q4_0, fused": Shape(6, 4, 64, 96, Q4_0, Q4_0, Q4_0, fused=True),
    "q4_K": Shape(4, 2, 256, 256, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K),
    "quantised router": Shape(7, 2, 64, 32, Q8_0, Q8_0, Q8_0, Q8_0),
}
MIXED = Shape(6, 2, 64, 96, Q4_0, GGMLType.F32, Q8_0)


@pytest.mark.parametrize("name", [*FLOATS, *QUANTISED, "mixed"])
def test_exact_experts_follow_the_reference(isa: str, name: str) -> None:
    shape = {**FLOATS, **QUANTISED, "mixed": MIXED}[name]
    check(Layer(_cpu.Cpu(2, isa, True), shape), 1e-5)


@pytest.mark.parametrize("name", QUANTISED)
def test_experts_of_int8_activations_follow_the_reference(isa: str, name: str) -> None:
    """Now and then an activation lies between two int8 steps, and goes the other way."""
    check(Layer(_cpu.Cpu(2, isa), QUANTISED[name]), 1e-3)


def check(layer: Layer, tolerance: float) -> None:
    for n in (1, 2, 19, 70):
        x, into = inputs(n, layer.shape.width, n)
        want = layer.want(x, into)
        assert np.abs(layer.run(x, into) - want).max() < tolerance * np.abs(want - into).max(), n


@pytest.mark.parametrize("exact", [False, True], ids=["int8", "exact"])
@pytest.mark.parametrize("shape", [DENSE, *QUANTISED.values(), MIXED])
def test_no_bit_depends_on_batch_or_threads(isa: str, shape: Shape, exact: bool) -> None:
    x, into = inputs(75, shape.width)
    alone = None
    for threads in (1, 2, 3):
        layer = Layer(_cpu.Cpu(threads, isa, exact), shape)
        if alone is None:
            rows = [layer.run(x[i : i + 1], into[i : i + 1]) for i in range(len(x))]
            alone = bits(np.concatenate(rows))
        for chunk in (2, 7, 32, 75):
            starts = range(0, len(x), chunk)
            parts = [layer.run(x[i : i + chunk], into[i : i + chunk]) for i in starts]
            assert np.array_equal(bits(np.concatenate(parts)), alone), (threads, chunk)
        order = np.random.default_rng(1).permutation(len(x))
        assert np.array_equal(bits(layer.run(x[order], into[order])), alone[order])


def test_many_tokens_of_one_expert(isa: str) -> None:
    """Enough that an expert's tokens are taken in several strips."""
    shape = Shape(2, 1, 4096, 32, Q8_0, Q8_0, Q8_0)
    layer = Layer(_cpu.Cpu(2, isa), shape)
    x, into = inputs(400, shape.width)
    got = layer.run(x, into)
    for at in (0, 199, 399):
        row = slice(at, at + 1)
        assert np.array_equal(bits(got[row]), bits(layer.run(x[row], into[row])))
    few = slice(300, 310)
    want = layer.want(x[few], into[few])
    assert np.abs(got[few] - want).max() < 1e-3 * np.abs(want - into[few]).max()


def test_of_equal_experts_the_lower_number_is_chosen(isa: str) -> None:
    layer = Layer(_cpu.Cpu(1, isa, True), Shape(6, 2, 16, 8))
    layer.router_values[:] = 0
    layer.router_values[[2, 4, 5]] = 1  # alike, and above the rest for a row of ones
    raw = layer.router_values.view(np.uint8).reshape(-1)
    layer.router = layer.cpu.pack([part(GGMLType.F32, 6, 16, raw)])
    layer.norm[:] = 1
    x, into = np.ones((3, 16), np.float32), np.zeros((3, 16), np.float32)
    x[1] = -1  # the three are below the rest: 0 and 1 are chosen
    ids, _ = reference.choose_experts(x @ layer.router_values.T, 2, True, 1.0)
    assert ids.tolist() == [[2, 4], [0, 1], [2, 4]]
    got, want = layer.run(x, into), layer.want(x, into)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_what_is_not_a_number_stays_in_its_row(isa: str) -> None:
    layer = Layer(_cpu.Cpu(2, isa), DENSE)
    x, into = inputs(5, DENSE.width)
    clean = layer.run(x, into)
    x[2, 3] = np.nan
    got = layer.run(x, into)
    assert np.isnan(got[2]).all()
    kept = [0, 1, 3, 4]
    assert np.array_equal(bits(got[kept]), bits(clean[kept]))


@pytest.mark.parametrize("name", FLOATS | QUANTISED)
@pytest.mark.parametrize("exact", [True, False])
def test_two_halves_are_the_whole(isa: str, name: str, exact: bool) -> None:
    """Bit for bit, in batches of every kind."""
    layer = Layer(_cpu.Cpu(2, isa, exact), (FLOATS | QUANTISED)[name])
    for n in (0, 1, 7, 40):
        x, into = inputs(n, layer.shape.width, n)
        assert np.array_equal(bits(layer.run_halves(x, into)), bits(layer.run(x, into)))


def test_no_rows(isa: str) -> None:
    layer = Layer(_cpu.Cpu(2, isa), DENSE)
    assert layer.run(*inputs(0, DENSE.width)).shape == (0, DENSE.width)


def test_into_may_be_x_itself(isa: str) -> None:
    layer = Layer(_cpu.Cpu(2, isa), DENSE)
    x, _ = inputs(9, DENSE.width)
    want, cpu = layer.run(x, x), layer.cpu
    both = cpu.array(x)
    cpu.experts(
        both, layer.router, layer.gate_up, layer.down, DENSE.used, norm=cpu.array(layer.norm[None]),
        eps=EPS, normalize=True, scale=1.0, into=both,
    )  # fmt: skip
    assert np.array_equal(bits(both.numpy()), bits(want))


def test_add_gated(isa: str) -> None:
    cpu = _cpu.Cpu(2, isa)
    y, into = inputs(40, 33)
    gate = np.random.default_rng(1).normal(0, 3, (40, 1)).astype(np.float32)
    out = cpu.array(into)
    cpu.add_gated(out, cpu.array(y), cpu.array(gate))
    assert np.allclose(out.numpy(), reference.add_gated(into, y, gate), rtol=1e-6, atol=1e-6)


def test_arguments_are_checked() -> None:
    cpu = _cpu.Cpu(1)
    layer = Layer(cpu, DENSE)
    x = cpu.empty(2, 64)
    given = {
        "x": x, "router": layer.router, "gate_up": layer.gate_up, "down": layer.down, "n_used": 3,
        "norm": cpu.empty(1, 64), "eps": EPS, "normalize": True, "scale": 1.0, "into": x,
    }  # fmt: skip
    other = Layer(cpu, Shape(7, 1, 64, 40))
    for name, value, message in [
        ("n_used", 0, "n_used is 0"),
        ("n_used", 9, "8 experts"),
        ("norm", cpu.empty(1, 63), "norm"),
        ("into", cpu.empty(3, 64), "into"),
        ("router", other.router, "7 experts"),
        ("gate_up", other.gate_up, "14 parts"),
        ("down", other.down, "7 parts"),
        ("x", cpu.empty(2, 63), "router"),
    ]:
        with pytest.raises(ValueError, match=message):
            cpu.experts(**{**given, name: value})
    with pytest.raises(ValueError, match="one column of 2"):
        cpu.add_gated(x, x, cpu.empty(1, 1))
    with pytest.raises(ValueError, match="into"):
        cpu.add_gated(x, cpu.empty(2, 63), cpu.empty(2, 1))
