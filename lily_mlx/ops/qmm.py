"""Many vectors times quantised matrices: the products of prefill, up to four matrices in one launch.

    y = x [W_0; W_1; ...]^T,  with a residual  residual + ...

| array | shape | dtype |
| --- | --- | --- |
| x | [..., K], T vectors | bfloat16, float16 or float32 |
| matrices | 1 to 4 :class:`~lily_mlx.ops.packed.Packed` [Ni, K], 4 or 8 bits each | |
| residual | [..., N] or None, N the sum of the Ni | as x |
| y (result) | [..., N] | as x, or as asked for |

Numbers of the matrices are rounded to x's dtype once; products are summed in float32 and rounded once, after
the residual is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, Variant, declare, launch
from ..tiles import choose, of_chip
from .packed import ACTIVATION_DTYPES, Packed, why_mixed, why_not
from .tile_product import step, tile_memory, why_no_product
from .trust import off_reference, paired, self_check

MAX_MATRICES = 4


def _template(
    dtypes: Sequence[mx.Dtype],
    K: int,
    group_size: int,
    rows: Sequence[int],
    bits: Sequence[int],
    has_residual: bool,
    tile: Mapping[str, int],
) -> dict[str, int | bool | mx.Dtype]:
    """``dtypes`` of x, y and scales; ``rows`` and ``bits`` of each matrix."""
    absent = MAX_MATRICES - len(rows)
    rows, bits = [*rows, *[0] * absent], [*bits, *[bits[0]] * absent]
    return {
        **dict(zip(("InT", "OutT", "ScaleT"), dtypes, strict=True)),
        "K": K,
        "GROUP": group_size,
        **{f"N{i}": rows[i] for i in range(MAX_MATRICES)},
        **{f"BITS{i}": bits[i] for i in range(MAX_MATRICES)},
        "HAS_RESIDUAL": has_residual,
        "ROWS": tile["rows"],
        "COLS": tile["cols"],
        "STEP": step(dtypes[0], K, tile),
        "SIMDGROUPS": tile["simdgroups"],
    }


def _threads(template: Mapping[str, Any], T: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x: each matrix has threadgroups of its own."""
    columns = template["COLS"] * template["SIMDGROUPS"]
    threadgroups = sum(-(-template[f"N{i}"] // columns) for i in range(MAX_MATRICES))
    threads = 32 * template["SIMDGROUPS"]
    return (threadgroups * -(-T // template["ROWS"]) * threads, 1, 1), (threads, 1, 1)


def _variant(
    dtypes: Sequence[mx.Dtype],
    K: int,
    group_size: int,
    rows: Sequence[int],
    bits: Sequence[int],
    tile: Mapping[str, int],
    *,
    has_residual: bool = False,
) -> Variant:
    template = _template(dtypes, K, group_size, rows, bits, has_residual, tile)
    axes = {"T": 64, "G": K // group_size, "P0": K * bits[0] // 32, "N": sum(rows)}
    return Variant(template, axes, *_threads(template, 64))


def _matrix_buffers(i: int) -> tuple[Buffer, ...]:
    # "*": where a matrix is absent (Ni = 0), an example of it must not be empty.
    return (
        Buffer(f"weight_{i}", f"N{i} P{i}" if i == 0 else "*", "uint32", optional=i > 0),
        Buffer(f"scales_{i}", f"N{i} G" if i == 0 else "*", "ScaleT", optional=i > 0),
        Buffer(f"biases_{i}", f"N{i} G" if i == 0 else "*", "ScaleT", optional=i > 0),
    )


_TILE = {"rows": 128, "cols": 32, "step": 64, "simdgroups": 4}
_BF16 = (mx.bfloat16, mx.bfloat16, mx.bfloat16)

KERNEL = declare(
    Kernel(
        stem="qmm",
        inputs=(
            Buffer("x", "T K", "InT"),
            Buffer("residual", "*", "InT", optional=True),
            *(buffer for i in range(MAX_MATRICES) for buffer in _matrix_buffers(i)),
            Buffer("parameters", "8", "int32"),
        ),
        outputs=(Buffer("y", "T N", "OutT"),),
        template=tuple(
            _template(_BF16, 64, 64, [8], [4], False, _TILE)  # any call has every name, in order
        ),
        variants=(
            _variant(_BF16, 2048, 64, [8192, 4096, 32, 32], [4] * 4, _TILE),
            _variant(_BF16, 4096, 64, [2048], [4], {**_TILE, "rows": 64, "cols": 16}, has_residual=True),
            _variant(
                (mx.float16, mx.float32, mx.float32),
                128,
                32,
                [256, 1],
                [4, 8],
                {"rows": 32, "cols": 16, "step": 128, "simdgroups": 2},
                has_residual=True,
            ),
        ),
        threadgroup_bytes=tile_memory,
    )
)


def supports(
    x: mx.array,
    matrices: Sequence[Packed],
    *,
    residual: mx.array | None = None,
    out_dtype: mx.Dtype | None = None,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    K = x.shape[-1]
    if out_dtype is not None and out_dtype not in ACTIVATION_DTYPES:
        return f"the result cannot be {out_dtype}"
    if not 1 <= len(matrices) <= MAX_MATRICES:
        return f"{len(matrices)} matrices; the kernel takes 1 to {MAX_MATRICES}"
    if reason := why_no_product("x", x):
        return reason
    for i, matrix in enumerate(matrices):
        if reason := why_not(f"matrix {i}", matrix, K):
            return reason
    if reason := why_mixed(matrices):
        return reason
    shape = (*x.shape[:-1], sum(matrix.rows for matrix in matrices))
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype):
        return f"residual is {residual.dtype} {residual.shape}, not {x.dtype} {shape}"
    return None


def qmm_reference(x: mx.array, matrices: Sequence[Packed], *, residual: mx.array | None = None) -> mx.array:
    """The product in plain MLX, in float32 with weights dequantised in float32; y is float32 too."""
    x = x.astype(mx.float32)
    y = mx.concatenate([x @ matrix.dequantised().T for matrix in matrices], axis=-1)
    return y if residual is None else residual.astype(mx.float32) + y


def qmm(
    x: mx.array,
    matrices: Sequence[Packed],
    *,
    residual: mx.array | None = None,
    out_dtype: mx.Dtype | None = None,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Multiply on the GPU (or the host back-end).

    Args:
        x, matrices, residual: see the module's table; :func:`supports` must answer None.
        out_dtype: of the result; by default as x.
        tile: ``rows`` of y in a threadgroup, ``cols`` of y in a simdgroup, ``step`` columns of x at a time,
            ``simdgroups`` of a threadgroup; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        y, the matrices' results one after another on the last axis.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    K = x.shape[-1]
    T = x.size // K
    rows = [matrix.rows for matrix in matrices]
    N = sum(rows)
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("qmm", backends.chip(backend), T=T, N=N, K=K)
    out_dtype = out_dtype or x.dtype
    template = _template(
        (x.dtype, out_dtype, matrices[0].scales.dtype),
        K,
        matrices[0].group_size,
        rows,
        [matrix.bits for matrix in matrices],
        residual is not None,
        tile,
    )
    grid, threadgroup = _threads(template, T)
    absent: list[mx.array | None] = [None] * (3 * (MAX_MATRICES - len(matrices)))
    parts = [part for matrix in matrices for part in (matrix.weight, matrix.scales, matrix.biases)]
    (y,) = launch(
        KERNEL,
        [x.reshape(T, K), residual, *parts, *absent, mx.array([T, 0, 0, 0, 0, 0, 0, 0], dtype=mx.int32)],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(T, N)],
        output_dtypes=[out_dtype],
        backend=backend,
    )
    return y.reshape(*x.shape[:-1], N)


@self_check("qmm")
def _self_check(backend: str) -> str | None:
    """4-bit and 8-bit matrices of the real width with edges in T and N, without and with a residual."""
    keys = mx.random.split(mx.random.key(0), 4)
    K, T = 2048, 150

    def normal(key: mx.array, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=key).astype(mx.bfloat16)

    matrices = [
        Packed(*mx.quantize(normal(key, rows, K), 64, bits), bits, 64)
        for key, rows, bits in ((keys[0], 150, 4), (keys[1], 34, 8))
    ]
    x, residual = normal(keys[2], 1, T, K), normal(keys[3], 1, T, 184)
    forms = (("product", None), ("residual", residual))
    for (name, added), tile in paired(forms, of_chip("qmm", backends.chip(backend))):
        got = qmm(x, matrices, residual=added, tile=tile, backend=backend)
        want = qmm_reference(x, matrices, residual=added)
        # bfloat16 rounds the result once, by at most 2^-8 of a value, and each number
        if off := off_reference(got, want, 2**-7):
            return f"{name}: {off}, with {tile}"
    return None
