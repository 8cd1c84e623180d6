"""One vector times a quantised matrix: the GEMV of decoding.

    y = W x,  with a norm  W rms_norm(x),  with a residual  residual + ...

| array | shape | dtype |
| --- | --- | --- |
| x | [..., K], one vector | bfloat16, float16 or float32 |
| matrix | :class:`~lily_mlx.ops.packed.Packed` [N, K], 4 or 8 bits | |
| norm_weight | [K] or None | bfloat16, float16 or float32 |
| residual | [..., N] or None | as x |
| y (result) | [..., N] | as x, or as asked for |

Sums are float32 and rounded once, after the residual is added. The normalised x is not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import MAX_THREADGROUP_BYTES, Buffer, Kernel, Variant, declare, launch
from ..tiles import choose, of_chip
from .packed import (
    ACTIVATION_DTYPES,
    Packed,
    float_bits,
    lanes_per_row,
    shared_vector_bytes,
    why_not,
)
from .trust import off_reference, paired, self_check

MAX_SIMDGROUPS = 32


def _template(
    x: mx.Dtype,
    y: mx.Dtype,
    scales: mx.Dtype,
    norm: mx.Dtype | None,
    N: int,
    K: int,
    group_size: int,
    bits: int,
    eps: float,
    has_residual: bool,
    tile: Mapping[str, int],
) -> dict[str, int | bool | mx.Dtype]:
    rows = tile["rows"]
    while rows > N:
        rows //= 2
    return {
        "InT": x,
        "OutT": y,
        "ScaleT": scales,
        "NormT": norm or x,
        "N": N,
        "K": K,
        "GROUP": group_size,
        "BITS": bits,
        "EPS_BITS": float_bits(eps) if norm else 0,
        "HAS_NORM": norm is not None,
        "HAS_RESIDUAL": has_residual,
        "ROWS": rows,
        "REPEAT": tile["repeat"],
        "AHEAD": tile["ahead"],
        "SIMDGROUPS": tile["simdgroups"],
    }


def _threads(template: Mapping[str, Any]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x."""
    block = 32 // lanes_per_row(template["K"], template["BITS"]) * template["ROWS"] * template["REPEAT"]
    threadgroups = -(-template["N"] // (block * template["SIMDGROUPS"]))
    threads = 32 * template["SIMDGROUPS"]
    return (threadgroups * threads, 1, 1), (threads, 1, 1)


def _variant(
    dtypes: Sequence[mx.Dtype],
    N: int,
    K: int,
    group_size: int,
    bits: int,
    tile: Mapping[str, int],
    *,
    has_norm: bool = False,
    has_residual: bool = False,
) -> Variant:
    x, y, scales = dtypes
    template = _template(
        x, y, scales, x if has_norm else None, N, K, group_size, bits, 1e-6, has_residual, tile
    )
    return Variant(template, {}, *_threads(template))


_TILE = {"rows": 4, "repeat": 1, "ahead": 2, "simdgroups": 8}
_BF16 = (mx.bfloat16, mx.bfloat16, mx.bfloat16)

KERNEL = declare(
    Kernel(
        stem="qmv",
        inputs=(
            Buffer("x", "*", "InT"),
            Buffer("matrix", "*", "uint32"),
            Buffer("norm_weight", "K", "NormT", optional=True),
            Buffer("residual", "*", "InT", optional=True),
        ),
        outputs=(Buffer("y", "*", "OutT"),),
        template=tuple(
            _template(*_BF16, None, 8, 64, 64, 4, 0.0, False, _TILE)  # any call has every name, in order
        ),
        variants=(
            _variant(_BF16, 12352, 2048, 64, 4, _TILE, has_norm=True),
            _variant(_BF16, 2048, 4096, 64, 4, _TILE, has_residual=True),
            _variant((mx.bfloat16, mx.float32, mx.bfloat16), 257, 2048, 64, 8, _TILE, has_norm=True),
            _variant((mx.float16, mx.float16, mx.float32), 40, 96, 32, 4, _TILE, has_residual=True),
        ),
        threadgroup_bytes=lambda template: shared_vector_bytes(template["K"], template["SIMDGROUPS"]),
    )
)


def supports(
    x: mx.array,
    matrix: Packed,
    *,
    norm_weight: mx.array | None = None,
    residual: mx.array | None = None,
    out_dtype: mx.Dtype | None = None,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    K = x.shape[-1]
    if x.size != K:
        return f"x has shape {x.shape}, more than one vector"
    if x.dtype not in ACTIVATION_DTYPES:
        return f"x is {x.dtype}"
    if out_dtype is not None and out_dtype not in ACTIVATION_DTYPES:
        return f"the result cannot be {out_dtype}"
    if K % 32:
        return f"K={K} is not a multiple of 32"
    if shared_vector_bytes(K, MAX_SIMDGROUPS) > MAX_THREADGROUP_BYTES:
        return f"K={K} does not fit into threadgroup memory"
    if reason := why_not("the matrix", matrix, K):
        return reason
    if norm_weight is not None and (norm_weight.shape != (K,) or norm_weight.dtype not in ACTIVATION_DTYPES):
        return f"norm_weight is {norm_weight.dtype} {norm_weight.shape}, not [{K}]"
    if residual is not None and (residual.size != matrix.rows or residual.dtype != x.dtype):
        return f"residual is {residual.dtype} {residual.shape}, not {matrix.rows} values of {x.dtype}"
    return None


def qmv_reference(
    x: mx.array,
    matrix: Packed,
    *,
    norm_weight: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
) -> mx.array:
    """The product in plain MLX, in float32 with weights dequantised in float32; y is float32 too."""
    x = x.astype(mx.float32)
    if norm_weight is not None:
        x = x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps) * norm_weight.astype(mx.float32)
    y = (matrix.dequantised() * x.reshape(-1)).sum(-1).reshape(*x.shape[:-1], -1)
    return y if residual is None else residual.astype(mx.float32).reshape(y.shape) + y


def qmv(
    x: mx.array,
    matrix: Packed,
    *,
    norm_weight: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    out_dtype: mx.Dtype | None = None,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Multiply on the GPU (or the host back-end).

    Args:
        x, matrix, norm_weight, residual: see the module's table; :func:`supports` must answer None.
        eps: of the norm.
        out_dtype: of the result; by default as x.
        tile: ``rows`` a lane has at once, ``repeat`` blocks of rows one after another, ``ahead`` 16-byte
            loads of each row in flight, ``simdgroups`` of a threadgroup; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        y.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    N, K = matrix.rows, x.shape[-1]
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("qmv", backends.chip(backend), N=N, K=K, bits=matrix.bits)
    out_dtype = out_dtype or x.dtype
    template = _template(
        x.dtype,
        out_dtype,
        matrix.scales.dtype,
        None if norm_weight is None else norm_weight.dtype,
        N,
        K,
        matrix.group_size,
        matrix.bits,
        eps,
        residual is not None,
        tile,
    )
    grid, threadgroup = _threads(template)
    (y,) = launch(
        KERNEL,
        [x, matrix.in_one(), norm_weight, residual],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(*x.shape[:-1], N)],
        output_dtypes=[out_dtype],
        backend=backend,
    )
    return y


@self_check("qmv")
def _self_check(backend: str) -> str | None:
    """A norm with 4-bit and 8-bit matrices of the real width, then a residual, against the reference."""
    keys = mx.random.split(mx.random.key(0), 5)
    K = 2048

    def normal(key: mx.array, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=key).astype(mx.bfloat16)

    x, norm_weight, residual = normal(keys[2], 1, 1, K), normal(keys[3], K), normal(keys[4], 1, 1, 70)
    forms = (
        ("norm, 4 bits", 4, norm_weight, None),
        ("norm, 8 bits", 8, norm_weight, None),
        ("residual", 4, None, residual),
    )
    for (name, bits, norm, added), tile in paired(forms, of_chip("qmv", backends.chip(backend))):
        matrix = Packed(*mx.quantize(normal(keys[0], 70, K), 64, bits), bits, 64)
        got = qmv(x, matrix, norm_weight=norm, residual=added, tile=tile, backend=backend)
        want = qmv_reference(x, matrix, norm_weight=norm, residual=added)
        # bfloat16 rounds once, by at most 2^-8 of a value
        if off := off_reference(got, want, 2**-7):
            return f"{name}: {off}, with {tile}"
    return None
