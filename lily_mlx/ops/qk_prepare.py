"""Query and key preparation: RMSNorm, partial rotary embedding, and the new rows of the cache, for any T.

    q = rope(rmsnorm(q_raw) * q_weight);  k = rope(rmsnorm(k_raw) * k_weight);  v = v_raw

| array | shape | dtype |
| --- | --- | --- |
| projected | [B, T, columns]; see below | bfloat16, float16 or float32 |
| q_weight, k_weight | [D] | as projected |
| frequencies | [rotary / 2], radians a position; see :func:`rope_frequencies` | float32 |
| position | [P], P at least B; ``position[b]`` is that of row b's first token, counted from 0 | int32 |
| before | None, or if B T = 1 two arrays [1, Hk, 2, D]: the last rows of keys and of values | as projected |
| q (result) | [B, Hq, T, D] | float32, or as projected |
| k, v (results) | [B, Hk, T, D]; with ``before`` [1, Hk, 2, D], its second row first | as projected |

The first ``rotary`` elements of a head are rotated, element i with element i + rotary / 2, as by
``mx.fast.rope`` with ``traditional=False``.

The columns of a token are q_raw, Hq heads from ``offsets[0]`` on, each D of the query and D of the output
gate; k_raw, Hk heads of D from ``offsets[1]`` on; and v_raw likewise from ``offsets[2]`` on. The gate is left
where it is: ``attention_decode`` and ``attention_gate`` read it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, TemplateValue, Variant, declare, launch
from ..tiles import choose, of_chip
from .packed import float_bits
from .trust import off_reference, self_check

ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def _template(
    dtype: mx.Dtype,
    q_dtype: mx.Dtype,
    Hq: int,
    Hk: int,
    D: int,
    rotary: int,
    columns: int,
    offsets: Sequence[int],
    eps: float,
    one_token: bool,
    has_before: bool,
    tile: Mapping[str, int],
) -> dict[str, TemplateValue]:
    return {
        "InT": dtype,
        "QT": q_dtype,
        "Hq": Hq,
        "Hk": Hk,
        "D": D,
        "ROTARY": rotary,
        "COLUMNS": columns,
        "Q_OFFSET": offsets[0],
        "K_OFFSET": offsets[1],
        "V_OFFSET": offsets[2],
        "EPS_BITS": float_bits(eps),
        "ONE_TOKEN": one_token,
        "HAS_BEFORE": has_before,
        "HEADS": tile["heads"],
        "SIMDGROUPS": tile["simdgroups"],
    }


def _threads(
    tokens: int, heads: int, tile: Mapping[str, int]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup: simdgroups along the heads of all tokens."""
    simdgroups = tokens * -(-heads // tile["heads"])
    threads = 32 * tile["simdgroups"]
    return (threads * -(-simdgroups // tile["simdgroups"]), 1, 1), (threads, 1, 1)


def _variant(
    dtype: mx.Dtype, q_dtype: mx.Dtype, T: int, Hq: int, Hk: int, D: int, rotary: int, **tile: int
) -> Variant:
    columns = 2 * (Hq + Hk) * D
    offsets = (0, 2 * Hq * D, (2 * Hq + Hk) * D)
    one = T == 1
    template = _template(dtype, q_dtype, Hq, Hk, D, rotary, columns, offsets, 1e-6, one, one, tile)
    return Variant(template, {"B": 1, "T": T, "R": 2 if one else T}, *_threads(T, Hq + 2 * Hk, tile))


KERNEL = declare(
    Kernel(
        stem="qk_prepare",
        inputs=(
            Buffer("projected", "B T COLUMNS", "InT"),
            Buffer("q_weight", "D", "InT"),
            Buffer("k_weight", "D", "InT"),
            Buffer("frequencies", "*", "float32"),
            Buffer("position", "*", "int32"),
            Buffer("sizes", "8", "int32", optional=True),
            Buffer("k_before", "B Hk 2 D", "InT", optional=True),
            Buffer("v_before", "B Hk 2 D", "InT", optional=True),
        ),
        outputs=(
            Buffer("q", "B Hq T D", "QT"),
            Buffer("k", "B Hk R D", "InT"),
            Buffer("v", "B Hk R D", "InT"),
        ),
        template=(
            "InT",
            "QT",
            "Hq",
            "Hk",
            "D",
            "ROTARY",
            "COLUMNS",
            "Q_OFFSET",
            "K_OFFSET",
            "V_OFFSET",
            "EPS_BITS",
            "ONE_TOKEN",
            "HAS_BEFORE",
            "HEADS",
            "SIMDGROUPS",
        ),
        variants=(
            _variant(mx.bfloat16, mx.float32, 1, 16, 2, 256, 64, heads=1, simdgroups=1),
            _variant(mx.bfloat16, mx.bfloat16, 70, 16, 2, 256, 64, heads=4, simdgroups=4),
            _variant(mx.float16, mx.float16, 70, 8, 1, 256, 64, heads=2, simdgroups=8),
            _variant(mx.float32, mx.float32, 5, 6, 2, 96, 24, heads=3, simdgroups=2),
        ),
        threadgroup_bytes=lambda values: (
            4 * values["SIMDGROUPS"] * values["HEADS"] * ((values["ROTARY"] + 7) // 8 * 8)
        ),
    )
)


@lru_cache
def rope_frequencies(rotary: int, theta: float) -> mx.array:
    """Radians a position of each pair, ``theta ** (-2 i / rotary)``, rounded once: float32 [rotary / 2]."""
    return mx.array((theta ** (-2.0 * np.arange(rotary // 2) / rotary)).astype(np.float32))


def supports(
    projected: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    frequencies: mx.array,
    position: mx.array,
    *,
    Hq: int,
    Hk: int,
    offsets: Sequence[int],
    q_dtype: mx.Dtype = mx.float32,
    before: tuple[mx.array, mx.array] | None = None,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if q_weight.ndim != 1 or q_weight.size == 0 or q_weight.size % 32:
        return f"q_weight has shape {q_weight.shape}; D must be a multiple of 32"
    D = q_weight.size
    if k_weight.shape != (D,):
        return f"k_weight has shape {k_weight.shape}, not {(D,)}"
    if min(Hq, Hk) < 1:
        return f"no heads: Hq={Hq} Hk={Hk}"
    if projected.ndim != 3 or projected.size == 0:
        return f"projected has shape {projected.shape}, not [B, T, columns]"
    B, T, columns = projected.shape
    if B * T * (Hq + 2 * Hk) >= 2**31 - 2**16:
        return f"q, k and v have {B * T * (Hq + 2 * Hk)} heads, more than the kernel counts"
    for name, size, offset in zip("qkv", (2 * Hq * D, Hk * D, Hk * D), offsets, strict=True):
        if not 0 <= offset <= columns - size:
            return f"{name} needs {size} columns from {offset}, projected has {columns}"
        if offset % 8 or columns % 8:
            return f"{name} starts at column {offset} of {columns}, which are not multiples of 8"
    if projected.dtype not in ACTIVATION_DTYPES:
        return f"projected is {projected.dtype}"
    same = {"q_weight": q_weight, "k_weight": k_weight}
    if before is not None:
        same |= {"k_before": before[0], "v_before": before[1]}
        if {a.shape for a in before} != {(1, Hk, 2, D)} or B * T != 1:
            return f"before has shapes {[a.shape for a in before]}, not {(1, Hk, 2, D)} for one token"
    for name, array in same.items():
        if array.dtype != projected.dtype:
            return f"{name} is {array.dtype}, projected is {projected.dtype}"
    if q_dtype not in (mx.float32, projected.dtype):
        return f"q cannot be {q_dtype}: projected is {projected.dtype}"
    if frequencies.dtype != mx.float32 or frequencies.ndim != 1 or not 2 <= 2 * frequencies.size <= D:
        return f"frequencies is {frequencies.dtype} {frequencies.shape}, not float32 of 1 to {D // 2}"
    if position.dtype != mx.int32 or position.ndim != 1 or position.size < B:
        return f"position is {position.dtype} {position.shape}, not int32 of at least {B}"
    return None


def qk_prepare_reference(
    projected: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    frequencies: mx.array,
    position: mx.array,
    *,
    Hq: int,
    Hk: int,
    eps: float = 1e-6,
    offsets: Sequence[int],
    before: tuple[mx.array, mx.array] | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The preparation in plain MLX, in float32; q and k are float32, v has the dtype given."""
    B, T, _ = projected.shape
    D, pairs = q_weight.size, frequencies.size
    positions = position[:B, None] + mx.arange(T)
    angles = positions[..., None, None].astype(mx.float32) * frequencies  # [B, T, 1, pairs]
    cosine, sine = mx.cos(angles), mx.sin(angles)

    def take(offset: int, *shape: int) -> mx.array:
        size = int(np.prod(shape))
        return projected[..., offset : offset + size].reshape(B, T, *shape)

    def prepare(x: mx.array, weight: mx.array) -> mx.array:
        x = x.astype(mx.float32)
        x = x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(mx.float32)
        first, second, rest = mx.split(x, [pairs, 2 * pairs], axis=-1)
        rotated = [first * cosine - second * sine, second * cosine + first * sine, rest]
        return mx.concatenate(rotated, axis=-1).transpose(0, 2, 1, 3)

    q = prepare(take(offsets[0], Hq, 2, D)[..., 0, :], q_weight)
    k = prepare(take(offsets[1], Hk, D), k_weight)
    v = take(offsets[2], Hk, D).transpose(0, 2, 1, 3)
    if before is None:
        return q, k, v
    rows = [
        mx.concatenate([b[:, :, 1:].astype(x.dtype), x], axis=2) for b, x in zip(before, (k, v), strict=True)
    ]
    return q, rows[0], rows[1]


@lru_cache(maxsize=256)
def _sizes(B: int, T: int) -> mx.array:
    return mx.array([T, B * T, 0, 0, 0, 0, 0, 0], dtype=mx.int32)


def qk_prepare(
    projected: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    frequencies: mx.array,
    position: mx.array,
    *,
    Hq: int,
    Hk: int,
    eps: float = 1e-6,
    offsets: Sequence[int],
    q_dtype: mx.Dtype = mx.float32,
    before: tuple[mx.array, mx.array] | None = None,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run the preparation on the GPU (or the host back-end).

    Args:
        projected ... position, before: see the module's table; :func:`supports` must answer None.
        Hq, Hk: query heads, and key and value heads.
        eps: of both RMSNorms.
        offsets: first column of q_raw, k_raw and v_raw, multiples of 8.
        q_dtype: of q.
        tile: ``heads`` of a simdgroup and ``simdgroups`` of a threadgroup; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        (q, k, v).

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    B, T, columns = projected.shape
    D = q_weight.size
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("qk_prepare", backends.chip(backend), T=T, D=D)
    one, has_before = B * T == 1, before is not None
    rows = 2 if has_before else T
    grid, threadgroup = _threads(B * T, Hq + 2 * Hk, tile)
    q, k, v = launch(
        KERNEL,
        [
            *(projected, q_weight, k_weight, frequencies, position, None if one else _sizes(B, T)),
            *(before or (None, None)),
        ],
        template=_template(
            *(projected.dtype, q_dtype, Hq, Hk, D, 2 * frequencies.size, columns, offsets, eps),
            *(one, has_before, tile),
        ),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(B, Hq, T, D), (B, Hk, rows, D), (B, Hk, rows, D)],
        output_dtypes=[q_dtype, projected.dtype, projected.dtype],
        backend=backend,
    )
    return q, k, v


@self_check("qk_prepare")
def _self_check(backend: str) -> str | None:
    """Three tokens of heads of the real size, in one projection, against the reference."""
    B, T, Hq, Hk, D = 1, 3, 3, 1, 256
    keys = mx.random.split(mx.random.key(0), 3)
    projected = mx.random.normal((B, T, 2 * (Hq + Hk) * D), key=keys[0]).astype(mx.bfloat16)
    weights = [mx.random.uniform(0.5, 1.5, (D,), key=key).astype(mx.bfloat16) for key in keys[1:]]
    position = mx.array([1000] * 8, dtype=mx.int32)
    operands = (projected, *weights, rope_frequencies(64, 1e7), position)
    heads: dict[str, Any] = {"Hq": Hq, "Hk": Hk, "offsets": (0, 2 * Hq * D, (2 * Hq + Hk) * D)}
    want = qk_prepare_reference(*operands, **heads)
    # bfloat16 rounds k once, by at most 2^-8 of it; an angle of 1,000 radians is 3e-5 off; v is copied.
    bounds = {"q": 2**-12, "k": 2**-7, "v": 0.0}
    for tile in of_chip("qk_prepare", backends.chip(backend)):
        got = qk_prepare(*operands, **heads, tile=tile, backend=backend)
        for (name, bound), ours, theirs in zip(bounds.items(), got, want, strict=True):
            if off := off_reference(ours, theirs, bound):
                return f"{name} is {off}, with {tile}"
    return None
