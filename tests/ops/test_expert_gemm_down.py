"""The experts' down projections over grouped rows against their fp32 reference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close, with_both_widths
from packed_problems import as_unquantised, matrix, unpacked, vector
from routing_problems import LOADS, chosen_experts, routing_reference

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import expert_gemm_down as op
from lily_mlx.ops.packed import Packed
from lily_mlx.ops.tile_product import grouped_tile
from lily_mlx.tiles import choose, table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [
    {"rows": 16, "cols": 16, "step": 64, "simdgroups": 1},
    {"rows": 32, "cols": 16, "step": 128, "simdgroups": 4},
    {"rows": 64, "cols": 32, "step": 64, "simdgroups": 2},
    {"rows": 16, "cols": 16, "step": 128, "simdgroups": 8},
]

# Unequal everywhere, so that a swapped axis cannot go unseen.
SMALL = {"T": 21, "M": 128, "H": 48, "E": 5, "top_k": 3}


def problem(T, M, H, E, top_k, block_rows, bits=4, group=64, dtype=mx.float32, load="uniform", seed=0):
    """Arguments of the op."""
    rng = np.random.default_rng(seed)
    rows, blocks, count = routing_reference(chosen_experts(rng, T, E, top_k, load), E, block_rows)
    return {
        "h": vector(rng, T * (top_k + 1), M, dtype=dtype),
        "rows": rows,
        "blocks": blocks,
        "count": count,
        "down": matrix(rng, E, H, M, bits=bits, group=group, dtype=dtype),
        "shared_down": matrix(rng, H, M, bits=bits, group=group, dtype=dtype),
        "top_k": top_k,
    }


def expected(arguments) -> mx.array:
    """Row by row, with numbers rounded to the activations' dtype, which is part of what the op means."""
    h = arguments["h"]
    down, shared = (as_unquantised(arguments[name], h.dtype) for name in ("down", "shared_down"))
    y = [mx.zeros((0,))] * h.shape[0]
    for expert, first, size, _ in arguments["blocks"].tolist()[: arguments["count"][0].item()]:
        for r in range(first, first + size):
            numbers = shared if expert == down.shape[0] else down[expert]
            y[arguments["rows"][r].item()] = numbers @ h[r].astype(mx.float32)
    return mx.stack(y)


def check(arguments, **options) -> mx.array:
    assert op.supports(**arguments, backend=options["backend"]) is None
    y = op.expert_gemm_down(**arguments, **options)
    assert y.dtype == arguments["h"].dtype
    assert_close("y", y, expected(arguments))
    return y


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_every_layout(backend, tile):
    check(problem(**SMALL, block_rows=tile["rows"]), tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 257])
