"""llama.cpp as a worker: its C interface through ctypes, so that no Python loop slows it down."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np
from _worker import main

FLASH_ATTENTION = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


class LlamaCpp:
    """One model, one context; f16 K/V and memory mapping are llama.cpp's own defaults."""

    def __init__(
        self,
        model: str,
        *,
        threads: int,
        n_ctx: int,
        sequences: int,
        flash_attention: str,
        kv_unified: bool,
    ) -> None:
        loaded = llama.llama_model_load_from_file(
            os.fsencode(model), llama.llama_model_default_params()
        )
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = n_ctx * sequences, sequences
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        params.kv_unified = kv_unified
        context = llama.llama_init_from_model(loaded, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make {sequences} contexts of {n_ctx} tokens")
        self._model, self._context = loaded, context
        self._memory = llama.llama_get_memory(context)
        self._vocab = llama.llama_model_get_vocab(loaded)
        self._n_vocab = llama.llama_vocab_n_tokens(self._vocab)
        self._batch = llama.llama_batch_init(2048, 0, 1)

    def __del__(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)

    def describe(self) -> dict[str, Any]:
        return {
            "version": llama.__version__,
            "system": llama.llama_print_system_info().decode().strip(" |"),
            "n_vocab": self._n_vocab,
            "weight_bytes": llama.llama_model_size(self._model),
        }

    def prefill(self, prompt: list[int]) -> float:
        llama.llama_memory_clear(self._memory, False)
        start = time.perf_counter()
        self._prompts([prompt])
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        llama.llama_memory_clear(self._memory, False)
        last = self._prompts(prompts)
        places = [len(prompt) for prompt in prompts]
        start = time.perf_counter()
        for step in range(steps):
            last = self._next(last, [place + step for place in places])
        return time.perf_counter() - start

    def complete(self, text: str, steps: int) -> str:
        llama.llama_memory_clear(self._memory, False)
        prompt = self._encode(text)
        ids = self._prompts([prompt])
        while len(ids) < steps:
            ids += self._next(ids[-1:], [len(prompt) + len(ids) - 1])
        return self._decode(ids)

    def _prompts(self, prompts: list[list[int]]) -> list[int]:
        """Compute every prompt in one batch; the greedy token after each."""
        batch, i, ends = self._batch, 0, []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, 0
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                i += 1
            batch.logits[i - 1] = 1
            ends.append(i - 1)
        batch.n_tokens = i
        self._run()
        return [self._greedy(end) for end in ends]

    def _next(self, tokens: list[int], positions: list[int]) -> list[int]:
        """One more token for each sequence, as one batch."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, i
        self._run()
        return [self._greedy(i) for i in range(len(tokens))]

    def _run(self) -> None:
        status = llama.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")

    def _greedy(self, row: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, row)
        address = ctypes.addressof(logits.contents)
        values = (ctypes.c_float * self._n_vocab).from_address(address)
        return int(np.frombuffer(values, np.float32).argmax())

    def _encode(self, text: str) -> list[int]:
        raw = text.encode()
        room = (llama.llama_token * (len(raw) + 2))()
        n = llama.llama_tokenize(self._vocab, raw, len(raw), room, len(room), True, True)
        return list(room[:n])

    def _decode(self, ids: list[int]) -> str:
        room = ctypes.create_string_buffer(64 * len(ids))
        array = (llama.llama_token * len(ids))(*ids)
        n = llama.llama_detokenize(self._vocab, array, len(ids), room, len(room), False, True)
        return room.raw[:n].decode(errors="replace")


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def silent(level: int, text: bytes, data: object) -> None:
    """llama.cpp logs every tensor by default."""


if __name__ == "__main__":
    llama.llama_log_set(silent, None)
    main(LlamaCpp)
