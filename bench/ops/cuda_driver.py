"""As much of NVIDIA's driver API, through ctypes, as timing kernels without MLX takes.

MLX's CUDA back-end works in the primary context of device 0, and so does a :class:`Driver`: what it sees is
the GPU as MLX has it. Memory and stream are its own.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WARM_UPS, SAMPLES = 2, 7
_NON_BLOCKING, _THIS_THREAD = 1, 1  # a stream apart from the default one; a capture apart from MLX's threads
_L2_CACHE_SIZE = 38  # CUdevice_attribute
_LOCAL_SIZE_BYTES, _NUM_REGS = 3, 4  # CUfunction_attribute
_Size, _Address = ctypes.c_size_t, ctypes.c_uint64


@dataclass(frozen=True)
class Function:
    """A kernel that is loaded; registers and bytes of local memory (spills, indexed arrays) of a thread."""

    handle: ctypes.c_void_p
    registers: int
    local_bytes: int


class Driver:
    """Device 0.

    Attributes:
        cache_bytes: of the L2 cache.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._allocated: list[int] = []
        device, cache = ctypes.c_int(), ctypes.c_int()
        context, self._stream, self._start, self._end = (ctypes.c_void_p() for _ in range(4))
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        for event in (self._start, self._end):
            self._call("cuEventCreate", ctypes.byref(event), 0)
        self._call("cuDeviceGetAttribute", ctypes.byref(cache), _L2_CACHE_SIZE, device)
        self.cache_bytes = cache.value

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()}")

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, which is kept until :meth:`release`."""
        address = _Address()
        self._call("cuMemAlloc_v2", ctypes.byref(address), _Size(nbytes))
        self._allocated.append(address.value)
        return address.value

    def upload(self, data: np.ndarray, copies: int = 1) -> list[int]:
        """The addresses of copies of a row contiguous array."""
        first, *others = (self.allocate(data.nbytes) for _ in range(copies))
        host = ctypes.c_void_p(data.ctypes.data)
        self._call("cuMemcpyHtoDAsync_v2", _Address(first), host, _Size(data.nbytes), self._stream)
        for other in others:
            self.copy(other, first, data.nbytes)
        self._call("cuStreamSynchronize", self._stream)
        return [first, *others]

    def release(self) -> None:
        """Free all memory."""
        while self._allocated:
            self._call("cuMemFree_v2", _Address(self._allocated.pop()))

    def function(self, code: bytes, name: str) -> Function:
        """Load machine code: a cubin or a fat binary."""
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), code)
        self._call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
        registers, local_bytes = ctypes.c_int(), ctypes.c_int()
        self._call("cuFuncGetAttribute", ctypes.byref(registers), _NUM_REGS, handle)
        self._call("cuFuncGetAttribute", ctypes.byref(local_bytes), _LOCAL_SIZE_BYTES, handle)
        return Function(handle, registers.value, local_bytes.value)

    def launch(
        self, function: Function, grid: Sequence[int], block: Sequence[int], addresses: Sequence[int]
    ) -> None:
        """Put a launch into the stream: ``grid`` in blocks, ``block`` in threads, an address a parameter."""
        values = [_Address(address) for address in addresses]
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._call("cuLaunchKernel", function.handle, *grid, *block, 0, self._stream, parameters, None)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Put a copy within the device into the stream."""
        self._call("cuMemcpyDtoDAsync_v2", _Address(target), _Address(source), _Size(nbytes), self._stream)

    def seconds(self, enqueue: Callable[[], None]) -> list[float]:
        """Of each of SAMPLES runs of a CUDA graph of what ``enqueue`` puts into the stream, once warm."""
        self._call("cuCtxSynchronize")  # MLX may be at work
        enqueue()
        self._call("cuStreamSynchronize", self._stream)  # a fault shows here
        graph, runnable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, _THIS_THREAD)
        enqueue()
        self._call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(runnable), graph, ctypes.c_uint64(0))
        found = self._timed(lambda: self._call("cuGraphLaunch", runnable, self._stream))
        self._call("cuGraphExecDestroy", runnable)
        self._call("cuGraphDestroy", graph)
        return found

    def _timed(self, enqueue: Callable[[], None]) -> list[float]:
        """Seconds of SAMPLES runs of what ``enqueue`` puts into the stream, once warm."""
        found = []
        for _ in range(WARM_UPS + SAMPLES):
            self._call("cuEventRecord", self._start, self._stream)
            enqueue()
            self._call("cuEventRecord", self._end, self._stream)
            self._call("cuStreamSynchronize", self._stream)
            milliseconds = ctypes.c_float()
            self._call("cuEventElapsedTime", ctypes.byref(milliseconds), self._start, self._end)
            found.append(milliseconds.value / 1e3)
        return found[WARM_UPS:]

    def copy_bandwidth(self, nbytes: int = 1 << 30, calls: int = 8) -> float:
        """Bytes per second read and written by copies within the device, the median run.

        Not in a graph: there a copy is another operation, on an H200 at 2.8 TB/s instead of 4.25.
        """
        target, source = self.allocate(nbytes), self.allocate(nbytes)

        def copies() -> None:
            for _ in range(calls):
                self.copy(target, source, nbytes)

        seconds = statistics.median(self._timed(copies))
        self.release()
        return calls * 2 * nbytes / seconds
