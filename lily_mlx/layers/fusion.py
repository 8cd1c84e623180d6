"""Quantised matrices that one launch multiplies, joined in one buffer.

Every buffer of a launch costs the CPU, so a decode kernel takes one: the rows of q, k and v behind one
another, or the experts' gate and up projections and the shared expert's; first all weights, then all scales,
then all biases. The modules keep their parameters, which become views of the buffer: stock's code, saving,
LoRA and ``model.update`` work as before, and nothing is kept twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from ..ops.packed import Packed, in_one_buffer, part_views

_PARTS = ("weight", "scales", "biases")

_joined: dict[int, tuple[Packed, list[weakref.ref[mx.array]]]] = {}
"""Joined matrices and their views, by the id of the first view; gone when that view is."""


def join(modules: Sequence[nn.Module]) -> Packed | None:
    """The modules' matrices joined along their first axis, or None if they cannot be.

    A matrix [N, K] among some with experts [E, N, K] counts as one expert more. The first call copies, and
    makes the modules' parameters views of the copy; later calls find it, unless a parameter was replaced.

    Args:
        modules: quantised linear layers. Their kind is the caller's to check.
    """
    matrices = [Packed.of(module) for module in modules]
    if why_apart(matrices) is not None:
        return None
    return _find(matrices) or _join(modules, matrices)


def why_apart(matrices: Sequence[Packed]) -> str | None:
    """None if the matrices can be joined, else the reason."""
    facts: dict[str, set[Any]] = {
        "bits": {matrix.bits for matrix in matrices},
        "group size": {matrix.group_size for matrix in matrices},
        "dtype of scales": {str(matrix.scales.dtype) for matrix in matrices},
        "columns": {matrix.columns for matrix in matrices},
    }
    if max(matrix.weight.ndim for matrix in matrices) == 3:
        facts["rows"] = {matrix.rows for matrix in matrices}
    for name, values in facts.items():
        if len(values) > 1:
            return f"the matrices differ in {name}: {', '.join(sorted(map(str, values)))}"
    return None


def _find(matrices: Sequence[Packed]) -> Packed | None:
    arrays = _arrays(matrices)
    if (found := _joined.get(id(arrays[0]))) is None:
        return None
    packed, views = found
    # Ids alone do not tell: a dead array's id may be a new one's.
    same = len(views) == len(arrays) and all(view() is a for view, a in zip(views, arrays, strict=True))
    return packed if same else None


def _join(modules: Sequence[nn.Module], matrices: Sequence[Packed]) -> Packed:
    axes = max(matrix.weight.ndim for matrix in matrices)
    wholes = []
    for part in _PARTS:
        arrays = [getattr(matrix, part) for matrix in matrices]
        wholes.append(mx.concatenate([array if array.ndim == axes else array[None] for array in arrays]))
    buffer = in_one_buffer(wholes)
    mx.eval(buffer)
    joined = []
    for part, whole, flat in zip(_PARTS, wholes, part_views(buffer, wholes), strict=True):
        view = flat.reshape(whole.shape)
        start = 0
        for module, matrix in zip(modules, matrices, strict=True):
            count = matrix.weight.shape[0] if matrix.weight.ndim == axes else 1
            own = view[start : start + count]
            module[part] = own if matrix.weight.ndim == axes else own[0]
            mx.eval(module[part])
            start += count
        joined.append(view)
    mx.eval(joined)
    weight, scales, biases = joined
    packed = Packed(weight, scales, biases, matrices[0].bits, matrices[0].group_size, buffer)
    views = _arrays([Packed.of(module) for module in modules])
    key = id(views[0])
    _joined[key] = (packed, [weakref.ref(view) for view in views])
    weakref.finalize(views[0], _joined.pop, key, None)
    return packed


def _arrays(matrices: Sequence[Packed]) -> list[mx.array]:
    return [array for matrix in matrices for array in matrix[:3]]
