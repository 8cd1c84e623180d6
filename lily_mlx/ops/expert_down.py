"""The second half of the experts of one token: down projections, weighted, summed, with the residual.

    y = residual + sum over s of weights[s] * (down_e h_s),  e = experts[s]; last comes the shared expert

| array | shape | dtype |
| --- | --- | --- |
| h | [top_k * M + MS], expert after expert | float32 |
| experts | [top_k + 1]; the last is not looked at | int32 |
| weights | [top_k + 1] | float32 |
| residual | [..., N], one vector | bfloat16, float16 or float32 |
| down | :class:`~lily_mlx.ops.packed.Packed` [E, N, M] | |
| shared_down | Packed [N, MS] | |
| y (result) | as residual | as residual |

h, experts and weights come from :func:`~lily_mlx.ops.expert_gate_up.expert_gate_up`. Sums are float32 and
rounded once: the experts in the order given, the shared expert, the residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import MAX_THREADGROUP_BYTES, Buffer, Kernel, Variant, declare, launch
from ..tiles import choose
from .packed import ACTIVATION_DTYPES, Packed, lanes_per_row, shared_vector_bytes, why_mixed, why_not
from .trust import self_check

MAX_TOP_K = 31
MAX_CHUNK = 512  # values of h in threadgroup memory at once, for each expert


def _template(
    residual: mx.Dtype, scales: mx.Dtype, sizes: Mapping[str, int], tile: Mapping[str, int]
) -> dict[str, int | bool | mx.Dtype]:
    """``sizes``: N M MS TOP_K GROUP BITS SHARED_BITS."""
    rows = max(
        tile["rows"],
        _rows_side_by_side(sizes["M"], sizes["BITS"]),
        _rows_side_by_side(sizes["MS"], sizes["SHARED_BITS"]),
    )
    return {"InT": residual, "ScaleT": scales, **sizes, "ROWS": rows, "AHEAD": tile["ahead"]}


def _rows_side_by_side(width: int, bits: int) -> int:
    """Rows that a simdgroup reads at once."""
    return 32 // min(lanes_per_row(width, bits), MAX_CHUNK * bits // 128)


def _threads(template: Mapping[str, Any]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x: a simdgroup for each expert."""
    threads = 32 * (template["TOP_K"] + 1)
    return (template["N"] // template["ROWS"] * threads, 1, 1), (threads, 1, 1)


def _threadgroup_bytes(template: Mapping[str, Any]) -> int:
    return (template["TOP_K"] + 1) * (shared_vector_bytes(MAX_CHUNK, 1) + 4 * template["ROWS"])


def _variant(
    residual: mx.Dtype, scales: mx.Dtype, E: int, sizes: Mapping[str, int], tile: Mapping[str, int]
) -> Variant:
    template = _template(residual, scales, sizes, tile)
    M, MS, top_k = sizes["M"], sizes["MS"], sizes["TOP_K"]
    axes = {
        "E": E,
        "P": M * sizes["BITS"] // 32,
        "G": M // sizes["GROUP"],
        "SP": MS * sizes["SHARED_BITS"] // 32,
        "SG": MS // sizes["GROUP"],
        "H": top_k * M + MS,
        "S": top_k + 1,
    }
    return Variant(template, axes, *_threads(template))


_QWEN = {"N": 2048, "M": 512, "MS": 512, "TOP_K": 8, "GROUP": 64, "BITS": 4, "SHARED_BITS": 4}
_SMALL = {"N": 64, "M": 96, "MS": 160, "TOP_K": 7, "GROUP": 32, "BITS": 4, "SHARED_BITS": 8}

KERNEL = declare(
    Kernel(
        stem="expert_down",
        inputs=(
            Buffer("h", "H", "float32"),
            Buffer("experts", "S", "int32"),
            Buffer("weights", "S", "float32"),
            Buffer("residual", "*", "InT"),
            Buffer("down_weight", "E N P", "uint32"),
            Buffer("down_scales", "E N G", "ScaleT"),
            Buffer("down_biases", "E N G", "ScaleT"),
            Buffer("shared_weight", "N SP", "uint32"),
            Buffer("shared_scales", "N SG", "ScaleT"),
            Buffer("shared_biases", "N SG", "ScaleT"),
        ),
        outputs=(Buffer("y", "*", "InT"),),
        template=(
            *("InT", "ScaleT", "N", "M", "MS", "TOP_K", "GROUP", "BITS", "SHARED_BITS"),
            *("ROWS", "AHEAD"),
        ),
        variants=(
            _variant(mx.bfloat16, mx.bfloat16, 256, _QWEN, {"rows": 16, "ahead": 1}),
            _variant(mx.float16, mx.float32, 10, _SMALL, {"rows": 8, "ahead": 2}),
        ),
        threadgroup_bytes=_threadgroup_bytes,
    )
)


def supports(
    h: mx.array,
    experts: mx.array,
    weights: mx.array,
    residual: mx.array,
    down: Packed,
    shared_down: Packed,
    *,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    N = residual.shape[-1]
    for name, matrix, count in (("down", down, down.weight.shape[0]), ("shared down", shared_down, None)):
        if reason := why_not(name, matrix, matrix.columns, count):
            return reason
        if matrix.rows != N:
            return f"{name} has {matrix.rows} rows, not {N}"
    M, MS, top_k = down.columns, shared_down.columns, experts.size - 1
    if residual.size != N:
        return f"residual has shape {residual.shape}, more than one vector"
    if residual.dtype not in ACTIVATION_DTYPES:
        return f"residual is {residual.dtype}"
    if h.shape != (top_k * M + MS,) or weights.shape != (top_k + 1,) or experts.ndim != 1:
        return f"h {h.shape}, experts {experts.shape} and weights {weights.shape} do not belong together"
    if h.dtype != mx.float32 or weights.dtype != mx.float32 or experts.dtype != mx.int32:
        return f"h is {h.dtype}, experts are {experts.dtype}, weights {weights.dtype}"
    if not 1 <= top_k <= MAX_TOP_K:
        return f"{top_k} chosen experts; 1 to {MAX_TOP_K} are possible"
    if M % 32 or MS % 32:
        return f"the experts' widths, {M} and {MS}, are not multiples of 32"
    if reason := why_mixed((down, shared_down)):
        return reason
    if N % 32:
        return f"N={N} is not a multiple of 32"
    if (top_k + 1) * (shared_vector_bytes(MAX_CHUNK, 1) + 4 * 32) > MAX_THREADGROUP_BYTES:
        return f"{top_k} chosen experts do not fit into threadgroup memory"
    return None


def expert_down_reference(
    h: mx.array,
    experts: mx.array,
    weights: mx.array,
    residual: mx.array,
    down: Packed,
    shared_down: Packed,
) -> mx.array:
    """The same in plain MLX, in float32 with weights dequantised in float32; y is float32 too."""
    routed, shared = mx.split(h, [h.size - shared_down.columns])
    parts = (down.dequantised(experts[:-1]) * routed.reshape(-1, 1, down.columns)).sum(-1)
    y = (weights[:-1, None] * parts).sum(0) + weights[-1] * (shared_down.dequantised() * shared).sum(-1)
    return residual.astype(mx.float32) + y


def expert_down(
    h: mx.array,
    experts: mx.array,
    weights: mx.array,
    residual: mx.array,
    down: Packed,
    shared_down: Packed,
    *,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Project and sum on the GPU (or the host back-end).

    Args:
        h, experts, weights, residual, down, shared_down: see the module's table; :func:`supports` must answer
            None.
        tile: ``rows`` of y that a threadgroup has (more where the experts are narrow), ``ahead`` 16-byte
            loads of each row in flight; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        y.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    backend = backend or backends.resolve()
    sizes = {
        "N": residual.shape[-1],
        "M": down.columns,
        "MS": shared_down.columns,
        "TOP_K": experts.size - 1,
        "GROUP": down.group_size,
        "BITS": down.bits,
        "SHARED_BITS": shared_down.bits,
    }
    if tile is None:
        tile = choose("expert_down", backends.chip(backend), N=sizes["N"], M=sizes["M"], bits=down.bits)
    template = _template(residual.dtype, down.scales.dtype, sizes, tile)
    grid, threadgroup = _threads(template)
    parts = [part for matrix in (down, shared_down) for part in (matrix.weight, matrix.scales, matrix.biases)]
    (y,) = launch(
        KERNEL,
        [h, experts, weights, residual, *parts],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[residual.shape],
        output_dtypes=[residual.dtype],
        backend=backend,
    )
    return y


@self_check("expert_down")
def _self_check(backend: str) -> str | None:
    """Ten experts of the real width with 64 outputs, one of them chosen twice, against the reference."""
    keys = mx.random.split(mx.random.key(0), 4)
    E, N, M = 10, 64, 512

    def matrix(key: mx.array, *shape: int) -> Packed:
        values = (mx.random.normal((*shape, M), key=key) * M**-0.5).astype(mx.bfloat16)
        return Packed(*mx.quantize(values, 64, 4), 4, 64)

    experts = mx.array([3, 9, 0, 3, 5, 7, 1, 2, E], dtype=mx.int32)
    h = mx.random.normal((experts.size * M,), key=keys[0])
    weights = mx.softmax(mx.arange(experts.size).astype(mx.float32))
    residual = mx.random.normal((1, 1, N), key=keys[1]).astype(mx.bfloat16)
    down, shared_down = matrix(keys[2], E, N), matrix(keys[3], N)
    got = expert_down(h, experts, weights, residual, down, shared_down, backend=backend)
    want = expert_down_reference(h, experts, weights, residual, down, shared_down)
    error: Any = (mx.abs(got.astype(mx.float32) - want).max() / mx.abs(want).max()).item()
    if not error <= 2**-7:  # bfloat16 rounds once, by at most 2^-8 of a value
        return f"y: {error:.1e} off the reference, allowed {2**-7:.1e}"
    return None
