"""How tensors become matrices: parts, rows, experts, and blocks made while loading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.errors import FileError, ModelError
from quire.models.loader import Loader, TensorLoader
from quire.models.registry import open_weights
from quire.models.tensor_check import TensorCheck
from quire.ops.cpu import CpuOps
from quire.weights.gguf import GGUF
from quire.weights.quant import GGMLType, dequantize
from quire.weights.quantize import quantize
from tests.gguf_export import export
from tests.gguf_writer import write_gguf
from tests.model_folders import MODELS

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
    check = TensorCheck(file, CpuOps(1))
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


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_matrices_become_blocks(file: GGUF, name: str) -> None:
    load = loader(file, name)
    type = GGMLType[name.upper()]
    for tensor in ("w", "half", "experts"):
        values = TENSORS[tensor].astype(np.float32).reshape(-1, 64)
        wanted = dequantize(quantize(values, type).reshape(-1), type, values.shape)
        assert np.array_equal(load.matrix(64, (tensor, len(values))).unpack(), wanted)
    assert np.array_equal(load.matrix(60, ("odd", 6)).unpack(), TENSORS["odd"])
    assert np.array_equal(load.matrix(64, ("w", 6), exact=True).unpack(), TENSORS["w"])
    embedding = TENSORS["token_embd.weight"]
    wanted = dequantize(
        quantize(embedding, GGMLType.Q8_0).reshape(-1), GGMLType.Q8_0, embedding.shape
    )
    assert np.array_equal(load.matrix(64, ("token_embd.weight", 6)).unpack(), wanted)


@pytest.mark.parametrize("quantize", [None, "q8_0", "q4_0"])
def test_what_loading_takes_is_foretold(file: GGUF, quantize: str | None) -> None:
    """Matrix by matrix, by the same code that packs them."""
    check = TensorCheck(file, CpuOps(1), quantize)

    def matrices(load: Loader) -> list[int]:
        made = [
            load.matrix(64, ("w", 6), ("half", 6)),
            load.matrix(64, ("w", 6, slice(1, 6, 2)), ("half", 6, np.array([4, 0]))),
            load.matrix(64, ("experts", 15)),
            load.experts(3, 64, ("experts", 5)),
            load.matrix(60, ("odd", 6)),
            load.matrix(64, ("w", 6), exact=True),
            load.matrix(64, ("token_embd.weight", 6)),
            load.matrix(64, ("norm", 1)),
        ]
        return [matrix.nbytes for matrix in made]

    foretold = matrices(check)
    assert foretold == matrices(loader(file, quantize)) and min(foretold) > 0
    assert sum(check.packed.values()) == sum(foretold)
    assert check.idle == (quantize is None)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_bytes_that_are_read_where_they_lie_are_those_of_a_copy(kind: str, tmp_path: Path) -> None:
    """Tensors that are changed on the way are not told; all others are, in any cut."""
    path = MODELS / "tiny-hybrid"
    if kind == "gguf":
        path = export(path, tmp_path / "m.gguf")
    told = 0
    with open_weights(path) as file:
        for name in file.tensors:
            if (stored := file.stored(name)) is None:
                continue
            told += 1
            data, cut = file.data(name), stored.size // 3
            found = np.zeros(stored.size, np.uint8)
            stored[:cut].read(0, found[:cut])
            stored[cut:].read(0, found[cut:])
            assert stored.size == data.size and np.array_equal(found, data.reshape(-1))
            both = stored[:cut].with_next(stored[cut:])
            assert both is not None and both.size == stored.size
            assert stored[:cut].with_next(stored[cut + 1 :]) is None
        assert told == len(file.tensors) if kind == "gguf" else 0 < told < len(file.tensors)
    with pytest.raises(FileError, match="closed"):
        stored.read(0, found)
