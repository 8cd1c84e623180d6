"""What the ops over common/tile_product.h share: limits, threadgroup memory, and the routing they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import MAX_THREADGROUP_BYTES
from ..tiles import choose
from .packed import ACTIVATION_DTYPES

COLUMN_STEP = 64
"""Columns of the left operand in the smallest step of the sum."""

MAX_CHUNKS = 2**32
"""The kernels count the left operand in chunks of 8 elements, in 32 bits."""


def step(dtype: mx.Dtype, columns: int, tile: Mapping[str, int]) -> int:
    """The tile's ``step``, or the smallest where columns are no multiple of it or a buffer does not fit."""
    fits = columns % tile["step"] == 0 and tile["rows"] * tile["step"] * dtype.size <= MAX_THREADGROUP_BYTES
    return tile["step"] if fits else COLUMN_STEP


def tile_memory(template: Mapping[str, Any]) -> int:
    """Bytes of threadgroup memory: two buffers for the left operand if 32 KB hold them, else one."""
    one: int = template["ROWS"] * template["STEP"] * template["InT"].size
    return 2 * one if 2 * one <= MAX_THREADGROUP_BYTES else one


def why_no_product(name: str, left: mx.array) -> str | None:
    """None if the array can be the left operand, else the reason."""
    if left.dtype not in ACTIVATION_DTYPES:
        return f"{name} is {left.dtype}"
    if left.size == 0:
        return f"{name} has shape {left.shape}, no vector"
    if left.shape[-1] % COLUMN_STEP:
        return f"{name} has vectors of {left.shape[-1]}, not a multiple of {COLUMN_STEP}"
    if left.size // 8 > MAX_CHUNKS:
        return f"{name} has shape {left.shape}, over {8 * MAX_CHUNKS} elements"
    return None


def why_not_routed(rows: mx.array, blocks: mx.array, count: mx.array, assignments: int) -> str | None:
    """None if the three arrays of a routing fit ``assignments`` grouped rows, else the reason."""
    for name, array in (("rows", rows), ("blocks", blocks), ("count", count)):
        if array.dtype != mx.int32:
            return f"{name} is {array.dtype}, not int32"
    if rows.shape != (assignments,):
        return f"rows have shape {rows.shape}, not ({assignments},)"
    if blocks.ndim != 2 or blocks.shape[1] != 4 or blocks.shape[0] < 1 or count.shape != (8,):
        return f"blocks have shape {blocks.shape} and count {count.shape}, not [blocks, 4] and [8]"
    return None


def blocks_of(groups: Sequence[Sequence[int]], block_rows: int) -> tuple[mx.array, mx.array]:
    """``blocks`` and ``count`` of a routing, from the expert, first grouped row and rows of each group."""
    blocks = [
        (expert, first + start, min(block_rows, rows - start), 0)
        for expert, first, rows in groups
        for start in range(0, rows, block_rows)
    ]
    return mx.array(blocks, dtype=mx.int32), mx.array([len(blocks), *[0] * 7], dtype=mx.int32)


def used_blocks(blocks: mx.array, count: mx.array) -> list[tuple[int, int, int]]:
    """The blocks of a routing that are used, read back: (expert, first grouped row, rows) of each."""
    used: Any = count[0].item()
    values: Any = blocks[:used].tolist()
    return [(expert, first, rows) for expert, first, rows, _ in values]


def grouped_tile(tokens: int, top_k: int, experts: int, backend: str | None = None) -> Mapping[str, int]:
    """The tile of expert_gemm_gate_up for a load; its ``rows`` are the block size to route for.

    Args:
        tokens, top_k, experts: T, the experts chosen for each token, and E.
        backend: by default the one in use.
    """
    chip = backends.chip(backend or backends.resolve())
    return choose("expert_gemm_gate_up", chip, load=tokens * top_k // experts)
