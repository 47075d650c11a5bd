"""What the CUDA driver is asked for: ranges of addresses, and memory mapped into them."""

from __future__ import annotations

import ctypes
from functools import cache

OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class DriverError(RuntimeError):
    """A call that the driver refused."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} (CUDA error {code})")
        self.code = code


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location),
        ("win32", ctypes.c_void_p), ("compression", ctypes.c_ubyte), ("gpu_direct", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ADDRESS, _SIZE, _HANDLE = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64
_CALLS = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "cuCtxGetCurrent": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(_SIZE), ctypes.POINTER(_Properties), ctypes.c_int,
    ),
    "cuMemAddressReserve": (
        ctypes.POINTER(_ADDRESS), _SIZE, _SIZE, _ADDRESS, ctypes.c_uint64,
    ),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemCreate": (
        ctypes.POINTER(_HANDLE), _SIZE, ctypes.POINTER(_Properties), ctypes.c_uint64,
    ),
    "cuMemRelease": (_HANDLE,),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _HANDLE, ctypes.c_uint64),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemSetAccess": (_ADDRESS, _SIZE, ctypes.POINTER(_Access), _SIZE),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _ADDRESS, _SIZE),
    "cuMemcpyHtoD_v2": (_ADDRESS, ctypes.c_void_p, _SIZE),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, _SIZE),
    "cuMemGetInfo_v2": (ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)),
}  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """The driver's library; OSError where there is none."""
    found = ctypes.CDLL("libcuda.so.1")
    for name, types in _CALLS.items():
        getattr(found, name).argtypes = types
    found.cuGetErrorString.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    return found


def call(name: str, *arguments: object) -> None:
    """Calls the driver; DriverError unless it succeeds."""
    code = getattr(library(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(name, code, (text.value or b"unknown").decode())


class Driver:
    """One GPU, through the context that torch uses as well."""

    def __init__(self, index: int) -> None:
        call("cuInit", 0)
        self._context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), index)
        self._place = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._place)
        self.enter()
        size = _SIZE()
        call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), 0)
        self.granularity = int(size.value)
        """Memory is created in multiples of this."""

    def enter(self) -> None:
        """Makes the GPU the one of this thread, whoever used the thread before."""
        current = ctypes.c_void_p()
        call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value != self._context.value:
            call("cuCtxSetCurrent", self._context)

    def reserve(self, size: int) -> int:
        """A range of addresses, without memory."""
        self.enter()
        address = _ADDRESS()
        call("cuMemAddressReserve", ctypes.byref(address), size, self.granularity, 0, 0)
        return int(address.value)

    def free(self, address: int, size: int) -> None:
        """Gives a range of addresses back."""
        self.enter()
        call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> int:
        """Memory at an address; its handle. Nothing is held if any of it fails."""
        self.enter()
        handle = _HANDLE()
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        try:
            call("cuMemMap", address, size, 0, handle, 0)
            try:
                access = _Access(self._place, _READ_WRITE)
                call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
            except DriverError:
                call("cuMemUnmap", address, size)
                raise
        except DriverError:
            call("cuMemRelease", handle)
            raise
        return int(handle.value)

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Takes memory away from an address and returns it."""
        self.enter()
        call("cuMemUnmap", address, size)
        call("cuMemRelease", handle)

    def fetch(self, into: int, address: int, size: int) -> None:
        """Copies from the GPU to a host address, after all work before."""
        self.enter()
        call("cuMemcpyDtoH_v2", into, address, size)

    def put(self, address: int, source: int, size: int) -> None:
        """Copies from a host address to the GPU, after all work before."""
        self.enter()
        call("cuMemcpyHtoD_v2", address, source, size)

    def fill(self, address: int, byte: int, size: int) -> None:
        """Sets bytes of the GPU, after all work before."""
        self.enter()
        call("cuMemsetD8_v2", address, byte, size)

    def free_bytes(self) -> tuple[int, int]:
        """Free bytes of the GPU, and all of them."""
        self.enter()
        free, total = _SIZE(), _SIZE()
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return int(free.value), int(total.value)
