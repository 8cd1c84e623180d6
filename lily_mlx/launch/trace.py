"""The primitives of a function as Metal would run them, on a machine without Metal.

``mx.export_function`` hands out the graph that MLX recorded for a function, custom Metal kernels with their
complete source included. On its own that graph is not what a Mac runs: functions compiled with ``mx.compile``
arrive as their separate primitives, ``mx.fast`` operations as the ops a CPU falls back to, and code that asks
for the device takes its CPU branch. :func:`primitives` corrects all three and prices every primitive by the
rules of :mod:`lily_mlx.launch.metal_costs`.

Limits: MLX's export merges equal subexpressions over the whole graph, which an eager run does not. An array
that is captured by the function and not evaluated yet counts as work of the function: evaluate weights first,
or pass them as inputs (inputs need no data). The export does not say whether a custom kernel was called with
``init_value``, which costs a fill an output. A function compiled with ``shapeless=True`` holds broadcasts
that are not in the export; they count towards MLX's limit of depth, so a deep one may split earlier.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import importlib.util
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..errors import LilyError
from ..settings import BACKENDS
from . import backend
from .metal_costs import BINARY, TERNARY, UNARY, Array, Costing, Node

__all__ = ["Array", "Primitive", "Summary", "TraceError", "as_on_metal", "primitives", "summary"]

# MLX's limits on one fused kernel.
MAX_FUSED_DEPTH = 11
MAX_FUSED_ARRAYS = 24

_FUSABLE = UNARY | BINARY | TERNARY | {"Broadcast"}
_MARK = re.compile(r"custom_kernel_lily_trace_(\d+)_")
_COMPILED_FUNCTION = type(mx.compile(lambda: None))


class TraceError(LilyError):
    """The function holds something that MLX cannot export."""


@dataclass(frozen=True)
class Primitive:
    """One primitive as Metal runs it.

    Attributes:
        name: MLX's name of it; ``Compiled`` for a fused group; a custom kernel's name as MLX specialised it.
        inputs, outputs: arrays with name, shape, dtype. Equal names are the same array.
        dispatches: kernel launches; 0 for a view.
        stages: launches of it that wait for one another.
        grid, threadgroup: threads a launch, custom kernels only.
        source: complete Metal source with the signature, custom kernels only.
        fused: the primitives inside a fused group.
        bytes_read, bytes_written: memory traffic, each input once, of a gather only the selected rows.
        why: the rule behind the numbers.
    """

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    dispatches: int
    stages: int
    grid: tuple[int, int, int] | None
    threadgroup: tuple[int, int, int] | None
    source: str | None
    fused: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    why: str


@dataclass(frozen=True)
class Summary:
    """Totals of a trace.

    Attributes:
        primitives: primitives that launch at least one kernel.
        dispatches: kernel launches.
        stages: launches on the longest chain of dependent ones.
        chain: primitives on the longest chain, each counted once.
        bytes_read, bytes_written: memory traffic.
        by_name: launches of each primitive, most first.
    """

    primitives: int
    dispatches: int
    stages: int
    chain: int
    bytes_read: int
    bytes_written: int
    by_name: dict[str, int]


def primitives(fn: Callable[..., Any], *inputs: Any) -> list[Primitive]:
    """Record ``fn(*inputs)`` and return its primitives, dependencies first, views included.

    Args:
        fn: any function of arrays, compiled or not; it runs once, on placeholders, and nothing is evaluated.
        inputs: its arguments. Arrays (also inside lists, tuples and dicts) become inputs of the graph and
            need only shape and dtype; everything else is passed as it is.

    Raises:
        TraceError: the graph holds a primitive that MLX cannot export.
    """
    nodes, outputs = _record(fn, inputs)
    costing = Costing(nodes, outputs)
    result = []
    for node in nodes:
        cost = costing.price(node)
        custom = node.name == "CustomKernel"
        result.append(
            Primitive(
                name=node.arguments["kernel"] if custom else node.name,
                inputs=tuple(node.inputs),
                outputs=tuple(node.outputs),
                dispatches=cost.dispatches,
                stages=cost.stages,
                grid=node.grid,
                threadgroup=node.threadgroup,
                source=node.source,
                fused=node.fused,
                bytes_read=cost.read,
                bytes_written=cost.written,
                why=cost.why,
            )
        )
    return result


def summary(primitives: Iterable[Primitive]) -> Summary:
    """Totals of ``primitives``, which must be in the order that :func:`primitives` returns."""
    depth: dict[str, tuple[int, int]] = {}
    stages = chain = count = dispatches = read = written = 0
    by_name: Counter[str] = Counter()
    for p in primitives:
        before = [depth.get(array.name, (0, 0)) for array in p.inputs]
        at = max((s for s, _ in before), default=0) + p.stages
        links = max((n for _, n in before), default=0) + bool(p.dispatches)
        depth.update((array.name, (at, links)) for array in p.outputs)
        stages, chain = max(stages, at), max(chain, links)
        count += bool(p.dispatches)
        dispatches += p.dispatches
        read += p.bytes_read
        written += p.bytes_written
        if p.dispatches:
            by_name[p.name] += p.dispatches
    return Summary(count, dispatches, stages, chain, read, written, dict(by_name.most_common()))


# --- Recording ----------------------------------------------------------------------------------------------


class _Recorder:
    """Leaves marks in the graph: custom kernels that stand for something the export would lose.

    A mark is a call of a custom kernel named ``lily_trace_<index>_``; what it stands for is kept in
    :attr:`marks`. Every mark also reads :attr:`anchor`, an input of the graph, so that its outputs are
    placeholders even where all its other inputs are constants.
    """

    def __init__(self) -> None:
        self.marks: list[tuple[str, Any]] = []
        self.anchor: mx.array | None = None
        self.regions = 0
        self.inside_compiled = False
        self._metal_kernel: Callable[..., Any] = mx.fast.metal_kernel

    def mark(
        self, kind: str, arguments: Any, inputs: Sequence[mx.array], outputs: Sequence[tuple[Any, mx.Dtype]]
    ) -> list[mx.array]:
        """Record ``kind`` with ``inputs``; ``outputs`` are (shape, dtype) of the arrays it returns."""
        name = f"lily_trace_{len(self.marks)}_"
        self.marks.append((kind, arguments))
        kernel: Callable[..., list[mx.array]] = self._metal_kernel(
            name=name,
            input_names=[f"in_{i}" for i in range(len(inputs) + 1)],
            output_names=[f"out_{i}" for i in range(len(outputs))],
            source="",
        )
        return kernel(
            inputs=[*inputs, self.anchor],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )

    def passing(self, kind: str, region: int, tree: Any) -> Any:
        """``tree`` with its arrays led through one mark."""
        arrays = _arrays(tree)
        if not arrays:
            return tree
        marked = iter(self.mark(kind, region, arrays, [(a.shape, a.dtype) for a in arrays]))
        return _with_arrays(tree, marked)

    def compiled(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Stand-in for ``mx.compile(fun)``: runs ``fun`` between two marks; inside another, just runs it."""

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside_compiled:
                return fun(*args, **kwargs)
            self.inside_compiled = True
            try:
                region = self.regions
                self.regions += 1
                args, kwargs = self.passing("enter", region, (args, kwargs))
                return self.passing("leave", region, fun(*args, **kwargs))
            finally:
                self.inside_compiled = False

        return call

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """While open, what the export would expand or refuse leaves a mark instead."""
        token = _recording.set(self)
        try:
            with contextlib.ExitStack() as stack:
                for module, name, stand_in in self._stand_ins():
                    stack.enter_context(_replaced(module, name, stand_in))
                stack.enter_context(self._compiled_functions_marked())
                yield
        finally:
            _recording.reset(token)

    def _stand_ins(self) -> Iterator[tuple[types.ModuleType, str, Callable[..., Any]]]:
        yield mx, "compile", functools.partial(_compile_for_any_trace, mx.compile)
        for module, name, as_mark in _MARKED_OPS:
            original = getattr(module, name)
            yield module, name, functools.partial(self._marked_op, original, as_mark)

    def _marked_op(self, original: Callable[..., Any], as_mark: _AsMark, *args: Any, **kwargs: Any) -> Any:
        """Call an MLX operation for its checks and its result's shape, and record one primitive for it."""
        result = original(*args, **kwargs)
        mark = as_mark(*args, **kwargs)
        if mark is None:
            return result
        kind, arguments, inputs = mark
        outputs = _arrays(result)
        marked = self.mark(kind, arguments, inputs, [(a.shape, a.dtype) for a in outputs])
        return _with_arrays(result, iter(marked))

    @contextlib.contextmanager
    def _compiled_functions_marked(self) -> Iterator[None]:
        """Put a marking stand-in wherever a function that is compiled already is bound.

        MLX's compiled functions cannot be told to leave a mark, and modules bind them at import, so every
        module, class, object, closure and list that holds one is given the stand-in until the trace ends.
        """
        undo: list[Callable[[], None]] = []
        functions = [o for o in gc.get_objects() if type(o) is _COMPILED_FUNCTION]
        stand_ins = {id(function): (function, self.compiled(_inner(function))) for function in functions}
        try:
            for holder in gc.get_referrers(*functions):
                if holder is not functions and type(holder) is not tuple:
                    undo += _rebind(holder, stand_ins)
            yield
        finally:
            for action in undo:
                action()


