"""Texts as vectors: what comes out, in any company, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.engine.embedding import Embedding
from quire.errors import BudgetError, ContextError, ModelError, RequestError
from tests import tiny
from tests.model_folders import model_folder
from tests.safetensors_writer import file_bytes

SHAPE = tiny.Tiny(arch="qwen3", context=2048, tied=False, quantized=False)
TEXTS = ["one", "two two", "three " * 90, "f", "five five " * 10]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, SHAPE)
    return made


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[quire.LLM]:
    with quire.load(path, activations="f32") as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def nothing_stays(llm: quire.LLM) -> Iterator[None]:
    yield
    llm.memory.audit()
    llm.forget()
    assert llm.memory.as_dict()["stats"]["attention"]["pages_used"] == 0


def test_vectors_are_what_logits_are_made_of(llm: quire.LLM) -> None:
    weights = tiny.weights(SHAPE)
    back = np.linalg.pinv(weights["output.weight"].astype(np.float64)).T
    for text in ("one", "three " * 30, "f"):
        hidden = tiny.forward(SHAPE, weights, llm.encode(text)) @ back
        means = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(axis=0)}
        for pooling, expected in means.items():
            (vector,) = llm.embed(text, pooling, normalize=False)
            np.testing.assert_allclose(vector, expected, atol=5e-3)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_company_makes_no_difference(llm: quire.LLM, pooling: str) -> None:
    together = llm.embed(TEXTS, pooling)
    assert together.dtype == np.float32 and together.shape == (len(TEXTS), SHAPE.width)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(llm.embed([text], pooling)[0], vector)
        np.testing.assert_array_equal(llm.embed(llm.encode(text), pooling)[0], vector)


def test_any_thread_and_beside_generations(llm: quire.LLM) -> None:
    expected = llm.embed(TEXTS)
    answer = llm.generate("Hello", max_tokens=40, ignore_eos=True).text
    llm.forget()
    with ThreadPoolExecutor(4) as pool:
        vectors = [pool.submit(llm.embed, TEXTS) for _ in range(4)]
        texts = [
            pool.submit(llm.generate, "Hello", max_tokens=40, ignore_eos=True) for _ in range(2)
        ]
        for one in vectors:
            np.testing.assert_array_equal(one.result(), expected)
        assert all(one.result().text == answer for one in texts)
    np.testing.assert_array_equal(asyncio.run(llm.aembed(TEXTS)), expected)


def test_a_task_that_is_cancelled_ends_at_once(llm: quire.LLM) -> None:
    """Between two steps, and while it waits for others."""
    steps = 0

    async def both() -> list[BaseException | object]:
        tasks = [asyncio.create_task(llm.aembed(["a b c " * 40] * 500)) for _ in range(2)]
        while steps < 2:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    def counted(self: Embedding) -> bool:
        nonlocal steps
        steps += 1
        return step(self)

    step = Embedding.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedding, "step", counted)
        found = asyncio.run(both())  # which waits for its threads
    assert [type(one) for one in found] == [asyncio.CancelledError] * 2 and steps < 100
    assert llm.memory.as_dict()["stats"]["attention"]["pages_used"] == 0


def test_little_memory_takes_more_steps(path: Path, llm: quire.LLM) -> None:
    long = "x" * 150
    with quire.load(path, activations="f32", kv_cache_tokens=192) as tight:
        got = tight.embed([long, "a", long, "b"])
        np.testing.assert_array_equal(got, llm.embed([long, "a", long, "b"]))
        session = tight.session().append("y" * 100)
        np.testing.assert_array_equal(tight.embed(long), got[:1])  # the session gives way
        assert len(session.generate(max_tokens=4, ignore_eos=True).token_ids) == 4
        session.close()
        tight.memory.audit()


def test_what_cannot_be_is_refused_and_leaves_nothing(path: Path, llm: quire.LLM) -> None:
    with pytest.raises(RequestError, match="last, mean, cls"):
        llm.embed("a", "max")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="text 1 has no tokens"):
        llm.embed(["a", ""])
    with pytest.raises(ContextError):
        llm.embed("a" * 5000)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.embed([[1, 2], [100_000]])
    with quire.load(path, kv_cache_tokens=64, n_ctx=512) as tight:
        with pytest.raises((BudgetError, quire.errors.PagesError)):
            tight.embed("a" * 300)
        tight.memory.audit()
        assert tight.memory.as_dict()["stats"]["attention"]["pages_used"] == 0


@pytest.mark.parametrize(("number", "name"), [(0, "last"), (1, "mean"), (2, "cls"), (3, "last")])
def test_the_file_says_how_vectors_are_pooled(tmp_path: Path, number: int, name: str) -> None:
    made = tmp_path / "tiny.gguf"
    tiny.write(made, SHAPE, {"qwen3.pooling_type": number})
    with quire.load(made) as loaded:
        assert loaded.pooling == name
        np.testing.assert_array_equal(loaded.embed("hello"), loaded.embed("hello", name))


def test_a_model_that_ranks_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "tiny.gguf"
    tiny.write(made, SHAPE, {"qwen3.pooling_type": 4})
    with pytest.raises(ModelError, match="ranks"):
        quire.load(made)


DENSE = Path(__file__).parent.parent / "data" / "models" / "tiny-dense"


def test_a_folder_that_makes_vectors_is_stored_without_an_output(tmp_path: Path) -> None:
    """Qwen3-Embedding: names without `model.`, no head, and its pooling in a folder of its own."""
    bare = tmp_path / "bare"
    shutil.copytree(DENSE, bare)
    stored = (DENSE / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8:end])
    assert "lm_head.weight" not in header
    renamed = {name.removeprefix("model."): value for name, value in header.items()}
    (bare / "model.safetensors").write_bytes(file_bytes(renamed, stored[end:]))
    (bare / "1_Pooling").mkdir()
    (bare / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    ids = [5, 7, 11, 400, 5]
    with quire.load(DENSE) as whole, quire.load(bare) as loaded:
        assert (whole.pooling, loaded.pooling) == ("last", "mean")
        np.testing.assert_array_equal(loaded.embed(ids), whole.embed(ids, "mean"))


@pytest.mark.parametrize("name", ["tiny-window", "tiny-recurrent", "tiny-hybrid", "tiny-moe"])
def test_every_kind_of_memory(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(8)
    texts = [rng.integers(3, 300, n).tolist() for n in (3, 700, 40, 1)]
    with quire.load(model_folder(name, tmp_path)) as loaded:
        together = loaded.embed(texts, "mean")
        for text, vector in zip(texts, together, strict=True):
            np.testing.assert_array_equal(loaded.embed([text], "mean")[0], vector)
        loaded.memory.audit()
        stats = loaded.memory.as_dict()["stats"]
        assert not any(figures["pages_used"] for figures in stats.values())
