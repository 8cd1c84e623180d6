"""Gated RMSNorm: what follows a gated DeltaNet scan, before the output projection.

    out = silu(z) * weight * rmsnorm(y)

| array | shape | dtype |
| --- | --- | --- |
| y | [B, T, Hv, Dv] | bfloat16, float16 or float32 |
| z | [B, T, *]; Hv Dv columns from ``offset`` | as y |
| weight | [Dv] | as y |
| out (result) | [B, T, Hv Dv] | as y |

The norm is over the Dv values of a head. Everything between the inputs and the result is float32; stock
rounds the norm to y's dtype before it multiplies.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, TemplateValue, Variant, declare, launch
from ..tiles import choose, of_chip
from .trust import off_reference, self_check

ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def _template(
    dtype: mx.Dtype, Dv: int, Hv: int, columns: int, offset: int, eps: float, tile: Mapping[str, int]
) -> dict[str, TemplateValue]:
    return {
        "InT": dtype,
        "Dv": Dv,
        "Hv": Hv,
        "Z_OFFSET": offset,
        "Z_COLUMNS": columns,
        "EPS_BITS": struct.unpack("<i", struct.pack("<f", eps))[0],
        "ROWS": tile["rows"],
        "SIMDGROUPS": tile["simdgroups"],
    }


def _threads(
    dtype: mx.Dtype, heads: int, Dv: int, tile: Mapping[str, int]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup: simdgroups along the heads of all tokens."""
    units = Dv * dtype.size // 16
    heads_at_once = 32 // min(units & -units, 32)  # lily_head_lanes of the kernel
    threads = 32 * tile["simdgroups"]
    groups = -(-heads // (heads_at_once * tile["rows"] * tile["simdgroups"]))
    return (threads * groups, 1, 1), (threads, 1, 1)


def _variant(dtype: mx.Dtype, Hv: int, Dv: int, **tile: int) -> Variant:
    B, T, columns = 2, 37, 3 * Hv * Dv
    template = _template(dtype, Dv, Hv, columns, Hv * Dv, 1e-6, tile)
    sizes = {"B": B, "T": T, "N": Hv * Dv}
    return Variant(template, sizes, *_threads(dtype, B * T * Hv, Dv, tile))


KERNEL = declare(
    Kernel(
        stem="gated_rms_norm",
        inputs=(
            Buffer("y", "B T Hv Dv", "InT"),
            Buffer("z", "B T Z_COLUMNS", "InT"),
            Buffer("weight", "Dv", "InT"),
            Buffer("sizes", "8", "int32"),
        ),
        outputs=(Buffer("out", "B T N", "InT"),),
        template=("InT", "Dv", "Hv", "Z_OFFSET", "Z_COLUMNS", "EPS_BITS", "ROWS", "SIMDGROUPS"),
        variants=(
            _variant(mx.bfloat16, 32, 128, rows=4, simdgroups=4),
            _variant(mx.bfloat16, 32, 128, rows=2, simdgroups=8),
            _variant(mx.float16, 32, 128, rows=1, simdgroups=1),
            _variant(mx.float32, 6, 96, rows=2, simdgroups=2),
        ),
    )
)


def supports(
    y: mx.array,
    z: mx.array,
    weight: mx.array,
    *,
    offset: int = 0,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if y.ndim != 4 or min(y.shape) < 1:
        return f"y has shape {y.shape}, not [B, T, Hv, Dv]"
    B, T, Hv, Dv = y.shape
    if Dv % 32:
        return f"Dv={Dv} is not a multiple of 32"
    if B * T * Hv >= 2**31 - 2**16:
        return f"y has {B * T * Hv} heads, more than the kernel counts"
    if weight.shape != (Dv,):
        return f"weight has shape {weight.shape}, not {(Dv,)}"
    if z.ndim != 3 or z.shape[:2] != (B, T):
        return f"z has shape {z.shape}, not [{B}, {T}, columns]"
    if not 0 <= offset <= z.shape[2] - Hv * Dv:
        return f"z has {z.shape[2]} columns; needs {Hv * Dv} from {offset}"
    if y.dtype not in ACTIVATION_DTYPES:
        return f"y is {y.dtype}"
    for name, array in (("z", z), ("weight", weight)):
        if array.dtype != y.dtype:
            return f"{name} is {array.dtype}, y is {y.dtype}"
    for name, number in (("columns", z.shape[2]), ("offset", offset)):
        if number * z.dtype.size % 16:
            return f"the {name} of z, {number}, is not a multiple of 16 bytes of {z.dtype}"
    return None


def gated_rms_norm_reference(
    y: mx.array, z: mx.array, weight: mx.array, *, eps: float = 1e-6, offset: int = 0
) -> mx.array:
    """The norm in plain MLX, in float32; the result is float32 too."""
    B, T, Hv, Dv = y.shape
    y, weight = y.astype(mx.float32), weight.astype(mx.float32)
    gate = z[..., offset : offset + Hv * Dv].astype(mx.float32)
    normalised = y * mx.rsqrt((y * y).mean(-1, keepdims=True) + eps) * weight
    return normalised.reshape(B, T, Hv * Dv) * gate * mx.sigmoid(gate)


@lru_cache(maxsize=256)
def _sizes(heads: int) -> mx.array:
    return mx.array([heads, 0, 0, 0, 0, 0, 0, 0], dtype=mx.int32)


def gated_rms_norm(
    y: mx.array,
    z: mx.array,
    weight: mx.array,
    *,
    eps: float = 1e-6,
    offset: int = 0,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Run the norm on the GPU (or the host back-end).

    Args:
        y, z, weight: see the module's table; :func:`supports` must answer None.
        eps: added to the mean of squares.
        offset: first column of z in its array, a multiple of 16 bytes.
        tile: ``rows``, heads of a lane, and ``simdgroups`` of a threadgroup; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        out.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    B, T, Hv, Dv = y.shape
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("gated_rms_norm", backends.chip(backend), T=T, Dv=Dv)
    grid, threadgroup = _threads(y.dtype, B * T * Hv, Dv, tile)
    (out,) = launch(
        KERNEL,
        [y, z, weight, _sizes(B * T * Hv)],
        template=_template(y.dtype, Dv, Hv, z.shape[2], offset, eps, tile),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(B, T, Hv * Dv)],
        output_dtypes=[y.dtype],
        backend=backend,
    )
    return out


@self_check("gated_rms_norm")
def _self_check(backend: str) -> str | None:
    """Five tokens of three heads of the real size against the reference."""
    keys = mx.random.split(mx.random.key(0), 3)
    y = mx.random.normal((1, 5, 3, 128), key=keys[0]).astype(mx.bfloat16)
    z = mx.random.normal((1, 5, 400), key=keys[1]).astype(mx.bfloat16)
    weight = mx.random.normal((128,), key=keys[2]).astype(mx.bfloat16)
    want = gated_rms_norm_reference(y, z, weight, offset=16)
    for tile in of_chip("gated_rms_norm", backends.chip(backend)):
        got = gated_rms_norm(y, z, weight, offset=16, tile=tile, backend=backend)
        # bfloat16 rounds the result once, by at most 2^-8 of it
        if off := off_reference(got, want, 2**-7):
            return f"{off}, with {tile}"
    return None