_recording: ContextVar[_Recorder | None] = ContextVar("lily_trace_recording", default=None)


def _compile_for_any_trace(
    compile_: Callable[..., Any], fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Stand-in for ``mx.compile`` while a trace runs.

    What it returns may be kept: it marks whatever trace it is called in, and outside of any it is MLX's own.
    """
    compiled = compile_(fun, *args, **kwargs)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _recording.get()
        return (recorder.compiled(fun) if recorder else compiled)(*args, **kwargs)

    return call


def _arrays(tree: Any) -> list[mx.array]:
    found: list[mx.array] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, mx.array) else None, tree)
    return found


def _with_arrays(tree: Any, arrays: Iterator[mx.array]) -> Any:
    return tree_map(lambda leaf: next(arrays) if isinstance(leaf, mx.array) else leaf, tree)


def _record(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[list[Node], frozenset[str]]:
    events: list[dict[str, Any]] = []
    recorder = _Recorder()

    def traced(anchor: mx.array, *arrays: mx.array) -> list[mx.array]:
        recorder.anchor = anchor
        function = recorder.compiled(_inner(fn)) if isinstance(fn, _COMPILED_FUNCTION) else fn
        return _arrays(function(*_with_arrays(inputs, iter(arrays))))

    with as_on_metal(), recorder.installed():
        try:
            mx.export_function(events.append, traced, mx.array(0), *_arrays(inputs))
        except ValueError as error:
            raise TraceError(f"the graph cannot be exported: {error}") from error
    outputs = [name for event in events if event["type"] == "outputs" for name, *_ in event["outputs"]]
    nodes = [_node(event, recorder.marks) for event in events if event["type"] == "primitive"]
    return _Graph(nodes).resolve(outputs)


def _node(event: dict[str, Any], marks: Sequence[tuple[str, Any]]) -> Node:
    inputs = [Array(name, tuple(shape), dtype) for name, shape, dtype in event["inputs"]]
    outputs = [Array(name, tuple(shape), dtype) for name, shape, dtype in event["outputs"]]
    name, arguments = event["name"], event["arguments"]
    if name != "CustomKernel":
        return Node(name, inputs, outputs, arguments)
    kernel, source, gx, gy, gz, tx, ty, tz, _, ensure_row_contiguous, *_ = arguments
    if match := _MARK.match(kernel):
        kind, arguments = marks[int(match[1])]
        return Node(kind, inputs[:-1], outputs, arguments)
    arguments = {
        "kernel": kernel.removeprefix("custom_kernel_"),
        "ensure_row_contiguous": ensure_row_contiguous,
    }
    return Node(name, inputs, outputs, arguments, (gx, gy, gz), (tx, ty, tz), source)


# --- What MLX does on Metal that its export loses -----------------------------------------------------------

_AsMark = Callable[..., tuple[str, Any, list[mx.array]] | None]


def _contiguous(a: mx.array, allow_col_major: bool = False, **_: Any) -> tuple[str, Any, list[mx.array]]:
    return "Contiguous", {"allow_col_major": allow_col_major}, [a]


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> tuple[str, Any, list[mx.array]]:
    return "RMSNorm", {"eps": eps}, _common_dtype(x, weight)


def _layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **_: Any
) -> tuple[str, Any, list[mx.array]]:
    return "LayerNorm", {"eps": eps}, _common_dtype(x, weight, bias)


def _common_dtype(*arrays: mx.array | None) -> list[mx.array]:
    """The arrays that are there, cast to their common dtype as MLX casts them before the kernel."""
    present = [a for a in arrays if a is not None]
    dtype = functools.reduce(mx.result_type, present[1:], present[0].dtype)
    return [a.astype(dtype) for a in present]


def _rope(
    a: mx.array, dims: int, *, offset: int | mx.array, freqs: mx.array | None = None, **_: Any
) -> tuple[str, Any, list[mx.array]]:
    where = offset if isinstance(offset, mx.array) else mx.array(offset, mx.int32)
    if where.dtype.size != 4:
        where = where.astype(mx.int32)
    return "RoPE", {"dims": dims}, [a, where, *([] if freqs is None else [freqs])]


def _attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
    force_fused: bool = False,
    **_: Any,
) -> tuple[str, Any, list[mx.array]] | None:
    """Fused only for the sizes of MLX's kernels; otherwise None, and MLX's own expansion stands."""
    length, keys, width = q.shape[2], k.shape[2], q.shape[3]
    if length > 8:
        supported = width == v.shape[3] and width in (64, 72, 80, 96, 128)
        supported &= mask != "causal" if isinstance(mask, str) and length > keys else True
    else:
        supported = width == v.shape[3] and width in (64, 96, 128, 256) and length <= keys
        supported &= length * (q.shape[1] // k.shape[1]) <= 32
    if not (supported or force_fused):
        return None
    inputs = _common_dtype(q, k, v)
    if isinstance(mask, mx.array):
        inputs.append(mx.broadcast_to(mask, (q.shape[0], q.shape[1], length, keys)))
    return "ScaledDotProductAttention", {"scale": scale}, inputs + ([] if sinks is None else [sinks])


def _cross_entropy(logits: mx.array, targets: mx.array, **_: Any) -> tuple[str, Any, list[mx.array]]:
    return "CrossEntropy", {}, [logits, targets]


def _gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gamma: mx.array,
    beta: mx.array,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    **_: Any,
) -> tuple[str, Any, list[mx.array]] | None:
    """MLX's kernel exists for head size 128 and these head counts, without a mask."""
    heads = (k.shape[2], v.shape[2])
    known = {(16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32)}
    if mask is not None or k.shape[3] != 128 or v.shape[3] != 128 or heads not in known:
        return None
    return "GatedDeltaUpdate", {}, [q, k, v, gamma, beta, *([] if initial_state is None else [initial_state])]


def _dequantize(
    w: mx.array, /, scales: mx.array, biases: mx.array | None = None, *_: Any, **__: Any
) -> tuple[str, Any, list[mx.array]]:
    return "Dequantize", {}, [w, scales, *([] if biases is None else [biases])]


_MARKED_OPS: tuple[tuple[Any, str, _AsMark], ...] = (
    (mx, "contiguous", _contiguous),
    (mx, "dequantize", _dequantize),
    (mx.fast, "cross_entropy", _cross_entropy),
    (mx.fast, "gated_delta_update", _gated_delta_update),
    (mx.fast, "layer_norm", _layer_norm),
    (mx.fast, "rms_norm", _rms_norm),
    (mx.fast, "rope", _rope),
    (mx.fast, "scaled_dot_product_attention", _attention),
)


@contextlib.contextmanager
def as_on_metal() -> Iterator[None]:
    """While open, Python code that asks MLX for the device takes its Metal branch.

    ``mx.metal.is_available()`` is true, ``mx.cuda.is_available()`` false and ``mx.default_device()`` the GPU;
    ``mx.default_stream()`` of any device is the stream that this machine uses.
    Modules of mlx-lm that build kernels at import, and bound None instead without Metal, get the kernels.

    Lily's own :func:`~lily_mlx.launch.backend.available` keeps saying what this machine has, so that nothing
    of Lily's asks a device for its name or tries a kernel on it.

    Kernels cannot run here without Metal: calling one outside a trace raises.
    """
    here = {name: backend.available(name) for name in BACKENDS if name != "auto"}
    stream = mx.default_stream(mx.default_device())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(mx, "default_stream", lambda device: stream))
        stack.enter_context(_replaced(backend, "available", here.__getitem__))
        stack.enter_context(_replaced(mx.metal, "is_available", lambda: True))
        stack.enter_context(_replaced(mx.cuda, "is_available", lambda: False))
        stack.enter_context(_replaced(mx, "default_device", lambda: mx.Device(mx.gpu, 0)))
        for module in [m for name, m in sys.modules.items() if name.startswith("mlx_lm.")]:
            for name, value in _kernels_built_at_import(module):
                stack.enter_context(_replaced(module, name, value))
        yield


