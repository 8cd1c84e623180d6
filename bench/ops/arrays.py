"""Random arrays to time ops on, in the dtypes of Qwen3.6-35B-A3B, and how far a result is off."""

from __future__ import annotations

import math

import mlx.core as mx

from lily_mlx.ops.packed import Packed

DTYPE = mx.bfloat16
GROUP = 64
TOP_K = 8


def normal(*shape: int, dtype: mx.Dtype = DTYPE, scale: float = 1.0) -> mx.array:
    """Normally distributed numbers, computed before they are used."""
    x = (mx.random.normal(shape) * scale).astype(dtype)
    mx.eval(x)
    return x


def random_matrix(*shape: int, bits: int = 4) -> Packed:
    """A matrix whose product keeps the size of its input, made as it is stored."""
    *leading, columns = shape
    weight = mx.random.randint(-(2**31), 2**31 - 1, (*leading, columns * bits // 32)).view(mx.uint32)
    groups = (*leading, columns // GROUP)
    spread = (2**bits - 1) / math.sqrt(12)
    scales = mx.random.uniform(0.5, 1.5, groups) / (spread * math.sqrt(columns))
    scales = scales.astype(DTYPE)
    packed = Packed(weight, scales, (scales * (-(2**bits - 1) / 2)).astype(DTYPE), bits, GROUP)
    return packed._replace(buffer=packed.in_one())


def relative_error(got: mx.array, want: mx.array) -> float:
    """Largest difference relative to the largest value; infinite where there is NaN."""
    want = want.astype(mx.float32)
    difference = mx.abs(got.astype(mx.float32) - want)
    return float(mx.where(mx.isnan(difference), mx.inf, difference).max() / mx.abs(want).max())
