"""The table of operations in plain NumPy: a device that says what every other one means."""

from __future__ import annotations

from quire.ops.reference.table.attention import Attention
from quire.ops.reference.table.matrices import Dequantize, Matrices
from quire.ops.reference.table.pages import PageWork
from quire.ops.reference.table.recurrent import RecurrentLayers
from quire.ops.reference.table.sampling import Sampling

__all__ = ["Dequantize", "ReferenceOps"]


class ReferenceOps(Matrices, Attention, RecurrentLayers, PageWork, Sampling):
    """Every operation by its definition, in float64 between arrays of float32; slow.

    `dequantize` gives the values of a part of a file: its bytes, ggml type, rows and columns.
    Pages have the bytes of the CPU's.
    """

    @property
    def name(self) -> str:
        """For people."""
        return "reference (NumPy)"

    @property
    def arithmetic(self) -> str:
        """Float64 between arrays of float32."""
        return "reference"
