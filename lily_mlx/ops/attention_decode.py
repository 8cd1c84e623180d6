"""Decode attention: one token's query heads over the KV cache, times the sigmoid of the output gate.

    out = softmax(q K^T / sqrt(D)) V * sigmoid(gate)    over the rows 0 .. position[0]

| array | shape | dtype |
| --- | --- | --- |
| q | [1, Hq, 1, D], normalised and rotated | float32, or as keys |
| keys, values | [1, Hk, capacity, D], this token's row included | bfloat16, float16 or float32 |
| projected | any; the gate of head h is D elements from ``offset + (2 h + 1) D`` | as keys |
| position | [8]: the token's position, up to which rows exist, then capacity | int32 |
| out (result) | [1, 1, Hq D] | as keys |

Query head h reads KV head h // (Hq // Hk). Rows past ``position[0]`` are not read. ``projected`` and
``offset`` are those of ``qk_prepare``, which leaves the gate in the projection's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, TemplateValue, Triple, Variant, declare, launch
from ..tiles import choose, of_chip
from .attention_combine import attention_combine, partials_size
from .trust import off_reference, paired, self_check

ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
MAX_HEAD_SIZE = 256
HEADS = 8  # query heads of a threadgroup in blocks, at most
TILE_BYTES = 64  # rows of a tile in blocks: this by the bytes of an element
SCORES = 4096  # in one pass, of all heads of a threadgroup between two barriers


def one_pass(tile: Mapping[str, int]) -> bool:
    """Whether the tile is of the form in one pass: it names ``heads`` and ``columns`` of a threadgroup."""
    return "heads" in tile


def simdgroups(D: int, tile: Mapping[str, int]) -> int:
    """Simdgroups in blocks: the tile's, or the next more that have whole tiles of 16 columns each."""
    tiles = D // 16
    count = min(tile["simdgroups"], tiles)
    while tiles % count:
        count += 1
    return count


