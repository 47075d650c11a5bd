"""Dense models against plain float64 arithmetic, and against themselves in other batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quire
from quire.errors import ModelError, QuireError
from tests import tiny
from tests.gguf_writer import write_gguf

IDS = [int(i) for i in np.random.default_rng(3).integers(0, 256, 150)]


@pytest.fixture(scope="module", params=list(tiny.VARIANTS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    t = tiny.VARIANTS[request.param]
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    return t, path, tiny.write(path, t)


def spread(logits: np.ndarray) -> float:
    return float(logits.std(axis=-1).mean())


def test_exact_mode_is_float32_arithmetic(model) -> None:
    t, path, weights = model
    expected = tiny.forward(t, weights, IDS)
    with quire.load(path, activations="f32", type_k="f32", type_v="f32") as llm:
        got = llm.logits(IDS)
    assert np.abs(got - expected).max() < 2e-4 * spread(expected)


def test_int8_activations_stay_close(model) -> None:
    t, path, weights = model
    expected = tiny.forward(t, weights, IDS)
    with quire.load(path) as llm:
        got = llm.logits(IDS)
    error = np.abs(got - expected).mean() / spread(expected)
    assert error < (0.03 if t.quantized else 0.01)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_and_batches_change_no_bit(model, chunk: int) -> None:
    _, path, _ = model
    with quire.load(path) as llm:
        whole = llm.logits(IDS)
        with llm.session() as s, llm.session() as other:
            other.append(IDS[5:40])
            for at in range(0, len(IDS), chunk):
                s.append(IDS[at : at + chunk])
                end = min(at + chunk, len(IDS)) - 1
                assert np.array_equal(s.logits(), whole[end])


def test_batched_greedy_equals_alone(model) -> None:
    _, path, _ = model
    prompts = [IDS[i : i + 3 + 5 * i] for i in range(9)]
    with quire.load(path) as llm:
        alone = [llm.generate(p, max_tokens=20, ignore_eos=True).token_ids for p in prompts]
        llm.forget()  # so that the batch computes everything itself
        together = llm.generate(prompts, max_tokens=20, ignore_eos=True)
    assert [c.token_ids for c in together] == alone


def test_every_fault_is_listed_at_once(tmp_path: Path) -> None:
    t = tiny.Tiny()
    tensors = tiny.weights(t)
    del tensors["blk.1.attn_q.weight"], tensors["output_norm.weight"]
    tensors["blk.0.ffn_up.weight"] = np.zeros((3, 64), np.float32)
    write_gguf(tmp_path / "bad.gguf", tiny.metadata(t), tensors)
    with pytest.raises(ModelError) as caught:
        quire.load(tmp_path / "bad.gguf")
    for name in ("blk.1.attn_q.weight", "output_norm.weight", "blk.0.ffn_up.weight"):
        assert name in str(caught.value)
    assert "3 tensors" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count", 0),
        ("llama.block_count", 2**31),
        ("llama.attention.head_count_kv", 8),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.embedding_length", 0),
        ("llama.feed_forward_length", 2**40),
        ("llama.context_length", 0),
        ("llama.rope.dimension_count", 17),
        ("llama.rope.freq_base", float("inf")),
        ("llama.rope.scaling.type", "elastic"),
        ("general.architecture", "perceptron"),
        ("tokenizer.ggml.tokens", ["a", "b"]),
    ],
)
def test_bad_hyperparameters_are_named(tmp_path: Path, key: str, value: object) -> None:
    t = tiny.Tiny()
    meta = tiny.metadata(t) | {key: value}
    if key.endswith("scaling.type"):
        meta["llama.rope.scaling.factor"] = 2.0
    write_gguf(tmp_path / "bad.gguf", meta, tiny.weights(t))
    with pytest.raises(QuireError) as caught:
        quire.load(tmp_path / "bad.gguf")
    named = key.rsplit(".", 1)[-1] if key != "tokenizer.ggml.tokens" else "token"
    assert named in str(caught.value) or str(value) in str(caught.value)
    assert "bad.gguf" in str(caught.value)


def test_what_kernels_refuse_is_an_error_of_the_model(tmp_path: Path) -> None:
    t = tiny.Tiny(head_dim=15)
    facts = tiny.metadata(t) | {"llama.rope.dimension_count": 14}
    write_gguf(tmp_path / "odd.gguf", facts, tiny.weights(t))
    with pytest.raises(ModelError, match=r"odd\.gguf.*15 of K .* must be a multiple of 2"):
        quire.load(tmp_path / "odd.gguf")


@pytest.mark.host
def test_the_last_network_computes_wanted_rows_alone(model, monkeypatch) -> None:
    t, path, _ = model
    with quire.load(path) as llm:
        run, network, rows = llm.model.run, llm.ops.network, []

        def noted(x, *args, **kwargs):
            rows.append(x.shape[0])
            return network(x, *args, **kwargs)

        def checked(x, batch, start, stop, **wanted):
            alone = llm.ops.array(llm.ops.numpy(x))
            whole = llm.ops.numpy(run(alone, batch, start, stop))
            rows.clear()
            made = run(x, batch, start, stop, **wanted)
            assert np.array_equal(llm.ops.numpy(made), whole[wanted["rows"]])
            assert not rows or rows == [len(whole)] * (stop - 1) + [len(wanted["rows"])]
            return made

        monkeypatch.setattr(llm.ops, "network", noted)
        monkeypatch.setattr(llm.model, "run", checked)
        llm.generate([IDS, IDS[7:90]], max_tokens=3, ignore_eos=True)
    assert rows or t.experts  # those are another operation
