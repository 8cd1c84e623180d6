"""Routing, and the first half of the experts of one token: gate and up projections with SwiGLU.

    n = rms_norm(x) * norm_weight
    experts = the top_k experts with the largest logits, by index; weights = softmax over their logits
    h_s = silu(gate_e n) * (up_e n),  e = experts[s]; last comes the shared expert

| array | shape | dtype |
| --- | --- | --- |
| x | [..., K], one vector | bfloat16, float16 or float32 |
| norm_weight | [K] | bfloat16, float16 or float32 |
| logits | [..., E + 1]: the router's, then the shared expert's gate | bfloat16, float16 or float32 |
| gate, up | :class:`~lily_mlx.ops.packed.Packed` [E, M, K] | |
| shared_gate, shared_up | Packed [MS, K] | |
| h (result) | [top_k * M + MS], expert after expert | float32 |
| experts (result) | [top_k + 1], ascending; E last, for the shared expert | int32 |
| weights (result) | [top_k + 1]; the last is the sigmoid of the shared expert's gate | float32 |

The weights are those of a softmax over all experts, renormalised over the chosen ones, which is the softmax
over the chosen logits. Among equal logits the lower index is chosen; NaN ranks below every number.
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

MAX_TOP_K = 31
MAX_EXPERTS = 1024
MAX_SIMDGROUPS = 32


def _template(
    dtypes: Sequence[mx.Dtype],
    sizes: Mapping[str, int],
    tile: Mapping[str, int],
) -> dict[str, int | bool | mx.Dtype]:
    """``dtypes`` of x, norm_weight, scales, logits; ``sizes`` K M MS E TOP_K GROUP BITS SHARED_BITS."""
    rows = tile["rows"]
    while rows > min(sizes["M"], sizes["MS"]):
        rows //= 2
    return {
        **dict(zip(("InT", "NormT", "ScaleT", "LogitT"), dtypes, strict=True)),
        **sizes,
        "ROWS": rows,
        "AHEAD": tile["ahead"],
        "SIMDGROUPS": tile["simdgroups"],
    }


def _threads(template: Mapping[str, Any]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x: the shared expert's threadgroups, then each chosen expert's."""

    def threadgroups(rows: int, bits: int) -> int:
        block = 32 // lanes_per_row(template["K"], bits) * template["ROWS"] * template["SIMDGROUPS"]
        return -(-rows // block)

    count = threadgroups(template["MS"], template["SHARED_BITS"])
    count += template["TOP_K"] * threadgroups(template["M"], template["BITS"])
    threads = 32 * template["SIMDGROUPS"]
    return (count * threads, 1, 1), (threads, 1, 1)


def _variant(dtypes: Sequence[mx.Dtype], sizes: Mapping[str, int], tile: Mapping[str, int]) -> Variant:
    template = _template(dtypes, sizes, tile)
    K, top_k = sizes["K"], sizes["TOP_K"]
    axes = {
        "P": K * sizes["BITS"] // 32,
        "SP": K * sizes["SHARED_BITS"] // 32,
        "G": K // sizes["GROUP"],
        "L": sizes["E"] + 1,
        "H": top_k * sizes["M"] + sizes["MS"],
        "S": top_k + 1,
    }
    return Variant(template, axes, *_threads(template))


_QWEN = {"K": 2048, "M": 512, "MS": 512, "E": 256, "TOP_K": 8, "GROUP": 64, "BITS": 4, "SHARED_BITS": 4}
_SMALL = {"K": 96, "M": 40, "MS": 24, "E": 37, "TOP_K": 3, "GROUP": 32, "BITS": 4, "SHARED_BITS": 8}

KERNEL = declare(
    Kernel(
        stem="expert_gate_up",
        inputs=(
            Buffer("x", "*", "InT"),
            Buffer("norm_weight", "K", "NormT"),
            Buffer("logits", "*", "LogitT"),
            Buffer("gate_weight", "E M P", "uint32"),
            Buffer("gate_scales", "E M G", "ScaleT"),
            Buffer("gate_biases", "E M G", "ScaleT"),
            Buffer("up_weight", "E M P", "uint32"),
            Buffer("up_scales", "E M G", "ScaleT"),
            Buffer("up_biases", "E M G", "ScaleT"),
            Buffer("shared_gate_weight", "MS SP", "uint32"),
            Buffer("shared_gate_scales", "MS G", "ScaleT"),
            Buffer("shared_gate_biases", "MS G", "ScaleT"),
            Buffer("shared_up_weight", "MS SP", "uint32"),
            Buffer("shared_up_scales", "MS G", "ScaleT"),
            Buffer("shared_up_biases", "MS G", "ScaleT"),
            Buffer("parameters", "8", "int32"),
        ),
        outputs=(
            Buffer("h", "H", "float32"),
            Buffer("experts", "S", "int32"),
            Buffer("weights", "S", "float32"),
        ),
        template=(
            *("InT", "NormT", "ScaleT", "LogitT"),
            *("K", "M", "MS", "E", "TOP_K", "GROUP", "BITS", "SHARED_BITS", "ROWS", "AHEAD", "SIMDGROUPS"),
        ),
        variants=(
            _variant(
                (mx.bfloat16, mx.bfloat16, mx.bfloat16, mx.float32),
                _QWEN,
                {"rows": 2, "ahead": 2, "simdgroups": 8},
            ),
            _variant(
                (mx.float16, mx.float32, mx.float16, mx.float16),
                _SMALL,
                {"rows": 4, "ahead": 1, "simdgroups": 2},
            ),
        ),
        threadgroup_bytes=lambda template: (
            shared_vector_bytes(template["K"], template["SIMDGROUPS"]) + 4 * template["TOP_K"]
        ),
    )
)


def supports(
    x: mx.array,
    norm_weight: mx.array,
    logits: mx.array,
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
    K = x.shape[-1]
    if x.size != K:
        return f"x has shape {x.shape}, more than one vector"
    if x.dtype not in ACTIVATION_DTYPES or logits.dtype not in ACTIVATION_DTYPES:
        return f"x is {x.dtype}, logits are {logits.dtype}"
    if norm_weight.shape != (K,) or norm_weight.dtype not in ACTIVATION_DTYPES:
        return f"norm_weight is {norm_weight.dtype} {norm_weight.shape}, not [{K}]"
    if K % 32:
        return f"K={K} is not a multiple of 32"
    if shared_vector_bytes(K, MAX_SIMDGROUPS) + 4 * MAX_TOP_K > MAX_THREADGROUP_BYTES:
        return f"K={K} does not fit into threadgroup memory"
    E = gate.weight.shape[0]
    if logits.size != E + 1:
        return f"logits have shape {logits.shape}, not {E} experts and the shared expert's gate"
    if not 1 <= top_k <= min(E, MAX_TOP_K) or E > MAX_EXPERTS:
        return f"top {top_k} of {E} experts; at most {MAX_TOP_K} of {MAX_EXPERTS}"
    matrices = {"gate": gate, "up": up, "shared gate": shared_gate, "shared up": shared_up}
    for name, matrix in matrices.items():
        if reason := why_not(name, matrix, K, None if name.startswith("shared") else E):
            return reason
    for one, other in ((gate, up), (shared_gate, shared_up)):
        if (one.rows, one.bits) != (other.rows, other.bits):
            return f"gate and up differ: {one.rows} and {other.rows} rows, {one.bits} and {other.bits} bits"
    return why_mixed(tuple(matrices.values()))


def route_reference(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    """The choice in plain MLX: (experts [top_k + 1] int32, weights [top_k + 1] float32)."""
    logits = logits.reshape(-1).astype(mx.float32)
    router, gate = logits[:-1], logits[-1:]
    values: Any = router.tolist()
    # sorted is stable, so equal logits stay in the order of their indices; NaN differs from itself.
    ranked = sorted(range(len(values)), key=lambda e: (values[e] != values[e], -values[e]))
    experts = mx.array(sorted(ranked[:top_k]))
    weights = mx.softmax(router[experts], precise=True)
    return (
        mx.concatenate([experts, mx.array([router.size])]).astype(mx.int32),
        mx.concatenate([weights, mx.sigmoid(gate)]),
    )


def expert_gate_up_reference(
    x: mx.array,
    norm_weight: mx.array,
    logits: mx.array,
    gate: Packed,
    up: Packed,
    shared_gate: Packed,
    shared_up: Packed,
    top_k: int,
    *,
    eps: float = 1e-6,
) -> tuple[mx.array, mx.array, mx.array]:
    """The same in plain MLX, in float32 with weights dequantised in float32: (h, experts, weights)."""
    x = x.reshape(-1).astype(mx.float32)
    n = x * mx.rsqrt((x * x).mean() + eps) * norm_weight.astype(mx.float32)
    experts, weights = route_reference(logits, top_k)

    def half(gate_matrix: mx.array, up_matrix: mx.array) -> mx.array:
        g, u = ((matrix * n).sum(-1) for matrix in (gate_matrix, up_matrix))
        return (g * mx.sigmoid(g) * u).reshape(-1)

    routed = half(gate.dequantised(experts[:-1]), up.dequantised(experts[:-1]))
    return (
        mx.concatenate([routed, half(shared_gate.dequantised(), shared_up.dequantised())]),
        experts,
        weights,
    )


def expert_gate_up(
    x: mx.array,
    norm_weight: mx.array,
    logits: mx.array,
    gate: Packed,
    up: Packed,
    shared_gate: Packed,
    shared_up: Packed,
    top_k: int,
    *,
    eps: float = 1e-6,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Route and compute on the GPU (or the host back-end).

    Args:
        x, norm_weight, logits, gate, up, shared_gate, shared_up: see the module's table; :func:`supports`
            must answer None.
        top_k: experts chosen.
        eps: of the norm.
        tile: ``rows`` of each projection a lane has at once, ``ahead`` 16-byte loads of each row in flight,
            ``simdgroups`` of a threadgroup; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        (h, experts, weights), which :func:`~lily_mlx.ops.expert_down.expert_down` takes.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    backend = backend or backends.resolve()
    sizes = {
        "K": x.shape[-1],
        "M": gate.rows,
        "MS": shared_gate.rows,
        "E": gate.weight.shape[0],
        "TOP_K": top_k,
        "GROUP": gate.group_size,
        "BITS": gate.bits,
        "SHARED_BITS": shared_gate.bits,
    }
    if tile is None:
        tile = choose("expert_gate_up", backends.chip(backend), K=sizes["K"], M=sizes["M"], bits=gate.bits)
    template = _template((x.dtype, norm_weight.dtype, gate.scales.dtype, logits.dtype), sizes, tile)
    grid, threadgroup = _threads(template)
    matrices = (gate, up, shared_gate, shared_up)
    parts = [part for matrix in matrices for part in (matrix.weight, matrix.scales, matrix.biases)]
    h, experts, weights = launch(
        KERNEL,
        [x, norm_weight, logits, *parts, eps_parameter(eps)],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(top_k * sizes["M"] + sizes["MS"],), (top_k + 1,), (top_k + 1,)],
        output_dtypes=[mx.float32, mx.int32, mx.float32],
        backend=backend,
    )
    return h, experts, weights


@self_check("expert_gate_up")
def _self_check(backend: str) -> str | None:
    """Twelve experts of a sixteenth of the real width, with two equal logits, against the reference."""
    keys = mx.random.split(mx.random.key(0), 6)
    K, M, MS, E, top_k = 2048, 40, 32, 12, 8

    def matrix(key: mx.array, *shape: int) -> Packed:
        values = (mx.random.normal((*shape, K), key=key) * K**-0.5).astype(mx.bfloat16)
        return Packed(*mx.quantize(values, 64, 4), 4, 64)

    x = mx.random.normal((1, 1, K), key=keys[0]).astype(mx.bfloat16)
    norm_weight = mx.random.normal((K,), key=keys[1]).astype(mx.bfloat16)
    logits = mx.array([0.5, 2.0, -1.0, 2.0, 3.0, 0.0, 1.0, -2.0, 1.5, 0.25, -0.5, -3.0, 0.75])
    gate, up = matrix(keys[2], E, M), matrix(keys[3], E, M)
    shared = matrix(keys[4], MS), matrix(keys[5], MS)
    got = expert_gate_up(x, norm_weight, logits, gate, up, *shared, top_k, backend=backend)
    want = expert_gate_up_reference(x, norm_weight, logits, gate, up, *shared, top_k)
    if got[1].tolist() != want[1].tolist():
        return f"experts {got[1].tolist()}, not {want[1].tolist()}"
    for name, ours, theirs in (("h", got[0], want[0]), ("weights", got[2], want[2])):
        error: Any = (mx.abs(ours - theirs).max() / mx.abs(theirs).max()).item()
        if not error <= 1e-4:  # float32 throughout
            return f"{name}: {error:.1e} off the reference, allowed 1e-4"
    return None
