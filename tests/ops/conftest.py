"""Kernels are tested on every instruction set of this machine, the table on every device."""

from __future__ import annotations

import pytest

from quire.ops import Ops
from tests.ops.devices import ISAS, TABLES, table


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """An instruction set of this machine."""
    return str(request.param)


@pytest.fixture(params=TABLES)
def ops(request: pytest.FixtureRequest) -> Ops:
    """An implementation of the table, with float32 activations."""
    return table(str(request.param))
