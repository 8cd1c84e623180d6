"""Metal kernels on the CPU: :func:`metal_kernel` stands in for ``mx.fast.metal_kernel`` in tests.

The kernel's complete source comes from MLX itself, out of an export trace, so its signature is the one that
Metal would see. It is compiled as C++ (``launch/msl`` has the language, ``launch/hostrt`` the simulated GPU)
and runs in a worker process, so that whatever a kernel does, the interpreter lives on.

Each launch is watched: buffers end, or begin, at a page that cannot be touched; memory that nothing wrote
holds a poison; lanes and threads must meet at the same operations. ``check=True`` runs a launch twice, with
the buffers against their end and against their start and with two poisons, a small one twice more with NaN
and with zeros, and compares the outputs bit by bit. An overflow counts if it also happens with zeros in place
of the poison.
:func:`check_schedules` looks for races by running launches in several orders.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .hostrt import compiler
from .hostrt.errors import (
    BarrierMismatch,
    CompileError,
    DivergentSimd,
    HostKernelError,
    InactiveLaneRead,
    IndexOverflow,
    KernelCrash,
    OutOfBounds,
    ScheduleDependence,
    Timeout,
    UninitializedRead,
    UnwrittenOutput,
)
from .hostrt.process import (
    CONTROL_BYTES,
    PAGE,
    BufferSpec,
    LoadError,
    Report,
    Worker,
    WorkerLostError,
    parse_schedule,
    thread_worker,
)
from .msl import INCLUDE_DIR, rewrite

__all__ = [
    "SCHEDULES",
    "BarrierMismatch",
    "CompileError",
    "DivergentSimd",
    "HostKernelError",
    "InactiveLaneRead",
    "IndexOverflow",
    "KernelCrash",
    "OutOfBounds",
    "ScheduleDependence",
    "Timeout",
    "UninitializedRead",
    "UnwrittenOutput",
    "check_schedules",
    "metal_kernel",
]

# MLX's own, taken now: tests put metal_kernel in its place.
_MLX_METAL_KERNEL = mx.fast.metal_kernel

SCHEDULES = ("fifo", "lifo", *(f"random:{seed}" for seed in range(5)))

MAX_THREADS = 1024
MAX_THREADGROUP_BYTES = 32768
# The bytes that outputs and other memory hold before anything wrote them, in the first and in the second run
# of a check. Floats made of them are large, below zero in the first run (about -3e16, as half -219) and above
# it in the second (6e17, 235), so that a minimum, a maximum or a comparison takes one of them. Integers
# differ in sign and parity, and a bool is neither true nor false. The second output holds a byte that is less
# by 2, and so on for four, so that what one copied from another does not look like its own.
_POISONS = ((0xD6, 0xDA), (0x57, 0x5B))
# A check of at most so many threads, a full threadgroup, runs twice more, because both poisons answer alike
# when multiplied by zero and when compared with it: with ones in every bit, which are NaN, and with zeros.
# More would cost too much.
SMALL_LAUNCH = 1024
# Metal's argument table.
MAX_METAL_BUFFERS = 31
# In place of the names of the function and of the files, which variants do not share.
_FUNCTION, _NAME = "lily_host_kernel", "@"

_NUMPY = {
    mx.bool_: np.bool_,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,  # NumPy has no bfloat16: its bits travel
    mx.float32: np.float32,
    mx.complex64: np.complex64,
}

_KINDS: dict[int, type[HostKernelError]] = {  # Kind in hostrt/runtime.h
    1: OutOfBounds,
    2: BarrierMismatch,
    3: DivergentSimd,
    4: InactiveLaneRead,
    5: IndexOverflow,
    6: KernelCrash,
    7: Timeout,
    8: UninitializedRead,
}

_default_schedule: ContextVar[str] = ContextVar("lily_host_schedule", default="fifo")
_recorder: ContextVar[list[_Launch] | None] = ContextVar("lily_host_recorder", default=None)


class _Launch(NamedTuple):
    """The outputs of a launch, kept by check_schedules."""

    kernel: str
    names: tuple[str, ...]
    dtypes: tuple[mx.Dtype, ...]
    outputs: tuple[np.ndarray, ...]  # bytes
    atomics: bool


class _Parameter(NamedTuple):
    """A buffer of a kernel's signature: an input or output, or the shape, strides or ndim of an input."""

    name: str
    source: str  # "input", "shape", "strides", "ndim" or "output"
    number: int  # of the input or output


