"""What can go wrong in a kernel that runs on the host."""

# ruff: noqa: N818 - the names say what the kernel did

from __future__ import annotations

from ...errors import LilyError


class HostKernelError(LilyError):
    """A kernel failed on the host back-end.

    Attributes:
        kernel: the name it was given.
        file: the source file of the fault; ``<kernel>.metal`` is the body, ``<kernel>.h`` the header,
            unless a ``#line`` directive in them says otherwise. None when no line is to blame.
        line: the line in ``file``, from 1, or None.
        thread: position of the thread in the grid (x, y, z), or None.
        threadgroup: position of its threadgroup in the grid (x, y, z), or None.
        buffer: name of the argument concerned, or None.
        element: index of the element of ``buffer`` concerned (row-major), or None.
    """

    def __init__(
        self,
        reason: str,
        *,
        kernel: str,
        file: str | None = None,
        line: int | None = None,
        thread: tuple[int, int, int] | None = None,
        threadgroup: tuple[int, int, int] | None = None,
        buffer: str | None = None,
        element: int | None = None,
    ) -> None:
        self.reason = reason
        self.kernel = kernel
        self.file = file
        self.line = line
        self.thread = thread
        self.threadgroup = threadgroup
        self.buffer = buffer
        self.element = element
        where = f", {file}:{line}" if file and line else f", line {line}" if line else ""
        who = f" (thread {thread} of the grid, threadgroup {threadgroup})" if thread else ""
        super().__init__(f"kernel {kernel!r}{where}: {reason}{who}")


class CompileError(HostKernelError):
    """The source is not valid, or asks for more than Metal allows.

    ``log`` holds all that the compiler said.
    """

    log = ""


class OutOfBounds(HostKernelError):
    """A read or write outside of a buffer or an array, or a write to an input."""


class IndexOverflow(OutOfBounds):
    """Integer arithmetic left the range of its type, so an index made from it is wrong."""


class UnwrittenOutput(HostKernelError):
    """An element of an output was never written."""


class UninitializedRead(HostKernelError):
    """An output depends on memory that nothing wrote: a local, threadgroup memory, or an output."""


class BarrierMismatch(HostKernelError):
    """Threads of a threadgroup are at different barriers, or some ended without reaching one."""


class DivergentSimd(HostKernelError):
    """Lanes of a simdgroup are at different simd operations, or some do not reach one."""


class InactiveLaneRead(HostKernelError):
    """A lane reads the value of a lane that takes no part in the operation."""


class ScheduleDependence(HostKernelError):
    """The result depends on the order in which threads run: a race."""


class KernelCrash(HostKernelError):
    """The kernel did what no program may: a wild access, a division by zero, endless recursion."""


class Timeout(HostKernelError):
    """The kernel did not end within its time limit."""
