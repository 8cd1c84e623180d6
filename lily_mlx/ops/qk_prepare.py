"""Query and key preparation of one token: RMSNorm, partial rotary embedding, and the new rows of the cache.

    q = rope(rmsnorm(q_raw) * q_weight);  k = rope(rmsnorm(k_raw) * k_weight);  v = v_raw

| array | shape | dtype |
| --- | --- | --- |
| q_raw | any; for each of Hq heads from ``offsets[0]``: D of query, D of gate | bfloat16, float16, float32 |
| k_raw, v_raw | any; Hk heads of D from ``offsets[1]`` and ``offsets[2]`` | as q_raw |
| q_weight, k_weight | [D] | as q_raw |
| frequencies | [rotary / 2], radians a position; see :func:`rope_frequencies` | float32 |
| position | [8]; ``position[0]`` is the token's position, counted from 0 | int32 |
| q (result) | [1, Hq, 1, D] | float32 |
| k, v (results) | [1, Hk, 1, D] | as q_raw |

The first ``rotary`` elements of a head are rotated, element i with element i + rotary / 2, as by
``mx.fast.rope`` with ``traditional=False``. q_raw, k_raw and v_raw may be one array. The output gate is left
where it is: ``attention_decode`` reads it there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, TemplateValue, Variant, declare, launch

ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
NO_OFFSETS = (0, 0, 0)


def _template(
    dtype: mx.Dtype, Hq: int, Hk: int, D: int, rotary: int, offsets: Sequence[int], eps: float
) -> dict[str, TemplateValue]:
    return {
        "InT": dtype,
        "Hq": Hq,
        "Hk": Hk,
        "D": D,
        "ROTARY": rotary,
        "Q_OFFSET": offsets[0],
        "K_OFFSET": offsets[1],
        "V_OFFSET": offsets[2],
        "EPS_BITS": struct.unpack("<i", struct.pack("<f", eps))[0],
    }


def _variant(dtype: mx.Dtype, Hq: int, Hk: int, D: int, rotary: int) -> Variant:
    template = _template(dtype, Hq, Hk, D, rotary, NO_OFFSETS, 1e-6)
    return Variant(template, {}, (32 * (Hq + 2 * Hk), 1, 1), (32, 1, 1))


KERNEL = declare(
    Kernel(
        stem="qk_prepare",
        inputs=(
            Buffer("q_raw", "*", "InT"),
            Buffer("k_raw", "*", "InT"),
            Buffer("v_raw", "*", "InT"),
            Buffer("q_weight", "D", "InT"),
            Buffer("k_weight", "D", "InT"),
            Buffer("frequencies", "*", "float32"),
            Buffer("position", "8", "int32"),
        ),
        outputs=(
            Buffer("q", "1 Hq 1 D", "float32"),
            Buffer("k", "1 Hk 1 D", "InT"),
            Buffer("v", "1 Hk 1 D", "InT"),
        ),
        template=("InT", "Hq", "Hk", "D", "ROTARY", "Q_OFFSET", "K_OFFSET", "V_OFFSET", "EPS_BITS"),
        variants=(
            _variant(mx.bfloat16, 16, 2, 256, 64),
            _variant(mx.float16, 8, 1, 256, 64),
            _variant(mx.float32, 6, 2, 96, 24),
        ),
        threadgroup_bytes=lambda values: 4 * values["D"],
    )
)


@lru_cache
def rope_frequencies(rotary: int, theta: float) -> mx.array:
    """Radians a position of each pair, ``theta ** (-2 i / rotary)``, rounded once: float32 [rotary / 2]."""
    return mx.array((theta ** (-2.0 * np.arange(rotary // 2) / rotary)).astype(np.float32))


def supports(
    q_raw: mx.array,
    k_raw: mx.array,
    v_raw: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    frequencies: mx.array,
    position: mx.array,
    *,
    Hq: int,
    Hk: int,
    offsets: Sequence[int] = NO_OFFSETS,
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
    raw = {"q_raw": (q_raw, 2 * Hq * D), "k_raw": (k_raw, Hk * D), "v_raw": (v_raw, Hk * D)}
    for (name, (array, size)), offset in zip(raw.items(), offsets, strict=True):
        if not 0 <= offset <= array.size - size:
            return f"{name} has {array.size} elements; needs {size} from {offset}"
        if offset % 8:
            return f"{name} starts at element {offset}, not at a multiple of 8"
    if q_raw.dtype not in ACTIVATION_DTYPES:
        return f"q_raw is {q_raw.dtype}"
    same = {"k_raw": k_raw, "v_raw": v_raw, "q_weight": q_weight, "k_weight": k_weight}
    for name, array in same.items():
        if array.dtype != q_raw.dtype:
            return f"{name} is {array.dtype}, q_raw is {q_raw.dtype}"
    if frequencies.dtype != mx.float32 or frequencies.ndim != 1 or 2 * frequencies.size > D:
        return f"frequencies is {frequencies.dtype} {frequencies.shape}, not float32 of at most {D // 2}"
    if position.dtype != mx.int32 or position.shape != (8,):
        return f"position is {position.dtype} {position.shape}, not int32 (8,)"
    return None


def qk_prepare_reference(
    q_raw: mx.array,
    k_raw: mx.array,
    v_raw: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    frequencies: mx.array,
    position: mx.array,
    *,
    Hq: int,
    Hk: int,
    eps: float = 1e-6,
    offsets: Sequence[int] = NO_OFFSETS,
) -> tuple[mx.array, mx.array, mx.array]:
    """The preparation in plain MLX, in float32; q and k are float32, v has the dtype given."""
    D, pairs = q_weight.size, frequencies.size
    angles = position[0].astype(mx.float32) * frequencies
    cosine, sine = mx.cos(angles), mx.sin(angles)

    def take(array: mx.array, offset: int, *shape: int) -> mx.array:
        size = int(np.prod(shape))
        return array.reshape(-1)[offset : offset + size].reshape(shape)

    def prepare(x: mx.array, weight: mx.array) -> mx.array:
        x = x.astype(mx.float32)
        x = x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(mx.float32)
        first, second, rest = mx.split(x, [pairs, 2 * pairs], axis=-1)
        rotated = [first * cosine - second * sine, second * cosine + first * sine, rest]
        return mx.concatenate(rotated, axis=-1)[None, :, None]

    q = prepare(take(q_raw, offsets[0], Hq, 2, D)[:, 0], q_weight)
    k = prepare(take(k_raw, offsets[1], Hk, D), k_weight)
    return q, k, take(v_raw, offsets[2], 1, Hk, 1, D)


def qk_prepare(
    q_raw: mx.array,
    k_raw: mx.array,
    v_raw: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    frequencies: mx.array,
    position: mx.array,
    *,
    Hq: int,
    Hk: int,
    eps: float = 1e-6,
    offsets: Sequence[int] = NO_OFFSETS,
    backend: str | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run the preparation on the GPU (or the host back-end).

    Args:
        q_raw ... position: see the module's table; :func:`supports` must answer None.
        Hq, Hk: query heads, and key and value heads.
        eps: of both RMSNorms.
        offsets: first element of q_raw, k_raw and v_raw in their arrays, multiples of 8.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        (q, k, v).

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    D = q_weight.size
    q, k, v = launch(
        KERNEL,
        [q_raw, k_raw, v_raw, q_weight, k_weight, frequencies, position],
        template=_template(q_raw.dtype, Hq, Hk, D, 2 * frequencies.size, offsets, eps),
        grid=(32 * (Hq + 2 * Hk), 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(1, Hq, 1, D), (1, Hk, 1, D), (1, Hk, 1, D)],
        output_dtypes=[mx.float32, q_raw.dtype, q_raw.dtype],
        backend=backend,
    )
    return q, k, v
