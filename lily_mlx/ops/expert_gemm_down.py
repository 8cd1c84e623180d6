"""The second half of the experts of many tokens: down projections, rows grouped by expert, results by token.

    y[rows[r]] = down_e h[r]    r: grouped row, of expert e

| array | shape | dtype |
| --- | --- | --- |
| h | [T * (top_k + 1), M], grouped | bfloat16, float16 or float32 |
| rows | [T * (top_k + 1)]: t * (top_k + 1) + slot of each grouped row, a permutation | int32 |
| blocks | [B, 4]: expert, first grouped row, rows of the block, 0; used blocks first | int32 |
| count | [8]; count[0] is the number of blocks used | int32 |
| down | :class:`~lily_mlx.ops.packed.Packed` [E, H, M] | |
| shared_down | Packed [H, M], of the shared expert, which blocks call expert E | |
| y (result) | [T * (top_k + 1), H], by token and slot, not weighted | as h |

Numbers of the matrices are rounded to h's dtype once; products are summed in float32, and y is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, Variant, declare, launch
from ..tiles import choose, of_chip
from .packed import Packed, why_mixed, why_not
from .tile_product import (
    blocks_of,
    grouped_tile,
    step,
    tile_memory,
    used_blocks,
    why_no_product,
    why_not_routed,
)
from .trust import off_reference, self_check


def _template(
    dtypes: Sequence[mx.Dtype], sizes: Mapping[str, int], tile: Mapping[str, int]
) -> dict[str, int | bool | mx.Dtype]:
    """``dtypes`` of h and scales; ``sizes`` M H E GROUP BITS."""
    return {
        **dict(zip(("InT", "ScaleT"), dtypes, strict=True)),
        **sizes,
        "ROWS": tile["rows"],
        "COLS": tile["cols"] if tile["cols"] <= sizes["H"] else 16,
        "STEP": step(dtypes[0], sizes["M"], tile),
        "SIMDGROUPS": tile["simdgroups"],
    }


def _threads(template: Mapping[str, Any], blocks: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x: each block of rows has threadgroups side by side."""
    threads = 32 * template["SIMDGROUPS"]
    columns = template["COLS"] * template["SIMDGROUPS"]
    return (blocks * -(-template["H"] // columns) * threads, 1, 1), (threads, 1, 1)


def _variant(dtypes: Sequence[mx.Dtype], sizes: Mapping[str, int], tile: Mapping[str, int]) -> Variant:
    template = _template(dtypes, sizes, tile)
    axes = {"R": 64, "B": 8, "P": sizes["M"] * sizes["BITS"] // 32, "G": sizes["M"] // sizes["GROUP"]}
    return Variant(template, axes, *_threads(template, 8))


_BF16 = (mx.bfloat16, mx.bfloat16)
_MIXED = (mx.float16, mx.float32)
_QWEN = {"M": 512, "H": 2048, "E": 256, "GROUP": 64, "BITS": 4}
_SMALL = {"M": 128, "H": 48, "E": 5, "GROUP": 32, "BITS": 8}

KERNEL = declare(
    Kernel(
        stem="expert_gemm_down",
        inputs=(
            Buffer("h", "R M", "InT"),
            Buffer("rows", "R", "int32"),
            Buffer("blocks", "B 4", "int32"),
            Buffer("count", "8", "int32"),
            Buffer("down_weight", "E H P", "uint32"),
            Buffer("down_scales", "E H G", "ScaleT"),
            Buffer("down_biases", "E H G", "ScaleT"),
            Buffer("shared_weight", "H P", "uint32"),
            Buffer("shared_scales", "H G", "ScaleT"),
            Buffer("shared_biases", "H G", "ScaleT"),
        ),
        outputs=(Buffer("y", "R H", "InT"),),
        template=("InT", "ScaleT", "M", "H", "E", "GROUP", "BITS", "ROWS", "COLS", "STEP", "SIMDGROUPS"),
        variants=(
            _variant(_BF16, _QWEN, {"rows": 64, "cols": 64, "step": 64, "simdgroups": 4}),
            _variant(_BF16, _QWEN, {"rows": 32, "cols": 32, "step": 128, "simdgroups": 4}),
            _variant(_MIXED, _SMALL, {"rows": 16, "cols": 16, "step": 128, "simdgroups": 2}),
        ),
        threadgroup_bytes=tile_memory,
    )
)


def supports(
    h: mx.array,
    rows: mx.array,
    blocks: mx.array,
    count: mx.array,
    down: Packed,
    shared_down: Packed,
    top_k: int,
    *,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if h.ndim != 2 or h.shape[0] % (top_k + 1):
        return f"h has shape {h.shape}, not [T * {top_k + 1}, M]"
    if reason := why_no_product("h", h):
        return reason
    if reason := why_not_routed(rows, blocks, count, h.shape[0]):
        return reason
    for name, matrix, experts in (("down", down, down.weight.shape[0]), ("shared down", shared_down, None)):
        if reason := why_not(name, matrix, h.shape[1], experts):
            return reason
    if (down.rows, down.bits) != (shared_down.rows, shared_down.bits):
        return (
            f"down and shared down differ: {down.rows} and {shared_down.rows} rows, "
            f"{down.bits} and {shared_down.bits} bits"
        )
    if down.rows % 16:
        return f"down has {down.rows} rows, not a multiple of 16"
    return why_mixed((down, shared_down))


def expert_gemm_down_reference(
    h: mx.array,
    rows: mx.array,
    blocks: mx.array,
    count: mx.array,
    down: Packed,
    shared_down: Packed,
    top_k: int,
) -> mx.array:
    """The same in plain MLX, block by block, in float32 with weights dequantised in float32."""
    h = h.astype(mx.float32)
    E = down.weight.shape[0]
    y = mx.zeros((rows.size, down.rows))
    for expert, first, size in used_blocks(blocks, count):
        matrix = shared_down.dequantised() if expert == E else down.dequantised(mx.array([expert]))[0]
        y[rows[first : first + size]] = h[first : first + size] @ matrix.T
    return y


def expert_gemm_down(
    h: mx.array,
    rows: mx.array,
    blocks: mx.array,
    count: mx.array,
    down: Packed,
    shared_down: Packed,
    top_k: int,
    *,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Multiply on the GPU (or the host back-end).

    Args:
        h, rows, blocks, count, down, shared_down: see the module's table; :func:`supports` must answer None.
        top_k: experts chosen for each token.
        tile: ``rows``, the largest number of rows of a block, for which ``blocks`` were made; ``cols`` of y
            in a simdgroup, ``step`` columns of h at a time, ``simdgroups`` of a threadgroup. By default from
            the tile table, for the block size of :func:`~lily_mlx.ops.tile_product.grouped_tile`.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        y; row t * (top_k + 1) + slot is the product of the grouped row of that token and slot.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    backend = backend or backends.resolve()
    sizes = {
        "M": h.shape[1],
        "H": down.rows,
        "E": down.weight.shape[0],
        "GROUP": down.group_size,
        "BITS": down.bits,
    }
    if tile is None:
        block_rows = grouped_tile(h.shape[0] // (top_k + 1), top_k, sizes["E"], backend)["rows"]
        tile = _tile(block_rows, backend)
    template = _template((h.dtype, down.scales.dtype), sizes, tile)
    grid, threadgroup = _threads(template, blocks.shape[0])
    parts = [part for matrix in (down, shared_down) for part in (matrix.weight, matrix.scales, matrix.biases)]
    (y,) = launch(
        KERNEL,
        [h, rows, blocks, count, *parts],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(rows.size, down.rows)],
        output_dtypes=[h.dtype],
        backend=backend,
    )
    return y


def _tile(block_rows: int, backend: str) -> dict[str, int]:
    """The tile for blocks of the routing's rows."""
    return {"rows": block_rows, **choose("expert_gemm_down", backends.chip(backend), rows=block_rows)}


@self_check("expert_gemm_down")
def _self_check(backend: str) -> str | None:
    """Three experts of the real width and the shared one: blocks full, ragged and of one row."""
    keys = mx.random.split(mx.random.key(0), 4)
    T, M, H, E, top_k = 70, 512, 144, 3, 1

    def matrix(key: mx.array, *shape: int) -> Packed:
        values = (mx.random.normal((*shape, M), key=key) * M**-0.5).astype(mx.bfloat16)
        return Packed(*mx.quantize(values, 64, 4), 4, 64)

    h = mx.random.normal((2 * T, M), key=keys[0]).astype(mx.bfloat16)
    matrices = (matrix(keys[1], E, H), matrix(keys[2], H))
    routed = mx.random.permutation(T, key=keys[3]).astype(mx.int32) * 2
    rows = mx.concatenate([routed, mx.arange(T, dtype=mx.int32) * 2 + 1])
    groups = ((0, 0, 69), (2, 69, 1), (3, 70, 70))  # the second expert has no rows
    for block_rows in {tile["rows"] for tile in of_chip("expert_gemm_gate_up", backends.chip(backend))}:
        tile = _tile(block_rows, backend)
        operands = (h, rows, *blocks_of(groups, block_rows), *matrices, top_k)
        got = expert_gemm_down(*operands, tile=tile, backend=backend)
        want = expert_gemm_down_reference(*operands)
        # bfloat16 rounds the result once, by at most 2^-8 of a value, and each number
        if off := off_reference(got, want, 2**-7):
            return f"{off}, with {tile}"
    return None
