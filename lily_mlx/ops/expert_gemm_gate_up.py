"""The first half of the experts of many tokens: gate and up projections with SwiGLU, rows grouped by expert.

    h[r] = silu(gate_e x[t]) * (up_e x[t])    r: grouped row, of expert e; t: its token

| array | shape | dtype |
| --- | --- | --- |
| x | [T, K], normalised | bfloat16, float16 or float32 |
| rows | [T * (top_k + 1)]: t * (top_k + 1) + slot of each grouped row | int32 |
| blocks | [B, 4]: expert, first grouped row, rows of the block, 0; used blocks first | int32 |
| count | [8]; count[0] is the number of blocks used | int32 |
| gate, up | :class:`~lily_mlx.ops.packed.Packed` [E, M, K] | |
| shared_gate, shared_up | Packed [M, K], of the shared expert, which blocks call expert E | |
| h (result) | [T * (top_k + 1), M], grouped | as x |

Numbers of the matrices are rounded to x's dtype once; products are summed in float32, and h is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, Variant, declare, launch
from ..tiles import of_chip
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
    """``dtypes`` of x and scales; ``sizes`` K M E TOP_K GROUP BITS."""
    return {
        **dict(zip(("InT", "ScaleT"), dtypes, strict=True)),
        **sizes,
        "ROWS": tile["rows"],
        "COLS": tile["cols"] if tile["cols"] <= sizes["M"] else 16,
        "STEP": step(dtypes[0], sizes["K"], tile),
        "SIMDGROUPS": tile["simdgroups"],
    }


def _threads(template: Mapping[str, Any], blocks: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x: each block of rows has threadgroups side by side."""
    threads = 32 * template["SIMDGROUPS"]
    columns = template["COLS"] * template["SIMDGROUPS"]
    return (blocks * -(-template["M"] // columns) * threads, 1, 1), (threads, 1, 1)


def _variant(dtypes: Sequence[mx.Dtype], sizes: Mapping[str, int], tile: Mapping[str, int]) -> Variant:
    template = _template(dtypes, sizes, tile)
    axes = {"T": 16, "R": 16 * (sizes["TOP_K"] + 1), "B": 8}
    axes |= {"P": sizes["K"] * sizes["BITS"] // 32, "G": sizes["K"] // sizes["GROUP"]}
    return Variant(template, axes, *_threads(template, 8))


_BF16 = (mx.bfloat16, mx.bfloat16)
_MIXED = (mx.float16, mx.float32)
_QWEN = {"K": 2048, "M": 512, "E": 256, "TOP_K": 8, "GROUP": 64, "BITS": 4}
_SMALL = {"K": 128, "M": 48, "E": 5, "TOP_K": 3, "GROUP": 32, "BITS": 8}

KERNEL = declare(
    Kernel(
        stem="expert_gemm_gate_up",
        inputs=(
            Buffer("x", "T K", "InT"),
            Buffer("rows", "R", "int32"),
            Buffer("blocks", "B 4", "int32"),
            Buffer("count", "8", "int32"),
            Buffer("gate_weight", "E M P", "uint32"),
            Buffer("gate_scales", "E M G", "ScaleT"),
            Buffer("gate_biases", "E M G", "ScaleT"),
            Buffer("up_weight", "E M P", "uint32"),
            Buffer("up_scales", "E M G", "ScaleT"),
            Buffer("up_biases", "E M G", "ScaleT"),
            Buffer("shared_gate_weight", "M P", "uint32"),
            Buffer("shared_gate_scales", "M G", "ScaleT"),
            Buffer("shared_gate_biases", "M G", "ScaleT"),
            Buffer("shared_up_weight", "M P", "uint32"),
            Buffer("shared_up_scales", "M G", "ScaleT"),
            Buffer("shared_up_biases", "M G", "ScaleT"),
        ),
        outputs=(Buffer("h", "R M", "InT"),),
        template=(
            "InT",
            "ScaleT",
            "K",
            "M",
            "E",
            "TOP_K",
            "GROUP",
            "BITS",
            "ROWS",
            "COLS",
            "STEP",
            "SIMDGROUPS",
        ),
        variants=(
            _variant(_BF16, _QWEN, {"rows": 64, "cols": 16, "step": 64, "simdgroups": 4}),
            _variant(_BF16, _QWEN, {"rows": 32, "cols": 16, "step": 128, "simdgroups": 4}),
            _variant(_MIXED, _SMALL, {"rows": 16, "cols": 16, "step": 128, "simdgroups": 2}),
        ),
        threadgroup_bytes=tile_memory,
    )
)


def supports(
    x: mx.array,
    rows: mx.array,
    blocks: mx.array,
    count: mx.array,
    gate: Packed,
    up: Packed,
    shared_gate: Packed,
    shared_up: Packed,
    top_k: int,
    *,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if x.ndim != 2:
        return f"x has shape {x.shape}, not [T, K]"
    if reason := why_no_product("x", x):
        return reason
    T, K = x.shape
    if reason := why_not_routed(rows, blocks, count, T * (top_k + 1)):
        return reason
    E = gate.weight.shape[0]
    matrices = {"gate": gate, "up": up, "shared gate": shared_gate, "shared up": shared_up}
    for name, matrix in matrices.items():
        if reason := why_not(name, matrix, K, None if name.startswith("shared") else E):
            return reason
        if (matrix.rows, matrix.bits) != (gate.rows, gate.bits):
            return (
                f"{name} and gate differ: {matrix.rows} and {gate.rows} rows, "
                f"{matrix.bits} and {gate.bits} bits"
            )
    if gate.rows % 16:
        return f"gate has {gate.rows} rows, not a multiple of 16"
    return why_mixed(tuple(matrices.values()))


def expert_gemm_gate_up_reference(
    x: mx.array,
    rows: mx.array,
    blocks: mx.array,
    count: mx.array,
    gate: Packed,
    up: Packed,
    shared_gate: Packed,
    shared_up: Packed,
    top_k: int,
) -> mx.array:
    """The same in plain MLX, block by block, in float32 with weights dequantised in float32."""
    x = x.astype(mx.float32)
    E = gate.weight.shape[0]
    h = mx.zeros((rows.size, gate.rows))
    for expert, first, size in used_blocks(blocks, count):
        n = x[rows[first : first + size] // (top_k + 1)]
        pair = (shared_gate, shared_up) if expert == E else (gate, up)
        one = None if expert == E else mx.array([expert])
        g, u = (n @ matrix.dequantised(one).reshape(gate.rows, -1).T for matrix in pair)
        h[first : first + size] = g * mx.sigmoid(g) * u
    return h


def expert_gemm_gate_up(
    x: mx.array,
    rows: mx.array,
    blocks: mx.array,
    count: mx.array,
    gate: Packed,
    up: Packed,
    shared_gate: Packed,
    shared_up: Packed,
    top_k: int,
    *,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Multiply on the GPU (or the host back-end).

    Args:
        x, rows, blocks, count, gate, up, shared_gate, shared_up: see the module's table; :func:`supports`
            must answer None.
        top_k: experts chosen for each token.
        tile: ``rows``, the largest number of rows of a block, for which ``blocks`` were made; ``cols`` of h
            in a simdgroup, ``step`` columns of x at a time, ``simdgroups`` of a threadgroup; by default
            :func:`~lily_mlx.ops.tile_product.grouped_tile`.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        h, grouped, which :func:`~lily_mlx.ops.expert_gemm_down.expert_gemm_down` takes.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    sizes = {
        "K": x.shape[1],
        "M": gate.rows,
        "E": gate.weight.shape[0],
        "TOP_K": top_k,
        "GROUP": gate.group_size,
        "BITS": gate.bits,
    }
    if tile is None:
        tile = grouped_tile(x.shape[0], top_k, sizes["E"], backend)
    template = _template((x.dtype, gate.scales.dtype), sizes, tile)
    grid, threadgroup = _threads(template, blocks.shape[0])
    matrices = (gate, up, shared_gate, shared_up)
    parts = [part for matrix in matrices for part in (matrix.weight, matrix.scales, matrix.biases)]
    (h,) = launch(
        KERNEL,
        [x, rows, blocks, count, *parts],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(rows.size, gate.rows)],
        output_dtypes=[x.dtype],
        backend=backend,
    )
    return h


@self_check("expert_gemm_gate_up")
def _self_check(backend: str) -> str | None:
    """Three experts of the real width and the shared one: blocks full, ragged and of one row."""
    keys = mx.random.split(mx.random.key(0), 6)
    T, K, M, E, top_k = 70, 2048, 80, 3, 1

    def matrix(key: mx.array, *shape: int) -> Packed:
        values = (mx.random.normal((*shape, K), key=key) * K**-0.5).astype(mx.bfloat16)
        return Packed(*mx.quantize(values, 64, 4), 4, 64)

    x = mx.random.normal((T, K), key=keys[0]).astype(mx.bfloat16)
    matrices = (matrix(keys[1], E, M), matrix(keys[2], E, M), matrix(keys[3], M), matrix(keys[4], M))
    routed = mx.random.permutation(T, key=keys[5]).astype(mx.int32) * 2
    rows = mx.concatenate([routed, mx.arange(T, dtype=mx.int32) * 2 + 1])
    groups = ((0, 0, 69), (2, 69, 1), (3, 70, 70))  # the second expert has no rows
    for tile in of_chip("expert_gemm_gate_up", backends.chip(backend)):
        operands = (x, rows, *blocks_of(groups, tile["rows"]), *matrices, top_k)
        got = expert_gemm_gate_up(*operands, tile=tile, backend=backend)
        want = expert_gemm_gate_up_reference(*operands)
        # both factors' numbers and the result are rounded to bfloat16
        if off := off_reference(got, want, 2**-6):
            return f"{off}, with {tile}"
    return None
