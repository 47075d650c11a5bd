"""The engine over the GPU's samplers: layers run on the host, tokens are chosen by whole steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.devices.device import Draws, Int32
from quire.devices.host import HostDevice
from quire.ops import Array
from quire.ops.cpu import CpuOps
from quire.ops.cuda.steps import Steps
from tests import tiny
from tests.choosing import WAYS, alone, result, stream, together
from tests.cuda.sides import GPU, cuda
from tests.flying import HostSteps

COUNT = 20 if GPU else 5


class Output:
    """A model whose rows come from elsewhere, and are logits."""

    n_layers = 2

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = self.width = n_vocab

    def run(self, x: Any, *_: Any) -> Any:
        return x

    def logits(self, x: Any) -> Any:
        return x


class ChoosingSteps(HostSteps):
    """Steps whose last part is the GPU's: to choose."""

    def __init__(self, device: HostDevice, model: Any, first: int) -> None:
        super().__init__(device, model, first)
        self._choosing = Steps(Output(model.n_vocab), cuda(), 1)  # type: ignore[arg-type]

    def run(
        self, tokens: Int32, positions: Int32, seq_rows: Int32, views: Mapping[str, Any],
        rows: Int32, draws: Draws, sources: Int32 | None, x: Array | None = None,
    ) -> Any:  # fmt: skip
        self._sources = None if sources is None else sources[rows]
        found: Any = super().run(tokens, positions, seq_rows, views, rows, draws, sources, x)
        return found[0], self._drawn

    def draw(self, logits: Array, draws: Draws, before: Int32 | None) -> Any:
        n = len(draws)
        every = np.arange(n, dtype=np.int32)
        mine = cuda().array(self._ops.numpy(logits))
        found = self._choosing.run(every, every, every, {}, every, draws, self._sources, mine)
        assert found is not None
        self._drawn = found[1]
        return self._drawn.read(), {}


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> list[ChoosingSteps]:
    """Models on the host have their tokens chosen by the GPU, or its kernels interpreted."""
    made: list[ChoosingSteps] = []

    def steps(self: HostDevice, model: Any, first: int = 0) -> ChoosingSteps:
        ops: Any = self.ops

        def there(logits: Array) -> Any:
            return cuda().array(ops.numpy(logits))

        ops.sampler = cuda().sampler
        ops.sample = lambda logits, *given: cuda().sample(there(logits), *given)
        ops.logprobs = lambda logits, *given: cuda().logprobs(there(logits), *given)
        made.append(ChoosingSteps(self, model, first))
        return made[-1]

    monkeypatch.setattr(HostDevice, "steps", steps)
    return made


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(path, tiny.Tiny(context=512))
    return path


def near(found: list[Any], want: list[Any]) -> None:
    """The same tokens, and log-probabilities but for rounding."""
    for (tokens, told), (right, all_told) in zip(found, want, strict=True):
        assert tokens == right and (told is None) == (all_told is None)
        for one, other in zip(told or (), all_told or (), strict=True):
            assert one[0] == other[0] and [i for i, _ in one[2]] == [i for i, _ in other[2]]
            np.testing.assert_allclose(one[1], other[1], rtol=1e-5, atol=1e-6)


def test_the_engine_says_what_cpus_say(dense: Path, request: pytest.FixtureRequest) -> None:
    with quire.load(dense, threads=1, device="cpu") as llm:
        want = alone(llm, COUNT)
    made = request.getfixturevalue("choosing")
    with quire.load(dense, threads=1, device="cpu") as llm:
        assert isinstance(llm.ops, CpuOps)
        near(together(llm, COUNT), want)
        assert made[0].followed > 1
        # Drafts wait, and are judged by the same samplers.
        near([result(stream(llm, 1, COUNT, speculate="ngram"))], want[1:2])
    assert len(want) == len(WAYS)
