"""One look at a file: what its model is, what it takes byte by byte, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.config import LoadConfig
from quire.errors import RequestError
from quire.memory.build import attention_layout
from quire.memory.groups.layout import GroupSpec
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout
from quire.models.active import ActiveSize, truncated
from quire.models.loader import Kit, Part, Place, ProgressFn, TensorLoader
from quire.models.registry import Model, architecture_of, build_model
from quire.models.settings import settings_errors
from quire.models.tensor_check import TensorCheck
from quire.ops import Ops
from quire.weights.file import WeightFile
from quire.weights.fingerprint import fingerprint
from quire.weights.unread import refuse_unread


@dataclass(frozen=True)
class GroupBytes:
    """What one sequence takes in a group, by the layouts that memory is made with."""

    kind: str
    layers: int
    bytes_per_token: int = 0
    """Of K and V in all layers."""
    window: int | None = None
    bytes_per_sequence: int | None = None
    """At most, however long it is; None where every token takes more."""
    state_bytes: int = 0
    log_bytes: int = 0


@dataclass(frozen=True)
class Blueprint:
    """A model before it is loaded, on the device and with the settings it is meant for.

    All sizes come from the code that packs weights and lays out pages, and no weight is read.
    """

    path: Path
    architecture: str
    active: ActiveSize
    n_ctx_train: int
    groups: tuple[GroupSpec | RecurrentSpec, ...]
    tensor_bytes: Mapping[str, int]
    """What each tensor of a matrix will hold in memory; small tensors are not counted."""
    layer_bytes: tuple[int, ...]
    """What the matrices of each layer will hold."""
    weight_bytes: int
    """What all matrices will hold: those of layers, the embedding, the output."""
    part_bytes: Mapping[Part, int]
    """What the matrices of each part will hold, which may be on devices of their own."""
    tied: bool
    """Whether the output is the embedding again."""
    errors: tuple[RequestError, ...]
    """What is wrong with the settings for this model."""
    _file: WeightFile = field(repr=False)
    _ops: Ops = field(repr=False)
    _settings: LoadConfig = field(repr=False)
    _file_bytes: int = field(repr=False)
    _place: Callable[[Part], Place] | None = field(repr=False)

    @classmethod
    def read(
        cls, file: WeightFile, ops: Ops, settings: LoadConfig,
        place: Callable[[Part], Place] | None = None,
    ) -> Blueprint:  # fmt: skip
        """Holds every tensor against what the model needs: all faults are told at once.

        `place` says which parts are on which of several devices.
        """
        seen = truncated(file, settings.n_layer_exit, settings.moe_n_expert)
        check = TensorCheck(seen, ops, settings.quantize)
        # How K and V are stored makes no difference here; float32 suits heads of every size.
        model = build_model(seen, Kit(ops, check, "f32", "f32", place))
        check.raise_faults()
        check.refuse_rest()
        refuse_unread(seen)
        errors = settings_errors(file.path, model.groups, settings)
        if settings.quantize and check.idle:
            errors.append(_idle(file.path, settings.quantize))
        return cls(
            path=file.path,
            architecture=architecture_of(seen),
            active=ActiveSize.of(seen),
            n_ctx_train=model.n_ctx_train,
            groups=model.groups,
            tensor_bytes=check.packed,
            layer_bytes=model.layer_bytes,
            weight_bytes=model.weight_bytes,
            part_bytes=model.part_bytes,
            tied=model.tied,
            errors=tuple(errors),
            _file=seen,
            _ops=ops,
            _settings=settings,
            _file_bytes=check.nbytes,
            _place=place,
        )

    @property
    def expert_share(self) -> float:
        """The share of its experts that a token uses."""
        count = self._file.get_int(f"{self.architecture}.expert_count", default=0)
        return self.active.experts / count if count else 1.0

    def raise_errors(self) -> None:
        """Refuses settings that cannot work, or would do nothing."""
        if self.errors:
            raise self.errors[0]

    def load(self, progress: ProgressFn | None = None) -> Model:
        """The model with its weights; the file must still be open."""
        self.raise_errors()
        s = self._settings
        load = TensorLoader(self._file, self._ops, self._file_bytes, progress, s.quantize)
        model = build_model(self._file, Kit(self._ops, load, s.type_k, s.type_v, self._place))
        assert model.weight_bytes == self.weight_bytes, (model.weight_bytes, self.weight_bytes)
        return model

    def kit(self, ops: Ops, stored: bool) -> Kit:
        """What parts of the model are made with again on one device; the file must be open.

        With `stored`, the device reads the file by itself.
        """
        s = self._settings
        load = TensorLoader(self._file, ops, 0, None, s.quantize, stored)
        return Kit(ops, load, s.type_k, s.type_v)

    def fingerprint(self) -> str:
        """Which weights were loaded, and what they were turned into; after `load`."""
        s = self._settings
        return fingerprint(self._file, f"{s.quantize=} {s.activations=}")

    @property
    def memory(self) -> dict[str, GroupBytes]:
        """What a sequence takes in each group, with the settings' types and pages."""
        self.raise_errors()
        return {group.name: self._group_bytes(group) for group in self.groups}

    @property
    def bytes_per_token(self) -> int:
        """What one more token takes in all groups that grow with every token."""
        groups = self.memory.values()
        return sum(g.bytes_per_token for g in groups if g.bytes_per_sequence is None)

    @property
    def bytes_per_sequence(self) -> int:
        """What a sequence takes besides: windows that are full, states and logs."""
        return sum(group.bytes_per_sequence or 0 for group in self.memory.values())

    def _group_bytes(self, group: GroupSpec | RecurrentSpec) -> GroupBytes:
        if group.kind == "recurrent":
            pages = StateLayout(group)
            state, log = pages.state_page_bytes, pages.log_page_bytes
            return GroupBytes(
                group.kind, len(group.layers), bytes_per_sequence=state + log, state_bytes=state,
                log_bytes=log,
            )  # fmt: skip
        layout = attention_layout(group, self._settings)
        most = None
        if group.window and not self._settings.swa_full:
            most = layout.pages_for(group.window + layout.page_tokens) * layout.page_bytes
        kv = layout.bytes_per_token
        return GroupBytes(group.kind, len(group.layers), kv, group.window, most)


def _idle(path: Path, quantize: str) -> RequestError:
    return RequestError(
        f"quantize is {quantize}, but {path} has no matrix of 16 or 32 bits that it could turn "
        "into such blocks; leave it out"
    )