@functools.cache
def _kernels_built_at_import(module: types.ModuleType) -> list[tuple[str, Any]]:
    """(name, value) of globals that are None here but not where Metal is, from executing the module again."""
    missing = [name for name, value in vars(module).items() if value is None and not name.startswith("__")]
    spec = module.__spec__
    if not missing or spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        return []
    if "metal.is_available" not in (spec.loader.get_source(spec.name) or ""):
        return []
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    built = [(name, vars(again).get(name)) for name in missing]
    return [(name, value) for name, value in built if value is not None]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _inner(function: Any) -> Callable[..., Any]:
    """The Python function inside a compiled one; only the garbage collector's view of it leads there."""
    return [o for o in gc.get_referents(function) if callable(o) and not isinstance(o, type)][-1]


def _rebind(holder: Any, new: Mapping[int, tuple[Any, Any]]) -> list[Callable[[], None]]:
    """Replace what ``holder`` holds by ``new``, (old, stand-in) by identity; returns what undoes it."""
    put: Callable[[Any, Any], None]
    if isinstance(holder, types.CellType):
        places: list[tuple[Any, Any]] = [("cell_contents", holder.cell_contents)]
        put = functools.partial(setattr, holder)
    elif isinstance(holder, list):
        places, put = list(enumerate(holder)), holder.__setitem__
    elif isinstance(holder, dict):
        owner = next((t for t in gc.get_referrers(holder) if isinstance(t, type)), None)
        # A class's attributes are set through the class, which caches them.
        places, put = (
            list(holder.items()),
            holder.__setitem__ if owner is None else functools.partial(setattr, owner),
        )
    else:  # an object whose attributes have no dictionary of their own yet
        places, put = list(getattr(holder, "__dict__", {}).items()), functools.partial(setattr, holder)
    undo: list[Callable[[], None]] = []
    for place, value in places:
        old, stand_in = new.get(id(value), (None, None))
        if old is value and old is not None:
            put(place, stand_in)
            undo.append(functools.partial(put, place, old))
    return undo


