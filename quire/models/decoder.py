"""The decoder that every architecture is: an embedding, layers, a norm and an output.

    embed ──▶ run: for each layer   x += mixer(x)   x += network(x) ──▶ logits

An architecture's own file says which mixers and networks its layers have. Parts of a model may be
on several devices; `run` is where activations change from one to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.models.layers import Mixer, Network, total_bytes
from quire.models.loader import EMBEDDING, MIXER, OUTPUT, Kit, Part
from quire.models.sizes import Sizes
from quire.ops import Array, Int32, Ops
from quire.ops.batch import Batch, cross

if TYPE_CHECKING:
    from quire.models.streaming import Streaming

_KINDS = ("attention", "window", "recurrent")


class Decoder:
    """A model; `layers` are its mixers, each with the network behind it if any.

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
        start, end = kit.at(EMBEDDING), kit.at(OUTPUT)
        self.ops, self._enter, self._eps = end.ops, start.ops, sizes.eps
        self._scale, self._softcap = embedding_scale, softcap
        embedding = ("token_embd.weight", sizes.n_vocab)
        self._embedding = start.load.matrix(sizes.width, embedding)
        self._final_norm = end.load.vector((final_norm, sizes.width))
        self.tied = not kit.load.has("output.weight")
        if not self.tied:
            self._output = end.load.matrix(sizes.width, ("output.weight", sizes.n_vocab))
        elif start.ops is end.ops:
            self._output = self._embedding
        else:
            self._output = end.load.matrix(sizes.width, embedding)
        self._count_bytes()
        self._declare()
        self._list_calls()

    def _count_bytes(self) -> None:
        ends = {Part(EMBEDDING): [self._embedding]}
        if self._output is not self._embedding:
            ends[Part(OUTPUT)] = [self._output]
        self.part_bytes = {part: total_bytes(matrices) for part, matrices in ends.items()}
        for i, (mixer, network) in enumerate(self.layers):
            self.part_bytes[Part(MIXER, i)] = mixer.nbytes
            for kind, size in (network.part_bytes if network else {}).items():
                self.part_bytes[Part(kind, i)] = size
        self.weight_bytes = sum(self.part_bytes.values())
        self.layer_bytes = tuple(
            mixer.nbytes + sum(network.part_bytes.values() if network else ())
            for mixer, network in self.layers
        )

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
        self.ops_after = [self._enter]
        used = [self._enter]
        for mixer, network in self.layers:
            at = next((i for i, rope in enumerate(self._ropes) if rope is mixer.rope), -1)
            if at < 0:
                at = len(self._ropes)
                self._ropes.append(mixer.rope)
            add, there = (network.add_to, network.ops) if network else (None, mixer.ops)
            used += [mixer.ops, *(network.ops_within if network else ()), there]
            self._calls.append((mixer.ops, mixer.add_to, mixer.group, at, there, add))
            self.ops_after.append(there)
        every = [ops.arithmetic for ops in [*used, self.ops]]
        self.arithmetic = every[0] if len(set(every)) == 1 else "; ".join(every)

    def first_of(self, ops: Ops) -> int:
        """The layer from which on everything is on this device; n_layers if the last is not."""
        first = self.n_layers
        for mixer, network in reversed(self.layers):
            within = (mixer.ops, *(network.ops_within if network else ()))
            if any(each is not ops for each in within):
                break
            first -= 1
        return first

    def groups_before(self, layer: int) -> set[str]:
        """The groups of memory that the layers before this one have."""
        return {mixer.group for mixer, _ in self.layers[:layer]}

    def stream(self, streaming: Streaming) -> None:
        """Lets long prompts run networks of the host elsewhere."""
        self.layers = [
            (mixer, network.streamed(streaming) if network else None)
            for mixer, network in self.layers
        ]
        self._list_calls()

    def close(self) -> None:
        """Lets go of the weights now, whoever still holds the model; it computes nothing more."""
        self.layers, self._calls, self._ropes, self.kernels = [], [], [], {}
        del self._embedding, self._output, self._final_norm

    def embed(self, batch: Batch) -> Array:
        """The batch's tokens as rows of the model's width."""
        return self._enter.embed(self._embedding, batch.tokens, self._scale)

    def run(
        self, x: Array, batch: Batch, start: int, stop: int, on: Ops | None = None,
        rows: Int32 | None = None,
    ) -> Array:  # fmt: skip
        """x after layers start … stop-1, in place on one device; each rope's table is made once.

        x is where the layer before left it, or where it is said to be. Where only some rows are
        wanted, which ascend, the last network, behind which nobody looks at the others, computes
        no more.
        """
        tables: dict[int, Array | None] = {}
        groups, here = batch.groups, on or self.ops_after[start]
        wanted = None if rows is None or len(rows) == x.shape[0] else rows
        last = self._calls[stop - 1]
        for call in self._calls[start:stop]:
            ops, mix, group, at, there, add = call
            if at not in tables:
                rope = self._ropes[at]
                tables[at] = None if rope is None else ops.rope_table(rope, batch.positions)
            if ops is not here:
                x = cross(x, here, ops)
            mix(x, groups[group], tables[at])
            if wanted is not None and call is last:
                x = ops.take_rows(x, wanted)
            if there is not ops:
                x = cross(x, ops, there)
            here = there
            if add is not None and x.shape[0]:
                x = add(x)
        return x

    def hidden(self, x: Array) -> Array:
        """Rows on the output's device, normed: what the output is made from."""
        normed = self.ops.array(np.zeros(x.shape, np.float32))
        self.ops.add_norm(normed, x, self._final_norm, self._eps)
        return normed

    def logits(self, x: Array) -> Array:
        """The output of rows that went through the layers and are on its device."""
        logits = self.ops.linear_int16(x, self._output, self._final_norm, self._eps)
        if self._softcap:
            self.ops.softcap(logits, self._softcap)
        return logits
