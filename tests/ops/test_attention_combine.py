"""The second pass of decode attention against its fp32 reference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close, with_both_widths

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import attention_combine as op
from lily_mlx.tiles import choose, table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [
    {"columns": 4, "simdgroups": 16},
    {"columns": 2, "simdgroups": 3},
    {"columns": 1, "simdgroups": 1},
]


def problem(blocks, Hq, D, dtype=mx.float32, stats=None, seed=0) -> dict:
    """``stats``: m and l of each block and head, [blocks, Hq, 2]."""
    rng = np.random.default_rng(seed)
    if stats is None:
        totals = rng.uniform(1, 100, size=(blocks, Hq))
        stats = np.stack([rng.normal(size=(blocks, Hq)) * 10, totals], axis=-1)
    partial = rng.normal(size=(blocks, Hq, D)) * stats[..., 1:]
    flat = np.concatenate([partial.ravel(), stats.swapaxes(0, 1).ravel()])
    return {
        "partials": mx.array(flat.astype(np.float32)),
        "projected": mx.array(rng.normal(size=(1, 1, 2 * Hq * D)).astype(np.float32)).astype(dtype),
        "blocks": blocks,
        "Hq": Hq,
        "D": D,
    }


def check(arguments: dict, backend: str, tile=None) -> mx.array:
    assert op.supports(**arguments, backend=backend) is None
    out = op.attention_combine(**arguments, tile=tile, backend=backend)
    assert out.dtype == arguments["projected"].dtype
    assert_close("out", out, op.attention_combine_reference(**arguments))
    return out


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
@pytest.mark.parametrize("blocks", [1, 2, 31, 67], ids=lambda blocks: f"{blocks} blocks")
def test_layouts_and_blocks(backend, tile, blocks):
    """Fewer blocks than simdgroups, one more than lanes, and a batch with a remainder."""
    check(problem(blocks, 3, 128), backend, tile)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("Hq", "D", "dtype"),
    with_both_widths([(16, 256), (5, 64), (6, 96), (2, 160), (1, 224)]),
    ids=lambda size: str(size),
)
def test_shapes_with_the_tile_of_the_table(backend, dtype, Hq, D):
    check(problem(9, Hq, D, dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gate_inside_a_larger_buffer(backend):
    arguments = problem(4, 3, 64, mx.bfloat16)
    want = op.attention_combine(**arguments, backend=backend)
    gap = mx.full((1, 1, 13), mx.nan, mx.bfloat16)
    queries = arguments["projected"].reshape(3, 2, 64)
    queries = mx.stack([mx.full((3, 64), mx.nan, mx.bfloat16), queries[:, 1]], axis=1).reshape(1, 1, -1)
    arguments |= {"projected": mx.concatenate([gap, queries, gap], axis=-1), "offset": 13}
    assert mx.array_equal(check(arguments, backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reference_is_attention_over_the_blocks(backend):
    """Softmax over all rows at once, from scores and values in float64."""
    rng = np.random.default_rng(3)
    scores, values = rng.normal(size=(5, 2, 7)) * 9, rng.normal(size=(5, 2, 7, 64))
    m = scores.max(-1)
    weights = 2 ** (scores - m[..., None])
    stats = np.stack([m, weights.sum(-1)], axis=-1)
    arguments = problem(5, 2, 64, stats=stats)
    partial = (weights[..., None] * values).sum(2)
    flat = np.concatenate([partial.ravel(), stats.swapaxes(0, 1).ravel()])
    arguments["partials"] = mx.array(flat.astype(np.float32))
    softmax = 2**scores / (2**scores).sum((0, 2), keepdims=True)
    gate = np.array(arguments["projected"], dtype=np.float64).reshape(2, 2, 64)[:, 1]
    want = (softmax[..., None] * values).sum((0, 2)) / (1 + np.exp(-gate))
    want = mx.array(want.reshape(1, 1, -1).astype(np.float32))
    assert_close("reference", op.attention_combine_reference(**arguments), want)
    assert_close("out", op.attention_combine(**arguments, backend=backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_without_rows_count_nothing(backend):
    stats = np.stack([np.arange(16.0).reshape(8, 2), np.ones((8, 2))], axis=-1)
    stats[5:] = [-1e30, 0.0]
    arguments = problem(8, 2, 64, stats=stats)
    fewer = problem(5, 2, 64, stats=stats[:5])
    got, want = (op.attention_combine(**a, tile=TILES[2], backend=backend) for a in (arguments, fewer))
    gate = arguments["projected"].reshape(2, 2, 64)[:, 1], fewer["projected"].reshape(2, 2, 64)[:, 1]
    got, want = (x.reshape(2, 64) / mx.sigmoid(g) for x, g in zip((got, want), gate, strict=True))
    assert_close("out", got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_far_apart(backend):
    """2^(m - M) underflows for one block and must not overflow for any."""
    stats = np.array([[[900.0, 1], [-900.0, 2]], [[-900.0, 1], [0, 1]], [[0, 1], [900.0, 1]]])
    check(problem(3, 2, 64, stats=stats), backend)


def test_no_schedule_changes_a_bit():
    arguments = problem(9, 2, 64)
    tile = {"columns": 1, "simdgroups": 4}
    host.check_schedules(lambda: op.attention_combine(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(9, 3, 128, mx.bfloat16), "host")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"D": 80}, "D a multiple of 32"),
        ({"partials": mx.zeros((792,), mx.float16)}, "not float32 (792,)"),
        ({"blocks": 5}, "not float32 (990,)"),
        ({"projected": mx.zeros((384,), mx.int32)}, "projected is mlx.core.int32"),
        ({"offset": 1}, "projected has 384 elements; needs 384 from 1"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**problem(4, 3, 64), **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**problem(4, 3, 64)) == "no GPU back-end"


def test_every_tile_of_the_table_launches():
    """A wrong tile would only show on the chip that it is for."""
    for choice in table("attention_combine"):
        check(problem(choice["when"].get("blocks", [20])[0], 2, 128, mx.bfloat16), "host", choice["tile"])


def test_the_table_chooses_by_blocks():
    few, many = (choose("attention_combine", "host", blocks=blocks, Hq=16, D=256) for blocks in (8, 66))
    assert few != many
