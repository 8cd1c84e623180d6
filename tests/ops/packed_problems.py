"""Quantised matrices for the tests of the decode kernels, and what accuracy these kernels have."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from lily_mlx.ops.packed import Packed

ACCUMULATED = 256 * 2.0**-24
"""Relative error of a sum: START_EVEN of common/packed_rows.h in units of fp32's last bit."""


def matrix(rng: np.random.Generator, *shape: int, bits: int = 4, group: int = 64, dtype=mx.float32) -> Packed:
    """A random matrix [..., N, K] whose product keeps the size of its input; ``dtype`` is of the scales."""
    values = mx.array((rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32))
    return Packed(*mx.quantize(values.astype(dtype), group, bits), bits, group)


def vector(rng: np.random.Generator, *shape: int, dtype=mx.float32) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def as_unquantised(packed: Packed, dtype: mx.Dtype) -> mx.array:
    """The numbers of a matrix rounded to ``dtype``, in float32."""
    return packed.dequantised().astype(dtype).astype(mx.float32)


def unpacked(packed: Packed) -> np.ndarray:
    """The numbers of a matrix in float64, taken apart by hand."""
    words = np.array(packed.weight)
    per_word = 32 // packed.bits
    fields = np.stack([words >> (packed.bits * i) & (2**packed.bits - 1) for i in range(per_word)], axis=-1)
    numbers = fields.reshape(*words.shape[:-1], -1).astype(np.float64)

    def spread(part: mx.array) -> np.ndarray:
        return np.repeat(np.array(part.astype(mx.float32), dtype=np.float64), packed.group_size, axis=-1)

    return numbers * spread(packed.scales) + spread(packed.biases)
