"""The experts' results of each token, weighted and summed, with the residual.

    out[t] = residual[t] + sum over s of weights[t, s] * y[t * (k + 1) + s]

| array | shape | dtype |
| --- | --- | --- |
| y | [T * (k + 1), H], not weighted; a token's last is the shared expert's | bfloat16, float16 or float32 |
| weights | [T, k + 1] | float32 |
| residual | [T, H] or None | bfloat16, float16 or float32 |
| out (result) | [T, H] | as residual, without one as y |

weights come from :func:`~lily_mlx.ops.expert_route.expert_route`. Sums are float32 and
rounded once: the slots in ascending order, then the residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, Variant, declare, launch
from ..tiles import choose, of_chip
from .expert_route import MAX_TOP_K
from .packed import ACTIVATION_DTYPES
from .trust import off_reference, self_check

UNIT_BYTES = 16  # of y that a lane loads at once


def _template(y: mx.Dtype, residual: mx.Dtype | None, H: int, slots: int) -> dict[str, int | bool | mx.Dtype]:
    return {
        "InT": y,
        "OutT": residual or y,
        "H": H,
        "SLOTS": slots,
        "HAS_RESIDUAL": residual is not None,
        "UNIT": UNIT_BYTES // y.size,
    }


def _threads(
    template: Mapping[str, Any], T: int, simdgroups: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x: a lane for every unit of every token."""
    threads = 32 * simdgroups
    lanes = T * template["H"] // template["UNIT"]
    return (-(-lanes // threads) * threads, 1, 1), (threads, 1, 1)


def _variant(y: mx.Dtype, residual: mx.Dtype | None, T: int, H: int, slots: int, simdgroups: int) -> Variant:
    template = _template(y, residual, H, slots)
    return Variant(template, {"R": T * slots, "T": T}, *_threads(template, T, simdgroups))


KERNEL = declare(
    Kernel(
        stem="expert_combine",
        inputs=(
            Buffer("y", "R H", "InT"),
            Buffer("weights", "T SLOTS", "float32"),
            Buffer("residual", "T H", "OutT", optional=True),
            Buffer("sizes", "8", "int32"),
        ),
        outputs=(Buffer("out", "T H", "OutT"),),
        template=("InT", "OutT", "H", "SLOTS", "HAS_RESIDUAL", "UNIT"),
        variants=(
            _variant(mx.bfloat16, mx.bfloat16, 2048, 2048, 9, 8),
            _variant(mx.float16, mx.float32, 7, 40, 4, 2),
            _variant(mx.float32, mx.bfloat16, 7, 40, 32, 1),
        ),
    )
)


def supports(
    y: mx.array, weights: mx.array, residual: mx.array | None = None, *, backend: str | None = None
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if weights.ndim != 2 or y.ndim != 2:
        return f"weights have shape {weights.shape}, y {y.shape}; both must be matrices"
    (T, slots), H = weights.shape, y.shape[1]
    if y.shape[0] != T * slots or (residual is not None and residual.shape != (T, H)):
        added = None if residual is None else residual.shape
        return f"y {y.shape}, weights {weights.shape} and residual {added} do not belong together"
    if y.dtype not in ACTIVATION_DTYPES:
        return f"y is {y.dtype}"
    if residual is not None and residual.dtype not in ACTIVATION_DTYPES:
        return f"residual is {residual.dtype}"
    if weights.dtype != mx.float32:
        return f"weights are {weights.dtype}, not float32"
    if T < 1:
        return "no tokens"
    if not 2 <= slots <= MAX_TOP_K + 1:
        return f"{slots} rows a token; 2 to {MAX_TOP_K + 1} are possible"
    if H % 8:
        return f"H={H} is not a multiple of 8"
    return None


def expert_combine_reference(y: mx.array, weights: mx.array, residual: mx.array | None = None) -> mx.array:
    """The same in plain MLX, in float32."""
    rows = y.astype(mx.float32).reshape(*weights.shape, -1)
    out = (weights[..., None] * rows).sum(1)
    return out if residual is None else residual.astype(mx.float32) + out


@lru_cache(maxsize=256)
def _sizes(T: int) -> mx.array:
    return mx.array([T, 0, 0, 0, 0, 0, 0, 0], dtype=mx.int32)


def expert_combine(
    y: mx.array,
    weights: mx.array,
    residual: mx.array | None = None,
    *,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Combine on the GPU (or the host back-end).

    Args:
        y, weights, residual: see the module's table; :func:`supports` must answer None.
        tile: ``simdgroups`` of a threadgroup; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        out.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    backend = backend or backends.resolve()
    (T, slots), H = weights.shape, y.shape[1]
    if tile is None:
        tile = choose("expert_combine", backends.chip(backend), T=T, H=H)
    template = _template(y.dtype, None if residual is None else residual.dtype, H, slots)
    grid, threadgroup = _threads(template, T, tile["simdgroups"])
    (out,) = launch(
        KERNEL,
        [y, weights, residual, _sizes(T)],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(T, H)],
        output_dtypes=[y.dtype if residual is None else residual.dtype],
        backend=backend,
    )
    return out


@self_check("expert_combine")
def _self_check(backend: str) -> str | None:
    """Five tokens of the real width, against the reference."""
    keys = mx.random.split(mx.random.key(0), 3)
    T, H, slots = 5, 2048, 9
    y = mx.random.normal((T * slots, H), key=keys[0]).astype(mx.bfloat16)
    weights = mx.softmax(mx.random.normal((T, slots), key=keys[1]), axis=-1)
    residual = mx.random.normal((T, H), key=keys[2]).astype(mx.bfloat16)
    want = expert_combine_reference(y, weights, residual)
    for tile in of_chip("expert_combine", backends.chip(backend)):
        got = expert_combine(y, weights, residual, tile=tile, backend=backend)
        # bfloat16 rounds once, by at most 2^-8 of a value
        if off := off_reference(got, want, 2**-7):
            return f"out: {off}, with {tile}"
    return None