@dataclass
class _Variant:
    """A kernel for one set of dtypes and template arguments, as MLX would compile it."""

    signature: str
    arguments: str  # template arguments, "" without
    source: str
    parameters: tuple[_Parameter, ...]
    order: tuple[int | str, ...]  # every parameter of the call: a buffer's number or an attribute
    libraries: dict[str, Path] = field(default_factory=dict)
    aligned: bool = False  # vector accesses need buffers at multiples of 16 bytes


# An expression per thread attribute that MLX knows; t and g are what runtime.h calls thread() and group().
_UINT3 = "uint3{{{0}.x, {0}.y, {0}.z}}"
_ATTRIBUTES = {
    "thread_position_in_grid": _UINT3.format("t.thread_position_in_grid"),
    "thread_position_in_threadgroup": _UINT3.format("t.thread_position_in_threadgroup"),
    "thread_index_in_threadgroup": "t.thread_index_in_threadgroup",
    "thread_index_in_simdgroup": "t.thread_index_in_simdgroup",
    "thread_index_in_quadgroup": "t.thread_index_in_simdgroup % 4",
    "simdgroup_index_in_threadgroup": "t.simdgroup_index_in_threadgroup",
    "quadgroup_index_in_threadgroup": "t.thread_index_in_threadgroup / 4",
    "threadgroup_position_in_grid": _UINT3.format("g.threadgroup_position_in_grid"),
    "threadgroups_per_grid": _UINT3.format("g.threadgroups_per_grid"),
    "threads_per_grid": _UINT3.format("g.threads_per_grid"),
    "grid_size": _UINT3.format("g.threads_per_grid"),
    "grid_origin": "uint3{0, 0, 0}",
    "threads_per_threadgroup": _UINT3.format("g.threads_per_threadgroup"),
    "dispatch_threads_per_threadgroup": _UINT3.format("g.dispatch_threads_per_threadgroup"),
    "simdgroups_per_threadgroup": "g.simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup": "g.dispatch_simdgroups_per_threadgroup",
    "quadgroups_per_threadgroup": "g.simdgroups_per_threadgroup * 8",
    "dispatch_quadgroups_per_threadgroup": "g.dispatch_simdgroups_per_threadgroup * 8",
    "threads_per_simdgroup": "lily::rt::simd_width",
    "thread_execution_width": "lily::rt::simd_width",
}


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, Any] | None = None,
) -> HostKernel:
    """A Metal kernel that runs on the CPU; the arguments are those of ``mx.fast.metal_kernel``.

    In errors, lines of ``source`` are lines of ``<name>.metal`` and those of ``header`` of ``<name>.h``,
    counted from 1, unless ``#line`` directives in them say otherwise.

    Returns:
        An object to call as MLX's: see :meth:`HostKernel.__call__`.

    Raises:
        ValueError: Metal has no function of such a name.
    """
    return HostKernel(
        name,
        tuple(input_names),
        tuple(output_names),
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        compile_options,
    )


