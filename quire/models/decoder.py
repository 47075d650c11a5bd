"""The decoder that every architecture is: an embedding, layers, a norm and an output.

    embed ──▶ run: for each layer   x += mixer(x)   x += network(x) ──▶ logits

An architecture's own file says which mixers and networks its layers have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.models.layers import Mixer, Network, total_bytes
from quire.models.loader import Kit
from quire.models.sizes import Sizes
from quire.ops import Array
from quire.ops.batch import Batch

_KINDS = ("attention", "window", "recurrent")


class Decoder:
    """A model on one device; `layers` are its mixers, each with the network behind it if any.

    The output is the embedding again where a file has no other. `softcap` bounds logits.
    """

    def __init__(
        self, kit: Kit, sizes: Sizes, layers: Sequence[tuple[Mixer, Network | None]], *,
        embedding_scale: float = 1.0, softcap: float = 0.0, final_norm: str = "output_norm.weight",
    ) -> None:  # fmt: skip
        self.n_layers = sizes.n_layers
        self.n_vocab = sizes.n_vocab
        self.width = sizes.width
        self.n_ctx_train = sizes.n_ctx_train
        self.layers = list(layers)
        self._ops, self._eps = kit.ops, sizes.eps
        self._scale, self._softcap = embedding_scale, softcap
        self._embedding = kit.load.matrix(sizes.width, ("token_embd.weight", sizes.n_vocab))
        self._final_norm = kit.load.vector((final_norm, sizes.width))
        self._output, ends = self._embedding, [self._embedding]
        if kit.load.has("output.weight"):
            self._output = kit.load.matrix(sizes.width, ("output.weight", sizes.n_vocab))
            ends.append(self._output)
        self.layer_bytes = tuple(
            mixer.nbytes + (network.nbytes if network else 0) for mixer, network in self.layers
        )
        self.weight_bytes = total_bytes(ends) + sum(self.layer_bytes)
        self._declare()
        self._list_calls()

    def _declare(self) -> None:
        """The groups of memory that the mixers make up, and what can be done to their pages."""
        members: dict[str, list[Mixer]] = {}
        for mixer, _ in self.layers:
            members.setdefault(mixer.group, []).append(mixer)
        declared = {name: mixers[0].declare(mixers) for name, mixers in members.items()}
        groups = [spec for spec, _ in declared.values()]
        self.groups = tuple(sorted(groups, key=lambda group: _KINDS.index(group.kind)))
        self.kernels = {name: kernels for name, (_, kernels) in declared.items()}

    def _list_calls(self) -> None:
        """What `run` calls for each layer, found once; ropes are shared by many layers."""
        self._ropes: list[Any] = []
        self._calls = []
        for mixer, network in self.layers:
            at = next((i for i, rope in enumerate(self._ropes) if rope is mixer.rope), -1)
            if at < 0:
                at = len(self._ropes)
                self._ropes.append(mixer.rope)
            add = network.add_to if network else None
            self._calls.append((mixer.add_to, mixer.group, at, add))

    def close(self) -> None:
        """Lets go of the weights now, whoever still holds the model; it computes nothing more."""
        self.layers, self._calls, self._ropes, self.kernels = [], [], [], {}
        del self._embedding, self._output, self._final_norm

    def embed(self, batch: Batch) -> Array:
        """The batch's tokens as rows of the model's width."""
        return self._ops.embed(self._embedding, batch.tokens, self._scale)

    def run(self, x: Array, batch: Batch, start: int, stop: int) -> None:
        """Layers start … stop-1, in place on x; each rope's table is made once."""
        tables: list[Array | None] = []
        for rope in self._ropes:
            table = None if rope is None else self._ops.rope_table(rope, batch.positions)
            tables.append(table)
        groups = batch.groups
        for mix, group, at, add in self._calls[start:stop]:
            mix(x, groups[group], tables[at])
            if add is not None:
                add(x)

    def hidden(self, x: Array) -> Array:
        """Rows that went through the layers, normed: what the output is made from."""
        normed = self._ops.array(np.zeros(x.shape, np.float32))
        self._ops.add_norm(normed, x, self._final_norm, self._eps)
        return normed

    def logits(self, x: Array) -> Array:
        """The output of rows that went through the layers."""
        logits = self._ops.linear_int16(x, self._output, self._final_norm, self._eps)
        if self._softcap:
            self._ops.softcap(logits, self._softcap)
        return logits
