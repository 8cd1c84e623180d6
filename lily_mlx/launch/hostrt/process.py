"""The worker process, as the parent sees it: one per launching thread, restarted when a kernel kills it.

The parent and the worker share a file, the arena: a control page (see ``worker.cpp`` for its layout), then
the buffers of one launch, each from a page boundary on. A byte through a pipe starts a launch, a byte
through another ends it, so a worker ends when its parent does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import BackendUnavailableError
from .compiler import discard_worker, worker_library

PAGE = mmap.PAGESIZE
CONTROL_BYTES = 65536
MAX_BUFFERS = 128
_REQUEST_OFFSET = 4096
_REQUEST = struct.Struct("<II3I3IIHHQIII1024s4x")
_BUFFER = struct.Struct("<QQQQIi")
_REPORT = struct.Struct("<IiI3I3IiqIIII512s512s")
_LOAD, _RUN = 1, 2
_SCHEDULES = {"fifo": 0, "lifo": 1, "random": 2}
_BOOT = (
    "import ctypes, sys\n"
    "try: ctypes.CDLL('libm.so.6', mode=ctypes.RTLD_GLOBAL)\n"
    "except OSError: pass\n"  # elsewhere the C library has the mathematical functions
    "sys.exit(ctypes.CDLL(sys.argv[1]).lily_worker(*map(int, sys.argv[2:])))"
)


class BufferSpec(NamedTuple):
    """Where a buffer of a launch lies: the mapping in the arena, and the data in the mapping, in bytes.

    ``poison`` is the byte that fills data without values, -1 for data that has some.
    """

    file_offset: int
    map_bytes: int
    data_offset: int
    data_bytes: int
    writable: bool
    poison: int


@dataclass(frozen=True)
class Report:
    """What the worker says about a launch that did not end well; fields as in ``worker.cpp``."""

    kind: int
    line: int
    thread: tuple[int, int, int] | None
    threadgroup: tuple[int, int, int] | None
    buffer: int
    offset: int
    access: int
    misaligned: bool
    file: str
    message: str


class WorkerLostError(Exception):
    """The worker ended without a report."""


class LoadError(BackendUnavailableError):
    """A compiled kernel cannot be loaded: its file, or the worker's, is damaged."""


class Loaded(NamedTuple):
    """A kernel in a worker: its number there, and its threadgroup memory in bytes."""

    number: int
    threadgroup_bytes: int


def parse_schedule(schedule: str) -> tuple[int, int]:
    """The number and the seed of ``fifo``, ``lifo`` or ``random:SEED``.

    Raises:
        ValueError: it is none of them.
    """
    name, colon, seed = schedule.partition(":")
    if name not in _SCHEDULES or (name == "random") != bool(colon) or (colon and not seed.isdigit()):
        raise ValueError(f"schedule {schedule!r}: expected 'fifo', 'lifo' or 'random:SEED'")
    return _SCHEDULES[name], int(seed or 0) % 2**64


