"""Layers that read another's keys and values, and memory that holds only some of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.devices.budget import Budget
from quire.devices.host import HostDevice
from quire.memory.batch import SeqTokens
from quire.memory.build import build_memory
from quire.memory.lease import Lease
from quire.memory.memory import Memory
from quire.models import llama, qwen2, qwen3
from quire.models.decoder import Decoder
from quire.models.layers import Attention, GatedNetwork
from quire.models.loader import Kit
from quire.models.sizes import DenseSizes
from quire.models.windows import Windows
from quire.ops.batch import Batch
from quire.weights.file import WeightFile
from tests import tiny
from tests.model_folders import RANDOM, TRAINED, exactly, model_folder

IDS = [int(i) for i in np.random.default_rng(6).integers(3, 256, 120)]
EXACT = {"activations": "f32", "type_k": "f32", "type_v": "f32"}
SHARED = {
    "llama": tiny.Tiny(layers=4, reads=((3, 1),), seed=31),
    "qwen2": tiny.Tiny(arch="qwen2", layers=5, reads=((2, 0), (4, 0)), seed=32),
    "qwen3": tiny.Tiny(arch="qwen3", layers=4, reads=((1, 0), (3, 2)), heads=6, seed=33),
    "windows": tiny.Tiny(
        arch="qwen2", layers=5, window=17, sliding=(True, False, True, True, False),
        reads=((2, 0), (3, 0), (4, 1)), seed=34,
    ),
}  # fmt: skip


# ---- reuse ----------------------------------------------------------------------------------


@pytest.fixture(params=list(SHARED))
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[tiny.Tiny, Path, np.ndarray]:
    """A model with readers, as an architecture that had them would build it; and its truth."""
    t = SHARED[request.param]
    reads = dict(t.reads)

    def build(file: WeightFile, kit: Kit) -> Decoder:
        c = DenseSizes.read(file, t.arch, neox=t.arch != "llama")
        windows = Windows.read(file, t.arch, c.n_layers)
        bias, norm = t.arch == "qwen2", t.arch == "qwen3"

        def attention(i: int) -> Attention:
            window, owner = windows.of(i), reads.get(i)
            return Attention(kit, c, i, c.rope, window=window, bias=bias, qk_norm=norm, reads=owner)

        layers = [(attention(i), GatedNetwork(kit, c, i)) for i in range(c.n_layers)]
        return Decoder(kit, c, layers)

    for module in (llama, qwen2, qwen3):
        monkeypatch.setattr(module, "build", build)
    path = tmp_path / "m.gguf"
    return t, path, tiny.forward(t, tiny.write(path, t), IDS)


def test_readers_see_what_their_owner_stored(shared: tuple[tiny.Tiny, Path, np.ndarray]) -> None:
    """In a prompt, in chunks of one, and token by token."""
    t, path, expected = shared
    readers = dict(t.reads)
    with quire.load(path, **EXACT) as llm:
        assert {r: o for group in llm.model.groups for r, o in group.reuse.items()} == readers
        assert sum(len(group.layers) for group in llm.model.groups) == t.layers - len(readers)
        whole = llm.logits(IDS)
        assert np.abs(whole - expected).max() < 2e-4 * expected.std()
        with llm.session() as s:
            ends = [50, 57, 89, *range(90, 121)]
            for start, end in zip([0, *ends], ends, strict=False):
                s.append(IDS[start:end])
                assert np.array_equal(s.logits(), whole[end - 1])
            with s.fork() as twin:
                assert np.array_equal(twin.rewind(-40).logits(), whole[79])
        llm.memory.audit()


def test_readers_take_no_memory(shared: tuple[tiny.Tiny, Path, np.ndarray]) -> None:
    t, path, _ = shared
    with quire.load(path, **EXACT) as llm, llm.session() as s:
        s.append(IDS[:16]).logits()
        stats = llm.memory.as_dict()["stats"].values()
        held = sum(group["bytes_per_token"] for group in stats)
    assert held == (t.layers - len(t.reads)) * 2 * t.kv_heads * t.head_dim * 4


# ---- only -----------------------------------------------------------------------------------


class Split:
    """A model whose layers keep their memory in two places, as they would on two devices."""

    def __init__(self, llm: quire.LLM, cut: int) -> None:
        self.llm, self.model = llm, llm.model
        self.spans = [(0, cut), (cut, self.model.n_layers)]
        self.memories = [self._memory(set(range(*span))) for span in self.spans]

    def _memory(self, layers: set[int]):
        groups = [g.only(layers.__contains__) for g in self.model.groups if layers & set(g.layers)]
        assert {i for group in groups for i in group.layers} == layers
        device = HostDevice(Budget(2**28), self.llm.ops)
        return build_memory(groups, device, self.llm.settings, self.model.kernels)

    def run(self, tokens: dict[int, Sequence[int]], keep: int | None = None) -> np.ndarray:
        """Logits of all these tokens, of which each sequence keeps so many."""
        entries = [SeqTokens(seq, np.array(new, np.int32)) for seq, new in tokens.items()]
        leases = [memory.reserve(entries) for memory in self.memories]
        batches = [self._batch(*pair) for pair in zip(self.memories, leases, strict=True)]
        x = self.model.embed(batches[0])
        for batch, span in zip(batches, self.spans, strict=True):
            self.model.run(x, batch, *span)
        for lease in leases:
            lease.commit({seq: len(new) if keep is None else keep for seq, new in tokens.items()})
        return np.array(self.llm.ops.numpy(self.model.logits(x)))

    def _batch(self, memory: Memory, lease: Lease) -> Batch:
        memory.run(lease.ubatch.work)
        where = lease.ubatch.positions, lease.ubatch.seq_rows
        (device,) = memory.devices
        groups = {name: device.group(name, view, *where) for name, view in lease.views.items()}
        return Batch(lease.tokens, lease.positions, groups)

    def remove(self, seq: int, start: int, stop: int) -> None:
        for memory in self.memories:
            assert memory.seq_rm(seq, start, stop)
            memory.seq_add(seq, stop, -1, start - stop)
            with memory.init_update(True) as update:
                update.apply()

    def back_to(self, seq: int, end: int) -> None:
        for memory in self.memories:
            assert memory.seq_rm(seq, end, -1)

    def close(self) -> None:
        for memory in self.memories:
            memory.audit()
            memory.close()


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
@pytest.mark.host
def test_layers_apart_compute_the_same(name: str, tmp_path: Path) -> None:
    """Prompts, drafts taken back and single tokens, past the folding of logs."""
    a, b = IDS, IDS[::-1]
    folder = model_folder(name, tmp_path)
    with quire.load(folder, **exactly(folder)) as llm:
        whole = [llm.logits(ids) for ids in (a, b)]
        for cut in {1, llm.model.n_layers // 2, llm.model.n_layers - 1}:
            split = Split(llm, cut)
            assert np.array_equal(split.run({0: a[:60]}), whole[0][:60])
            both = np.concatenate([whole[0][60:70], whole[1][:33]])
            assert np.array_equal(split.run({0: a[60:70], 1: b[:33]}), both)
            split.run({0: b[:5], 1: a[:5]}, keep=0)
            for i in range(30):
                both = np.stack([whole[0][70 + i], whole[1][33 + i]])
                assert np.array_equal(split.run({0: [a[70 + i]], 1: [b[33 + i]]}), both)
            split.close()


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
@pytest.mark.host
def test_tokens_leave_the_middle_of_layers_apart(name: str, tmp_path: Path) -> None:
    with quire.load(model_folder(name, tmp_path)) as llm:
        with llm.session() as s:
            expected = s.append(IDS[:60]).remove(7, 30).append(IDS[60:70]).logits()
        split = Split(llm, llm.model.n_layers // 2)
        split.run({0: IDS[:60]})
        split.remove(0, 7, 30)
        split.back_to(0, 36)  # a session computes its last token anew, which saw what is gone
        assert np.array_equal(split.run({0: IDS[59:70]})[-1], expected)
        split.close()
