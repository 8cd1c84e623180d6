"""One comparison for every op's tests: errors against an fp32 reference, with the worst row named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

UNIT_ROUNDOFF = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
"""Largest relative error of rounding to a dtype."""


def assert_close(name: str, got: mx.array, want: mx.array, accumulated: float = 1e-5) -> None:
    """Check ``got`` against a float32 reference.

    Args:
        name: for the message.
        got: the result; its dtype sets how much of the difference is rounding of the result itself.
        want: the reference, float32.
        accumulated: error allowed before that rounding, relative to the largest value of the row (last axis).
    """
    assert got.shape == want.shape, f"{name}: shape {got.shape}, not {want.shape}"
    values = np.array(got.astype(mx.float32), dtype=np.float64)
    reference = np.array(want, dtype=np.float64)
    assert np.isfinite(values).all(), f"{name}: {np.argwhere(~np.isfinite(values))[0]} is not finite"
    scale = np.abs(reference).max(axis=-1, keepdims=True)
    bound = UNIT_ROUNDOFF[got.dtype] * np.abs(reference) + accumulated * np.maximum(scale, 1e-3)
    error = np.abs(values - reference)
    if (error > bound).any():
        worst = np.unravel_index(np.argmax(error / bound), error.shape)
        rms = np.sqrt((error**2).mean() / (reference**2).mean())
        raise AssertionError(
            f"{name}: {int((error > bound).sum())} of {error.size} elements; worst {worst}: {values[worst]} "
            f"for {reference[worst]}; max abs {error.max():.3g}, relative RMS {rms:.3g}"
        )


def with_both_widths(cases: Sequence[tuple]) -> list[tuple]:
    """Each case with float32 and, by turns, with one of the 16-bit dtypes, as its last value.

    How a kernel loads and divides its work depends on the width of a dtype alone.
    """
    return [
        (*case, dtype)
        for case, half in zip(cases, itertools.cycle((mx.bfloat16, mx.float16)), strict=False)
        for dtype in (half, mx.float32)
    ]
