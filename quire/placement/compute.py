"""What arrays of steps will take on a device: prompts in whole steps, then token by token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np

from quire.config import LoadConfig
from quire.models.active import truncated
from quire.models.loader import DOWN, EMBEDDING, EXPERTS, MIXER, NETWORK, OUTPUT, Kit, Part
from quire.models.registry import build_model
from quire.ops import Ops, count_bytes
from quire.ops.cpu import CpuOps
from quire.placement.arena import Arena, Trace, block_bytes, peak_bytes
from quire.placement.cuda_arrays import RehearsedCuda, TorchArena
from quire.placement.facts import Compute
from quire.placement.kernels import Kernels, Step
from quire.placement.rehearsal import RehearsedLoader, RehearsedOps
from quire.weights.file import WeightFile

PROMPT = 512
"""Tokens of a step, at most; that of the engine's scheduler."""
_TAILS = 384, 256, 128, 64
"""Tokens of the last step of a prompt, for which a GPU takes other products and attention."""
_BEGUN, _SENT = -1000, -1001  # rows that come from elsewhere: where they are put, and as they come
_ODD = 8 << 20
"""What a GPU has besides: tables and counters of steps, and the rest of pieces of memory."""


_Noted = tuple[Trace, Iterable[Trace], Trace]
"""What a step has from its start on, what its parts take one after the other, and its end."""


class _Anywhere(dict[int, tuple[int, int]]):
    """Offsets of pages that are not there."""

    def __missing__(self, layer: int) -> tuple[int, int]:
        return 0, 0


class _Pages:
    """One group's memory in a step that does not take place."""

    pages = None
    offsets = _Anywhere()


