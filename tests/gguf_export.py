"""Writes a model folder as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

from pathlib import Path

from quire.convert import FORMATS, Recipe, convert
from quire.convert.recipe import is_exact
from quire.models.registry import open_weights
from quire.weights.file import TensorFacts
from quire.weights.quant import GGMLType


class AsItIs(Recipe):
    """Matrices keep their type."""

    def type_of(self, name: str, tensor: TensorFacts, n_layers: int) -> GGMLType:
        return GGMLType.F32 if is_exact(name, tensor) else tensor.type


def export(folder: Path, path: Path, exact: bool = False) -> Path:
    """The GGUF file of a folder.

    With `exact`, all of it is float32: llama.cpp rounds activations to the type of a matrix.
    """
    recipe = FORMATS["f32"] if exact else AsItIs(GGMLType.BF16, 32, GGMLType.BF16)
    with open_weights(folder) as file:
        return convert(file, path, recipe).path
