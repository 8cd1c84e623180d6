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
    """A quantised matrix, or one matrix for each expert."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

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
