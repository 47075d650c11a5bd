"""The ends of mixers: the products before memory is asked, and after.

    x ──▶ enter ──▶ y ──▶ memory ──▶ y ──▶ leave ──▶ x += …
              └──────── kept ───────────────▲

They look at each token alone, so they may be computed on another device than the memory is on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from quire.models.loader import Kit, Loader, Rows
from quire.ops import Array, Matrix
from quire.ops.batch import GroupPages


def total_bytes(matrices: Iterable[Matrix]) -> int:
    """Bytes that matrices hold together."""
    return sum(int(matrix.nbytes) for matrix in matrices)


class Product(NamedTuple):
    """Tensors of so many columns, under each other, and biases."""

    cols: int
    rows: tuple[Rows, ...]
    bias: tuple[Rows, ...] = ()

    def load(self, load: Loader) -> tuple[Matrix, Array | None]:
        """The matrix, and its bias if it has one."""
        bias = load.vector(*self.bias) if self.bias else None
        return load.matrix(self.cols, *self.rows), bias


class Ends:
    """A product of norm(x), and another one that is added to x, normed first with `post_norm`."""

    def __init__(
        self, kit: Kit, eps: float, norm: Rows, enter: Product, out: Product,
        post_norm: Rows | None = None,
    ) -> None:  # fmt: skip
        self._made: tuple[Any, ...] = (eps, norm, enter, out, post_norm)
        self.ops, self._eps = kit.ops, eps
        self._norm = kit.load.vector(norm)
        self._out, self._out_bias = out.load(kit.load)
        self._enter, self._enter_bias = enter.load(kit.load)
        self._post_norm = kit.load.vector(post_norm) if post_norm else None
        self.nbytes = total_bytes((self._enter, self._out))
        """Bytes that the matrices hold."""

    def enter(self, x: Array) -> tuple[Array, Array | None]:
        """What memory is asked with, and what waits for the answer."""
        y = self.ops.linear(x, self._enter, self._norm, self._eps, bias=self._enter_bias)
        return y, None

    def leave(self, x: Array, y: Array, kept: Array | None) -> None:
        """x += what comes of the answer."""
        if self._post_norm is None:
            self.ops.linear(y, self._out, bias=self._out_bias, into=x)
        else:
            y = self.ops.linear(y, self._out, bias=self._out_bias)
            self.ops.add_norm(x, y, self._post_norm, self._eps)

    def again(self, kit: Kit) -> Self:
        """The same made with another kit."""
        return type(self)(kit, *self._made)


class GatedEnds(Ends):
    """With a gate for what memory answers: sigmoid(gate) times it."""

    def __init__(
        self, kit: Kit, eps: float, norm: Rows, enter: Product, out: Product, gate: Product
    ) -> None:
        super().__init__(kit, eps, norm, enter, out)
        self._made = eps, norm, enter, out, gate
        self._gate, _ = gate.load(kit.load)
        self.nbytes += total_bytes((self._gate,))

    def enter(self, x: Array) -> tuple[Array, Array | None]:
        """What memory is asked with, and the gate."""
        ops = self.ops
        y = ops.linear(x, self._enter, self._norm, self._eps, bias=self._enter_bias)
        return y, ops.linear(x, self._gate, self._norm, self._eps)

    def leave(self, x: Array, y: Array, kept: Array | None) -> None:
        """x += out(y · sigmoid(gate))."""
        assert kept is not None
        self.ops.linear(self.ops.gate_sigmoid(y, kept), self._out, into=x)


class Mixing(ABC):
    """A mixer: its ends, and memory in between."""

    ends: Ends

    @property
    def nbytes(self) -> int:
        """Bytes that its matrices hold."""
        return self.ends.nbytes

    def add_to(self, x: Array, memory: GroupPages, rope: Array | None) -> Array:
        """x += mixer(norm(x)); `rope` is the table of this step's positions."""
        y, kept = self.ends.enter(x)
        self.ends.leave(x, self.recall(y, memory, rope), kept)
        return x

    @abstractmethod
    def recall(self, y: Array, memory: GroupPages, rope: Array | None) -> Array:
        """What memory answers; y goes into it too."""