class Worker:
    """A worker process and the arena shared with it. Not for use by two threads at a time."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._fd = _anonymous_file()
        self._map: mmap.mmap
        self.arena: np.ndarray
        self._bytes = 0
        self.reserve(CONTROL_BYTES + (1 << 20))
        self._loaded: dict[Path, Loaded] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = weakref.finalize(self, os.close, self._fd)

    @property
    def process_id(self) -> int | None:
        """The process id of the worker process, None before the first launch."""
        return self._process.pid if self._process else None

    def reserve(self, n_bytes: int) -> None:
        """Make the arena at least ``n_bytes`` long. Earlier views of it stay valid but are of no more use."""
        if n_bytes <= self._bytes:
            return
        n_bytes = -(-max(n_bytes, self._bytes * 3 // 2) // PAGE) * PAGE
        os.ftruncate(self._fd, n_bytes)
        self._map = mmap.mmap(self._fd, n_bytes)
        self.arena = np.frombuffer(self._map, np.uint8)
        self._bytes = n_bytes

    def load(self, library: Path) -> Loaded:
        """The kernel of a shared library, loaded at the first call.

        Raises:
            LoadError: it cannot be loaded.
        """
        if self._process is not None and self._process.poll() is not None:
            self._stop()  # something else killed it between two launches
        if self._process is None:
            self._start()
        if (found := self._loaded.get(library)) is None:
            path = os.fsencode(library)
            request = _REQUEST.pack(_LOAD, *(0,) * 14, path)
            try:
                status, fields = self._exchange(request, 60.0)
            except WorkerLostError:
                discard_worker()  # which may be why
                raise LoadError(f"cannot load {library}: the worker process ended; delete the file") from None
            if status != b"O":
                reason = _text(fields[-1]) or "the file is damaged"
                raise LoadError(f"cannot load {library}: {reason}; delete the file")
            found = self._loaded[library] = Loaded(fields[13], fields[14])
        return found

    def run(
        self,
        library: Path,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        buffers: list[BufferSpec],
        schedule: tuple[int, int],
        poison: int,
        time_limit: float,
        check: bool,
        wraps: bool,
    ) -> Report | None:
        """Run a loaded kernel over the buffers in the arena.

        Args:
            library: the compiled kernel.
            grid, threadgroup: in threads, (x, y, z).
            buffers: the kernel's arguments in order.
            schedule: as :func:`parse_schedule` gives it.
            poison: the byte that fills memory which nothing wrote: threadgroup memory, locals and what else
                lies on a stack.
            time_limit: seconds.
            check: the library is the checked build. Watch the ends of threadgroup variables, the calls by
                which lanes reach a collective, and that every thread reaches every barrier.
            wraps: an overflow is no fault.

        Returns:
            None, or what went wrong.

        Raises:
            WorkerLostError: the worker ended without saying why.
        """
        number = self.load(library).number
        limit = min(max(1, round(time_limit * 1000)), 2**31 - 1)
        head = (
            _RUN,
            number,
            *grid,
            *threadgroup,
            schedule[0],
            poison,
            wraps,
            schedule[1],
            limit,
            len(buffers),
            check,
            b"",
        )
        request = b"".join([_REQUEST.pack(*head), *[_BUFFER.pack(*b) for b in buffers]])
        status, fields = self._exchange(request, time_limit + 30.0)
        if status == b"O":
            return None
        if status == b"E":
            raise BackendUnavailableError(f"the host worker failed: {_text(fields[-1])}")
        return Report(
            kind=fields[0],
            line=fields[1],
            thread=fields[3:6] if fields[2] else None,
            threadgroup=fields[6:9] if fields[2] else None,
            buffer=fields[9],
            offset=fields[10],
            access=fields[11],
            misaligned=bool(fields[12]),
            file=_text(fields[15]),
            message=_text(fields[16]),
        )

    def _start(self) -> None:
        self._loaded.clear()
        library = worker_library()
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        passed = (self._fd, request_read, reply_write)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, str(library), *map(str, passed), str(os.getpid())],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            os.close(request_read)
            os.close(reply_write)
        self._process = process
        self._requests, self._replies = request_write, reply_read
        self._poll = select.poll()
        self._poll.register(reply_read, select.POLLIN)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _end, process, (request_write, reply_read, self._fd))

    def _stop(self) -> None:
        """Forget the worker process; the next launch starts another."""
        if self._process is not None:
            self._finalizer.detach()
            self._process.kill()
            _end(self._process, (self._requests, self._replies))
            self._process = None
            self._finalizer = weakref.finalize(self, os.close, self._fd)

    def _exchange(self, request: bytes, patience: float) -> tuple[bytes, tuple[Any, ...]]:
        self._map[_REQUEST_OFFSET : _REQUEST_OFFSET + len(request)] = request
        status = b""
        try:
            os.write(self._requests, b"r")
            if self._poll.poll(patience * 1000):
                status = os.read(self._replies, 1)
        except BrokenPipeError:
            pass
        except BaseException:
            self._stop()  # a reply to come would be taken for the next launch's
            raise
        if status == b"O" and request[0] == _RUN:
            return status, ()
        fields = _REPORT.unpack_from(self._map, 0)
        if status in (b"", b"D"):
            self._stop()
        if not status:
            raise WorkerLostError
        return status, fields


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="replace")


def _end(process: subprocess.Popen[bytes], fds: tuple[int, ...]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lily-host")
    handle, path = tempfile.mkstemp(prefix="lily-host-")
    os.unlink(path)
    return handle


_thread = threading.local()


def thread_worker() -> Worker:
    """The calling thread's worker. A forked child gets workers of its own."""
    worker: Worker | None = getattr(_thread, "worker", None)
    if worker is None or worker.pid != os.getpid():
        worker = _thread.worker = Worker()
    return worker
