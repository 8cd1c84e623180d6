"""What each MLX primitive costs on Metal: kernel launches, serial stages, bytes.

The graph that :mod:`lily_mlx.launch.trace` records says which primitives run, not how MLX's Metal back-end
runs them. That depends on memory layout (a reshape of a transposed array copies, of a plain one does not), on
who else holds a buffer (an update in place, or a copy first) and on sizes (a long sort merges, a long key
sequence is split). This module follows layouts through the graph as MLX's ``eval_gpu`` functions do and keeps
one rule a primitive, each with its reason.

What is counted:

- A launch is one compute kernel, the copies that a primitive makes of its inputs first included. A view, an
  array without elements and a scalar that the CPU writes are none. A group that ``mx.compile`` fuses is one.
- A stage is a launch that waits for another; those of one primitive that do not wait for each other (a
  concatenation's copies) are one stage. A chain counts each primitive once, however many stages it has.
- Bytes are what a primitive reads of each different input and writes, once, as if no cache held any of it:
  of a broadcast array what exists in memory, of a gather the selected rows, of an update in place the update.
  A custom kernel reads its inputs whole, but one of Lily's only the chosen of all experts' weights.
- A buffer is as large as its contents. MLX may hand out a cached one that is larger, and then copies where
  this module lets ``mx.contiguous`` share: at the sizes of Qwen3.6-35B-A3B the convolution state of a decode
  step (48 KB of 64) just fits the slack, so a Mac may launch up to one more kernel a DeltaNet layer.

Rules that depend on the GPU assume :data:`GPU_CLASS`, a Max chip of the M3 generation or later without matrix
accelerators; the vector kernels of a decode step are the same on every chip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx

from .kernel import Kernel, all_kernels

# MLX names GPU classes by one letter: g (base, Pro), s (Max), d (Ultra). On s and d attention over 1,024 keys
# and more is split in two passes.
GPU_CLASS = "s"

# Up to this much larger than its contents, a buffer is shared rather than copied (MLX: donation_extra).
SHARE_SLACK_BYTES = 16384

# Elements a thread of a reduction reads times threads of a threadgroup: above it a full reduction takes two
# passes.
ONE_PASS_REDUCE_SIZE = 4 * 1024


# The names that lily_mlx.launch.kernel gives: the stem, then a digest.
_LILY = re.compile(r"lily_(\w+?)_[0-9a-f]{16}")

# In the source that MLX writes: the buffers of the signature, the template arguments of the instance.
_SIGNATURE = re.compile(r"(\w+) \[\[buffer\(\d+\)\]\]")
_INSTANCE = re.compile(r"<([^<>]*)>;")


@dataclass(frozen=True)
class Array:
    """An array of the graph: its name there, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a packed copy."""
        return self.size * self.dtype.size


@dataclass
class Node:
    """One primitive of the recorded graph; ``arguments`` is its state as MLX exports it."""

    name: str
    inputs: list[Array]
    outputs: list[Array]
    arguments: Any = ()
    grid: tuple[int, int, int] | None = None
    threadgroup: tuple[int, int, int] | None = None
    source: str | None = None
    fused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Where an array's elements lie, as MLX's ``array::Flags`` and strides say it.

    ``owner`` names the array that allocated the buffer, ``buffer_bytes`` is the size of that allocation.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data_size: int
    contiguous: bool
    row: bool
    col: bool
    owner: str
    buffer_bytes: int

    @property
    def extent(self) -> int:
        """Elements that exist in memory: a broadcast axis counts once."""
        return math.prod(n for n, stride in zip(self.shape, self.strides, strict=True) if stride != 0)


class Cost(NamedTuple):
    """What one primitive does. ``read`` and ``written`` are bytes; ``stages`` counts launches that wait."""

    dispatches: int
    stages: int
    read: int
    written: int
    why: str


def _row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def _contiguity(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, bool, bool]:
    """(elements without broadcast axes, row-contiguous, column-contiguous)."""
    size = math.prod(n for n, stride in zip(shape, strides, strict=True) if stride > 0)
    row = col = True
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        row &= n == 1 or stride == expected
        expected *= n
    expected = 1
    for n, stride in zip(shape, strides, strict=True):
        col &= n == 1 or stride == expected
        expected *= n
    return size, row, col


def packed(array: Array) -> Layout:
    """The layout of a freshly allocated, row-contiguous array."""
    strides = _row_strides(array.shape)
    _, _, col = _contiguity(array.shape, strides)
    return Layout(array.shape, strides, array.size, True, True, col, array.name, array.nbytes)


def _collapse(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge neighbouring axes that walk memory evenly; axes of length 1 vanish."""
    out_shape: list[int] = []
    out_strides: list[int] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if out_shape and out_strides[-1] == n * stride:
            out_shape[-1] *= n
            out_strides[-1] = stride
        else:
            out_shape.append(n)
            out_strides.append(stride)
    return out_shape or [1], out_strides or [1]


