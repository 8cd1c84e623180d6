"""One vector times quantised matrices: the GEMV of decoding, up to four matrices in one launch.

    y = [W_0; W_1; ...] x,  with a norm  [W_0; ...] rms_norm(x),  with a residual  residual + ...

| array | shape | dtype |
| --- | --- | --- |
| x | [..., K], one vector | bfloat16, float16 or float32 |
| matrices | 1 to 4 :class:`~lily_mlx.ops.packed.Packed` [Ni, K], 4 or 8 bits each | |
| norm_weight | [K] or None | bfloat16, float16 or float32 |
| residual | [..., N] or None, N the sum of the Ni | as x |
| y (result) | [..., N] | as x, or as asked for |

Sums are float32 and rounded once, after the residual is added. The normalised x is not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import MAX_THREADGROUP_BYTES, Buffer, Kernel, Variant, declare, launch
from ..tiles import choose
from .packed import (
    ACTIVATION_DTYPES,
    Packed,
    eps_parameter,
    lanes_per_row,
    shared_vector_bytes,
    why_mixed,
    why_not,
)
from .trust import self_check

MAX_MATRICES = 4
MAX_SIMDGROUPS = 32


def _template(
    x: mx.Dtype,
    y: mx.Dtype,
    scales: mx.Dtype,
    norm: mx.Dtype | None,
    K: int,
    group_size: int,
    rows: Sequence[int],
    bits: Sequence[int],
    has_residual: bool,
    tile: Mapping[str, int],
) -> dict[str, int | bool | mx.Dtype]:
    absent = MAX_MATRICES - len(rows)
    rows, bits = [*rows, *[0] * absent], [*bits, *[bits[0]] * absent]
    return {
        "InT": x,
        "OutT": y,
        "ScaleT": scales,
        "NormT": norm or x,
        "K": K,
        "GROUP": group_size,
        **{f"N{i}": rows[i] for i in range(MAX_MATRICES)},
        **{f"BITS{i}": bits[i] for i in range(MAX_MATRICES)},
        "HAS_NORM": norm is not None,
        "HAS_RESIDUAL": has_residual,
        "ROWS": _rows_per_lane(tile, rows),
        "REPEAT": tile["repeat"],
        "AHEAD": tile["ahead"],
        "SIMDGROUPS": tile["simdgroups"],
    }


def _rows_per_lane(tile: Mapping[str, int], rows: Sequence[int]) -> int:
    """The tile's, or fewer where a matrix has fewer rows: a block must fit into every matrix."""
    fewest, found = min(n for n in rows if n), tile["rows"]
    while found > fewest:
        found //= 2
    return found


