"""Attention's output gate: the result of prefill attention times the sigmoid of the gate, heads side by side.

    out[b, t, h] = x[b, h, t] * sigmoid(gate[b, t, h])

| array | shape | dtype |
| --- | --- | --- |
| x | [B, Hq, T, D], what attention gave | bfloat16, float16 or float32 |
| projected | [B, T, *]; the gate of head h is D columns from ``offset + (2 h + 1) D`` | as x |
| out (result) | [B, T, Hq D] | as x |

``projected`` and ``offset`` are those of ``qk_prepare``, which leaves the gate in the projection's result.
Everything between the inputs and the result is float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, TemplateValue, Variant, declare, launch
from ..tiles import choose, of_chip
from .trust import off_reference, self_check

ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def _template(
    dtype: mx.Dtype, Hq: int, D: int, columns: int, offset: int, tile: Mapping[str, int]
) -> dict[str, TemplateValue]:
    return {
        "InT": dtype,
        "Hq": Hq,
        "D": D,
        "OFFSET": offset,
        "COLUMNS": columns,
        "UNITS": tile["units"],
        "SIMDGROUPS": tile["simdgroups"],
    }


def _threads(
    dtype: mx.Dtype, B: int, elements: int, tile: Mapping[str, int]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup: x along the elements of a batch row's result, z the batch row."""
    threads = 32 * tile["simdgroups"]
    groups = -(-elements * dtype.size // (16 * threads * tile["units"]))
    return (threads * groups, 1, B), (threads, 1, 1)


def _variant(dtype: mx.Dtype, Hq: int, D: int, **tile: int) -> Variant:
    B, T, columns = 2, 37, 2 * Hq * D + 64
    template = _template(dtype, Hq, D, columns, 64, tile)
    return Variant(template, {"B": B, "T": T, "N": Hq * D}, *_threads(dtype, B, T * Hq * D, tile))


KERNEL = declare(
    Kernel(
        stem="attention_gate",
        inputs=(
            Buffer("x", "B Hq T D", "InT"),
            Buffer("projected", "B T COLUMNS", "InT"),
            Buffer("sizes", "8", "int32"),
        ),
        outputs=(Buffer("out", "B T N", "InT"),),
        template=("InT", "Hq", "D", "OFFSET", "COLUMNS", "UNITS", "SIMDGROUPS"),
        variants=(
            _variant(mx.bfloat16, 16, 256, units=4, simdgroups=4),
            _variant(mx.float16, 16, 256, units=2, simdgroups=8),
            _variant(mx.float32, 6, 96, units=1, simdgroups=1),
        ),
    )
)


def supports(x: mx.array, projected: mx.array, *, offset: int = 0, backend: str | None = None) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if x.ndim != 4 or min(x.shape) < 1:
        return f"x has shape {x.shape}, not [B, Hq, T, D]"
    B, Hq, T, D = x.shape
    if D % 32:
        return f"D={D} is not a multiple of 32"
    if T * Hq * D >= 2**32:  # 2^31 loads of 16 bytes are 2^33 elements of 4 bytes
        return f"a batch row has {T * Hq * D} elements, more than the kernel counts"
    if projected.ndim != 3 or projected.shape[:2] != (B, T):
        return f"projected has shape {projected.shape}, not [{B}, {T}, columns]"
    if not 0 <= offset <= projected.shape[2] - 2 * Hq * D:
        return f"projected has {projected.shape[2]} columns; needs {2 * Hq * D} from {offset}"
    if x.dtype not in ACTIVATION_DTYPES:
        return f"x is {x.dtype}"
    if projected.dtype != x.dtype:
        return f"projected is {projected.dtype}, x is {x.dtype}"
    for name, number in (("columns", projected.shape[2]), ("offset", offset)):
        if number * x.dtype.size % 16:
            return f"the {name} of projected, {number}, is not a multiple of 16 bytes of {x.dtype}"
    return None


def attention_gate_reference(x: mx.array, projected: mx.array, *, offset: int = 0) -> mx.array:
    """The gate in plain MLX, in float32; the result is float32 too."""
    B, Hq, T, D = x.shape
    gate = projected[..., offset : offset + 2 * Hq * D].reshape(B, T, Hq, 2, D)[..., 1, :]
    out = x.transpose(0, 2, 1, 3).astype(mx.float32) * mx.sigmoid(gate.astype(mx.float32))
    return out.reshape(B, T, Hq * D)


@lru_cache(maxsize=256)
def _sizes(T: int) -> mx.array:
    return mx.array([T, 0, 0, 0, 0, 0, 0, 0], dtype=mx.int32)


def attention_gate(
    x: mx.array,
    projected: mx.array,
    *,
    offset: int = 0,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Run the gate on the GPU (or the host back-end).

    Args:
        x, projected: see the module's table; :func:`supports` must answer None.
        offset: first column of the first head's query, a multiple of 16 bytes.
        tile: ``units``, 16-byte loads of each input in a lane, and ``simdgroups`` of a threadgroup; by
            default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        out.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    B, Hq, T, D = x.shape
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("attention_gate", backends.chip(backend), T=T)
    grid, threadgroup = _threads(x.dtype, B, T * Hq * D, tile)
    (out,) = launch(
        KERNEL,
        [x, projected, _sizes(T)],
        template=_template(x.dtype, Hq, D, projected.shape[2], offset, tile),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(B, T, Hq * D)],
        output_dtypes=[x.dtype],
        backend=backend,
    )
    return out


@self_check("attention_gate")
def _self_check(backend: str) -> str | None:
    """Five tokens of three heads of the real size against the reference."""
    keys = mx.random.split(mx.random.key(0), 2)
    x = mx.random.normal((1, 3, 5, 256), key=keys[0]).astype(mx.bfloat16)
    projected = mx.random.normal((1, 5, 1600), key=keys[1]).astype(mx.bfloat16)
    want = attention_gate_reference(x, projected, offset=32)
    for tile in of_chip("attention_gate", backends.chip(backend)):
        got = attention_gate(x, projected, offset=32, tile=tile, backend=backend)
        # bfloat16 rounds the result once, by at most 2^-8 of it
        if off := off_reference(got, want, 2**-7):
            return f"{off}, with {tile}"
    return None