@dataclass
class Costing:
    """Walks a graph in order, keeping every array's layout, and prices each node.

    Args:
        nodes: the graph in execution order.
        outputs: names of the arrays that the caller keeps.
    """

    nodes: Sequence[Node]
    outputs: frozenset[str]
    layouts: dict[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producer = {array.name: node for node in self.nodes for array in node.outputs}
        self.consumers: dict[str, int] = {}
        for node in self.nodes:
            for array in {a.name for a in node.inputs}:
                self.consumers[array] = self.consumers.get(array, 0) + 1

    def layout(self, array: Array) -> Layout:
        """Layout of ``array``; inputs and constants of the graph are row-contiguous."""
        if array.name not in self.layouts:
            self.layouts[array.name] = packed(array)
        return self.layouts[array.name]

    def donatable(self, array: Array, *, leaf: bool = False) -> bool:
        """Whether the consumer of ``array`` may overwrite its buffer: nothing else reads it or a view of it.

        ``leaf`` says what to assume of an input of the graph. A cache is rebound to the updated array before
        evaluation, so an update in place takes it over; nothing else may.
        """
        while True:
            if array.name in self.outputs or self.consumers.get(array.name, 0) != 1:
                return False
            node = self.producer.get(array.name)
            if node is None:
                return leaf
            if self.layouts[array.name].owner == array.name:
                return True
            array = next(a for a in node.inputs if self.layout(a).owner == self.layouts[array.name].owner)

    def price(self, node: Node) -> Cost:
        """Cost of ``node``; also records the layouts of its outputs."""
        if all(array.size == 0 for array in node.outputs):
            self._allocate(node)
            return Cost(0, 0, 0, 0, "nothing to compute: the outputs are empty")
        if node.name in _VIEWS:
            return self._view(node)
        cost = _RULES.get(node.name, _elementwise if node.name in ELEMENTWISE else _unknown)(self, node)
        for array in node.outputs:
            if array.name not in self.layouts:
                self.layouts[array.name] = packed(array)
        return cost

    def _allocate(self, node: Node) -> None:
        for array in node.outputs:
            self.layouts[array.name] = packed(array)

    def _view(self, node: Node) -> Cost:
        layouts = _VIEWS[node.name](self, node)
        if layouts is not None:
            for array, layout in zip(node.outputs, layouts, strict=True):
                self.layouts[array.name] = layout
            return Cost(0, 0, 0, 0, "a view: new shape and strides over the same buffer")
        self._allocate(node)
        read = self.read_bytes(node.inputs[0])
        return Cost(1, 1, read, node.outputs[0].nbytes, "these strides cannot express it: a copy")

    def read_bytes(self, array: Array) -> int:
        """Bytes of ``array`` that exist in memory: its own extent, broadcast axes counted once."""
        return self.layout(array).extent * array.dtype.size

    def cost(
        self,
        node: Node,
        why: str,
        *,
        dispatches: int = 1,
        stages: int | None = None,
        copies: Sequence[Array] = (),
        read: int | None = None,
        written: int | None = None,
    ) -> Cost:
        """A cost with MLX's preparatory ``copies`` (all of one stage, before the kernels) added."""
        if read is None:
            read = sum(self.read_bytes(a) for a in {a.name: a for a in node.inputs}.values())
        if written is None:
            written = sum(a.nbytes for a in node.outputs)
        copied = sum(a.nbytes for a in copies)
        if copies:
            why += f"; {len(copies)} input{'s' * (len(copies) > 1)} copied to be contiguous"
        return Cost(
            dispatches + len(copies),
            (dispatches if stages is None else stages) + bool(copies),
            read + copied,
            written + copied,
            why,
        )

    def not_row(self, arrays: Sequence[Array]) -> list[Array]:
        """Those of ``arrays`` that a kernel wanting row-contiguous input must copy."""
        return [a for a in arrays if not self.layout(a).row]

    def not_matrix(self, arrays: Sequence[Array]) -> list[Array]:
        """Those of ``arrays`` whose last two axes are not packed."""
        bad = []
        for array in arrays:
            layout = self.layout(array)
            expected = (array.shape[-1], 1) if len(array.shape) > 1 else (1,)
            if layout.strides[-2:] != expected:
                bad.append(array)
        return bad


# --- Views --------------------------------------------------------------------------------------------------


def _share(layout: Layout, shape: Sequence[int], strides: Sequence[int], **flags: Any) -> list[Layout]:
    return [replace(layout, shape=tuple(shape), strides=tuple(strides), **flags)]


def _broadcast(c: Costing, node: Node) -> list[Layout]:
    source, shape = c.layout(node.inputs[0]), node.outputs[0].shape
    offset = len(shape) - len(source.shape)
    strides = [0] * len(shape)
    for axis, (n, stride) in enumerate(zip(source.shape, source.strides, strict=True)):
        strides[offset + axis] = stride if n == shape[offset + axis] else 0
    same = math.prod(shape) == math.prod(source.shape)
    return _share(source, shape, strides, row=source.row and same, col=source.col and same)


def _expand_dims(c: Costing, node: Node) -> list[Layout]:
    source = c.layout(node.inputs[0])
    strides = list(source.strides)
    for axis in node.arguments[0]:
        strides.insert(axis, 1)
    return _share(source, node.outputs[0].shape, strides)


def _squeeze(c: Costing, node: Node) -> list[Layout]:
    source, dropped = c.layout(node.inputs[0]), set(node.arguments[0])
    strides = [stride for axis, stride in enumerate(source.strides) if axis not in dropped]
    return _share(source, node.outputs[0].shape, strides)


def _transpose(c: Costing, node: Node) -> list[Layout]:
    source, shape = c.layout(node.inputs[0]), node.outputs[0].shape
    strides = [source.strides[axis] for axis in node.arguments[0]]
    row, col = source.row, source.col
    if source.contiguous and source.data_size == math.prod(shape):
        _, row, col = _contiguity(shape, strides)
    return _share(source, shape, strides, row=row, col=col)


def _part(source: Layout, shape: Sequence[int], strides: Sequence[int]) -> Layout:
    """A slice of ``source``: contiguous only where no holes are left."""
    size, row, col = _contiguity(shape, strides)
    if size == 1:
        contiguous = True
    elif size == source.data_size:
        contiguous = source.contiguous
    else:
        contiguous = source.contiguous and (row or col)
    return replace(
        source,
        shape=tuple(shape),
        strides=tuple(strides),
        data_size=size,
        contiguous=contiguous,
        row=row,
        col=col,
    )


def _slice(c: Costing, node: Node) -> list[Layout]:
    source = c.layout(node.inputs[0])
    strides = [s * step for s, step in zip(source.strides, node.arguments[2], strict=True)]
    return [_part(source, node.outputs[0].shape, strides)]


def _split(c: Costing, node: Node) -> list[Layout]:
    source = c.layout(node.inputs[0])
    return [_part(source, array.shape, source.strides) for array in node.outputs]


def _reshape(c: Costing, node: Node) -> list[Layout] | None:
    """Free over row-contiguous data, or where each new axis lies in one run of evenly strided old axes."""
    source, shape = c.layout(node.inputs[0]), node.outputs[0].shape
    if source.row:
        strides = _row_strides(shape)
        return _share(source, shape, strides, col=_contiguity(shape, strides)[2])
    if not source.shape:
        return _share(source, shape, [0] * len(shape))
    left, runs = _collapse(source.shape, source.strides)
    strides_out: list[int] = []
    run = 0
    for n in shape:
        if run < len(left) and left[run] % n == 0:
            left[run] //= n
            strides_out.append(left[run] * runs[run])
            run += left[run] == 1
        elif n == 1:
            strides_out.append(strides_out[-1])
        else:
            return None
    return _share(source, shape, strides_out)


def _view_dtype(c: Costing, node: Node) -> list[Layout] | None:
    source, out = c.layout(node.inputs[0]), node.outputs[0]
    before, after = node.inputs[0].dtype.size, out.dtype.size
    narrower = after < before and source.strides[-1:] == (1,)
    if not (before == after or narrower or source.row):
        return None
    strides = tuple(s * before // after for s in source.strides[:-1]) + source.strides[-1:]
    return _share(source, out.shape, strides, data_size=source.data_size * before // after)


def _contiguous(c: Costing, node: Node) -> list[Layout] | None:
    source, out = c.layout(node.inputs[0]), node.outputs[0]
    packed_enough = source.row or (node.arguments["allow_col_major"] and source.col)
    if packed_enough and source.buffer_bytes <= out.nbytes + SHARE_SLACK_BYTES:
        return [source]
    return None


def _same(c: Costing, node: Node) -> list[Layout]:
    return [c.layout(array) for array in node.inputs[: len(node.outputs)]]


def _custom_transforms(c: Costing, node: Node) -> list[Layout]:
    return [c.layout(array) for array in node.inputs[-len(node.outputs) :]]


def _as_strided(c: Costing, node: Node) -> list[Layout]:
    source, shape, strides = c.layout(node.inputs[0]), node.arguments[0], node.arguments[1]
    size, row, col = _contiguity(shape, strides)
    data_size = size if row or col else math.prod(shape)
    return _share(source, shape, strides, data_size=data_size, contiguous=row or col, row=row, col=col)


def _host_scalar(c: Costing, node: Node) -> list[Layout]:
    return [packed(node.outputs[0])]


_VIEWS: Mapping[str, Callable[[Costing, Node], list[Layout] | None]] = {
    "AsStrided": _as_strided,
    "Broadcast": _broadcast,
    "BroadcastAxes": _broadcast,
    "Contiguous": _contiguous,
    "Copy": _same,
    "CustomTransforms": _custom_transforms,
    "Depends": _same,
    "ExpandDims": _expand_dims,
    "Flatten": _reshape,
    "NumberOfElements": _host_scalar,  # the CPU writes the number while it builds the command buffer
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "StopGradient": _same,
    "Transpose": _transpose,
    "Unflatten": _reshape,
    "View": _view_dtype,
}


# --- Kernels ------------------------------------------------------------------------------------------------


# fmt: off
UNARY = frozenset((
    "Abs", "ArcCos", "ArcCosh", "ArcSin", "ArcSinh", "ArcTan", "ArcTanh", "AsType", "BitwiseInvert", "Ceil",
    "Conjugate", "Cos", "Cosh", "Erf", "ErfInv", "Exp", "Expm1", "Floor", "Imag", "Log", "Log1p",
    "LogicalNot", "Negative", "Real", "Remainder", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt",
    "Square", "Tan", "Tanh",
))
BINARY = frozenset((
    "Add", "ArcTan2", "BitwiseBinary", "Divide", "Equal", "FloorDivide", "Greater", "GreaterEqual", "Less",
    "LessEqual", "LogAddExp", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Multiply", "NotEqual",
    "Power", "Subtract",
))
# fmt: on
TERNARY = frozenset({"Select"})
# Elementwise for launches but never part of a fused kernel.
ELEMENTWISE = UNARY | BINARY | TERNARY | {"DivMod", "ToFP8", "FromFP8"}


def _elementwise(c: Costing, node: Node) -> Cost:
    """One kernel; the output keeps the inputs' layout when they agree on one without holes."""
    layouts = [c.layout(a) for a in node.inputs]
    full = [x for x in layouts if x.data_size > 1]
    alike = full and (
        all(x.contiguous and x.row for x in full)
        or all(x.contiguous and x.col for x in full)
        or (len(full) == 1 and full[0].contiguous)
    )
    if alike:
        for array in node.outputs:
            if full[0].shape == array.shape:
                nbytes = full[0].data_size * array.dtype.size
                c.layouts[array.name] = replace(full[0], owner=array.name, buffer_bytes=nbytes)
    return c.cost(node, "one elementwise kernel")


def _compiled(c: Costing, node: Node) -> Cost:
    cost = _elementwise(c, node)
    return cost._replace(why=f"mx.compile fuses {len(node.fused)} primitives into one kernel")


def _unknown(c: Costing, node: Node) -> Cost:
    return c.cost(node, "no rule for this primitive: counted as one kernel")


def _one(why: str) -> Callable[[Costing, Node], Cost]:
    return lambda c, node: c.cost(node, why)


def _one_row(why: str) -> Callable[[Costing, Node], Cost]:
    return lambda c, node: c.cost(node, why, copies=c.not_row(node.inputs))


def _concatenate(c: Costing, node: Node) -> Cost:
    parts = [a for a in node.inputs if a.size]
    return c.cost(node, "one copy an input, all at once", dispatches=len(parts), stages=1)


def _pad(c: Costing, node: Node) -> Cost:
    return c.cost(node, "fill, then copy the input into the middle", dispatches=2)


def _gather(c: Costing, node: Node) -> Cost:
    source, indices = node.inputs[0], node.inputs[1:]
    rows = min(node.outputs[0].nbytes, c.read_bytes(source))
    read = rows + sum(c.read_bytes(a) for a in indices)
    return c.cost(node, "one kernel; only the selected rows are read", read=read)


def _overwrite(c: Costing, node: Node, why: str, *, dispatches: int = 1) -> Cost:
    """An update of a copy of input 0: the copy is left out when the buffer can be taken over."""
    target, updates = node.inputs[0], node.inputs[1:]
    source = c.layout(target)
    moved = sum(c.read_bytes(a) for a in updates)
    written = updates[0].nbytes if node.name.endswith("SliceUpdate") else updates[-1].nbytes
    in_place = source.contiguous and source.data_size == target.size
    if in_place and c.donatable(target, leaf=True):
        c.layouts[node.outputs[0].name] = source
        return c.cost(node, f"{why}, in place", dispatches=dispatches, read=moved, written=written)
    return c.cost(
        node,
        f"copy the target, which something else still needs, then {why}",
        dispatches=dispatches + 1,
        read=moved + c.read_bytes(target),
        written=written + target.nbytes,
    )


def _slice_update(c: Costing, node: Node) -> Cost:
    return _overwrite(c, node, "copy the update into the slice")


def _dynamic_slice(c: Costing, node: Node) -> Cost:
    out = node.outputs[0]
    read = out.nbytes + c.read_bytes(node.inputs[1])
    return c.cost(node, "one kernel computes the offset, one copies", dispatches=2, read=read)


def _dynamic_slice_update(c: Costing, node: Node) -> Cost:
    return _overwrite(c, node, "one kernel computes the offset, one copies the update", dispatches=2)


def _scatter(c: Costing, node: Node) -> Cost:
    return _overwrite(c, node, "one scatter kernel")


def _masked_scatter(c: Costing, node: Node) -> Cost:
    return _overwrite(c, node, "scan the mask, then scatter", dispatches=2)


def _sort(c: Costing, node: Node) -> Cost:
    """One threadgroup sorts up to 2,048 values of 4 bytes; longer rows are merged in log2 rounds."""
    array = node.inputs[0]
    n = array.shape[node.arguments[-1]]
    per_thread = 4
    threads = next((t for t in (32, 64, 128, 256) if n <= t * per_thread), 512)
    if threads == 512 and array.dtype.size > 4:
        threads = 256
    blocks = -(-n // (threads * per_thread))
    if blocks == 1:
        return c.cost(node, "one threadgroup sorts a row")
    rounds = math.ceil(math.log2(blocks))
    why = f"{blocks} blocks sorted, {rounds} rounds of partition and merge, one copy"
    return c.cost(node, why, dispatches=2 + 2 * rounds)


def _reduce(c: Costing, node: Node) -> Cost:
    array, out = node.inputs[0], node.outputs[0]
    axes = sorted(axis % len(array.shape) for axis in node.arguments[1])
    layout = c.layout(array)
    if len(axes) == len(array.shape) and layout.contiguous and layout.data_size == array.size:
        passes = 1 if array.size <= ONE_PASS_REDUCE_SIZE else 2
        return c.cost(node, f"a reduction of everything: {passes} pass", dispatches=passes)
    kept = [
        (n, s)
        for i, (n, s) in enumerate(zip(layout.shape, layout.strides, strict=True))
        if i in axes and n > 1
    ]
    if not kept:
        return c.cost(node, "one reduction kernel")
    innermost = min(stride for _, stride in kept)
    if innermost == 1 and layout.strides[axes[-1]] == 1:
        return c.cost(node, "rows are reduced in one kernel")
    copies = [] if layout.contiguous else [array]
    stride = innermost if layout.contiguous else _row_strides(array.shape)[axes[-1]]
    total = math.prod(n for n, _ in kept)
    two = (stride < 32 and total >= 1024) or (total > 256 and out.size // 32 < 1024)
    passes = 2 if total >= 32 and two else 1
    return c.cost(node, f"columns are reduced in {passes} pass", dispatches=passes, copies=copies)


def _last_axis(why: str) -> Callable[[Costing, Node], Cost]:
    """Softmax and its kin walk the last axis with stride 1 and otherwise keep the layout."""

    def rule(c: Costing, node: Node) -> Cost:
        layout = c.layout(node.inputs[0])
        fine = layout.contiguous and layout.strides[-1] == 1
        return c.cost(node, why, copies=[] if fine else node.inputs[:1])

    return rule


def _norm(c: Costing, node: Node) -> Cost:
    """Rows must follow each other without a gap; the output keeps the layout."""
    array, out = node.inputs[0], node.outputs[0]
    layout = c.layout(array)
    fine = layout.contiguous and layout.strides[-1] == 1
    if fine and len(array.shape) > 1:
        fine = layout.strides[-2] in (0, array.shape[-1]) or array.shape[-2] == 1
    if not fine:
        return c.cost(node, "one kernel, a threadgroup a row", copies=[array])
    c.layouts[out.name] = replace(layout, owner=out.name, buffer_bytes=layout.data_size * out.dtype.size)
    return c.cost(node, "one kernel, a threadgroup a row")


def _rope(c: Costing, node: Node) -> Cost:
    """Partial rotation works in place on a copy, which is free when the input's buffer can be taken over."""
    array = node.inputs[0]
    layout = c.layout(array)
    read, written = c.read_bytes(array), array.nbytes
    if node.arguments["dims"] < array.shape[-1]:
        if layout.row and c.donatable(array):
            rotated = read * node.arguments["dims"] // array.shape[-1]
            return c.cost(node, "rotates part of each head in place", read=rotated, written=rotated)
        return c.cost(
            node, "copies, then rotates part of each head", dispatches=2, read=2 * read, written=2 * written
        )
    batch, length, width = array.shape[0], array.shape[-2], array.shape[-1]
    heads = math.prod(array.shape[1:-2])
    swapped = len(array.shape) == 4 and layout.strides[:3] == (length * heads * width, width, heads * width)
    flat = math.prod(array.shape[:-2]) == batch
    if layout.row or swapped or flat:
        return c.cost(node, "one kernel")
    return c.cost(
        node, "copies the strided input, then rotates", dispatches=2, read=2 * read, written=2 * written
    )


def _attention(c: Costing, node: Node) -> Cost:
    q, k, v = node.inputs[:3]
    copies = []
    if q.shape[2] > 8:
        copies = [a for a in (q, k, v) if c.layout(a).strides[-1] != 1]
        return c.cost(node, "one full attention kernel", copies=copies)
    layout = c.layout(q)
    plain = layout.row
    if not plain and 1 in q.shape[:2]:
        other = 1 if q.shape[0] == 1 else 0
        plain = layout.strides[3] == 1 and layout.strides[other] == q.shape[3]
        plain &= layout.strides[2] == q.shape[3] * q.shape[other]
    if not plain:
        copies.append(q)
    for array in (k, v):
        strides = c.layout(array).strides
        split_batch = 1 not in array.shape[:2] and strides[0] != strides[1] * array.shape[1]
        if strides[-1] != 1 or split_batch:
            copies.append(array)
    keys, grouped = k.shape[2], k.shape[1] < q.shape[1]
    if (GPU_CLASS in "sd" and keys >= 1024) or (grouped and keys >= 4096):
        why = "two passes: blocks of keys, then their combination"
        return c.cost(node, why, dispatches=2, copies=copies)
    return c.cost(node, "one vector attention kernel", copies=copies)


def _matmul(c: Costing, node: Node) -> Cost:
    a, b = node.inputs[:2]
    m, k, n = a.shape[-2] if len(a.shape) > 1 else 1, a.shape[-1], b.shape[-1]
    copies = []
    for array in (a, b):
        layout = c.layout(array)
        if len(array.shape) < 2:
            continue
        rows, cols = array.shape[-2:]
        plain = layout.strides[-1] == 1 and (layout.strides[-2] == cols or rows == 1)
        turned = layout.strides[-2] == 1 and (layout.strides[-1] == rows or cols == 1)
        if not (plain or turned):
            copies.append(array)
    batch = node.outputs[0].size // (m * n)
    if batch == 1 and min(m, n) > 1 and (m // 16) * (n // 16) <= 32 and k // 16 >= 8:
        return c.cost(node, "split along K, then summed", dispatches=2, copies=copies)
    return c.cost(node, "one kernel", copies=copies)


def _vector_limit(k: int, n: int) -> int:
    """Rows from which a quantised product runs as a matrix product (GPU generation 15 and later)."""
    if k <= 2048 and n <= 2048:
        return 18
    return 12 if k <= 4096 and n <= 4096 else 10


def _quantized_matmul(c: Costing, node: Node) -> Cost:
    group, transposed = node.arguments[0], node.arguments[3]
    x, w = node.inputs[:2]
    copies = c.not_matrix(node.inputs)
    k, n = x.shape[-1], node.outputs[0].shape[-1]
    flat = len(w.shape) == 2 and c.layout(x).row
    m = x.size // k if flat else x.shape[-2]
    batch = node.outputs[0].size // (m * n)
    if m >= (_vector_limit(k, n) if transposed else 4):
        parts = max(1, 512 // (-(-n // 32) * -(-m // 32))) if transposed and batch == 1 else 1
        align = max(group, 32)
        parts = min(parts, k // align)
        while parts > 1 and k % (parts * align):
            parts -= 1
        if parts > 1:
            return c.cost(
                node, f"too few tiles: K in {parts} parts, then summed", dispatches=2, copies=copies
            )
        return c.cost(node, "one matrix kernel", copies=copies)
    if not transposed and k >= 1024:
        return c.cost(node, "vector times matrix, K split, then summed", dispatches=2, copies=copies)
    return c.cost(node, "one vector kernel", copies=copies)


def _gather_qmm(c: Costing, node: Node) -> Cost:
    """One kernel; of the experts only the selected ones are read (at most one read a distinct expert)."""
    *operands, lhs, rhs = node.inputs
    experts = operands[1].shape[0]
    chosen = min(experts, rhs.size)
    read = c.read_bytes(operands[0]) + c.read_bytes(lhs) + c.read_bytes(rhs)
    read += sum(a.nbytes * chosen // experts for a in operands[1:])
    why = f"one kernel; {chosen} of {experts} experts are read"
    return c.cost(node, why, read=read, copies=c.not_matrix(operands))


def _gather_mm(c: Costing, node: Node) -> Cost:
    a, b, lhs, rhs = node.inputs
    matrices = math.prod(b.shape[:-2])
    read = c.read_bytes(a) + c.read_bytes(lhs) + c.read_bytes(rhs)
    read += b.nbytes * min(matrices, rhs.size) // matrices
    return c.cost(node, "one kernel; only the selected matrices are read", read=read)


def _convolution(c: Costing, node: Node) -> Cost:
    kernel_stride, pad_low, pad_high, kernel_dilation, input_dilation, groups, flip = node.arguments
    x, w = node.inputs
    copies = c.not_row(node.inputs)
    channels, outs = x.shape[-1], w.shape[0]
    plain = not flip and set(kernel_dilation) == set(input_dilation) == {1}
    unpadded = set(kernel_stride) == {1} and set(pad_low) == set(pad_high) == {0}
    if len(x.shape) == 3 and groups == channels == outs and plain and unpadded:
        return c.cost(node, "one depthwise kernel", copies=copies)
    if (
        set(input_dilation) == {1}
        and groups == 1
        and (channels <= 4 or channels % 16 == 0)
        and outs % 16 == 0
    ):
        return c.cost(node, "one implicit matrix product", copies=copies)
    return c.cost(node, "unfold, then a matrix product", dispatches=2, copies=copies)


def _custom_kernel(c: Costing, node: Node) -> Cost:
    copies = c.not_row(node.inputs) if node.arguments["ensure_row_contiguous"] else []
    match = _LILY.match(node.arguments["kernel"])
    kernel = next((k for k in all_kernels() if match and k.stem == match[1]), None)
    if kernel is None:
        return c.cost(node, "a custom kernel", copies=copies)
    return c.cost(node, "a kernel of Lily's", copies=copies, read=_lily_read(c, node, kernel))


def _lily_read(c: Costing, node: Node, kernel: Kernel) -> int:
    """Bytes read: of ``matrices``, every expert's and the shared one's, those of the chosen and the shared.

    The node holds what the call passed: an optional input that it left out is in neither the signature nor
    the graph.
    """
    source = node.source or ""
    declared = {buffer.name: buffer for buffer in kernel.inputs}
    passed = [declared[name] for name in _SIGNATURE.findall(source) if name in declared]
    arrays = {array.name: (buffer, array) for buffer, array in zip(passed, node.inputs, strict=True)}
    read = {array.name: c.read_bytes(array) for _, array in arrays.values()}
    if "TOP_K" in kernel.template:
        values = _INSTANCE.findall(source)[-1].split(", ")
        template = dict(zip(kernel.template, values, strict=True))
        for buffer, array in arrays.values():
            if buffer.name == "matrices":
                read[array.name] *= int(template["TOP_K"]) + 1
                read[array.name] //= int(template["E"]) + 1
    return sum(read.values())


def _gated_delta_update(c: Costing, node: Node) -> Cost:
    return c.cost(node, "clear the output, then one scan", dispatches=2, copies=c.not_row(node.inputs))


_RULES: Mapping[str, Callable[[Costing, Node], Cost]] = {
    "AddMM": _matmul,
    "Arange": _one("one kernel"),
    "ArgPartition": _sort,  # Metal sorts where a partition is asked for
    "ArgReduce": _one("one kernel"),
    "ArgSort": _sort,
    "Compiled": _compiled,
    "Concatenate": _concatenate,
    "Convolution": _convolution,
    "CrossEntropy": _last_axis("one kernel"),
    "CustomKernel": _custom_kernel,
    "Dequantize": _one_row("one kernel"),
    "DynamicSlice": _dynamic_slice,
    "DynamicSliceUpdate": _dynamic_slice_update,
    "Full": _one("a fill"),
    "GatedDeltaUpdate": _gated_delta_update,
    "Gather": _gather,
    "GatherAxis": _gather,
    "GatherMM": _gather_mm,
    "GatherQMM": _gather_qmm,
    "Hadamard": _one_row("one kernel"),
    "LayerNorm": _norm,
    "LogSumExp": _last_axis("one kernel"),
    "MaskedScatter": _masked_scatter,
    "Matmul": _matmul,
    "Pad": _pad,
    "Partition": _sort,
    "Quantize": _one_row("one kernel"),
    "QuantizedMatmul": _quantized_matmul,
    "RMSNorm": _norm,
    "RandomBits": _one("one kernel"),
    "Reduce": _reduce,
    "RoPE": _rope,
    "Scan": _last_axis("one kernel"),
    "ScaledDotProductAttention": _attention,
    "Scatter": _scatter,
    "ScatterAxis": _scatter,
    "SearchSorted": _one("one kernel"),
    "SliceUpdate": _slice_update,
    "Softmax": _last_axis("one kernel, a threadgroup a row"),
    "Sort": _sort,
}
