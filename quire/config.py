"""What the surroundings say: the only reader of environment variables and of the machine's size."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire import containers
from quire.errors import RequestError

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""How K and V can be stored."""
NOT_ON_GPUS = "activations='f32' is for the CPU; GPUs compute with 16 bits"
"""What is said to those who ask for both."""
_MOST = {"threads": 1024, "n_ctx": 2**31 - 1, "n_parallel": 16384}
_LONGEST_PAGE = 2**20
_MARGIN = 512 * 1024**2


@dataclass(frozen=True)
class LoadConfig:
    """How to load a model; the arguments of `quire.load`."""

    n_ctx: int | None = None
    threads: int | None = None
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 …, reference; or several of them, separated by commas."""
    n_gpu_layers: int | Literal["auto"] = "auto"
    """Layers on GPUs: first the output, which counts as one, then layers from the last on."""
    n_cpu_moe: int | None = None
    """So many first layers have their experts on the host."""
    tensor_split: Sequence[float] | str | None = None
    """How layers are shared out among GPUs."""
    main_gpu: int | None = None
    """The GPU that has the output: that with the most room, unless it is said."""
    override_tensor: Sequence[str] | str | None = None
    """PATTERN=DEVICE: what has a name like this goes there."""
    kv_offload: bool = True
    """Whether K and V, and so what reads them, may leave the host."""
    fit: bool = True
    """Whether what is left open is changed until it fits the devices."""
    n_parallel: int = 1
    """Sequences that there is to be room for at once."""
    memory_budget: int | str | Mapping[str, int | str] | None = None
    """Bytes, or a text such as "4GiB", of each device; or by the names of devices."""
    kv_cache_tokens: int | None = None
    kv_cache_demand_paged: bool = True
    page_tokens: int = 16
    type_k: str = "f16"
    type_v: str = "f16"
    swa_full: bool = False
    swap_space: int | str = "4GiB"
    """Bytes of disk for sequences that make room for others; 0 computes them again instead.

    Those of a GPU go to the host's memory first, of which they take half of what is free at most.
    """
    moe_n_expert: int | None = None
    n_layer_exit: int | None = None
    activations: Literal["int8", "f32"] = "int8"
    quantize: Literal["q8_0", "q4_0"] | None = None
    exact_batches: bool = True
    """Bits that depend on nothing but the tokens; False lets GPUs compute prompts faster."""

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if isinstance(value, np.generic):
                self.__dict__[name] = value.item()
        for name in ("n_ctx", "threads", "kv_cache_tokens", "moe_n_expert", "n_layer_exit",
                     "n_parallel"):  # fmt: skip
            value = getattr(self, name)
            left_open = value is None and name != "n_parallel"
            if not left_open and (type(value) is not int or value < 1):
                raise RequestError(f"{name} must be a whole number above 0, not {value!r:.80}")
        for name in ("device", "type_k", "type_v", "activations"):
            if not isinstance(getattr(self, name), str):
                raise RequestError(f"{name} is a text, not {getattr(self, name)!r:.80}")
        for name in ("kv_cache_demand_paged", "swa_full", "kv_offload", "fit", "exact_batches"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is True or False, not {getattr(self, name)!r:.80}")
        for name in ("swap_space", "quantize", "memory_budget"):
            value = getattr(self, name)
            known = (int, str, Mapping) if name == "memory_budget" else (int, str)
            if value is not None and (type(value) is bool or not isinstance(value, known)):
                raise RequestError(f"{name} is a number or a text, not {value!r:.80}")
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None and value > most:
                raise RequestError(f"{name} must be at most {most}, not {value}")
        for name in ("type_k", "type_v"):
            value = getattr(self, name)
            if value not in KV_TYPES:
                kinds = ", ".join(KV_TYPES)
                raise RequestError(f"{name} must be one of {kinds}, not {value!r:.80}")
        for name in self.device.split(","):
            if name != "auto" and not re.fullmatch(r"(cpu|cuda|reference)(:\d{1,3})?", name):
                raise RequestError(
                    f"device {name!r:.80} is not known; there are 'auto' (GPUs where there are "
                    "any), 'cpu', 'cuda', 'cuda:1' and so on, and 'reference' (NumPy, slow) to "
                    "check results; several are separated by commas"
                )
        self._check_places()
        if self.activations not in ("int8", "f32"):
            raise RequestError(f"activations must be 'int8' or 'f32', not {self.activations!r:.80}")
        if self.gpu is not None and self.activations == "f32":
            raise RequestError(NOT_ON_GPUS)
        if self.quantize not in (None, "q8_0", "q4_0"):
            kinds = "'q8_0', 'q4_0' or None"
            raise RequestError(f"quantize must be {kinds}, not {self.quantize!r:.80}")
        size = self.page_tokens
        if type(size) is not int or not 16 <= size <= _LONGEST_PAGE or size % 16:
            raise RequestError(
                f"page_tokens must be a multiple of 16 up to {_LONGEST_PAGE}, not {size!r:.80}"
            )

    def _check_places(self) -> None:
        """What says where parts of the model go."""
        for name in ("n_gpu_layers", "n_cpu_moe", "main_gpu"):
            value = getattr(self, name)
            if value is None or (name == "n_gpu_layers" and type(value) is str and value == "auto"):
                continue
            if type(value) is not int or value < 0:
                auto = ", or 'auto'" if name == "n_gpu_layers" else ""
                raise RequestError(
                    f"{name} must be a whole number from 0 on{auto}, not {value!r:.80}"
                )
        if self.n_gpu_layers is None:
            raise RequestError("n_gpu_layers is a number or 'auto', not None")
        self.shares()
        self.overrides()

    def shares(self) -> tuple[float, ...] | None:
        """`tensor_split` as numbers."""
        value = self.tensor_split
        if value is None:
            return None
        try:
            found = tuple(map(float, value.split(",") if isinstance(value, str) else value))
        except (TypeError, ValueError):
            found = ()
        if not found or not min(found) >= 0 or not 0 < sum(found) < float("inf"):
            raise RequestError(f"tensor_split is numbers such as '3,1', not {value!r:.80}")
        return found

    def overrides(self) -> tuple[tuple[str, str], ...]:
        """`override_tensor` as patterns and devices."""
        value = () if self.override_tensor is None else self.override_tensor
        if not isinstance(value, (str, list, tuple)):
            raise RequestError(f"override_tensor is PATTERN=DEVICE, not {value!r:.80}")
        found = []
        for text in value.split(",") if isinstance(value, str) else value:
            pattern, equals, device = str(text).rpartition("=")
            try:
                re.compile(pattern)
            except re.error as error:
                raise RequestError(f"override_tensor {text!r:.80}: {error}") from error
            if not equals or not pattern or not device:
                raise RequestError(f"override_tensor is PATTERN=DEVICE, not {text!r:.80}")
            found.append((pattern, device))
        return tuple(found)

    @property
    def gpu(self) -> int | None:
        """The number of the GPU that is asked for, if one is."""
        found = re.search(r"cuda(?::(\d{1,3}))?", self.device)
        return int(found[1] or 0) if found else None

    def budget_bytes(self, device: str = "cpu") -> int:
        """A device's byte budget: what was asked for, or what the host has free less a margin."""
        asked = self.asked_bytes(device)
        if asked is not None:
            return asked
        free = available_memory()
        return max(free - _MARGIN, free // 2, 1)

    def asked_bytes(self, device: str) -> int | None:
        """The budget that was asked for, for this device or for each."""
        asked = self.memory_budget
        if isinstance(asked, Mapping):
            asked = asked.get(device, asked.get(device.removesuffix(":0")))
        return None if asked is None else parse_bytes(asked, "memory_budget")

    def swap_bytes(self) -> int:
        """Bytes of disk that parked sequences may take."""
        asked = self.swap_space
        return 0 if asked in (0, "0") else parse_bytes(asked, "swap_space")

    def thread_count(self) -> int:
        """How many threads compute: what was asked for, or one per usable core."""
        return self.threads or usable_cores()


def settings_of(settings: Mapping[str, Any]) -> LoadConfig:
    """Settings by name; a name that there is none of is refused."""
    known = LoadConfig.__dataclass_fields__
    if unknown := sorted(set(settings) - set(known)):
        raise RequestError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return LoadConfig(**settings)


def parse_bytes(size: int | str, what: str = "a size") -> int:
    """Bytes from a number or a text such as "4GiB" or "500MB"; `what` is named if it is neither."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(size).lower())
    found = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if not 0 < found < float("inf"):
        raise RequestError(
            f"{what} is a number of bytes or a text such as '4GiB', not {size!r:.80}"
        )
    return int(found)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that programs may still take without pushing others out, or reaching a limit."""
    if sys.platform == "win32":
        return _windows_memory()
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    left = containers.free_memory(root)
    return free if left is None else min(free, left)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those it is bound to, within its container's share."""
    bound = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    share = containers.cores(root)
    return bound if share is None else min(bound, share)


def _windows_memory() -> int:
    """The same from Windows, which fills a structure: its size, the load, then counts of bytes."""
    import ctypes

    status = (ctypes.c_uint64 * 8)()
    ctypes.cast(status, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(status)
    windows: Any = ctypes
    windows.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return int(status[2])  # physical bytes that are free, behind those in all


def process_memory() -> int:
    """Bytes of this process that are in memory now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def cache_folder() -> Path:
    """Where fetched models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "quire"


def plain_terminal() -> bool:
    """Whether no escape codes are wanted: NO_COLOR is set, or the terminal knows none."""
    return bool(os.environ.get("NO_COLOR")) or dumb_terminal()


def dumb_terminal() -> bool:
    """Whether the terminal can do nothing but write line after line."""
    return os.environ.get("TERM") == "dumb"