def blocks(capacity: int, Hk: int, group: int, dtype: mx.Dtype, tile: Mapping[str, int]) -> int:
    """Blocks of rows that each query head is split over.

    ``block_rows`` of the tile above zero is the fixed-block layout. At zero it is the general one: as many
    blocks as make ``threadgroups`` threadgroups of all heads, but none without rows in a full cache.
    """
    if tile["block_rows"]:
        return -(-capacity // tile["block_rows"])
    most = -(-capacity // (TILE_BYTES // dtype.size))
    return max(1, min(tile["threadgroups"] // (Hk * -(-group // HEADS)), most))


def part(D: int, group: int, tile: Mapping[str, int]) -> tuple[int, int]:
    """Heads and columns of a threadgroup in one pass: the tile's, halved until they fit the shape."""
    heads, columns = tile["heads"], tile["columns"]
    while heads > group:
        heads //= 2
    while D % columns:
        columns //= 2
    return heads, columns


def _call(
    q_dtype: mx.Dtype,
    dtype: mx.Dtype,
    Hk: int,
    group: int,
    D: int,
    capacity: int,
    offset: int,
    tile: Mapping[str, int],
) -> tuple[dict[str, TemplateValue], Triple, Triple, int]:
    """Template, grid and threadgroup, and the number of blocks, 0 in one pass."""
    template: dict[str, TemplateValue] = {
        "QT": q_dtype,
        "KvT": dtype,
        "Hk": Hk,
        "GROUP": group,
        "D": D,
    }
    if one_pass(tile):
        heads, columns = part(D, group, tile)
        threads = 32 * tile["simdgroups"]
        template |= {
            "OutT": dtype,
            "SIMDGROUPS": tile["simdgroups"],
            "BLOCK_ROWS": 0,
            "HEADS": heads,
            "COLUMNS": columns,
            "GATE_OFFSET": offset + D,
            "GATE_STRIDE": 2 * D,
        }
        return template, (threads * Hk * -(-group // heads) * (D // columns), 1, 1), (threads, 1, 1), 0
    threads = 32 * simdgroups(D, tile)
    template |= {
        "OutT": mx.float32,
        "SIMDGROUPS": simdgroups(D, tile),
        "BLOCK_ROWS": tile["block_rows"],
        # Of one pass only; so layers whose gates lie elsewhere share the compiled kernel.
        "HEADS": 0,
        "COLUMNS": 0,
        "GATE_OFFSET": 0,
        "GATE_STRIDE": 0,
    }
    count = blocks(capacity, Hk, group, dtype, tile)
    return template, (threads * Hk * -(-group // HEADS), count, 1), (threads, 1, 1), count


def _threadgroup_bytes(values: Mapping[str, Any]) -> int:
    """As AttentionDecodeTile has it."""
    size, D, count, heads = values["KvT"].size, values["D"], values["SIMDGROUPS"], values["HEADS"]
    if heads:
        return 4 * (max(SCORES, count * heads * values["COLUMNS"]) + count * heads)
    rows, unit = TILE_BYTES // size, 16 // size
    splits = 2 if count >= rows // 8 else 1
    left = 16 if size == 2 else 8
    memory = size * ((left + rows) * (D + unit) + 16 * (rows + unit))
    return memory + 4 * (splits * 16 * (rows + 8) + HEADS)


_BLOCKS = {"simdgroups": 4, "block_rows": 0, "threadgroups": 132}
_ONE_PASS = {"simdgroups": 16, "heads": 1, "columns": 64}


def _variant(
    q_dtype: mx.Dtype,
    dtype: mx.Dtype,
    Hk: int,
    group: int,
    D: int,
    capacity: int,
    tile: Mapping[str, int],
) -> Variant:
    template, grid, threadgroup, _ = _call(q_dtype, dtype, Hk, group, D, capacity, 0, tile)
    return Variant(template, {"Hq": Hk * group, "capacity": capacity}, grid, threadgroup)


KERNEL = declare(
    Kernel(
        stem="attention_decode",
        inputs=(
            Buffer("q", "1 Hq 1 D", "QT"),
            Buffer("keys", "1 Hk capacity D", "KvT"),
            Buffer("values", "1 Hk capacity D", "KvT"),
            Buffer("position", "8", "int32"),
            Buffer("projected", "*", "KvT", optional=True),
        ),
        outputs=(Buffer("out", "*", "OutT"),),
        template=(
            "QT",
            "KvT",
            "OutT",
            "Hk",
            "GROUP",
            "D",
            "SIMDGROUPS",
            "BLOCK_ROWS",
            "HEADS",
            "COLUMNS",
            "GATE_OFFSET",
            "GATE_STRIDE",
        ),
        variants=(
            _variant(mx.float32, mx.bfloat16, 2, 8, 256, 4096, _BLOCKS),
            _variant(mx.float32, mx.bfloat16, 2, 8, 256, 4096, {**_BLOCKS, "simdgroups": 8}),
            _variant(mx.float32, mx.float16, 2, 8, 256, 4096, {**_BLOCKS, "block_rows": 512}),
            _variant(mx.float32, mx.bfloat16, 2, 8, 128, 4096, _BLOCKS),
            _variant(mx.bfloat16, mx.bfloat16, 2, 16, 64, 4096, _BLOCKS),
            _variant(mx.float32, mx.float32, 2, 8, 256, 128, _BLOCKS),
            _variant(mx.float32, mx.float32, 2, 6, 96, 128, _BLOCKS),
            _variant(mx.float16, mx.float16, 3, 5, 224, 128, _BLOCKS),
            _variant(mx.float32, mx.bfloat16, 2, 8, 256, 1024, _ONE_PASS),
            _variant(mx.float32, mx.bfloat16, 2, 8, 256, 1024, {"simdgroups": 12, "heads": 2, "columns": 64}),
            _variant(mx.float32, mx.bfloat16, 2, 8, 256, 1024, {**_ONE_PASS, "simdgroups": 8}),
            _variant(mx.float32, mx.float16, 2, 8, 256, 1024, {**_ONE_PASS, "simdgroups": 8}),
            _variant(mx.float32, mx.float32, 2, 8, 256, 1024, _ONE_PASS),
            _variant(mx.bfloat16, mx.bfloat16, 3, 5, 224, 128, _ONE_PASS),
            _variant(mx.float32, mx.bfloat16, 1, 8, 64, 128, _ONE_PASS),
        ),
        threadgroup_bytes=_threadgroup_bytes,
    )
)


def supports(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    projected: mx.array,
    position: mx.array,
    *,
    offset: int = 0,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if q.ndim != 4 or q.shape[0] != 1 or q.shape[2] != 1:
        return f"q has shape {q.shape}, not [1, Hq, 1, D]"
    _, Hq, _, D = q.shape
    if keys.ndim != 4 or keys.shape[0] != 1 or keys.shape[3] != D:
        return f"keys has shape {keys.shape}, not [1, Hk, capacity, {D}]"
    if values.shape != keys.shape:
        return f"values has shape {values.shape}, keys {keys.shape}"
    Hk, capacity = keys.shape[1:3]
    if not 64 <= D <= MAX_HEAD_SIZE or D % 32:
        return f"D={D} is not a multiple of 32 between 64 and {MAX_HEAD_SIZE}"
    if min(Hk, capacity) < 1 or Hq % Hk:
        return f"Hq={Hq} is not a multiple of Hk={Hk}, or capacity={capacity} is zero"
    if keys.dtype not in ACTIVATION_DTYPES:
        return f"keys is {keys.dtype}"
    if values.dtype != keys.dtype or projected.dtype != keys.dtype:
        return f"keys, values and projected differ in dtype: {keys.dtype}, {values.dtype}, {projected.dtype}"
    if q.dtype not in (keys.dtype, mx.float32):
        return f"q is {q.dtype}, keys is {keys.dtype}"
    if not 0 <= offset <= projected.size - 2 * Hq * D:
        return f"projected has {projected.size} elements; needs {2 * Hq * D} from {offset}"
    if position.dtype != mx.int32 or position.shape != (8,):
        return f"position is {position.dtype} {position.shape}, not int32 (8,)"
    return None


def attention_decode_reference(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    projected: mx.array,
    position: mx.array,
    *,
    offset: int = 0,
) -> mx.array:
    """The same in plain MLX, in float32."""
    _, Hq, _, D = q.shape
    Hk, capacity = keys.shape[1:3]
    exists = mx.arange(capacity) <= position[0]
    grouped = q.astype(mx.float32).reshape(Hk, Hq // Hk, 1, D)
    k, v = (mx.where(exists[:, None], x[0].astype(mx.float32), 0) for x in (keys, values))
    heads = []
    for h in range(Hq // Hk):  # sums, because a matrix product may be rounded to less than float32 on a GPU
        scores = mx.where(exists, (grouped[:, h] * k).sum(-1) * D**-0.5, -mx.inf)
        heads.append((mx.softmax(scores, axis=-1)[..., None] * v).sum(-2))
    out = mx.stack(heads, axis=1).reshape(Hq, D)
    gate = projected.reshape(-1)[offset : offset + 2 * Hq * D].reshape(Hq, 2, D)[:, 1]
    return (out * mx.sigmoid(gate.astype(mx.float32))).reshape(1, 1, -1)


def attention_decode(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    projected: mx.array,
    position: mx.array,
    *,
    offset: int = 0,
    tile: Mapping[str, int] | None = None,
    combine_tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> mx.array:
    """Run the attention on the GPU (or the host back-end): one kernel, or two where rows are in blocks.

    Args:
        q, keys, values, projected, position: see the module's table; :func:`supports` must answer None.
        offset: element of ``projected`` where the first head's query starts, D before its gate.
        tile: see :func:`one_pass`, :func:`part`, :func:`simdgroups` and :func:`blocks`; by default
            from the tile table.
        combine_tile: of ``attention_combine``; by default from its table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        [1, 1, Hq D], as ``keys``.

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    _, Hq, _, D = q.shape
    Hk, capacity = keys.shape[1:3]
    group = Hq // Hk
    backend = backend or backends.resolve()
    if tile is None:
        chip = backends.chip(backend)
        tile = choose("attention_decode", chip, capacity=capacity, Hk=Hk, group=group, D=D)
    template, grid, threadgroup, count = _call(q.dtype, keys.dtype, Hk, group, D, capacity, offset, tile)
    (out,) = launch(
        KERNEL,
        [q, keys, values, position, None if count else projected],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(partials_size(count, Hq, D),) if count else (1, 1, Hq * D)],
        output_dtypes=[mx.float32 if count else keys.dtype],
        backend=backend,
    )
    if not count:
        return out
    return attention_combine(
        out, projected, blocks=count, Hq=Hq, D=D, offset=offset, tile=combine_tile, backend=backend
    )


@self_check("attention_decode")
def _self_check(backend: str) -> str | None:
    """Eight query heads of the real size over 600 rows and NaN behind them, in one pass and in blocks."""
    Hq, D, length, capacity = 8, 256, 600, 1024
    keys = mx.random.split(mx.random.key(0), 4)
    q = mx.random.normal((1, Hq, 1, D), key=keys[0])
    exists = mx.arange(capacity)[:, None] < length
    k, v = (
        mx.where(exists, mx.random.normal((1, 1, capacity, D), key=key), mx.nan).astype(mx.bfloat16)
        for key in keys[1:3]
    )
    projected = mx.random.normal((1, 1, 2 * Hq * D), key=keys[3]).astype(mx.bfloat16)
    operands = (q, k, v, projected, mx.array([length - 1, capacity, *[0] * 6], dtype=mx.int32))
    want = attention_decode_reference(*operands)
    chip = backends.chip(backend)
    first, second = of_chip("attention_decode", chip), of_chip("attention_combine", chip)
    for tile, combine_tile in paired(first, second):
        got = attention_decode(*operands, tile=tile, combine_tile=combine_tile, backend=backend)
        # bfloat16 rounds once, by at most 2^-8 of a value
        if off := off_reference(got, want, 2**-7):
            return f"{off}, with {tile}, {combine_tile}"
    return None
