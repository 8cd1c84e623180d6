"""The second pass of decode attention: sums over blocks of rows become the gated output.

    M = max_b m_b
    out = sum_b 2^(m_b - M) partial_b / sum_b 2^(m_b - M) l_b * sigmoid(gate)

| array | shape | dtype |
| --- | --- | --- |
| partials | flat: partial [blocks, Hq, D], then m_b and l_b of each head, [Hq, blocks, 2] | float32 |
| projected | any; head h's gate is D elements from ``offset + (2 h + 1) D`` | bfloat16, float16, float32 |
| out (result) | [1, 1, Hq D] | as projected |

m_b is the largest score of a block in bits, l_b the sum of 2^(score - m_b). A block without rows has
partial 0, m -1e30 and l 0; at least one block has rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, TemplateValue, Variant, declare, launch
from ..tiles import choose

ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def _template(
    dtype: mx.Dtype, blocks: int, Hq: int, D: int, offset: int, tile: Mapping[str, int]
) -> dict[str, TemplateValue]:
    return {
        "T": dtype,
        "BLOCKS": blocks,
        "Hq": Hq,
        "D": D,
        "UNIT": _unit(D, tile),
        "SIMDGROUPS": tile["simdgroups"],
        "GATE_OFFSET": offset + D,
        "GATE_STRIDE": 2 * D,
    }


def partials_size(blocks: int, Hq: int, D: int) -> int:
    """Elements of ``partials``."""
    return blocks * Hq * (D + 2)


def _unit(D: int, tile: Mapping[str, int]) -> int:
    """Columns of a lane: the tile's, or as many as leave each threadgroup whole columns."""
    unit = tile["columns"]
    while D % (32 * unit):
        unit //= 2
    return unit


def _variant(dtype: mx.Dtype, Hq: int, D: int, blocks: int, **tile: int) -> Variant:
    grid = (tile["simdgroups"] * D // _unit(D, tile), Hq, 1)
    threadgroup = (32 * tile["simdgroups"], 1, 1)
    sizes = {"N": Hq * D, "SIZE": partials_size(blocks, Hq, D)}
    return Variant(_template(dtype, blocks, Hq, D, 0, tile), sizes, grid, threadgroup)


KERNEL = declare(
    Kernel(
        stem="attention_combine",
        inputs=(
            Buffer("partials", "SIZE", "float32"),
            Buffer("projected", "*", "T"),
        ),
        outputs=(Buffer("out", "1 1 N", "T"),),
        template=("T", "BLOCKS", "Hq", "D", "UNIT", "SIMDGROUPS", "GATE_OFFSET", "GATE_STRIDE"),
        variants=(
            _variant(mx.bfloat16, 16, 256, 66, columns=4, simdgroups=16),
            _variant(mx.bfloat16, 16, 256, 66, columns=2, simdgroups=8),
            _variant(mx.float16, 16, 256, 66, columns=1, simdgroups=32),
            _variant(mx.float32, 6, 96, 5, columns=4, simdgroups=4),
        ),
        threadgroup_bytes=lambda values: values["SIMDGROUPS"] * 128 * values["UNIT"],
    )
)


def supports(
    partials: mx.array,
    projected: mx.array,
    *,
    blocks: int,
    Hq: int,
    D: int,
    offset: int = 0,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if min(blocks, Hq, D) < 1 or D % 32:
        return f"blocks={blocks}, Hq={Hq}, D={D}: must be positive, D a multiple of 32"
    if partials.dtype != mx.float32 or partials.shape != (partials_size(blocks, Hq, D),):
        return f"partials is {partials.dtype} {partials.shape}, not float32 ({partials_size(blocks, Hq, D)},)"
    if projected.dtype not in ACTIVATION_DTYPES:
        return f"projected is {projected.dtype}"
    if not 0 <= offset <= projected.size - 2 * Hq * D:
        return f"projected has {projected.size} elements; needs {2 * Hq * D} from {offset}"
    return None


def attention_combine_reference(
    partials: mx.array, projected: mx.array, *, blocks: int, Hq: int, D: int, offset: int = 0
) -> mx.array:
    """The same in plain MLX, in float32."""
    partial = partials[: blocks * Hq * D].reshape(blocks, Hq, D)
    largest, totals = mx.moveaxis(partials[blocks * Hq * D :].reshape(Hq, blocks, 2), 2, 0)
    weights = mx.exp((largest - largest.max(1, keepdims=True)) * mx.log(mx.array(2.0)))
    out = (weights.T[..., None] * partial).sum(0) / (weights * totals).sum(1)[:, None]
    gate = projected.reshape(-1)[offset : offset + 2 * Hq * D].reshape(Hq, 2, D)[:, 1]
    return (out * mx.sigmoid(gate.astype(mx.float32))).reshape(1, 1, -1)


def attention_combine(
    partials: mx.array,
    projected: mx.array,
    *,
    blocks: int,
    Hq: int,
    D: int,
    offset: int = 0,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Combine the blocks on the GPU (or the host back-end).

    Args:
        partials, projected: see the module's table; :func:`supports` must answer None.
        blocks, Hq, D: its axes.
        offset: element of ``projected`` where the first head's query starts, D before its gate.
        tile: ``columns`` of a lane and ``simdgroups``; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        [1, 1, Hq D], as ``projected``.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("attention_combine", backends.chip(backend), blocks=blocks, Hq=Hq, D=D)
    template = _template(projected.dtype, blocks, Hq, D, offset, tile)
    (out,) = launch(
        KERNEL,
        [partials, projected],
        template=template,
        grid=(tile["simdgroups"] * D // _unit(D, tile), Hq, 1),
        threadgroup=(32 * tile["simdgroups"], 1, 1),
        output_shapes=[(1, 1, Hq * D)],
        output_dtypes=[projected.dtype],
        backend=backend,
    )
    return out
