"""Affine-quantised matrices as the decode kernels take them.

MLX's layout: ``weight`` [..., N, K * bits / 32] uint32, numbers from the low bits on; ``scales`` and
``biases`` [..., N, K / group_size]; w = scale * q + bias. The leading axis, if there is one, counts experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


class Packed(NamedTuple):
    """A quantised matrix, or one matrix for each expert.

    Attributes:
        weight, scales, biases: MLX's three arrays.
        bits, group_size: MLX's.
        buffer: None, or :func:`in_one_buffer` of the three, which then may be views of it.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int
    buffer: mx.array | None = None

    def in_one(self) -> mx.array:
        """The buffer that decode kernels take; where there is none it is made, at the price of a copy."""
        if self.buffer is not None:
            return self.buffer
        return in_one_buffer([self.weight, self.scales, self.biases])

    @classmethod
    def of(cls, layer: Any) -> Packed:
        """The matrix of a ``QuantizedLinear`` or ``QuantizedSwitchLinear``."""
        return cls(layer.weight, layer.scales, layer.biases, layer.bits, layer.group_size)

    @property
    def rows(self) -> int:
        """N, of one expert."""
        return self.weight.shape[-2]

    @property
    def columns(self) -> int:
        """K."""
        return self.weight.shape[-1] * 32 // self.bits

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes + self.biases.nbytes

    def dequantised(self, experts: mx.array | None = None) -> mx.array:
        """The numbers [..., N, K] in float32, of some experts only if ``experts`` [K] is given."""
        parts = (self.weight, self.scales, self.biases)
        weight, scales, biases = parts if experts is None else (part[experts] for part in parts)
        return mx.dequantize(
            weight, scales.astype(mx.float32), biases.astype(mx.float32), self.group_size, self.bits
        )


PART_BYTES = 16
"""Where the parts of a buffer begin: at multiples of it, as loads of 16 bytes want."""


def in_one_buffer(arrays: Sequence[mx.array]) -> mx.array:
    """The bytes of arrays behind one another as uint32 [words], each from a multiple of PART_BYTES on."""
    parts = []
    for array in arrays:
        flat = array.reshape(-1)
        if missing := -array.nbytes % PART_BYTES:
            flat = mx.concatenate([flat, mx.zeros((missing // array.dtype.size,), array.dtype)])
        parts.append(flat.view(mx.uint32))
    return mx.concatenate(parts)


def part_views(buffer: mx.array, arrays: Sequence[mx.array]) -> list[mx.array]:
    """Views of :func:`in_one_buffer` that show what the arrays show, flat.

    Args:
        buffer: made of ``arrays``.
        arrays: for their sizes and dtypes.
    """
    views, start = [], 0
    for array in arrays:
        words = -(-array.nbytes // PART_BYTES) * PART_BYTES // 4
        views.append(buffer[start : start + words].view(array.dtype)[: array.size])
        start += words
    return views


def why_not(name: str, matrix: Packed, columns: int, experts: int | None = None) -> str | None:
    """None if a decode kernel takes the matrix, else the reason.

    Args:
        name: for the reason.
        matrix: [N, K], or [E, N, K] if ``experts`` is given.
        columns: the K expected.
        experts: the E expected.
    """
    if matrix.bits not in BITS:
        return f"{name} has {matrix.bits} bits"
    if matrix.group_size not in GROUP_SIZES:
        return f"{name} has groups of {matrix.group_size}"
    if matrix.biases is None:
        return f"{name} is not affine"
    if matrix.weight.dtype != mx.uint32:
        return f"{name} is {matrix.weight.dtype}, not uint32"
    if matrix.columns != columns:
        return f"{name} has {matrix.columns} columns, not {columns}"
    leading = () if experts is None else (experts,)
    if matrix.weight.shape[:-2] != leading or matrix.weight.ndim != len(leading) + 2:
        return f"{name} has shape {matrix.weight.shape}"
    groups = (*leading, matrix.rows, columns // matrix.group_size)
    if matrix.scales.shape != groups or matrix.biases.shape != groups or columns % matrix.group_size:
        return f"{name}: scales {matrix.scales.shape} and biases {matrix.biases.shape}, not {groups}"
    if matrix.scales.dtype not in ACTIVATION_DTYPES or matrix.biases.dtype != matrix.scales.dtype:
        return f"{name}: scales are {matrix.scales.dtype}, biases {matrix.biases.dtype}"
    return None


def why_mixed(matrices: Sequence[Packed]) -> str | None:
    """None if the matrices agree in group size and in the dtype of scales, else the reason."""
    if len(sizes := {matrix.group_size for matrix in matrices}) > 1:
        return f"the group sizes differ: {sorted(sizes)}"
    if len(dtypes := {str(matrix.scales.dtype) for matrix in matrices}) > 1:
        return f"the dtypes of scales differ: {sorted(dtypes)}"
    return None


def float_bits(value: float) -> int:
    """The bits of a float32, as a template parameter carries them."""
    return int(np.float32(value).view(np.int32))


@lru_cache
def eps_parameter(eps: float) -> mx.array:
    """The ``parameters`` of a kernel that normalises: the bits of eps, in float32, first."""
    bits = int(np.float32(eps).view(np.int32))
    return mx.array([bits, 0, 0, 0, 0, 0, 0, 0], dtype=mx.int32)


def shared_vector_bytes(columns: int, simdgroups: int) -> int:
    """Bytes of ``lily_shared_vector`` of common/packed_rows.h."""
    floats = columns // 32 * 36 + columns // 4 + 4 + simdgroups
    return -(-floats // 4) * 4 * 4


def lanes_per_row(columns: int, bits: int) -> int:
    """Lanes that share a row: the largest power of two up to 32 that divides its 16-byte loads."""
    loads = columns * bits // 128
    return min(32, loads & -loads)