def _threads(template: Mapping[str, Any]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x: each matrix has threadgroups of its own."""
    threadgroups = 0
    for i in range(MAX_MATRICES):
        block = (
            32 // lanes_per_row(template["K"], template[f"BITS{i}"]) * template["ROWS"] * template["REPEAT"]
        )
        threadgroups += -(-template[f"N{i}"] // (block * template["SIMDGROUPS"]))
    threads = 32 * template["SIMDGROUPS"]
    return (threadgroups * threads, 1, 1), (threads, 1, 1)


def _variant(
    dtypes: Sequence[mx.Dtype],
    K: int,
    group_size: int,
    rows: Sequence[int],
    bits: Sequence[int],
    tile: Mapping[str, int],
    *,
    has_norm: bool = False,
    has_residual: bool = False,
) -> Variant:
    x, y, scales = dtypes
    template = _template(x, y, scales, x if has_norm else None, K, group_size, rows, bits, has_residual, tile)
    return Variant(template, {"G": K // group_size, "P0": K * bits[0] // 32}, *_threads(template))


def _matrix_buffers(i: int) -> tuple[Buffer, ...]:
    # "*": where a matrix is absent (Ni = 0), an example of it must not be empty.
    return (
        Buffer(f"weight_{i}", f"N{i} P{i}" if i == 0 else "*", "uint32", optional=i > 0),
        Buffer(f"scales_{i}", f"N{i} G" if i == 0 else "*", "ScaleT", optional=i > 0),
        Buffer(f"biases_{i}", f"N{i} G" if i == 0 else "*", "ScaleT", optional=i > 0),
    )


_TILE = {"rows": 4, "repeat": 1, "ahead": 2, "simdgroups": 8}
_BF16 = (mx.bfloat16, mx.bfloat16, mx.bfloat16)

KERNEL = declare(
    Kernel(
        stem="qmv",
        inputs=(
            Buffer("x", "*", "InT"),
            Buffer("norm_weight", "K", "NormT", optional=True),
            Buffer("residual", "*", "InT", optional=True),
            *(buffer for i in range(MAX_MATRICES) for buffer in _matrix_buffers(i)),
            Buffer("parameters", "8", "int32"),
        ),
        outputs=(Buffer("y", "*", "OutT"),),
        template=tuple(
            _template(*_BF16, None, 64, 64, [8], [4], False, _TILE)  # any call has every name, in order
        ),
        variants=(
            _variant(_BF16, 2048, 64, [8192, 4096, 32, 32], [4] * 4, _TILE, has_norm=True),
            _variant(_BF16, 4096, 64, [2048], [4], _TILE, has_residual=True),
            _variant(
                (mx.bfloat16, mx.float32, mx.bfloat16), 2048, 64, [256, 1], [8, 8], _TILE, has_norm=True
            ),
            _variant(
                (mx.float16, mx.float16, mx.float32), 96, 32, [40, 24], [4, 8], _TILE, has_residual=True
            ),
        ),
        threadgroup_bytes=lambda template: shared_vector_bytes(template["K"], template["SIMDGROUPS"]),
    )
)


def supports(
    x: mx.array,
    matrices: Sequence[Packed],
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
    if not 1 <= len(matrices) <= MAX_MATRICES:
        return f"{len(matrices)} matrices; the kernel takes 1 to {MAX_MATRICES}"
    if K % 32:
        return f"K={K} is not a multiple of 32"
    if shared_vector_bytes(K, MAX_SIMDGROUPS) > MAX_THREADGROUP_BYTES:
        return f"K={K} does not fit into threadgroup memory"
    for i, matrix in enumerate(matrices):
        if reason := why_not(f"matrix {i}", matrix, K):
            return reason
    if reason := why_mixed(matrices):
        return reason
    if norm_weight is not None and (norm_weight.shape != (K,) or norm_weight.dtype not in ACTIVATION_DTYPES):
        return f"norm_weight is {norm_weight.dtype} {norm_weight.shape}, not [{K}]"
    N = sum(matrix.rows for matrix in matrices)
    if residual is not None and (residual.size != N or residual.dtype != x.dtype):
        return f"residual is {residual.dtype} {residual.shape}, not {N} values of {x.dtype}"
    return None


def qmv_reference(
    x: mx.array,
    matrices: Sequence[Packed],
    *,
    norm_weight: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
) -> mx.array:
    """The product in plain MLX, in float32 with weights dequantised in float32; y is float32 too."""
    x = x.astype(mx.float32)
    if norm_weight is not None:
        x = x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps) * norm_weight.astype(mx.float32)
    y = mx.concatenate([(matrix.dequantised() * x.reshape(-1)).sum(-1) for matrix in matrices])
    y = y.reshape(*x.shape[:-1], -1)
    return y if residual is None else residual.astype(mx.float32).reshape(y.shape) + y


def qmv(
    x: mx.array,
    matrices: Sequence[Packed],
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
        x, matrices, norm_weight, residual: see the module's table; :func:`supports` must answer None.
        eps: of the norm.
        out_dtype: of the result; by default as x.
        tile: ``rows`` a lane has at once, ``repeat`` blocks of rows one after another, ``ahead`` 16-byte
            loads of each row in flight, ``simdgroups`` of a threadgroup; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        y, the matrices' results one after another on the last axis.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    K = x.shape[-1]
    rows = [matrix.rows for matrix in matrices]
    N = sum(rows)
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("qmv", backends.chip(backend), N=N, K=K, bits=matrices[0].bits)
    out_dtype = out_dtype or x.dtype
    template = _template(
        x.dtype,
        out_dtype,
        matrices[0].scales.dtype,
        None if norm_weight is None else norm_weight.dtype,
        K,
        matrices[0].group_size,
        rows,
        [matrix.bits for matrix in matrices],
        residual is not None,
        tile,
    )
    grid, threadgroup = _threads(template)
    absent: list[mx.array | None] = [None] * (3 * (MAX_MATRICES - len(matrices)))
    parts = [part for matrix in matrices for part in (matrix.weight, matrix.scales, matrix.biases)]
    (y,) = launch(
        KERNEL,
        [x, norm_weight, residual, *parts, *absent, eps_parameter(eps)],
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
    """A norm and 4-bit and 8-bit matrices of the real width, then a residual, against the reference."""
    keys = mx.random.split(mx.random.key(0), 5)
    K = 2048

    def normal(key: mx.array, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=key).astype(mx.bfloat16)

    matrices = [
        Packed(*mx.quantize(normal(key, rows, K), 64, bits), bits, 64)
        for key, rows, bits in ((keys[0], 70, 4), (keys[1], 33, 8))
    ]
    x, norm_weight, residual = normal(keys[2], 1, 1, K), normal(keys[3], K), normal(keys[4], 1, 1, 103)
    for name, norm, added in (("norm", norm_weight, None), ("residual", None, residual)):
        got = qmv(x, matrices, norm_weight=norm, residual=added, backend=backend)
        want = qmv_reference(x, matrices, norm_weight=norm, residual=added)
        error: Any = (mx.abs(got.astype(mx.float32) - want).max() / mx.abs(want).max()).item()
        if not error <= 2**-7:  # bfloat16 rounds once, by at most 2^-8 of a value
            return f"{name}: {error:.1e} off the reference, allowed {2**-7:.1e}"
    return None
