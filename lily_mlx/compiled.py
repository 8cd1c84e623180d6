"""What the compiled steps share: functions that MLX compiles, and noticing that a model has changed."""

from __future__ import annotations

import io
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from .counters import counts

_END = object()


class Compiled:
    """A function of arrays that MLX compiles for each set of shapes; each call counts its kernel launches.

    With several sets of shapes in use the launches counted are those of the one compiled last.

    Args:
        function: takes arrays and returns them; weights it uses are constants.
        traced: called after each trace.
    """

    def __init__(self, function: Callable[..., Any], traced: Callable[[], None] = lambda: None) -> None:
        self._function = function
        self._traced = traced
        self._launches: Counter[str] = Counter()
        self._run = mx.compile(self._trace)

    def __call__(self, *arrays: mx.array) -> Any:
        results = self._run(*arrays)
        counts.update(self._launches)
        return results

    def _trace(self, *arrays: mx.array) -> Any:
        # Kernels count themselves when Python calls them: here, for every run to come.
        before = Counter(counts)
        results = self._function(*arrays)
        self._launches = counts - before
        counts.subtract(self._launches)
        self._traced()
        return results


def why_not_constants(module: nn.Module) -> str | None:
    """None if a compiled function may take the module's arrays as constants, else the reason.

    They are computed for that: what is not would be computed in each run. What a gradient or another
    transformation is taken of keeps its graph even then; as a constant it would have a gradient of zero.
    """
    leaves: Any = tree_flatten(module.parameters())
    arrays = [array for _, array in leaves]
    graph = io.StringIO()
    try:
        mx.eval(arrays)
        mx.export_to_dot(graph, *arrays)
    except ValueError:  # of a transformation that computes nothing
        graph.write("->")
    return "the weights are being transformed" if "->" in graph.getvalue() else None


class Snapshot:
    """The modules and arrays that a module tree holds, to be compared with what it holds later.

    Nothing until the first :meth:`take` or :meth:`renew`.

    Args:
        root: a module.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._holders: list[Iterable[Any]] = []
        self._held: list[Any] = []

    def take(self) -> None:
        """Remember what the tree holds now."""
        # Views of dicts show later changes. The end mark is in its place only while nothing comes or goes.
        self._holders = [*map(_values, _holders(self._root)), (_END,)]
        self._held = list(chain.from_iterable(self._holders))

    def renew(self) -> bool:
        """Take again unless the tree still holds the very same objects; returns whether it was taken."""
        if self._held and all(map(operator.is_, chain.from_iterable(self._holders), self._held)):
            return False
        self.take()
        return True


def _holders(root: Any) -> Iterator[Any]:
    """The dicts (a module is one) and lists of a module tree."""
    yield root
    for held in _values(root):
        if isinstance(held, (dict, list)):
            yield from _holders(held)


def _values(holder: Any) -> Iterable[Any]:
    return holder.values() if isinstance(holder, dict) else holder