class Rehearsal:
    """The steps of a model, noted part by part."""

    def __init__(self, file: WeightFile, ops: RehearsedOps, settings: LoadConfig) -> None:
        seen = truncated(file, settings.n_layer_exit, settings.moe_n_expert)
        self._ops = ops
        check: Any = RehearsedLoader(seen, ops, settings.quantize)  # type: ignore[arg-type]
        rehearsed: Any = self._ops
        self._vectors: dict[Part, list[int]] = {}
        kit = Kit(rehearsed, check, settings.type_k, settings.type_v, self._noting(rehearsed))
        self.model: Any = build_model(seen, kit)
        self._note_vectors(None)
        self._longest = max(settings.n_ctx or 0, self.model.n_ctx_train)
        self._ran: dict[tuple[Step, tuple[int, ...]], dict[Part, Trace]] = {}

    def _noting(self, rehearsed: Any) -> Any:
        """Vectors are noted with the part that asks for them."""
        self._part: Part | None = None

        def place(part: Part) -> Any:
            self._note_vectors(part)
            return "", rehearsed

        return place

    def _note_vectors(self, part: Part | None) -> None:
        events = self._ops.noted()
        gone = {key for key, floats in events if not floats}
        sizes = [block_bytes(floats) for key, floats in events if key not in gone]
        if self._part is not None:
            self._vectors.setdefault(self._part, []).extend(sizes)
        self._part = part

    def counts(self, parts: frozenset[Part], sequences: int) -> int:
        """Bytes in which sequences count their tokens for penalties, where those are chosen."""
        return (Part(OUTPUT) in parts) * sequences * count_bytes(self.model.n_vocab)

    def vectors(self, parts: frozenset[Part]) -> int:
        """Bytes of vectors that stay."""
        return sum(sum(self._vectors.get(part, ())) for part in parts)

    def around(self, step: Step, parts: frozenset[Part]) -> Trace:
        """What is there while layers run: x, and a table for each rope of the mixers here."""
        n = step.tokens * step.sequences
        mixers = [self.model.layers[part.layer][0] for part in parts if part.kind == MIXER]
        ropes = {id(mixer.rope) for mixer in mixers if mixer.rope is not None}
        tables = tuple((-2 - i, n * self._rotated) for i in range(len(ropes)))
        body = any(part.kind != OUTPUT for part in parts)
        return (((-1, n * self._width),) if body else ()) + tables

    def fold(self, step: Step, parts: frozenset[Part]) -> Trace:
        """What it takes to fold the full logs of all layers here, which is done at once."""
        mixers = (self.model.layers[part.layer][0] for part in sorted(parts) if part.kind == MIXER)
        layers = [mixer.recurrent for mixer in mixers if mixer.rope is None]
        self._ops.noted()
        self._ops.fold_logs(layers, step.sequences)
        return self._ops.noted()

    def traces(self, step: Step) -> dict[Part, Trace]:
        """What parts take in a step; of those that are alike, the first."""
        return self._run(step, self._firsts)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(sorted({part.layer for part in self.like.values() if part.layer >= 0}))

    @cached_property
    def like(self) -> dict[Part, Part]:
        """For each part the same of the first layer that takes as much: in a prompt, and at the
        end of the longest context."""
        layers = tuple(range(len(self.model.layers)))
        ends = Step(min(PROMPT, self._longest), 1, self._longest), Step(1, 1, self._longest)
        seen: dict[Any, int] = {}
        found = {Part(EMBEDDING): Part(EMBEDDING), Part(OUTPUT): Part(OUTPUT)}
        for i in layers:
            parts = self._parts(i)
            takes = tuple(self._run(step, layers)[part] for step in ends for part in parts)
            first = seen.setdefault((tuple(part.kind for part in parts), takes), i)
            found |= {part: part._replace(layer=first) for part in parts}
        return found

    def _parts(self, i: int) -> list[Part]:
        """The parts of a layer."""
        networks = (Part(kind, i) for kind in (NETWORK, EXPERTS, DOWN))
        return [Part(MIXER, i), *(part for part in networks if part in self.model.part_bytes)]

    def _run(self, step: Step, layers: tuple[int, ...]) -> dict[Part, Trace]:
        """A step with some of the layers, once."""
        if (step, layers) not in self._ran:
            self._ran[step, layers] = self._rehearsed(step, layers)
        return self._ran[step, layers]

    def _rehearsed(self, step: Step, layers: tuple[int, ...]) -> dict[Part, Trace]:
        ops, model = self._ops, self.model
        ops.step = step
        n = step.tokens * step.sequences
        ids = np.zeros(n, np.int32)
        ops.noted()
        found: dict[Part, Trace] = {}
        x = model._enter.embed(model._embedding, ids)
        found[Part(EMBEDDING)] = ops.noted()[1:] if ops._kernels else ()
        table = ops.rope_table(None, ids)
        ops.noted()
        ends = np.zeros(step.sequences, np.int32)
        few = n > len(ends) and not isinstance(ops, RehearsedCuda)  # behind the last mixer
        for i in layers:
            mixer, network = model.layers[i]
            mixer.add_to(x, _Pages(), table)
            found[Part(MIXER, i)] = ops.noted()
            if network is not None:
                rows = ops.take_rows(x, ends) if few and i == model.n_layers - 1 else x
                network.add_to(rows)
                rows = x
                trace = ops.noted()
                found |= dict.fromkeys(self._parts(i)[1:], trace)
        rows = ops.take_rows(x, ends)
        logits = model.logits(rows)
        if k := ops._kernels:
            scratch = (model.n_vocab + 64 + 15) // 16 * 16 * 6
            ops.array(np.broadcast_to(np.float32(0), (k.threads, scratch)))
        # Bias and penalties are for a copy, where log-probabilities of the model's own are told.
        edited = None if k else ops.take_rows(logits, ends)
        del rows, logits, edited
        found[Part(OUTPUT)] = ops.noted()
        self._width, self._rotated = x.shape[1], table.shape[1]
        return found


