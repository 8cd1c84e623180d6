"""Kernels and how they are launched.

A :class:`Kernel` says what a ``.metal`` file takes and gives; :func:`launch` checks a call against it and
runs it on a back-end. Every rule that all back-ends share is enforced here and nowhere else:

- buffers have the declared axes and dtypes, and an axis has one size throughout a call;
- the grid is whole threadgroups, and a threadgroup whole simdgroups of 32, because CUDA launches whole
  blocks where Metal would cut the last threadgroup;
- static threadgroup memory is at most 32 KB, Metal's limit; a threadgroup has at most 384 threads on Metal,
  whatever the GPU here, and 1,024 elsewhere;
- an input of fewer than 8 elements is padded to 8, because MLX passes smaller ones in another address space;
- every variant has a name of its own, because MLX caches compiled kernels by name.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..counters import counts
from . import source
from .backend import resolve

MAX_THREADGROUP_BYTES = 32 * 1024
MAX_THREADS_PER_THREADGROUP = 1024
MAX_METAL_THREADS_PER_THREADGROUP = 384
"""Threads that Apple GPUs of every generation launch, whatever registers a kernel takes.

An M1 or M2 has registers for 1,024 threads of 52 each, but only for 384 of 128, the most that a thread can
have (Mesa's table for these GPUs). How many a kernel takes is up to Apple's compiler, so it shows on the
user's machine only, and there MLX raises ValueError for a launch of more threads than the pipeline allows.
"""
SIMD_WIDTH = 32
MIN_INPUT_SIZE = 8
MAX_BLOCKS_YZ = 65535  # CUDA's limit on the second and third axis of a grid

TemplateValue = int | bool | mx.Dtype
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Buffer:
    """An input or output.

    Attributes:
        name: its name in the body.
        axes: axis names or sizes, separated by spaces ("B T Hk Dk", "8"); "*" for any shape (8 elements in
            an example).
        dtype: the name of a template parameter, or of an MLX dtype ("float32").
        optional: an input that a call may leave out (None). It is a null pointer then and costs nothing.
    """

    name: str
    axes: str
    dtype: str
    optional: bool = False


@dataclass(frozen=True)
class Variant:
    """Values with which a kernel can be compiled and launched, for checks that need an example.

    Attributes:
        template: a value for each template parameter.
        sizes: a size for each axis that is not a template parameter.
        grid, threadgroup: threads.
    """

    template: Mapping[str, TemplateValue]
    sizes: Mapping[str, int]
    grid: Triple
    threadgroup: Triple


@dataclass(frozen=True, eq=False)
class Kernel:
    """One ``.metal`` file.

    Attributes:
        stem: the file's name without suffix.
        inputs, outputs: buffers in the order of the signature.
        template: names of the template parameters, in order. A dtype, an int or a bool each.
        variants: examples, see :meth:`variants_on`.
        threadgroup_bytes: template values -> bytes of static threadgroup memory.
        math_mode: Metal's: "safe" keeps NaN, infinities and the order of operations.
        folder: where the file is.
    """

    stem: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    template: tuple[str, ...]
    variants: tuple[Variant, ...]
    threadgroup_bytes: Callable[[Mapping[str, Any]], int] = field(default=lambda _: 0)
    math_mode: str = "safe"
    folder: Path = source.KERNELS

    def variants_on(self, backend: str) -> tuple[Variant, ...]:
        """The variants whose threadgroups may be launched on a back-end."""
        most = max_threads(backend)
        return tuple(variant for variant in self.variants if math.prod(variant.threadgroup) <= most)

    def example(self, variant: Variant) -> dict[str, Any]:
        """Arguments of :func:`launch` for a variant, with inputs of zeros."""
        sizes: dict[str, Any] = {**variant.template, **variant.sizes}

        def shape(buffer: Buffer) -> tuple[int, ...]:
            axes = ["8"] if buffer.axes == "*" else buffer.axes.split()
            return tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in axes)

        def dtype(buffer: Buffer) -> mx.Dtype:
            return _dtype(buffer, variant.template)

        return {
            "inputs": [mx.zeros(shape(buffer), dtype(buffer)) for buffer in self.inputs],
            "template": dict(variant.template),
            "grid": variant.grid,
            "threadgroup": variant.threadgroup,
            "output_shapes": [shape(buffer) for buffer in self.outputs],
            "output_dtypes": [dtype(buffer) for buffer in self.outputs],
        }


def max_threads(backend: str) -> int:
    """Threads that a threadgroup may have on a back-end."""
    return MAX_METAL_THREADS_PER_THREADGROUP if backend == "metal" else MAX_THREADS_PER_THREADGROUP


_kernels: dict[str, Kernel] = {}
_host_options: ContextVar[Mapping[str, Any] | None] = ContextVar("lily_host_options", default=None)


def declare(kernel: Kernel) -> Kernel:
    """Add a kernel to those that :func:`all_kernels` returns, and return it.

    Raises:
        ValueError: the stem is taken.
    """
    if _kernels.setdefault(kernel.stem, kernel) is not kernel:
        raise ValueError(f"kernel {kernel.stem!r} is declared twice")
    return kernel


def all_kernels() -> tuple[Kernel, ...]:
    """Every kernel of Lily, in order of name."""
    # The ops declare the kernels; they are looked up by name because launch does not depend on ops.
    importlib.import_module("lily_mlx.ops")
    return tuple(_kernels[stem] for stem in sorted(_kernels))


@contextmanager
def host_options(**options: Any) -> Iterator[None]:
    """Pass options (``schedule=``, ``check=``) to every launch on the host back-end inside the block."""
    token = _host_options.set(options)
    try:
        yield
    finally:
        _host_options.reset(token)


def launch(
    kernel: Kernel,
    inputs: Sequence[mx.array | None],
    *,
    template: Mapping[str, TemplateValue],
    grid: Triple,
    threadgroup: Triple,
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    backend: str | None = None,
    init_value: float | None = None,
) -> list[mx.array]:
    """Run a kernel.

    Args:
        kernel: what to run.
        inputs: an array for each input, None for an optional one that is absent. Made row contiguous.
        template: a value for each template parameter.
        grid: threads on each axis, a multiple of ``threadgroup``.
        threadgroup: threads on each axis; their product is a multiple of 32, at most
            :func:`max_threads`.
        output_shapes, output_dtypes: of each output.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.
        init_value: fill outputs with it first; by default they start undefined.

    Returns:
        The outputs.

    Raises:
        ValueError: the call does not fit the kernel's declaration, or a limit above.
    """
    if template.keys() != set(kernel.template):
        raise ValueError(f"{kernel.stem}: template has {sorted(template)}, not {sorted(kernel.template)}")
    arrays = [array for array in inputs if array is not None]
    call = _prepare(
        kernel,
        backend or resolve(),
        tuple(None if array is None else (array.shape, array.dtype) for array in inputs),
        tuple((name, template[name]) for name in kernel.template),
        grid,
        threadgroup,
        tuple(tuple(shape) for shape in output_shapes),
        tuple(output_dtypes),
    )
    options: dict[str, Any] = {} if init_value is None else {"init_value": init_value}
    if call.backend == "host" and (host := _host_options.get()):
        options |= host
    counts[f"op.{kernel.stem}"] += 1
    return call.function(
        inputs=[_pad(array) if array.size < MIN_INPUT_SIZE else array for array in arrays],
        template=call.template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=call.output_shapes,
        output_dtypes=call.output_dtypes,
        **options,
    )


def _pad(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    return mx.concatenate([flat, mx.zeros((MIN_INPUT_SIZE - flat.size,), flat.dtype)])


@dataclass(frozen=True)
class _Call:
    backend: str
    function: Callable[..., list[mx.array]]
    template: list[tuple[str, TemplateValue]]
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]


Signature = tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]


# Checking a call costs as much as building the graph node, and decoding repeats the same calls.
@lru_cache(maxsize=4096)
def _prepare(
    kernel: Kernel,
    backend: str,
    inputs: Signature,
    template: tuple[tuple[str, TemplateValue], ...],
    grid: Triple,
    threadgroup: Triple,
    output_shapes: tuple[tuple[int, ...], ...],
    output_dtypes: tuple[mx.Dtype, ...],
) -> _Call:
    values = dict(template)
    _check_buffers(kernel, inputs, values, output_shapes, output_dtypes)
    _check_threads(kernel, backend, grid, threadgroup)
    used = kernel.threadgroup_bytes(values)
    if used > MAX_THREADGROUP_BYTES:
        raise ValueError(
            f"{kernel.stem}: {used} bytes of threadgroup memory; the limit is {MAX_THREADGROUP_BYTES}"
        )
    dtypes = tuple(None if given is None else given[1] for given in inputs)
    return _Call(
        backend,
        _function(kernel, backend, dtypes, template, output_dtypes),
        list(template),
        list(output_shapes),
        list(output_dtypes),
    )


def _dtype(buffer: Buffer, template: Mapping[str, TemplateValue]) -> mx.Dtype:
    dtype = template.get(buffer.dtype)
    if dtype is None:
        dtype = getattr(mx, "bool_" if buffer.dtype == "bool" else buffer.dtype)
    if not isinstance(dtype, mx.Dtype):
        raise ValueError(f"{buffer.name}: {buffer.dtype!r} is not a dtype")
    return dtype


def _check_buffers(
    kernel: Kernel,
    inputs: Signature,
    template: Mapping[str, TemplateValue],
    output_shapes: tuple[tuple[int, ...], ...],
    output_dtypes: tuple[mx.Dtype, ...],
) -> None:
    if len(inputs) != len(kernel.inputs):
        raise ValueError(f"{kernel.stem}: {len(inputs)} inputs, declared {len(kernel.inputs)}")
    if not len(output_shapes) == len(output_dtypes) == len(kernel.outputs):
        raise ValueError(f"{kernel.stem}: {len(output_shapes)} outputs, declared {len(kernel.outputs)}")
    sizes = {name: value for name, value in template.items() if isinstance(value, int)}
    outputs = tuple(zip(output_shapes, output_dtypes, strict=True))
    for buffer, given in zip(kernel.inputs + kernel.outputs, inputs + outputs, strict=True):
        if given is None:
            if not buffer.optional:
                raise ValueError(f"{kernel.stem}: input {buffer.name!r} is missing")
            continue
        shape, dtype = given
        if dtype != (declared := _dtype(buffer, template)):
            raise ValueError(f"{kernel.stem}: {buffer.name} is {dtype}, declared {declared} ({buffer.dtype})")
        if buffer.axes == "*":
            continue
        axes = buffer.axes.split()
        # An axis has the size that its name got first: from the template, or from an earlier buffer.
        if len(axes) != len(shape) or any(
            size != (int(axis) if axis.isdigit() else sizes.setdefault(axis, size))
            for axis, size in zip(axes, shape, strict=True)
        ):
            known = {axis: sizes[axis] for axis in axes if axis in sizes}
            raise ValueError(f"{kernel.stem}: {buffer.name} is {shape}, declared [{buffer.axes}] {known}")


def _check_threads(kernel: Kernel, backend: str, grid: Triple, threadgroup: Triple) -> None:
    threads = math.prod(threadgroup)
    if threads % SIMD_WIDTH or not 0 < threads <= max_threads(backend):
        raise ValueError(
            f"{kernel.stem}: threadgroup {threadgroup} has {threads} threads; "
            f"must be a multiple of {SIMD_WIDTH} up to {max_threads(backend)} on {backend}"
        )
    if any(size <= 0 or size % group for size, group in zip(grid, threadgroup, strict=True)):
        raise ValueError(f"{kernel.stem}: grid {grid} is not whole threadgroups of {threadgroup}")
    if max(grid[1] // threadgroup[1], grid[2] // threadgroup[2]) > MAX_BLOCKS_YZ:
        raise ValueError(f"{kernel.stem}: grid {grid} has over {MAX_BLOCKS_YZ} threadgroups on axis y or z")


@cache
def _function(
    kernel: Kernel,
    backend: str,
    input_dtypes: tuple[mx.Dtype | None, ...],
    template: tuple[tuple[str, TemplateValue], ...],
    output_dtypes: tuple[mx.Dtype, ...],
) -> Callable[..., list[mx.array]]:
    """The compiled-once object of one variant, under a name that no other variant has.

    MLX looks a kernel up by name alone, so the name holds a digest of all that the code depends on: text,
    signature, template and math mode.
    """
    header, body = source.assemble(kernel, backend)
    given = [buffer.name for buffer, dtype in zip(kernel.inputs, input_dtypes, strict=True) if dtype]
    absent = [buffer.name for buffer in kernel.inputs if buffer.name not in given]
    body = "".join(f"LILY_ABSENT({name});\n" for name in absent) + body
    buffers = [buffer.name for buffer in kernel.inputs + kernel.outputs]
    identity = repr((header, body, kernel.math_mode, buffers, input_dtypes, template, output_dtypes))
    name = f"lily_{kernel.stem}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    description: dict[str, Any] = {
        "name": name,
        "input_names": given,
        "output_names": [buffer.name for buffer in kernel.outputs],
        "header": header,
        "source": body,
    }
    if backend == "cuda":
        from . import cuda

        dtypes = [dtype for dtype in input_dtypes if dtype]
        return cuda.build(description, dtypes, output_dtypes, dict(template))
    if backend == "host":
        from . import host

        return host.metal_kernel(**description, compile_options={"math_mode": kernel.math_mode})
    from . import metal

    return metal.build(description, kernel.math_mode)
