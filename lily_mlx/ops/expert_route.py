"""Routing of a prompt's tokens: experts, weights, rows grouped by expert, blocks of a grouped product.

    experts[t] = the top_k experts with the largest logits, by index; weights[t] = softmax over their logits

| array | shape | dtype |
| --- | --- | --- |
| logits | [T, E + 1]: the router's, then the shared expert's gate | bfloat16, float16 or float32 |

The results are those of :class:`Routing`. The weights are those of a softmax over all experts, renormalised
over the chosen ones, which is the softmax over the chosen logits. Among equal logits the lower index is
chosen; NaN ranks below every number. Nothing is read on the CPU: the size of ``blocks`` is a bound that
shapes give.

Few tokens are one launch, ``expert_route``; more are two: ``expert_choose`` counts, in chunks of tokens, how
often each expert is chosen, and ``expert_scatter`` writes rows and blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..launch import backend as backends
from ..launch.kernel import MAX_THREADGROUP_BYTES, Buffer, Kernel, Variant, declare, launch
from ..tiles import choose, of_chip
from .packed import ACTIVATION_DTYPES
from .trust import self_check

MAX_TOP_K = 31
MAX_EXPERTS = 1024
MAX_TOKENS = 65535  # counts have 16 bits


class Routing(NamedTuple):
    """Where the rows of T tokens go, each with k experts and the shared expert, E.

    Attributes:
        weights: [T, k + 1] float32; the last is the sigmoid of the shared expert's gate.
        rows: [T * (k + 1)] int32, for each grouped row token * (k + 1) + slot, slot the expert's place among
            the token's chosen ones and k for the shared expert. Rows are in the order of their experts, then
            of their tokens; the shared expert's group comes last.
        blocks: [max_blocks, 4] int32: expert, first grouped row, number of rows, 0. Groups are cut into
            blocks of ``block_rows``, the last may have fewer; after those in use come entries of zeros.
        count: [8] int32: the number of blocks in use, then zeros.
        experts: [T, k] int32, ascending.
    """

    weights: mx.array
    rows: mx.array
    blocks: mx.array
    count: mx.array  # type: ignore[assignment]  # tuple's method of this name is not used
    experts: mx.array


def max_blocks(T: int, E: int, top_k: int, block_rows: int) -> int:
    """How many blocks T tokens can need at most: each chosen expert may leave one that is not full."""
    return -(-T * top_k // block_rows) + min(E, T * top_k) + -(-T // block_rows)


# ---- layouts ---------------------------------------------------------------------------------------------


def _words(E: int) -> int:
    """Words of a chunk's counts, two experts each, in whole 16-byte loads."""
    return -(-E // 8) * 4


def _group_bytes(E: int, tokens: int) -> int:
    """Threadgroup memory of the grouping: sums of counts, marks of tokens, starts of groups and blocks."""
    return 4 * (2 * _words(E) + E * -(-tokens // 32) + 2 * (E + 2))


def _choice_bytes(top_k: int, simdgroups: int) -> int:
    return 4 * top_k * simdgroups


def _simdgroups(E: int, top_k: int, wanted: int) -> int:
    """No more than have registers: a lane holds its logits and two lists of the largest."""
    values = -(-E // 32) + 2 * (1 << (top_k - 1).bit_length())
    return min(wanted, 32 if values <= 24 else 16 if values <= 64 else 8)


def _fitting(E: int, top_k: int, tile: Mapping[str, int]) -> dict[str, int]:
    """The tile, with fewer tokens and simdgroups where many experts leave no room for as many."""
    simdgroups = _simdgroups(E, top_k, tile["simdgroups"])
    tokens, scatter_tokens = tile["tokens"], tile["scatter_tokens"]
    room = MAX_THREADGROUP_BYTES - _choice_bytes(top_k, simdgroups)
    while max(_group_bytes(E, tokens), _group_bytes(E, scatter_tokens)) > room:
        tokens, scatter_tokens = min(tokens, scatter_tokens // 2), scatter_tokens // 2
    return {
        "tokens": tokens,
        "simdgroups": simdgroups,
        "scatter_tokens": scatter_tokens,
        "scatter_simdgroups": min(tile["scatter_simdgroups"], 32 if E <= 512 else 16),
    }


def _choice_template(
    logits: mx.Dtype, E: int, top_k: int, tile: Mapping[str, int]
) -> dict[str, int | bool | mx.Dtype]:
    return {
        "LogitT": logits,
        "E": E,
        "TOP_K": top_k,
        "TOKENS": tile["tokens"],
        "SIMDGROUPS": tile["simdgroups"],
    }


def _scatter_template(E: int, top_k: int, tile: Mapping[str, int]) -> dict[str, int | bool | mx.Dtype]:
    return {
        "E": E,
        "TOP_K": top_k,
        "CHUNK_TOKENS": tile["tokens"],
        "TOKENS": tile["scatter_tokens"],
        "SIMDGROUPS": tile["scatter_simdgroups"],
    }


def _grid(threadgroups: int, simdgroups: int) -> tuple[int, int, int]:
    return (32 * simdgroups * threadgroups, 1, 1)


def _tile(tokens: int, simdgroups: int, scatter_tokens: int, scatter_simdgroups: int) -> dict[str, int]:
    return {
        "tokens": tokens,
        "simdgroups": simdgroups,
        "scatter_tokens": scatter_tokens,
        "scatter_simdgroups": scatter_simdgroups,
    }


def _choice_variant(logits: mx.Dtype, T: int, E: int, top_k: int, tile: Mapping[str, int]) -> Variant:
    """Of expert_choose and of expert_route."""
    chunks = -(-T // tile["tokens"])
    axes = {
        "T": T,
        "L": E + 1,
        "S": top_k + 1,
        "R": T * (top_k + 1),
        "N": max_blocks(T, E, top_k, 32),
        "CHUNKS": chunks,
        "WORDS": _words(E),
    }
    template = _choice_template(logits, E, top_k, tile)
    return Variant(template, axes, _grid(chunks, tile["simdgroups"]), (32 * tile["simdgroups"], 1, 1))


def _scatter_variant(T: int, E: int, top_k: int, tile: Mapping[str, int]) -> Variant:
    axes = {
        "T": T,
        "R": T * (top_k + 1),
        "N": max_blocks(T, E, top_k, 32),
        "CHUNKS": -(-T // tile["tokens"]),
        "WORDS": _words(E),
    }
    grid = _grid(-(-T // tile["scatter_tokens"]), tile["scatter_simdgroups"])
    return Variant(_scatter_template(E, top_k, tile), axes, grid, (32 * tile["scatter_simdgroups"], 1, 1))


ROUTE = declare(
    Kernel(
        stem="expert_route",
        inputs=(Buffer("logits", "T L", "LogitT"), Buffer("sizes", "8", "int32")),
        outputs=(
            Buffer("weights", "T S", "float32"),
            Buffer("rows", "R", "int32"),
            Buffer("blocks", "N 4", "int32"),
            Buffer("count", "8", "int32"),
            Buffer("experts", "T TOP_K", "int32"),
        ),
        template=("LogitT", "E", "TOP_K", "TOKENS", "SIMDGROUPS"),
        variants=(
            _choice_variant(mx.float32, 32, 256, 8, _tile(32, 32, 64, 16)),
            _choice_variant(mx.float32, 32, 256, 8, _tile(32, 12, 32, 12)),
            _choice_variant(mx.bfloat16, 5, 37, 3, _tile(64, 4, 64, 4)),
        ),
        threadgroup_bytes=lambda values: (
            _choice_bytes(values["TOP_K"], values["SIMDGROUPS"]) + _group_bytes(values["E"], values["TOKENS"])
        ),
    )
)

CHOOSE = declare(
    Kernel(
        stem="expert_choose",
        inputs=(Buffer("logits", "T L", "LogitT"), Buffer("sizes", "8", "int32")),
        outputs=(
            Buffer("weights", "T S", "float32"),
            Buffer("experts", "T TOP_K", "int32"),
            Buffer("counts", "CHUNKS WORDS", "uint32"),
        ),
        template=("LogitT", "E", "TOP_K", "TOKENS", "SIMDGROUPS"),
        variants=(
            _choice_variant(mx.float32, 2048, 256, 8, _tile(16, 16, 64, 16)),
            _choice_variant(mx.float32, 2048, 256, 8, _tile(16, 12, 32, 12)),
            _choice_variant(mx.bfloat16, 100, 37, 3, _tile(8, 2, 32, 4)),
            _choice_variant(mx.float16, 100, 1024, 31, _tile(32, 8, 32, 4)),
        ),
        threadgroup_bytes=lambda values: (
            _choice_bytes(values["TOP_K"], values["SIMDGROUPS"]) + 4 * _words(values["E"])
        ),
    )
)

SCATTER = declare(
    Kernel(
        stem="expert_scatter",
        inputs=(
            Buffer("experts", "T TOP_K", "int32"),
            Buffer("counts", "CHUNKS WORDS", "uint32"),
            Buffer("sizes", "8", "int32"),
        ),
        outputs=(
            Buffer("rows", "R", "int32"),
            Buffer("blocks", "N 4", "int32"),
            Buffer("count", "8", "int32"),
        ),
        template=("E", "TOP_K", "CHUNK_TOKENS", "TOKENS", "SIMDGROUPS"),
        variants=(
            _scatter_variant(2048, 256, 8, _tile(16, 16, 64, 16)),
            _scatter_variant(2048, 256, 8, _tile(16, 12, 32, 12)),
            _scatter_variant(100, 37, 3, _tile(8, 2, 32, 4)),
            _scatter_variant(100, 1024, 31, _tile(32, 8, 128, 4)),
        ),
        threadgroup_bytes=lambda values: _group_bytes(values["E"], values["TOKENS"]),
    )
)


def supports(logits: mx.array, top_k: int, block_rows: int, *, backend: str | None = None) -> str | None:
    """None if the kernels take these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if logits.ndim != 2 or logits.shape[1] < 2:
        return f"logits have shape {logits.shape}, not tokens of some experts and the shared expert's gate"
    if logits.dtype not in ACTIVATION_DTYPES:
        return f"logits are {logits.dtype}"
    T, E = logits.shape[0], logits.shape[1] - 1
    if not 1 <= T <= MAX_TOKENS:
        return f"{T} tokens; 1 to {MAX_TOKENS} are possible, as counts have 16 bits"
    if not 1 <= top_k <= min(E, MAX_TOP_K) or E > MAX_EXPERTS:
        return f"top {top_k} of {E} experts; at most {MAX_TOP_K} of {MAX_EXPERTS}"
    if block_rows < 1:
        return f"blocks of {block_rows} rows; must be at least 1"
    return None


def expert_route_reference(logits: mx.array, top_k: int, block_rows: int) -> Routing:
    """The same in NumPy, read on the CPU, with the weights in plain MLX."""
    values = np.array(logits.astype(mx.float32))
    router = values[:, :-1]
    T, E = router.shape
    is_nan = np.isnan(router)
    # lexsort is stable, so equal logits stay in the order of their indices; its last key is the first.
    ranked = np.lexsort((-np.where(is_nan, 0.0, router), is_nan), axis=-1)
    experts = np.sort(ranked[:, :top_k], axis=-1)
    chosen = mx.array(np.take_along_axis(router, experts, axis=-1))
    weights = mx.concatenate([mx.softmax(chosen, axis=-1), mx.sigmoid(mx.array(values[:, -1:]))], axis=-1)

    slots = np.arange(T * (top_k + 1)).reshape(T, top_k + 1)
    of_group = np.concatenate([experts, np.full((T, 1), E)], axis=-1)
    rows = slots.reshape(-1)[np.argsort(of_group.reshape(-1), kind="stable")]

    blocks = np.zeros((max_blocks(T, E, top_k, block_rows), 4))
    used = start = 0
    for expert, size in enumerate(np.bincount(of_group.reshape(-1), minlength=E + 1).tolist()):
        for first in range(0, size, block_rows):
            blocks[used] = expert, start + first, min(block_rows, size - first), 0
            used += 1
        start += size
    count = [used, *[0] * 7]
    return Routing(weights, *(mx.array(x, dtype=mx.int32) for x in (rows, blocks, count, experts)))


@lru_cache(maxsize=256)
def _sizes(*sizes: int) -> mx.array:
    return mx.array([*sizes, *[0] * (8 - len(sizes))], dtype=mx.int32)


def expert_route(
    logits: mx.array,
    top_k: int,
    block_rows: int,
    *,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> Routing:
    """Route on the GPU (or the host back-end).

    Args:
        logits: [T, E + 1], see the module's table; :func:`supports` must answer None.
        top_k: experts chosen for each token.
        block_rows: grouped rows of a block.
        tile: ``tokens`` and ``simdgroups`` of a threadgroup that chooses (no more tokens: one launch),
            ``scatter_tokens``, a multiple of ``tokens``, and ``scatter_simdgroups`` of one that writes rows;
            fewer where the experts are many. By default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        The :class:`Routing`.

    Raises:
        ValueError: the arrays do not fit the kernels.
    """
    backend = backend or backends.resolve()
    T, E = logits.shape[0], logits.shape[1] - 1
    if tile is None:
        tile = choose("expert_route", backends.chip(backend), T=T)
    tile = _fitting(E, top_k, tile)
    chunks = -(-T // tile["tokens"])
    blocks_size = max_blocks(T, E, top_k, block_rows)
    sizes = _sizes(T, block_rows, blocks_size, chunks)
    choice = _choice_template(logits.dtype, E, top_k, tile)
    chosen_shapes, grouped_shapes = [(T, top_k + 1), (T, top_k)], [(T * (top_k + 1),), (blocks_size, 4), (8,)]
    threadgroup = (32 * tile["simdgroups"], 1, 1)
    if chunks == 1:
        return Routing(
            *launch(
                ROUTE,
                [logits, sizes],
                template=choice,
                grid=threadgroup,
                threadgroup=threadgroup,
                output_shapes=[chosen_shapes[0], *grouped_shapes, chosen_shapes[1]],
                output_dtypes=[mx.float32, *[mx.int32] * 4],
                backend=backend,
            )
        )
    weights, experts, counts = launch(
        CHOOSE,
        [logits, sizes],
        template=choice,
        grid=_grid(chunks, tile["simdgroups"]),
        threadgroup=threadgroup,
        output_shapes=[*chosen_shapes, (chunks, _words(E))],
        output_dtypes=[mx.float32, mx.int32, mx.uint32],
        backend=backend,
    )
    rows, blocks, count = launch(
        SCATTER,
        [experts, counts, sizes],
        template=_scatter_template(E, top_k, tile),
        grid=_grid(-(-T // tile["scatter_tokens"]), tile["scatter_simdgroups"]),
        threadgroup=(32 * tile["scatter_simdgroups"], 1, 1),
        output_shapes=grouped_shapes,
        output_dtypes=[mx.int32] * 3,
        backend=backend,
    )
    return Routing(weights, rows, blocks, count, experts)


@self_check("expert_route")
def _self_check(backend: str) -> str | None:
    """Few and many tokens, one expert far ahead in half of them, equal logits, against the reference."""
    E, top_k = 256, 8
    chip = backends.chip(backend)
    few = choose("expert_route", chip, T=7)
    many = [tile for tile in of_chip("expert_route", chip) if tile != few]
    for T, tile in ((7, few), *((301, tile) for tile in many)):
        logits = mx.round(mx.random.normal((T, E + 1), key=mx.random.key(T)) * 8) / 8
        ahead = mx.where((mx.arange(T) % 2 == 0)[:, None] & (mx.arange(E + 1) == 17), 9.0, 0.0)
        got = expert_route(logits + ahead, top_k, 32, tile=tile, backend=backend)
        want = expert_route_reference(logits + ahead, top_k, 32)
        for name in ("experts", "rows", "blocks", "count"):
            if not mx.array_equal(getattr(got, name), getattr(want, name)):
                return f"{name} of {T} tokens differ from the reference's with {tile}"
        error: Any = mx.abs(got.weights - want.weights).max().item()
        if not error <= 1e-6:
            return f"weights of {T} tokens: {error:.1e} off the reference, allowed 1e-6, with {tile}"
    return None