def steps_of(n_ctx: int, sequences: int) -> list[Step]:
    """The largest steps of so many sequences: of prompts, then token by token."""
    together = min(sequences, -(-PROMPT // n_ctx))
    steps = [Step(min(PROMPT // together, n_ctx), together, n_ctx)]
    places = range(128, n_ctx, 128)  # what attention joins grows with the context
    for at in [*places[:: max((len(places) + 1) // 64, 1)], n_ctx]:
        steps.append(Step(1, min(sequences, PROMPT), at))
    return steps


def _rounded(n_ctx: int) -> int:
    """A little more, so that plans which are nearly alike are computed once."""
    size = 1 << max(n_ctx.bit_length() - 4, 4) if n_ctx > PROMPT else 1
    return -(-n_ctx // size) * size


def compute_of(looks: Mapping[str, Rehearsal]) -> Compute:
    """Bytes of arrays, by kind of device, the parts that are there, context and sequences."""

    @cache
    def held(kind: str, parts: frozenset[Part], n_ctx: int, sequences: int) -> int:
        return _held(looks[kind], kind, parts, n_ctx, sequences)

    return lambda kind, parts, n_ctx, sequences: held(kind, parts, _rounded(n_ctx), sequences)


def _held(
    look: Rehearsal, kind: str, parts: frozenset[Part], n_ctx: int, sequences: int
) -> int:  # fmt: skip
    """With each different trace once: layers that are alike use the same blocks again."""
    fixed = look.vectors(parts)
    different = dict.fromkeys(look.like[part] for part in sorted(parts) if part in look.like)
    steps: list[_Noted] = []
    tails = [Step(tail, 1, n_ctx) for tail in _TAILS if tail < n_ctx] if kind == "cuda" else []
    prompts, *decoding = steps_of(n_ctx, sequences)
    for step in [prompts, *tails, *decoding]:
        traces, around = look.traces(step), look.around(step, parts)
        mine = dict.fromkeys(traces[part] for part in different)
        if step.tokens == 1:
            mine[look.fold(step, parts)] = None
        steps.append((around, mine, tuple((key, 0) for key, _ in around)))
    if kind == "cpu":
        arena = Arena()
        for around, taken, end in steps:
            arena.run([around, *taken, end])
        return fixed + arena.held
    if kind == "cuda":
        return fixed + look.counts(parts, sequences) + _on_gpu(look, parts, steps)
    return fixed + max(peak_bytes([around, *mine, end], 512) for around, mine, end in steps)


def _on_gpu(look: Rehearsal, parts: frozenset[Part], steps: Sequence[_Noted]) -> int:
    """Steps that run for the first time, beside those that are recorded."""
    n_layers = look.model.n_layers
    recorded = {Part(OUTPUT), Part(MIXER, n_layers - 1)} <= parts
    split = sum(part.kind == MIXER for part in parts) < n_layers
    eager, again = TorchArena(), TorchArena()
    if recorded and split:
        eager.take(_BEGUN, PROMPT * look.model.width)
    for around, mine, end in steps:
        if recorded:
            again.run([around, *mine, end])
        sent = ((_SENT, around[0][1]),) if split and around else ()
        eager.run([(*sent, *around), *mine, (*end, *((key, 0) for key, _ in sent))])
    return eager.held + again.held + _ODD


def rehearse(file: WeightFile, ops: Ops, kind: str, settings: LoadConfig) -> Rehearsal:
    """The steps of a file's model on a kind of device."""
    kernels = None
    if isinstance(ops, CpuOps) and kind == "cpu":
        kernels = Kernels.of(ops.cpu.isa, ops.cpu.threads, ops.cpu.exact)
    rehearsed = RehearsedOps(ops, kernels)
    if kind == "cuda":
        real: Any = None if isinstance(ops, CpuOps) else ops  # else it is described, or played
        rehearsed = RehearsedCuda(ops, real is not None and real.hopper)
    return Rehearsal(file, rehearsed, settings)
