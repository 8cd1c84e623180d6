"""The second half of the experts of one token: down projections, weighted, summed, with the residual.

    y = residual + sum over s of weights[s] * (down_e h_s),  e = experts[s]; last comes the shared expert

| array | shape | dtype |
| --- | --- | --- |
| chosen | [(top_k + 1) (M + 2)]: h, experts and weights, see ``expert_gate_up.Chosen`` | float32 |
| residual | [..., N], one vector | bfloat16, float16 or float32 |
| matrices | :class:`~lily_mlx.ops.packed.Packed` [E + 1, N, M], the shared expert last | |
| y (result) | as residual | as residual |

chosen comes from :func:`~lily_mlx.ops.expert_gate_up.expert_gate_up`. Sums are float32 and rounded once: the
experts in the order given, the shared expert, the residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import MAX_THREADGROUP_BYTES, Buffer, Kernel, Variant, declare, launch, max_threads
from ..tiles import choose, of_chip
from .expert_gate_up import Chosen
from .packed import ACTIVATION_DTYPES, Packed, lanes_per_row, shared_vector_bytes, why_not
from .trust import off_reference, self_check

MAX_TOP_K = 31
MAX_CHUNK = 512  # values of h in threadgroup memory at once, for each expert


def _template(
    residual: mx.Dtype, scales: mx.Dtype, sizes: Mapping[str, int], tile: Mapping[str, int]
) -> dict[str, int | bool | mx.Dtype]:
    """``sizes``: N M E TOP_K GROUP BITS."""
    rows = max(tile["rows"], 32 // _lanes(sizes["M"], sizes["BITS"]))
    return {"InT": residual, "ScaleT": scales, **sizes, "ROWS": rows, "AHEAD": tile["ahead"]}


def _lanes(width: int, bits: int) -> int:
    """Lanes that share a row."""
    return min(lanes_per_row(width, bits), MAX_CHUNK * bits // 128)


def _threads(template: Mapping[str, Any]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x: a simdgroup for each expert."""
    threads = 32 * (template["TOP_K"] + 1)
    return (template["N"] // template["ROWS"] * threads, 1, 1), (threads, 1, 1)


def _threadgroup_bytes(template: Mapping[str, Any]) -> int:
    chunk = _lanes(template["M"], template["BITS"]) * 128 // template["BITS"]
    return int((template["TOP_K"] + 1) * (shared_vector_bytes(chunk, 1) + 4 * template["ROWS"]))


def _variant(
    residual: mx.Dtype, scales: mx.Dtype, sizes: Mapping[str, int], tile: Mapping[str, int]
) -> Variant:
    template = _template(residual, scales, sizes, tile)
    return Variant(template, {"C": (sizes["TOP_K"] + 1) * (sizes["M"] + 2)}, *_threads(template))


_QWEN = {"N": 2048, "M": 512, "E": 256, "TOP_K": 8, "GROUP": 64, "BITS": 4}
_SMALL = {"N": 64, "M": 96, "E": 9, "TOP_K": 7, "GROUP": 32, "BITS": 8}

KERNEL = declare(
    Kernel(
        stem="expert_down",
        inputs=(
            Buffer("chosen", "C", "float32"),
            Buffer("residual", "*", "InT"),
            Buffer("matrices", "*", "uint32"),
        ),
        outputs=(Buffer("y", "*", "InT"),),
        template=("InT", "ScaleT", "N", "M", "E", "TOP_K", "GROUP", "BITS", "ROWS", "AHEAD"),
        variants=(
            _variant(mx.bfloat16, mx.bfloat16, _QWEN, {"rows": 16, "ahead": 1}),
            _variant(mx.float16, mx.float32, _SMALL, {"rows": 8, "ahead": 2}),
        ),
        threadgroup_bytes=_threadgroup_bytes,
    )
)


def supports(
    chosen: mx.array,
    residual: mx.array,
    matrices: Packed,
    top_k: int,
    *,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    backend = backend or backends.resolve()
    if backend == "ops":
        return "no GPU back-end"
    N, M = residual.shape[-1], matrices.columns
    if reason := why_not("down", matrices, M, matrices.weight.shape[0]):
        return reason
    if matrices.rows != N:
        return f"down has {matrices.rows} rows, not {N}"
    if residual.size != N:
        return f"residual has shape {residual.shape}, more than one vector"
    if residual.dtype not in ACTIVATION_DTYPES:
        return f"residual is {residual.dtype}"
    most = min(MAX_TOP_K, max_threads(backend) // 32 - 1)  # a simdgroup for each, and the shared one
    if not 1 <= top_k <= most:
        return f"{top_k} chosen experts; 1 to {most} are possible on {backend}"
    if chosen.dtype != mx.float32 or chosen.shape != ((top_k + 1) * (M + 2),):
        return f"chosen is {chosen.dtype} {chosen.shape}, not {top_k + 1} experts of {M}"
    if M % 32:
        return f"the experts' width, {M}, is not a multiple of 32"
    if N % 32:
        return f"N={N} is not a multiple of 32"
    if (
        _threadgroup_bytes({"M": M, "BITS": matrices.bits, "TOP_K": top_k, "ROWS": 32})
        > MAX_THREADGROUP_BYTES
    ):
        return f"{top_k} chosen experts do not fit into threadgroup memory"
    return None


def expert_down_reference(
    chosen: mx.array,
    residual: mx.array,
    matrices: Packed,
    top_k: int,
) -> mx.array:
    """The same in plain MLX, in float32 with weights dequantised in float32; y is float32 too."""
    h, experts, weights = Chosen.of(chosen, top_k)
    parts = (matrices.dequantised(experts) * h[:, None]).sum(-1)
    return residual.astype(mx.float32) + (parts * weights[:, None]).sum(0).reshape(residual.shape)


def expert_down(
    chosen: mx.array,
    residual: mx.array,
    matrices: Packed,
    top_k: int,
    *,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Project and sum on the GPU (or the host back-end).

    Args:
        chosen, residual, matrices: see the module's table; :func:`supports` must answer None.
        top_k: experts chosen, without the shared one.
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
        "M": matrices.columns,
        "E": matrices.weight.shape[0] - 1,
        "TOP_K": top_k,
        "GROUP": matrices.group_size,
        "BITS": matrices.bits,
    }
    if tile is None:
        tile = choose("expert_down", backends.chip(backend), N=sizes["N"], M=sizes["M"], bits=matrices.bits)
    template = _template(residual.dtype, matrices.scales.dtype, sizes, tile)
    grid, threadgroup = _threads(template)
    (y,) = launch(
        KERNEL,
        [chosen, residual, matrices.in_one()],
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
    keys = mx.random.split(mx.random.key(0), 3)
    N, M, top_k = 64, 512, 8
    experts = mx.array([3, 9, 0, 3, 5, 7, 1, 2, 10], dtype=mx.int32)
    h = mx.random.normal((top_k + 1, M), key=keys[0])
    chosen = Chosen(h, experts, mx.softmax(mx.arange(top_k + 1).astype(mx.float32))).array
    residual = mx.random.normal((1, 1, N), key=keys[1]).astype(mx.bfloat16)
    values = (mx.random.normal((11, N, M), key=keys[2]) * M**-0.5).astype(mx.bfloat16)
    matrices = Packed(*mx.quantize(values, 64, 4), 4, 64)
    want = expert_down_reference(chosen, residual, matrices, top_k)
    for tile in of_chip("expert_down", backends.chip(backend)):
        got = expert_down(chosen, residual, matrices, top_k, tile=tile, backend=backend)
        # bfloat16 rounds once, by at most 2^-8 of a value
        if off := off_reference(got, want, 2**-7):
            return f"y: {off}, with {tile}"
    return None