# --- From the exported graph to what runs -------------------------------------------------------------------


class _Graph:
    """The exported nodes; :meth:`resolve` fuses compiled regions and removes the marks."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.producer = {array.name: node for node in nodes for array in node.outputs}

    def resolve(self, outputs: Sequence[str]) -> tuple[list[Node], frozenset[str]]:
        """(nodes in dependency order, names of the outputs)."""
        for mark in [node for node in self.nodes if node.name == "leave"]:
            self._fuse_region(mark)
        alias = {
            out.name: array
            for node in self.nodes
            if node.name in ("enter", "leave")
            for array, out in zip(node.inputs, node.outputs, strict=True)
        }

        def resolved(array: Array) -> Array:
            while array.name in alias:
                array = alias[array.name]
            return array

        for node in {id(node): node for node in self.producer.values()}.values():
            node.inputs = [resolved(array) for array in node.inputs]
        kept = [resolved(alias[name]).name if name in alias else name for name in outputs]
        return self._before(kept, stop=set()), frozenset(kept)

    def _before(self, names: Sequence[str], stop: set[int]) -> list[Node]:
        """Nodes that ``names`` depend on, dependencies first; ``stop`` holds ids of nodes not to enter."""
        done, order = set(stop), []
        stack = [(name, False) for name in reversed(names)]
        while stack:
            name, expanded = stack.pop()
            node = self.producer.get(name)
            if node is None or id(node) in done:
                continue
            if expanded:
                done.add(id(node))
                order.append(node)
            else:
                stack.append((name, True))
                stack.extend((array.name, False) for array in reversed(node.inputs))
        return order

    def _fuse_region(self, leave: Node) -> None:
        """Replace what ran between one region's marks by the kernels that ``mx.compile`` makes of it."""
        results = list(dict.fromkeys(array.name for array in leave.inputs))
        borders = {id(node) for node in self.nodes if node.name in ("enter", "leave")}
        for node in _Fusion(self._before(results, borders), results).run():
            self.producer.update((array.name, node) for array in node.outputs)


