"""Routing, and the first half of the experts of one token: gate and up projections with SwiGLU.

    n = rms_norm(x) * norm_weight
    experts = the top_k experts with the largest logits; weights = softmax over their logits
    h_s = silu(gate_e n) * (up_e n),  e = experts[s]; last comes the shared expert, e = E

| array | shape | dtype |
| --- | --- | --- |
| x | [..., K], one vector | bfloat16, float16 or float32 |
| norm_weight | [K] | bfloat16, float16 or float32 |
| logits | [..., E + 1]: the router's, then the shared expert's gate | bfloat16, float16 or float32 |
| matrices | Packed [2 (E + 1), M, K]: the gates, the shared expert last, then the ups | |
| chosen (result) | [(top_k + 1) (M + 2)], see :class:`Chosen` | float32 |

The weights are those of a softmax over all experts, renormalised over the chosen ones, which is the softmax
over the chosen logits. Experts come by their logits, the largest first, among equal ones the lower index; NaN
ranks below every number.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import MAX_THREADGROUP_BYTES, Buffer, Kernel, Variant, declare, launch
from ..tiles import choose, of_chip
from .packed import ACTIVATION_DTYPES, Packed, lanes_per_row, shared_vector_bytes, why_not
from .trust import off_reference, self_check

MAX_TOP_K = 31
MAX_EXPERTS = 1024
MAX_SIMDGROUPS = 32


class Chosen(NamedTuple):
    """What the two halves of the experts pass on, as one array: every buffer of a launch costs time.

    Attributes:
        h: [top_k + 1, M] float32, expert after expert, the shared one last.
        experts: [top_k + 1] int32; E, the shared one, last.
        weights: [top_k + 1] float32; the last is the sigmoid of the shared expert's gate.
    """

    h: mx.array
    experts: mx.array
    weights: mx.array

    @classmethod
    def of(cls, array: mx.array, top_k: int) -> Chosen:
        """Take the array apart."""
        count = top_k + 1
        width = array.size // count - 2
        h, experts, weights = mx.split(array, [count * width, count * (width + 1)])
        return cls(h.reshape(count, width), experts.astype(mx.int32), weights)

    @property
    def array(self) -> mx.array:
        """[(top_k + 1) (M + 2)] float32: h, experts as numbers (their bits would be subnormal), weights."""
        parts = (self.h.reshape(-1), self.experts, self.weights)
        return mx.concatenate([part.astype(mx.float32) for part in parts])


def _template(
    dtypes: Sequence[mx.Dtype],
    sizes: Mapping[str, int],
    eps: float,
    tile: Mapping[str, int],
) -> dict[str, int | bool | mx.Dtype]:
    """``dtypes`` of x, norm_weight, scales, logits; ``sizes`` K M E TOP_K GROUP BITS."""
    rows = tile["rows"]
    while rows > sizes["M"]:
        rows //= 2
    return {
        **dict(zip(("InT", "NormT", "ScaleT", "LogitT"), dtypes, strict=True)),
        **sizes,
        "EPS_BITS": struct.unpack("<i", struct.pack("<f", eps))[0],
        "ROWS": rows,
        "AHEAD": tile["ahead"],
        "SIMDGROUPS": tile["simdgroups"],
    }


def _threads(template: Mapping[str, Any]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup, along x: the shared expert's threadgroups, then each chosen expert's."""
    simdgroups = template["SIMDGROUPS"]
    rows = 32 // lanes_per_row(template["K"], template["BITS"]) * template["ROWS"] * simdgroups
    count = (template["TOP_K"] + 1) * -(-template["M"] // rows)
    threads = 32 * simdgroups
    return (count * threads, 1, 1), (threads, 1, 1)


def _threadgroup_bytes(K: int, E: int, top_k: int, simdgroups: int) -> int:
    return shared_vector_bytes(K, simdgroups) + 4 * (2 * (E + 8) + top_k)


def _variant(dtypes: Sequence[mx.Dtype], sizes: Mapping[str, int], tile: Mapping[str, int]) -> Variant:
    template = _template(dtypes, sizes, 1e-6, tile)
    return Variant(template, {"C": (sizes["TOP_K"] + 1) * (sizes["M"] + 2)}, *_threads(template))


_QWEN = {"K": 2048, "M": 512, "E": 256, "TOP_K": 8, "GROUP": 64, "BITS": 4}
_SMALL = {"K": 96, "M": 40, "E": 37, "TOP_K": 3, "GROUP": 32, "BITS": 8}

KERNEL = declare(
    Kernel(
        stem="expert_gate_up",
        inputs=(
            Buffer("x", "*", "InT"),
            Buffer("norm_weight", "K", "NormT"),
            Buffer("logits", "*", "LogitT"),
            Buffer("matrices", "*", "uint32"),
        ),
        outputs=(Buffer("chosen", "C", "float32"),),
        template=(
            *("InT", "NormT", "ScaleT", "LogitT"),
            *("K", "M", "E", "TOP_K", "GROUP", "BITS", "EPS_BITS", "ROWS", "AHEAD", "SIMDGROUPS"),
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
        threadgroup_bytes=lambda template: _threadgroup_bytes(
            template["K"], template["E"], template["TOP_K"], template["SIMDGROUPS"]
        ),
    )
)


def supports(
    x: mx.array,
    norm_weight: mx.array,
    logits: mx.array,
    matrices: Packed,
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
    E = logits.size - 1
    if not 1 <= top_k <= min(E, MAX_TOP_K) or E > MAX_EXPERTS:
        return f"top {top_k} of {E} experts; at most {MAX_TOP_K} of {MAX_EXPERTS}"
    if _threadgroup_bytes(K, E, top_k, MAX_SIMDGROUPS) > MAX_THREADGROUP_BYTES:
        return f"K={K} and {E} experts do not fit into threadgroup memory"
    return why_not("gate and up", matrices, K, 2 * (E + 1))


def route_reference(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    """The choice in plain MLX: (experts [top_k + 1] int32, weights [top_k + 1] float32)."""
    logits = logits.reshape(-1).astype(mx.float32)
    router, gate = logits[:-1], logits[-1:]
    values: Any = router.tolist()
    # sorted is stable, so equal logits stay in the order of their indices; NaN differs from itself.
    ranked = sorted(range(len(values)), key=lambda e: (values[e] != values[e], -values[e]))
    experts = mx.array(ranked[:top_k])
    weights = mx.softmax(router[experts], precise=True)
    return (
        mx.concatenate([experts, mx.array([router.size])]).astype(mx.int32),
        mx.concatenate([weights, mx.sigmoid(gate)]),
    )


def expert_gate_up_reference(
    x: mx.array,
    norm_weight: mx.array,
    logits: mx.array,
    matrices: Packed,
    top_k: int,
    *,
    eps: float = 1e-6,
) -> mx.array:
    """The same in plain MLX, in float32 with weights dequantised in float32."""
    x = x.reshape(-1).astype(mx.float32)
    n = x * mx.rsqrt((x * x).mean() + eps) * norm_weight.astype(mx.float32)
    experts, weights = route_reference(logits, top_k)
    g, u = ((matrices.dequantised(rows) * n).sum(-1) for rows in (experts, experts + logits.size))
    return Chosen(g * mx.sigmoid(g) * u, experts, weights).array


def expert_gate_up(
    x: mx.array,
    norm_weight: mx.array,
    logits: mx.array,
    matrices: Packed,
    top_k: int,
    *,
    eps: float = 1e-6,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Route and compute on the GPU (or the host back-end).

    Args:
        x, norm_weight, logits, matrices: see the module's table; :func:`supports` must answer None.
        top_k: experts chosen.
        eps: of the norm.
        tile: ``rows`` of each projection a lane has at once, ``ahead`` 16-byte loads of each row in flight,
            ``simdgroups`` of a threadgroup; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        chosen, which :func:`~lily_mlx.ops.expert_down.expert_down` takes and :meth:`Chosen.of` takes apart.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    backend = backend or backends.resolve()
    sizes = {
        "K": x.shape[-1],
        "M": matrices.rows,
        "E": matrices.weight.shape[0] // 2 - 1,
        "TOP_K": top_k,
        "GROUP": matrices.group_size,
        "BITS": matrices.bits,
    }
    if tile is None:
        tile = choose(
            "expert_gate_up", backends.chip(backend), K=sizes["K"], M=sizes["M"], bits=matrices.bits
        )
    dtypes = (x.dtype, norm_weight.dtype, matrices.scales.dtype, logits.dtype)
    template = _template(dtypes, sizes, eps, tile)
    grid, threadgroup = _threads(template)
    (chosen,) = launch(
        KERNEL,
        [x, norm_weight, logits, matrices.in_one()],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[((top_k + 1) * (sizes["M"] + 2),)],
        output_dtypes=[mx.float32],
        backend=backend,
    )
    return chosen


@self_check("expert_gate_up")
def _self_check(backend: str) -> str | None:
    """Forty experts of a sixteenth of the real width, with two equal logits, against the reference."""
    keys = mx.random.split(mx.random.key(0), 4)
    K, M, E, top_k = 2048, 32, 40, 8
    values = (mx.random.normal((2 * (E + 1), M, K), key=keys[0]) * K**-0.5).astype(mx.bfloat16)
    matrices = Packed(*mx.quantize(values, 64, 4), 4, 64)
    x = mx.random.normal((1, 1, K), key=keys[1]).astype(mx.bfloat16)
    norm_weight = mx.random.normal((K,), key=keys[2]).astype(mx.bfloat16)
    logits = mx.random.normal((E + 1,), key=keys[3])
    logits[5] = logits[36] = 1.5
    arguments = (x, norm_weight, logits, matrices, top_k)
    want = Chosen.of(expert_gate_up_reference(*arguments), top_k)
    for tile in of_chip("expert_gate_up", backends.chip(backend)):
        got = Chosen.of(expert_gate_up(*arguments, tile=tile, backend=backend), top_k)
        if got.experts.tolist() != want.experts.tolist():
            return f"experts {got.experts.tolist()}, not {want.experts.tolist()}, with {tile}"
        for name, ours, theirs in (("h", got.h, want.h), ("weights", got.weights, want.weights)):
            # float32 throughout
            if off := off_reference(ours, theirs, 1e-4):
                return f"{name}: {off}, with {tile}"
    return None
