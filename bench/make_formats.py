"""Make the default model's other file formats with llama.cpp's own quantiser.

Run it with the interpreter that has llama-cpp-python:

    PEER_PYTHON bench/make_formats.py FOLDER [--model MODEL.gguf] [--formats Q4_0,F16]

The source is already quantised (Q4_1), so the files serve for measuring speed and size, and for
comparing two engines on the same bytes; they say nothing about the quality of a format.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections import Counter
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]

MODEL_NAME = "SmolLM2-135M-Instruct"
SOURCE_FORMAT = "Q4_1"
FTYPES = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
}


class _GGUFInit(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def quantize(source: Path, target: Path, ftype: int) -> None:
    """Write `source` in another format; the target appears only when it is complete."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    params.allow_requantize = True
    partial = target.with_suffix(".partial")
    failed = llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(partial), ctypes.byref(params)
    )
    if failed:
        partial.unlink(missing_ok=True)
        sys.exit(f"llama.cpp could not write {target} from {source} (status {failed})")
    partial.replace(target)


def tensor_types(path: Path) -> Counter[str]:
    """How many tensors of each type the file holds, read by ggml itself."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    ggml = ctypes.CDLL(str(folder / "libggml-base.so"))
    ggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, _GGUFInit]
    ggml.gguf_init_from_file.restype = ctypes.c_void_p
    ggml.gguf_get_n_tensors.argtypes = [ctypes.c_void_p]
    ggml.gguf_get_n_tensors.restype = ctypes.c_int64
    ggml.gguf_get_tensor_type.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    ggml.ggml_type_name.restype = ctypes.c_char_p
    ggml.gguf_free.argtypes = [ctypes.c_void_p]
    file = ggml.gguf_init_from_file(os.fsencode(path), _GGUFInit(True, None))
    if not file:
        sys.exit(f"llama.cpp cannot read {path}")
    types = (ggml.gguf_get_tensor_type(file, i) for i in range(ggml.gguf_get_n_tensors(file)))
    counts = Counter(ggml.ggml_type_name(t).decode() for t in types)
    ggml.gguf_free(file)
    return counts


def cached_model() -> Path:
    """The default model where Quire keeps it, or an end that says what to do."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "quire"
    found = sorted(folder.rglob(f"{MODEL_NAME}.{SOURCE_FORMAT}.gguf"))
    if not found:
        sys.exit(f"no default model under {folder}; fetch it with `quire pull`, or pass --model")
    return found[0]


def make(source: Path, target: Path, name: str) -> None:
    """One file; the source's own format is a link to it."""
    if target.exists():
        return
    if name == SOURCE_FORMAT:
        target.symlink_to(source.resolve())
    else:
        quantize(source, target, FTYPES[name])


def main() -> None:
    """Make the asked-for files and print what each of them holds."""
    known = [SOURCE_FORMAT, *FTYPES]
    parser = argparse.ArgumentParser(description="Make the default model's other file formats.")
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--model", type=Path, help="the Q4_1 file; default: Quire's cached one")
    parser.add_argument("--formats", default=",".join(known), help="which, with commas")
    args = parser.parse_args()
    source = args.model or cached_model()
    if not source.is_file():
        parser.error(f"there is no file {source}")
    args.folder.mkdir(parents=True, exist_ok=True)
    llama_cpp.llama_log_set(silent, None)
    for name in args.formats.split(","):
        if name not in known:
            parser.error(f"unknown format {name}; known: {', '.join(known)}")
        target = args.folder / f"{MODEL_NAME}.{name}.gguf"
        make(source, target, name)
        held = ", ".join(f"{n} {t}" for t, n in tensor_types(target).most_common())
        print(f"{name:7} {target.stat().st_size / 1e6:6.1f} MB  {held}", flush=True)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def silent(level: int, text: bytes, data: object) -> None:
    """llama.cpp says a line per tensor; what matters is printed at the end."""


if __name__ == "__main__":
    main()