class HostKernel:
    """What :func:`metal_kernel` returns. Threads may call it at the same time."""

    def __init__(
        self,
        name: str,
        input_names: tuple[str, ...],
        output_names: tuple[str, ...],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
        compile_options: dict[str, Any] | None,
    ) -> None:
        if not re.fullmatch(r"\w+", name, re.ASCII):
            raise ValueError(
                f"kernel {name!r}: MLX makes the name part of a function's; letters, digits and _ are right"
            )
        self.name = name
        self.input_names = input_names
        self.output_names = output_names
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        options = {"compile_options": compile_options} if compile_options else {}
        self._traced: Any = _MLX_METAL_KERNEL(
            name=name,
            input_names=list(input_names),
            output_names=list(output_names),
            source=source,
            header=header,
            ensure_row_contiguous=ensure_row_contiguous,
            atomic_outputs=atomic_outputs,
            **options,
        )
        self._variants: dict[Any, _Variant] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        schedule: str | None = None,
        check: bool = True,
        time_limit: float = 300.0,
    ) -> list[mx.array]:
        """Run the kernel now; the keywords are MLX's, and these:

        Args:
            schedule: the order of threads: "fifo", "lifo" or "random:SEED". None: "fifo", unless
                :func:`check_schedules` is at work.
            check: run twice, a small launch four times, with the compiler's bounds and overflow checks, and
                compare. Without, the launch is faster, and still confined to its buffers; a barrier does
                not wait for threads that have ended, as on Apple's GPUs, though Metal asks that every
                thread reaches it; and a simd operation that other lanes skip is over the lanes that reach it.
            time_limit: seconds that one run may take.

        Returns:
            The outputs, evaluated.

        Raises:
            CompileError: the source does not compile, or needs more than 32,768 bytes of threadgroup memory
                or more than 31 buffers.
            OutOfBounds, UnwrittenOutput, UninitializedRead, BarrierMismatch, DivergentSimd, InactiveLaneRead,
            IndexOverflow, KernelCrash, Timeout: a fault of the kernel.
            HostKernelError: the call is inside ``mx.compile`` or ``mx.vmap``, where arrays have no values; or
                ``mx.grad``, ``mx.vjp`` or ``mx.jvp`` needs its derivative, which MLX's have not either.
            ValueError: grid, threadgroup, shapes or schedule cannot be launched.
        """
        if not len(output_shapes) == len(output_dtypes) == len(self.output_names):
            raise ValueError(
                f"kernel {self.name!r} has {len(self.output_names)} outputs; "
                f"{len(output_shapes)} shapes and {len(output_dtypes)} dtypes were given"
            )
        arrays = self._evaluated(inputs)
        variant = self._variant(arrays, template, output_shapes, output_dtypes)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{variant.source}\n```")
        order = parse_schedule(schedule or _default_schedule.get())
        grid, threadgroup = self._extents(grid, threadgroup)
        launch = _Arguments(self, variant, arrays, output_shapes, output_dtypes, init_value)
        if 0 in grid:
            first = launch.initial_outputs()
        else:
            library = self._library(variant, "checked" if check else "plain")
            how = _How(library, grid, threadgroup, order, time_limit, check)
            run = launch.run_without_wraps if check else launch.run
            first = run(how, _POISONS[0], "end")
            if check:
                launch.compare(first, run(how, _POISONS[1], "start"))
                if math.prod(grid) <= SMALL_LAUNCH:
                    launch.compare(first, run(how, (0xFF, 0xFF), "end"))
                    try:
                        launch.compare(first, launch.run(how, (0, 0), "end"))
                    except KernelCrash as crash:
                        # With the poisons nothing was divided by zero: this zero is of this run's making.
                        if "division by zero" not in str(crash):
                            raise
        if (record := _recorder.get()) is not None:
            dtypes, atomics = tuple(output_dtypes), "atomic_" in variant.source
            record.append(_Launch(self.name, self.output_names, dtypes, tuple(first), atomics))
        outputs = [
            _to_mlx(data, shape, dtype)
            for data, shape, dtype in zip(first, output_shapes, output_dtypes, strict=True)
        ]
        return _without_derivative(self.name, arrays, outputs)

    def _evaluated(self, inputs: Sequence[Any]) -> list[mx.array]:
        if len(inputs) != len(self.input_names):
            raise ValueError(
                f"kernel {self.name!r} has {len(self.input_names)} inputs, {len(inputs)} were given"
            )
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        try:
            mx.eval(arrays)
        except ValueError as error:
            if "transformations" not in str(error):
                raise
            raise HostKernelError(
                "the host back-end computes with values, so it cannot run inside mx.compile, mx.vmap or a "
                "trace; call it outside, or switch compilation off with mx.disable_compile()",
                kernel=self.name,
            ) from error
        if self.ensure_row_contiguous and not all(_view(a).c_contiguous for a in arrays):
            arrays = [mx.contiguous(a) for a in arrays]
            mx.eval(arrays)
        return arrays

    def _extents(
        self, grid: tuple[int, int, int], threadgroup: tuple[int, int, int]
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        if (
            len(grid) != 3
            or len(threadgroup) != 3
            or min(grid) < 0
            or max(grid) >= 2**32
            or min(threadgroup) < 1
        ):
            raise ValueError(
                f"kernel {self.name!r}: grid {grid} and threadgroup {threadgroup} cannot be launched"
            )
        # MLX launches no more threads than the grid has.
        x, y, z = (min(t, max(g, 1)) for t, g in zip(threadgroup, grid, strict=True))
        if x * y * z > MAX_THREADS:
            raise ValueError(
                f"kernel {self.name!r}: threadgroup {threadgroup} has over {MAX_THREADS} threads"
            )
        return (grid[0], grid[1], grid[2]), (x, y, z)

    def _variant(
        self,
        arrays: list[mx.array],
        template: Sequence[tuple[str, Any]] | None,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> _Variant:
        key = (
            tuple((a.dtype, a.ndim == 0, a.size < 8) for a in arrays),
            tuple((name, type(value), value) for name, value in template or ()),
            tuple(output_dtypes),
        )
        if (found := self._variants.get(key)) is None:
            with self._lock:
                text = self._trace(arrays, template, output_shapes, output_dtypes)
                found = self._variants[key] = self._parse(*text)
        return found

    def _trace(
        self,
        arrays: list[mx.array],
        template: Sequence[tuple[str, Any]] | None,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> tuple[str, str]:
        """The function's name and its complete source, from MLX."""
        seen: list[tuple[str, str]] = []

        def call(*traced: mx.array) -> list[mx.array]:
            result: list[mx.array] = self._traced(
                inputs=list(traced),
                template=list(template) if template else None,
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                output_shapes=[tuple(shape) for shape in output_shapes],
                output_dtypes=list(output_dtypes),
            )
            return result

        def note(entry: dict[str, Any]) -> None:
            if entry.get("name") == "CustomKernel":
                seen.append((entry["arguments"][0], entry["arguments"][1]))

        mx.export_function(note, call, *arrays)
        return seen[0]

    def _parse(self, entry: str, source: str) -> _Variant:
        """Take the complete source apart: header, signature, body, instantiation."""
        rest = source.removeprefix(self.header)
        end = rest.index(") {\n" + self.source)
        signature = rest[: end + 1]
        instance = re.search(re.escape(f"decltype({entry}<") + r"(.*)>\) " + re.escape(entry), rest[end:])
        start = signature.index(f" {entry}(") + len(entry) + 2
        parameters: list[_Parameter] = []
        order: list[int | str] = []
        for text in re.split(r",\s*\n", signature[start:-1]):
            match = re.search(r"(\w+) \[\[(\w+)(?:\(\d+\))?\]\]\s*$", text)
            if match is None:
                continue
            if match[2] == "buffer":
                order.append(len(parameters))
                parameters.append(self._parameter(match[1]))
            else:
                order.append(match[2])
        if len(parameters) > MAX_METAL_BUFFERS:
            raise CompileError(
                f"{len(parameters)} buffers, shapes and strides among them; Metal has {MAX_METAL_BUFFERS}",
                kernel=self.name,
            )
        return _Variant(
            signature=re.sub(r" ?\[\[[^\]]*\]\]", "", signature).replace(f" {entry}(", f" {_FUNCTION}("),
            arguments=f"<{instance[1]}>" if instance else "",
            source=source,
            parameters=tuple(parameters),
            order=tuple(order),
        )

    def _parameter(self, name: str) -> _Parameter:
        if name in self.output_names:
            return _Parameter(name, "output", self.output_names.index(name))
        if name in self.input_names:
            return _Parameter(name, "input", self.input_names.index(name))
        base, _, what = name.rpartition("_")
        return _Parameter(name, what, self.input_names.index(base))

    def _library(self, variant: _Variant, build: str) -> Path:
        if (found := variant.libraries.get(build)) is None:
            metal, entry = _metal_source(self, variant.signature), _entry_source(variant)

            def source() -> str:
                return _translated_kernel(metal).replace(f'"{_NAME}.', f'"{self.name}.') + entry

            def compiled() -> Path:
                try:
                    return compiler.kernel_library(
                        compiler.Source(_language_digest(), _prefix_source),
                        compiler.Source(f"{self.name}\n{metal}{entry}", source),
                        (INCLUDE_DIR,),
                        build,
                    )
                except compiler.CompilerError as failure:
                    raise _compile_error(self.name, str(failure)) from None

            found = compiled()
            try:
                used = thread_worker().load(found).threadgroup_bytes
            except LoadError:
                # What a crash or a full disk left in the cache.
                found.unlink(missing_ok=True)
                found = compiled()
                used = thread_worker().load(found).threadgroup_bytes
            if used > MAX_THREADGROUP_BYTES:
                raise CompileError(
                    f"{used} bytes of threadgroup memory; Metal has {MAX_THREADGROUP_BYTES}", kernel=self.name
                )
            variant.libraries[build] = found
        return found


# ------------------------------------------------------------------------------------------ source


# Code of the language's headers counts as code of the line that uses it, and two calls on different lines
# stay two.
_LANGUAGE = """#include "runtime.h"
#pragma clang attribute push(__attribute__((nodebug)), apply_to = hasType(functionType))
#pragma clang attribute push(__attribute__((nomerge)), apply_to = function)
#include <metal_stdlib>
#pragma clang attribute pop
#pragma clang attribute pop
"""


def _prefix_source() -> str:
    """What comes before every kernel: the language, and the header that MLX puts there."""
    text, _ = _mlx_prefix()
    return _LANGUAGE + _translated(text)


@functools.cache
def _mlx_prefix() -> tuple[str, frozenset[Path]]:
    """MLX's header with the headers that it includes, and which they are."""
    seen: set[Path] = set()
    text = _inline_includes('#include "mlx/backend/metal/kernels/utils.h"\n', "prefix", seen)
    return text, frozenset(seen)


def _metal_source(kernel: HostKernel, signature: str) -> str:
    """The kernel in Metal: its header, signature and body, each with its own line numbers."""
    return "\n".join(
        (
            f'#line 1 "{_NAME}.h"',
            kernel.header,
            f'#line 1 "{_NAME}.signature"',
            signature + " {",
            f'#line 1 "{_NAME}.metal"',
            kernel.source,
            "}",
            "",
        )
    )


def _entry_source(variant: _Variant) -> str:
    """The function that a fiber calls: the kernel with its buffers and the attributes of its thread."""
    values = [
        f"lily::rt::Argument{{buffers[{p}]}}" if isinstance(p, int) else _ATTRIBUTES[p] for p in variant.order
    ]
    return f"""#line 1 "entry"
#include "entry.h"
extern "C" __attribute__((visibility("default"))) void lily_entry(void* const* buffers) {{
  [[maybe_unused]] const auto& t = lily::rt::thread();
  [[maybe_unused]] const auto& g = lily::rt::group();
  {_FUNCTION}{variant.arguments}({", ".join(values)});
}}
"""


@functools.lru_cache(maxsize=64)
def _translated_kernel(metal: str) -> str:
    """C++ from a kernel in Metal, which its variants share."""
    return _translated(_inline_includes(metal, "kernel", set(_mlx_prefix()[1])))


def _translated(metal: str) -> str:
    """C++ from Metal; a plain ``return;`` also tells the scheduler that the lane left on purpose."""
    return re.sub(r"\breturn(?=\s*;)", "LILY_RT_RETURN", rewrite.translate(metal, mode="host"))


_INCLUDE = re.compile(
    r'^[ \t]*#[ \t]*(?:include[ \t]*"(?P<path>[^"]+)"|line[ \t]+(?P<line>\d+)(?:[ \t]+"(?P<file>[^"]+)")?)'
)


def _inline_includes(text: str, file: str, seen: set[Path]) -> str:
    """Put MLX's headers in place of ``#include "mlx/..."``, each once, and keep every line's file and number.

    Args:
        text: Metal source.
        file: its name, until a ``#line`` directive gives another.
        seen: the headers that came before; updated.
    """
    lines: list[str] = []
    number = 1
    for text_line in text.splitlines():
        match = _INCLUDE.match(text_line)
        if match and match["path"]:
            path = (_mlx_include() / match["path"]).resolve()
            if not path.exists():
                lines.append(text_line)  # for the compiler to complain about
                number += 1
                continue
            if path not in seen:
                seen.add(path)
                included = _inline_includes(path.read_text().replace("#pragma once", ""), match["path"], seen)
                lines.append(f'#line 1 "{match["path"]}"\n{included}')
            lines.append(f'#line {number + 1} "{file}"')
        else:
            lines.append(text_line)
        if match and match["line"]:
            number, file = int(match["line"]), match["file"] or file
        else:
            number += 1
    return "\n".join(lines) + "\n"


@functools.cache
def _mlx_include() -> Path:
    return Path(mx.__file__).parent / "include"


@functools.cache
def _language_digest() -> str:
    """A digest of what a translated kernel depends on besides its own text."""
    digest = hashlib.sha256(version("mlx").encode())
    for path in sorted(Path(rewrite.__file__).parent.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile_error(kernel: str, log: str) -> CompileError:
    match = re.search(r"^(.*?):(\d+):\d+: (?:fatal )?error: (.*)$", log, re.M)
    if match is None:
        error = CompileError(log.strip() or "the compiler failed", kernel=kernel)
    else:
        error = CompileError(match[3], kernel=kernel, file=match[1], line=int(match[2]))
    error.log = log
    return error


# ----------------------------------------------------------------------------------------- buffers


class _How(NamedTuple):
    """What all runs of a launch have in common."""

    library: Path
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    schedule: tuple[int, int]
    time_limit: float
    check: bool


class _Arguments:
    """The buffers of one call: their values, where they lie in the arena, and what came back."""

    def __init__(
        self,
        kernel: HostKernel,
        variant: _Variant,
        arrays: list[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None,
    ) -> None:
        self.kernel = kernel
        self.variant = variant
        self.arrays = arrays
        self.output_shapes = output_shapes
        self.output_dtypes = output_dtypes
        self.init_value = init_value
        self.values = [self._value(p) for p in variant.parameters]
        self.item_bytes = [self._item_bytes(p) for p in variant.parameters]

    def _value(self, p: _Parameter) -> np.ndarray | int:
        """The bytes of an argument, or for an output without initial value the number of its bytes."""
        if p.source == "output":
            dtype = self.output_dtypes[p.number]
            size = int(np.prod(self.output_shapes[p.number], dtype=np.int64))
            if self.init_value is None:
                return size * dtype.size
            one = np.frombuffer(_view(_evaluated(mx.array(self.init_value).astype(dtype))), np.uint8)
            return np.tile(one, size)
        array = self.arrays[p.number]
        if p.source == "input":
            return _memory(array)
        if p.source == "shape":
            return np.array(array.shape, np.int32).view(np.uint8)
        if p.source == "ndim":
            return np.array([array.ndim], np.int32).view(np.uint8)
        view = _view(array)
        strides = [s // view.itemsize for s in view.strides or ()]
        return np.array(strides, np.int64).view(np.uint8)

    def _item_bytes(self, p: _Parameter) -> int:
        if p.source == "output":
            return int(self.output_dtypes[p.number].size)
        if p.source == "input":
            return int(self.arrays[p.number].dtype.size)
        return 8 if p.source == "strides" else 4

    def initial_outputs(self) -> list[np.ndarray]:
        """The outputs of a launch without threads, as bytes; without an initial value zeros."""
        outputs: list[np.ndarray] = [np.empty(0, np.uint8)] * len(self.output_shapes)
        for p, value in zip(self.variant.parameters, self.values, strict=True):
            if p.source == "output":
                outputs[p.number] = np.zeros(value, np.uint8) if isinstance(value, int) else value
        return outputs

    def run(
        self, how: _How, poison: tuple[int, int], placement: str, wraps: bool = False
    ) -> list[np.ndarray]:
        """One run with the buffers against the ``end`` or the ``start`` of their pages: output bytes.

        With ``wraps`` an overflow is no fault.
        """
        worker = thread_worker()
        buffers = self._place(worker, placement, poison)
        try:
            report = worker.run(
                how.library,
                how.grid,
                how.threadgroup,
                buffers,
                how.schedule,
                poison[1],
                how.time_limit,
                how.check,
                wraps,
            )
        except WorkerLostError:
            raise KernelCrash("the worker process ended without a report", kernel=self.kernel.name) from None
        if report is not None and report.misaligned and not self.variant.aligned:
            # Vector instructions want multiples of 16 bytes, as every buffer on the GPU has.
            self.variant.aligned = True
            return self.run(how, poison, placement, wraps)
        if report is not None:
            raise self._error(report)
        if self.variant.aligned:
            self._check_rest(worker, buffers, poison[1])
        outputs: list[np.ndarray] = [np.empty(0, np.uint8)] * len(self.output_shapes)
        for p, b in zip(self.variant.parameters, buffers, strict=True):
            if p.source == "output":
                start = b.file_offset + b.data_offset
                outputs[p.number] = worker.arena[start : start + b.data_bytes].copy()
        return outputs

    def run_without_wraps(self, how: _How, poison: tuple[int, int], placement: str) -> list[np.ndarray]:
        """As :meth:`run` of a poisoned launch, where overflows of the poison itself are no fault.

        A kernel may compute with what was never written and drop the result. An access that happens elsewhere
        without the poison is said to come from it.
        """
        try:
            return self.run(how, poison, placement)
        except IndexOverflow:
            pass
        except OutOfBounds as fault:
            try:
                self.run(how, (0, 0), placement)
            except HostKernelError as other:
                if str(other) == str(fault):
                    raise fault from None
            reason = f"{fault.reason}; the index depends on memory that was never written"
            raise OutOfBounds(**(vars(fault) | {"reason": reason})) from None
        try:
            self.run(how, (0, 0), placement)
        except IndexOverflow:
            raise
        except HostKernelError:
            pass  # a fault of the zeros; the kernel's own show below
        return self.run(how, poison, placement, wraps=True)

    def _place(self, worker: Worker, placement: str, poison: tuple[int, int]) -> list[BufferSpec]:
        buffers: list[BufferSpec] = []
        offset = CONTROL_BYTES
        for p, value in zip(self.variant.parameters, self.values, strict=True):
            size = value if isinstance(value, int) else value.size
            mapped = -(-size // PAGE) * PAGE
            start = mapped - size if placement == "end" else 0
            if self.variant.aligned:
                start -= start % 16
            fill = _output_poison(poison, p.number) if isinstance(value, int) else -1
            buffers.append(BufferSpec(offset, mapped, start, size, p.source == "output", fill))
            offset += mapped
        worker.reserve(offset)
        for b, value in zip(buffers, self.values, strict=True):
            if not isinstance(value, int):
                at = b.file_offset + b.data_offset
                worker.arena[at : at + b.data_bytes] = value
            if self.variant.aligned:
                _rest(worker, b)[:] = poison[1]
        return buffers

    def _check_rest(self, worker: Worker, buffers: list[BufferSpec], poison: int) -> None:
        """Raise if bytes were written between the end of a buffer and the end of its last page.

        Only buffers at multiples of 16 bytes leave room there.
        """
        for p, b, item in zip(self.variant.parameters, buffers, self.item_bytes, strict=True):
            written = _rest(worker, b) != poison
            if written.any():
                element = (b.data_bytes + int(written.argmax())) // item
                raise OutOfBounds(
                    f"write of element {element} of {p.name!r}, which has {b.data_bytes // item}",
                    kernel=self.kernel.name,
                    buffer=p.name,
                    element=element,
                )

    def _error(self, report: Report) -> HostKernelError:
        reason, buffer, element = report.message, None, None
        if report.buffer >= 0:
            parameter = self.variant.parameters[report.buffer]
            value = self.values[report.buffer]
            item = self.item_bytes[report.buffer]
            buffer, element = parameter.name, report.offset // item
            count = (value if isinstance(value, int) else value.size) // item
            access = {1: "read", 2: "write"}.get(report.access, "access")
            inside = 0 <= element < count
            reason = f"{access} of element {element} of {buffer!r}, which has {count}"
            if inside and parameter.source != "output":
                reason = f"write to element {element} of {buffer!r}, an input"
        return _KINDS[report.kind](
            reason,
            kernel=self.kernel.name,
            file=report.file or None,
            line=report.line or None,
            thread=report.thread,
            threadgroup=report.threadgroup,
            buffer=buffer,
            element=element,
        )

    def compare(self, first: list[np.ndarray], second: list[np.ndarray]) -> None:
        """Compare two runs that differ in the poison: what differs depends on memory nobody wrote.

        Raises:
            UnwrittenOutput, UninitializedRead: it does.
        """
        for number, (name, dtype, a, b) in enumerate(
            zip(self.kernel.output_names, self.output_dtypes, first, second, strict=True)
        ):
            a, b = a.reshape(-1, dtype.size), b.reshape(-1, dtype.size)
            fills = [_output_poison(poison, number) for poison in _POISONS]
            kept = (a == fills[0]) & (b == fills[1])
            # A complex number or a long may be written by halves.
            halves = max(dtype.size // 4, 1)
            unwritten = kept.reshape(len(a), halves, dtype.size // halves).all(axis=2).any(axis=1)
            if unwritten.any():
                element = int(unwritten.argmax())
                raise UnwrittenOutput(
                    f"element {element} of {name!r} was never written ({int(unwritten.sum())} of {len(a)})",
                    kernel=self.kernel.name,
                    buffer=name,
                    element=element,
                )
            tainted = (a != b).any(axis=1)
            if tainted.any():
                element = int(tainted.argmax())
                raise UninitializedRead(
                    f"element {element} of {name!r} depends on memory that was never written, such as a "
                    f"local, or threadgroup memory before the barrier "
                    f"({int(tainted.sum())} of {len(tainted)})",
                    kernel=self.kernel.name,
                    buffer=name,
                    element=element,
                )


def _output_poison(poison: tuple[int, int], number: int) -> int:
    """The byte that an output holds before anything wrote it, by the output's number."""
    return max(poison[0] - 2 * (number % 4), 0)


def _without_derivative(kernel: str, inputs: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
    """``outputs`` as a function of ``inputs`` whose derivatives are refused; MLX takes them for constants."""

    def refuse(*_: Any) -> None:
        raise HostKernelError(
            "a kernel has no derivative, neither here nor as mx.fast.metal_kernel; give it one with "
            "mx.custom_function",
            kernel=kernel,
        )

    launched: Any = mx.custom_function(lambda *_: outputs)
    launched.vjp(refuse)
    launched.jvp(refuse)
    result = list(launched(*inputs)) if inputs else outputs
    mx.eval(result)
    return result


def _evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array


def _view(array: Any) -> memoryview:
    """An evaluated array's memory; MLX's type stubs do not say that arrays are buffers."""
    return memoryview(array)


def _rest(worker: Worker, b: BufferSpec) -> np.ndarray:
    """The bytes of a buffer's mapping behind its data."""
    return worker.arena[b.file_offset + b.data_offset + b.data_bytes : b.file_offset + b.map_bytes]


def _memory(array: mx.array) -> np.ndarray:
    """The bytes of an array as they lie in memory, from its first to its last element."""
    view = _view(array)
    if view.c_contiguous:
        return np.frombuffer(view, np.uint8)
    bits = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[view.itemsize]
    strided = np.array(_evaluated(array.view(bits)), copy=False)
    if min(strided.strides) < 0:
        # MLX passes the address of element 0; what lies before it belongs to the buffer too, but no kernel
        # can be given a pointer into the middle here.
        raise ValueError("an input with negative strides needs ensure_row_contiguous=True")
    span = sum((n - 1) * s for n, s in zip(strided.shape, strided.strides, strict=True)) + view.itemsize
    flat = np.lib.stride_tricks.as_strided(strided, (span // view.itemsize,), (view.itemsize,))
    return flat.view(np.uint8)


def _to_mlx(data: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    array = mx.array(data.view(_NUMPY[dtype]).reshape(tuple(shape)))
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


# --------------------------------------------------------------------------------------- schedules


@contextmanager
def _recording(schedule: str) -> Iterator[list[_Launch]]:
    record: list[_Launch] = []
    tokens = _default_schedule.set(schedule), _recorder.set(record)
    try:
        yield record
    finally:
        _default_schedule.reset(tokens[0])
        _recorder.reset(tokens[1])


def check_schedules(call: Callable[..., Any], schedules: Sequence[str] = SCHEDULES) -> Any:
    """Run ``call`` once per schedule and compare the outputs of every host kernel it launches, bit by bit.

    Args:
        call: called with the schedule if it requires an argument or takes ``schedule``, else without; kernels
            that it calls without ``schedule`` follow the schedule either way.
        schedules: at least one; the first is what the others are compared with.

    Returns:
        What ``call`` returned under the first schedule.

    Raises:
        ScheduleDependence: an output differs. It names the kernel, the buffer and the element.
    """
    run = _with_schedule(call)
    expected: list[_Launch] = []
    result: Any = None
    for n, schedule in enumerate(schedules):
        with _recording(schedule) as record:
            value = run(schedule)
        if n == 0:
            expected, result = record, value
            continue
        for before, after in zip(expected, record, strict=True):
            _compare_schedules(before, after, schedules[0], schedule)
    return result


def _with_schedule(call: Callable[..., Any]) -> Callable[[str], Any]:
    """``call`` as a function of the schedule, which it may take by name, by position or not at all."""
    parameters = inspect.signature(call).parameters.values()
    if any(p.name == "schedule" or p.kind is p.VAR_KEYWORD for p in parameters):
        return lambda schedule: call(schedule=schedule)
    if any(p.kind is not p.VAR_POSITIONAL and p.default is p.empty for p in parameters):
        return call
    return lambda schedule: call()


def _compare_schedules(before: _Launch, after: _Launch, one: str, other: str) -> None:
    for name, dtype, a, b in zip(before.names, before.dtypes, before.outputs, after.outputs, strict=True):
        if not np.array_equal(a, b):
            differs = (a.reshape(-1, dtype.size) != b.reshape(-1, dtype.size)).any(axis=1)
            element = int(differs.argmax())
            allowed = ", or an order that its atomics leave open" if before.atomics else ""
            raise ScheduleDependence(
                f"element {element} of {name!r} differs between the schedules {one!r} and {other!r} "
                f"({int(differs.sum())} of {len(differs)}): a race{allowed}",
                kernel=before.kernel,
                buffer=name,
                element=element,
            )
