"""CUDA C++ compiled when it is first needed, by the compiler that comes with torch, and launched.

What was compiled is kept beside Triton's kernels, by its source and architecture. Every launch
lets the kernel start before the one ahead of it ends: kernels wait where they must.
"""

from __future__ import annotations

import ctypes
import hashlib
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton.runtime.cache import get_cache_manager

from quire.ops.cuda.driver import call

SOURCES = Path(__file__).parent / "csrc"
_OWN_SHARED, _MOST_SHARED, _CARVEOUT, _ALL = 1, 8, 9, 100
_CLUSTER, _OVERLAP = 4, 6  # attributes: blocks that share memory; a kernel may start early


class CompileError(RuntimeError):
    """Source that the compiler refused."""


@cache
def _compiler() -> ctypes.CDLL | None:
    """The compiler's library: where the system, torch or its own package has it."""
    folders = [Path(sysconfig.get_paths()["purelib"]) / "nvidia"]
    found = sorted((p for f in folders for p in f.glob("*/lib/libnvrtc.so.*")), reverse=True)
    names = [str(path) for path in found if "builtins" not in path.name and "alt" not in path.name]
    for name in [*names, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def has_compiler() -> bool:
    """Whether sources can be compiled here; that takes no GPU."""
    return _compiler() is not None


def _checked(code: int, program: ctypes.c_void_p) -> None:
    if not code:
        return
    library, size = _need_compiler(), ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    library.nvrtcGetProgramLog(program, log)
    raise CompileError(f"NVRTC error {code}: {log.value.decode()}")


def _need_compiler() -> ctypes.CDLL:
    found = _compiler()
    if found is None:
        raise CompileError(
            "kernels need NVRTC, which comes with PyTorch for CUDA, and there is no libnvrtc.so; "
            "pip install nvidia-cuda-nvrtc"
        )
    return found


def source_of(names: Sequence[str]) -> str:
    """Files of csrc one after the other: the later ones use the earlier."""
    return "\n".join((SOURCES / f"{name}.cu").read_text("utf-8") for name in names)


def compile_source(source: str, architecture: str, defines: dict[str, object]) -> bytes:
    """Machine code for an architecture such as sm_90."""
    library, program = _need_compiler(), ctypes.c_void_p()
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    text = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _checked(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"quire.cu", 0, None, None
        ),
        program,
    )
    try:
        _checked(library.nvrtcCompileProgram(program, len(options), text), program)
        size = ctypes.c_size_t()
        _checked(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), program)
        code = ctypes.create_string_buffer(size.value)
        _checked(library.nvrtcGetCUBIN(program, code), program)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def compiled(names: Sequence[str], architecture: str, defines: dict[str, object]) -> bytes:
    """The same, from Triton's cache if it was compiled before."""
    source = source_of(names)
    key = hashlib.sha256(repr((source, architecture, sorted(defines.items()))).encode())
    cache, name = get_cache_manager(key.hexdigest()), f"{names[-1]}-{architecture}.cubin"
    if (kept := cache.get_file(name)) is not None:
        return Path(kept).read_bytes()
    code = compile_source(source, architecture, defines)
    with suppress(OSError):  # a folder that cannot be written: compiled again next time
        cache.put(code, name, binary=True)
    return code


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )  # fmt: skip


def _how(early: bool, cluster: int) -> ctypes.Array[_Attribute]:
    """Attributes of a launch."""
    found = [_Attribute(_OVERLAP, 0, (ctypes.c_int * 16)(1))] * early
    if cluster > 1:
        found.append(_Attribute(_CLUSTER, 0, (ctypes.c_int * 16)(1, 1, cluster)))
    return (_Attribute * len(found))(*found)


class Kernel:
    """One kernel on one GPU."""

    def __init__(
        self, module: ctypes.c_void_p, name: str, threads: int, most_shared: int, early: bool
    ) -> None:
        self.threads = threads
        self._early = early
        self._function = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        own = ctypes.c_int()  # what it declares itself comes on top of what it is given
        call("cuFuncGetAttribute", ctypes.byref(own), _OWN_SHARED, self._function)
        self._most_shared = most_shared - own.value
        for attribute, value in ((_MOST_SHARED, self._most_shared), (_CARVEOUT, _ALL)):
            call("cuFuncSetAttribute", self._function, attribute, value)
        self._fits: dict[int, int] = {}

    def resident(self, shared: int) -> int:
        """Blocks that one multiprocessor runs at a time with so much shared memory; 0: too much."""
        if shared not in self._fits:
            found = ctypes.c_int()
            if shared <= self._most_shared:
                call(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(found),
                    self._function, self.threads, ctypes.c_size_t(shared),
                )  # fmt: skip
            self._fits[shared] = found.value
        return self._fits[shared]

    def launch(
        self, stream: int, grid: tuple[int, int, int], shared: int, arguments: ctypes.Structure,
        cluster: int = 1,
    ) -> None:  # fmt: skip
        """Queues it; `arguments` is the one structure that it takes.

        So many blocks of one x and y form a cluster.
        """
        attributes = _how(self._early, cluster)
        how = _Launch(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(self.threads, 1, 1), shared, stream,
            attributes, len(attributes),
        )  # fmt: skip
        given = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        call("cuLaunchKernelEx", ctypes.byref(how), self._function, given, None)


class Native:
    """The kernels of one GPU, each compiled and loaded when it is first asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        found = torch.cuda.get_device_properties(device)
        self.processors = int(found.multi_processor_count)
        self.most_shared = int(found.shared_memory_per_block_optin)
        self.architecture = f"sm_{found.major}{found.minor}" + ("a" if found.major == 9 else "")
        self.clusters = found.major >= 9  # older ones know none, and no early start
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._modules: dict[tuple[Any, ...], ctypes.c_void_p] = {}

    def kernel(self, files: tuple[str, ...], name: str, threads: int, **defines: object) -> Kernel:
        """A kernel of these files with these definitions."""
        module_key = (files, *sorted(defines.items()))
        key = (*module_key, name)
        if key not in self._kernels:
            if module_key not in self._modules:
                code = compiled(files, self.architecture, defines)
                module = ctypes.c_void_p()
                call("cuModuleLoadData", ctypes.byref(module), code)
                self._modules[module_key] = module
            module = self._modules[module_key]
            self._kernels[key] = Kernel(module, name, threads, self.most_shared, self.clusters)
        return self._kernels[key]

    @property
    def stream(self) -> int:
        """Torch's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)


@cache
def native(device: torch.device) -> Native:
    """The kernels of a GPU."""
    return Native(device)