class _Fusion:
    """MLX's kernel fusion over the primitives of one compiled function.

    MLX goes through the function from its results to its inputs. From each primitive not fused yet it walks
    up through elementwise ones as long as every consumer is in the group too; a broadcast that also serves
    others is duplicated. The walk ends at a depth, at a number of inputs, and at a result of another shape.

    Args:
        tape: the function's primitives, dependencies first.
        results: names of the arrays it returns.
    """

    def __init__(self, tape: Sequence[Node], results: Sequence[str]) -> None:
        self.tape = [replace(node, inputs=list(node.inputs)) for node in tape]
        self.results = set(results)
        self.producer = {array.name: node for node in self.tape for array in node.outputs}
        self.arrays = {a.name: a for node in self.tape for a in (*node.inputs, *node.outputs)}
        self.consumers: dict[str, list[str]] = {}
        for node in self.tape:
            for array in node.inputs:
                self.consumers.setdefault(array.name, []).extend(out.name for out in node.outputs)

    def run(self) -> list[Node]:
        """One ``Compiled`` node for each group of at least two primitives."""
        fused: set[str] = set()
        groups = []
        for node in reversed(self.tape):
            top = node.outputs[0].name
            if top in fused or node.name not in _FUSABLE or node.name == "Broadcast":
                continue
            self.top, self.group, self.edge = top, set[str](), set[str]()
            self._walk(top, 0)
            if len(self.group) > 1:
                fused |= self.group
                groups.append(self._node())
        return groups

    def _walk(self, name: str, depth: int) -> None:
        node = self.producer.get(name)
        if name in self.group:
            return
        other_shape = name in self.results and self.arrays[name].shape != self.arrays[self.top].shape
        if depth >= MAX_FUSED_DEPTH or node is None or node.name not in _FUSABLE or other_shape:
            self.edge.add(name)
            return
        if depth and any(consumer not in self.group for consumer in self.consumers[name]):
            if node.name != "Broadcast" or len(self.edge) >= MAX_FUSED_ARRAYS:
                self.edge.add(name)
                return
            name = self._duplicate(node)
        if name in self.results:
            self.edge.add(name)
        else:
            self.edge.discard(name)
        if len(self.edge) >= MAX_FUSED_ARRAYS:
            return
        self.group.add(name)
        for array in node.inputs:
            self._walk(array.name, depth + 1)

    def _duplicate(self, broadcast: Node) -> str:
        """A second broadcast for those consumers of ``broadcast`` that are in the group."""
        old = broadcast.outputs[0]
        new = replace(old, name=f"{old.name}'{len(self.arrays)}")
        self.arrays[new.name] = new
        self.producer[new.name] = replace(broadcast, outputs=[new])
        self.consumers[new.name] = [c for c in self.consumers[old.name] if c in self.group]
        self.consumers[old.name] = [c for c in self.consumers[old.name] if c not in self.group]
        for array in broadcast.inputs:
            self.consumers[array.name].append(new.name)
        for consumer in self.consumers[new.name]:
            node = self.producer[consumer]
            node.inputs = [new if array.name == old.name else array for array in node.inputs]
        return new.name

    def _node(self) -> Node:
        """The group as one node, its inputs in the order in which the walk from the top meets them."""
        inputs: dict[str, Array] = {}
        inside: dict[str, Node] = {}

        def collect(name: str) -> None:
            if name not in self.group:
                inputs.setdefault(name, self.arrays[name])
            elif name not in inside:
                node = self.producer[name]
                for array in node.inputs:
                    collect(array.name)
                inside[name] = node

        collect(self.top)
        outputs = [self.arrays[name] for name in inside if name in self.results or name == self.top]
        return Node("Compiled", list(inputs.values()), outputs, fused=tuple(n.name for n in inside.values()))
