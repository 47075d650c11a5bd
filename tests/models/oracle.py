"""Random small models of transformers as folders, and what transformers computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

N_VOCAB = 97


def save_random(folder: Path, name: str, seed: int = 0, **settings: Any) -> Any:
    """A model with random weights of the class `name` + "ForCausalLM", saved as a folder.

    The weights are spread so that logits differ by several units, and norms and biases are not
    what they start as. A vocabulary of single tokens lies beside it.
    """
    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(
        vocab_size=N_VOCAB, bos_token_id=None, eos_token_id=1, pad_token_id=None, **settings
    )
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.3 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    save_vocabulary(folder)
    return model


def save_vocabulary(folder: Path) -> None:
    """Tokens t0, t1, …; models are given ids, so text does not matter."""
    vocab = {f"t{i}": i for i in range(N_VOCAB)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def logits(model: Any, ids: list[int]) -> NDArray[np.float32]:
    """Logits after each token, in one pass."""
    with torch.no_grad():
        out: NDArray[np.float32] = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return out