@pytest.mark.parametrize("load", LOADS)
def test_lengths_and_loads(backend, T, load):
    """Blocks full and ragged, experts with nothing to do, with everything, and with most of it."""
    tile = grouped_tile(T, 2, 6, backend)
    arguments = problem(T, 64, 16, 6, 2, tile["rows"], dtype=mx.bfloat16, load=load)
    check(arguments, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "why", "dtype"),
    with_both_widths(
        [
            ({"T": 5, "M": 64, "H": 256, "E": 9, "top_k": 8}, "the tiny checkpoint's widths, fewer experts"),
            (
                {"T": 9, "M": 192, "H": 16, "E": 3, "top_k": 2, "group": 32},
                "two groups a step; one column tile",
            ),
            (
                {"T": 9, "M": 128, "H": 80, "E": 3, "top_k": 1, "group": 128, "bits": 8},
                "columns left over",
            ),
        ]
    ),
)
def test_shapes_and_dtypes(backend, shape, why, dtype):
    tile = TILES[1]
    check(problem(**shape, block_rows=tile["rows"], dtype=dtype), tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_see_each_other(backend):
    tile = TILES[1]
    arguments = problem(**SMALL, block_rows=tile["rows"], dtype=mx.bfloat16)
    y = op.expert_gemm_down(**arguments, tile=tile, backend=backend)
    arguments["h"] = arguments["h"] + mx.where(mx.arange(84) == 7, mx.nan, 0.0)[:, None].astype(mx.bfloat16)
    spoilt = op.expert_gemm_down(**arguments, tile=tile, backend=backend)
    of_row = (mx.arange(84) == arguments["rows"][7])[:, None]
    assert mx.array_equal(mx.isnan(spoilt), mx.broadcast_to(of_row, y.shape))
    assert mx.array_equal(mx.where(of_row, 0, spoilt), mx.where(of_row, 0, y))


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_size_and_layout_do_not_change_a_bit(backend):
    """Deterministic: a row's sum has one order, whichever block it is in."""
    results = [
        op.expert_gemm_down(
            **problem(**SMALL, block_rows=tile["rows"], dtype=mx.bfloat16), tile=tile, backend=backend
        )
        for tile in TILES
    ]
    assert all(mx.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("tile", TILES[1:3], ids=lambda tile: "-".join(map(str, tile.values())))
def test_no_schedule_changes_a_bit(tile):
    arguments = problem(9, 192, 48, 3, 2, tile["rows"], dtype=mx.bfloat16)
    host.check_schedules(lambda: op.expert_gemm_down(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(9, 64, 16, 3, 2, 16, dtype=mx.bfloat16), tile=TILES[0], backend="host")


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem(**SMALL, block_rows=16, dtype=mx.bfloat16)
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(h, rows, blocks, count, *parts):
        with backends.override("metal"):
            return op.expert_gemm_down(
                h, rows, blocks, count, Packed(*parts[:3], 4, 64), Packed(*parts[3:], 4, 64), 3
            )

    parts = [part for name in ("down", "shared_down") for part in arguments[name][:3]]
    given = [arguments[name] for name in ("h", "rows", "blocks", "count")]
    mx.export_function(record, layer, *given, *parts)
    assert names == ["CustomKernel"]


def test_reference_is_the_formula():
    """In float64, with the numbers taken apart by hand."""
    arguments = problem(**SMALL, block_rows=16)
    y = np.array(op.expert_gemm_down_reference(**arguments))
    experts = chosen_experts(np.random.default_rng(0), 21, 5, 3, "uniform")
    down, shared = unpacked(arguments["down"]), unpacked(arguments["shared_down"])
    for r, place in enumerate(arguments["rows"].tolist()):
        t, slot = divmod(place, 4)
        numbers = shared if slot == 3 else down[experts[t, slot]]
        want = numbers @ np.array(arguments["h"][r], float)
        np.testing.assert_allclose(y[place], want, rtol=1e-4, atol=1e-5)


def test_self_check_fails_where_the_kernel_is_wrong(monkeypatch):
    """It compares: with blocks that miss a row it says so."""
    real = op.expert_gemm_down_reference

    def forgetful(h, rows, blocks, count, *matrices, tile, backend):
        return real(h, rows, blocks - mx.array([0, 0, 1, 0]), count, *matrices)

    monkeypatch.setattr(op, "expert_gemm_down", forgetful)
    assert "off the reference" in op._self_check("host")


def test_tiles_fit():
    """Columns and sums that a lane can hold, for every block size that routing makes."""
    for chip in ("", *(choice["chip"] for choice in table("expert_gemm_down"))):
        for rows in (16, 32, 64, 128):
            tile = choose("expert_gemm_down", chip, rows=rows)
            assert 1 <= tile["simdgroups"] <= 8
            assert rows * tile["cols"] <= 128 * 32


GOOD = problem(4, 64, 32, 5, 3, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"h": GOOD["h"][None]}, "h has shape"),
        ({"h": GOOD["h"][1:]}, "h has shape"),
        ({"h": GOOD["h"].astype(mx.int32)}, "h is"),
        ({"h": GOOD["h"][:, :32]}, "not a multiple of 64"),
        ({"rows": GOOD["rows"][:-1]}, "rows have shape"),
        ({"rows": GOOD["rows"].astype(mx.uint32)}, "rows is"),
        ({"blocks": GOOD["blocks"][:, :3]}, "blocks have shape"),
        ({"count": GOOD["count"][:4]}, "blocks have shape"),
        ({"down": GOOD["down"]._replace(bits=2)}, "down has 2 bits"),
        ({"down": GOOD["shared_down"]}, "down has"),
        ({"shared_down": matrix(np.random.default_rng(0), 16, 64)}, "down and shared down differ"),
        ({"shared_down": matrix(np.random.default_rng(0), 32, 64, bits=8)}, "down and shared down differ"),
        ({name: Packed(*(part[..., :8, :] for part in GOOD[name][:3]), 4, 64)
          for name in ("down", "shared_down")}, "not a multiple of 16"),
    ],
)  # fmt: skip
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**GOOD, **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**GOOD) == "no GPU back-end"
