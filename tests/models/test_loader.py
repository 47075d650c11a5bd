"""How tensors become matrices: parts, rows, experts, and blocks made while loading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.errors import ModelError
from quire.models.loader import TensorCheck, TensorLoader, loaded_bytes
from quire.ops.cpu import CpuOps
from quire.weights.gguf import GGUF
from quire.weights.quant import GGMLType, dequantize, quantize_q4_0, quantize_q8_0
from tests.gguf_writer import write_gguf

RNG = np.random.default_rng(8)
TENSORS = {
    "w": RNG.standard_normal((6, 64)).astype(np.float32),
    "half": RNG.standard_normal((6, 64)).astype(np.float16),
    "experts": RNG.standard_normal((3, 5, 64)).astype(np.float32),
    "odd": RNG.standard_normal((6, 60)).astype(np.float32),
    "token_embd.weight": RNG.standard_normal((6, 64)).astype(np.float32),
    "conv": RNG.standard_normal((6, 4)).astype(np.float32),
    "norm": RNG.standard_normal(64).astype(np.float32),
}


@pytest.fixture
def file(tmp_path: Path) -> GGUF:
    return GGUF.open(write_gguf(tmp_path / "x.gguf", {"general.architecture": "x"}, TENSORS))


def loader(file: GGUF, quantize: str | None = None) -> TensorLoader:
    return TensorLoader(file, CpuOps(1, exact=True), 1, None, quantize)


def test_parts_rows_and_experts_are_stacked(file: GGUF) -> None:
    load = loader(file)
    some = ("w", 6, slice(1, 3))
    got = load.matrix(64, ("half", 6), some, ("experts", 15), ("w", 6, slice(0, 6, 2))).unpack()
    x = {name: values.astype(np.float32) for name, values in TENSORS.items()}
    parts = [x["half"], x["w"][1:3], x["experts"].reshape(15, 64), x["w"][::2]]
    assert np.array_equal(got, np.concatenate(parts))
    assert np.array_equal(load.array("conv", (6, 4)), x["conv"])


def test_every_kind_of_fault_is_listed(file: GGUF) -> None:
    check = TensorCheck(file)
    check.matrix(64, ("w", 6), ("experts", 15))
    assert check.array("conv", (6, 4)).shape == (6, 4)
    check.raise_faults()
    assert check.nbytes == sum(TENSORS[name].nbytes for name in ("w", "experts", "conv"))
    check.matrix(64, ("experts", 14), ("absent", 2), ("w", 7, slice(0, 1)))
    check.matrix(32, ("experts", 30))
    check.vector(("norm", 63))
    with pytest.raises(ModelError, match="5 tensors"):
        check.raise_faults()
    with pytest.raises(ModelError, match="6 tensors"):  # at once: nothing so large is made up
        check.array("conv", (2**40, 2**20))


@pytest.mark.parametrize(("name", "quantized"), [("q8_0", quantize_q8_0), ("q4_0", quantize_q4_0)])
def test_matrices_become_blocks(file: GGUF, name: str, quantized) -> None:
    load = loader(file, name)
    type = GGMLType[name.upper()]
    for tensor in ("w", "half", "experts"):
        values = TENSORS[tensor].astype(np.float32).reshape(-1, 64)
        wanted = dequantize(quantized(values).reshape(-1), type, values.shape)
        assert np.array_equal(load.matrix(64, (tensor, len(values))).unpack(), wanted)
    assert np.array_equal(load.matrix(60, ("odd", 6)).unpack(), TENSORS["odd"])
    assert np.array_equal(load.matrix(64, ("w", 6), exact=True).unpack(), TENSORS["w"])
    embedding = TENSORS["token_embd.weight"]
    wanted = dequantize(quantize_q8_0(embedding).reshape(-1), GGMLType.Q8_0, embedding.shape)
    assert np.array_equal(load.matrix(64, ("token_embd.weight", 6)).unpack(), wanted)


def test_what_loading_takes_is_foretold(file: GGUF) -> None:
    assert loaded_bytes(file, None) == sum(values.nbytes for values in TENSORS.values())
    blocks = (6 + 6 + 15) * GGMLType.Q4_0.nbytes((64,)) + 6 * GGMLType.Q8_0.nbytes((64,))
    floats = sum(TENSORS[name].nbytes for name in ("odd", "conv", "norm"))
    assert loaded_bytes(file, "q4_0") == blocks + floats
