"""The operations a model is made of, as one table that each device implements.

Models see arrays and matrices as opaque handles of their device and pass them from one operation
to the next, so the same model file runs on every device.

    handles.py     what operations take and give
    table.py       the table, `Ops`, in groups
    batch.py       what a model is given in one step
    reference/     what each operation means, in NumPy, and a device made of that
    cpu.py         the table in C++, over csrc/
"""

from __future__ import annotations

from quire.ops.handles import (
    GELU_MUL,
    SILU_MUL,
    Array,
    Draw,
    Drawn,
    Float32,
    Heads,
    HeadsHandle,
    Int32,
    Int64,
    Matrix,
    Pages,
    PageTables,
    Part,
    Recurrent,
    Refused,
    Rope,
    RopeHandle,
    Sampler,
    States,
    StateTables,
    count_bytes,
)
from quire.ops.table import Ops

__all__ = [
    "GELU_MUL",
    "SILU_MUL",
    "Array",
    "Draw",
    "Drawn",
    "Float32",
    "Heads",
    "HeadsHandle",
    "Int32",
    "Int64",
    "Matrix",
    "Ops",
    "PageTables",
    "Pages",
    "Part",
    "Recurrent",
    "Refused",
    "Rope",
    "RopeHandle",
    "Sampler",
    "StateTables",
    "States",
    "count_bytes",
]
