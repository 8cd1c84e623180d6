"""The experts' gate and up projections over grouped rows against their fp32 reference."""

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
from lily_mlx.ops import expert_gemm_gate_up as op
from lily_mlx.ops.packed import Packed
from lily_mlx.ops.tile_product import grouped_tile
from lily_mlx.tiles import table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [
    {"rows": 16, "cols": 16, "step": 64, "simdgroups": 1},
    {"rows": 32, "cols": 16, "step": 128, "simdgroups": 4},
    {"rows": 64, "cols": 32, "step": 64, "simdgroups": 2},
    {"rows": 16, "cols": 16, "step": 128, "simdgroups": 8},
]

# Unequal everywhere, so that a swapped axis cannot go unseen.
SMALL = {"T": 21, "K": 128, "M": 48, "E": 5, "top_k": 3}


def problem(T, K, M, E, top_k, block_rows, bits=4, group=64, dtype=mx.float32, load="uniform", seed=0):
    """Arguments of the op."""
    rng = np.random.default_rng(seed)
    rows, blocks, count = routing_reference(chosen_experts(rng, T, E, top_k, load), E, block_rows)

    def some(*shape):
        return matrix(rng, *shape, K, bits=bits, group=group, dtype=dtype)

    return {
        "x": vector(rng, T, K, dtype=dtype),
        "rows": rows,
        "blocks": blocks,
        "count": count,
        "gate": some(E, M),
        "up": some(E, M),
        "shared_gate": some(M),
        "shared_up": some(M),
        "top_k": top_k,
    }


def expected(arguments) -> mx.array:
    """Row by row, with numbers rounded to the activations' dtype, which is part of what the op means."""
    x, top_k = arguments["x"], arguments["top_k"]
    numbers = {
        name: as_unquantised(arguments[name], x.dtype) for name in ("gate", "up", "shared_gate", "shared_up")
    }
    E = numbers["gate"].shape[0]
    h = [mx.zeros((0,))] * arguments["rows"].size
    for expert, first, size, _ in arguments["blocks"].tolist()[: arguments["count"][0].item()]:
        for r in range(first, first + size):
            n = x[arguments["rows"][r].item() // (top_k + 1)].astype(mx.float32)
            pair = (
                (numbers["shared_gate"], numbers["shared_up"])
                if expert == E
                else (numbers["gate"][expert], numbers["up"][expert])
            )
            g, u = (each @ n for each in pair)
            h[r] = g * mx.sigmoid(g) * u
    return mx.stack(h)


def check(arguments, **options) -> mx.array:
    assert op.supports(**arguments, backend=options["backend"]) is None
    h = op.expert_gemm_gate_up(**arguments, **options)
    assert h.dtype == arguments["x"].dtype
    # The error of gate and of up, the latter times silu, which grows up to 1.1 times as fast as its argument.
    assert_close("h", h, expected(arguments), 2.2e-5)
    return h


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
            ({"T": 5, "K": 256, "M": 64, "E": 9, "top_k": 8}, "the tiny checkpoint's widths, fewer experts"),
            (
                {"T": 9, "K": 192, "M": 16, "E": 3, "top_k": 2, "group": 32},
                "two groups a step; one column tile",
            ),
            (
                {"T": 9, "K": 128, "M": 80, "E": 3, "top_k": 1, "group": 128, "bits": 8},
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
    h = op.expert_gemm_gate_up(**arguments, tile=tile, backend=backend)
    arguments["x"] = arguments["x"] + mx.where(mx.arange(21) == 7, mx.nan, 0.0)[:, None].astype(mx.bfloat16)
    spoilt = op.expert_gemm_gate_up(**arguments, tile=tile, backend=backend)
    of_token = (arguments["rows"] // 4 == 7)[:, None]
    assert mx.array_equal(mx.isnan(spoilt), mx.broadcast_to(of_token, h.shape))
    assert mx.array_equal(mx.where(of_token, 0, spoilt), mx.where(of_token, 0, h))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [64, 128])
def test_block_size_and_layout_do_not_change_a_bit(backend, step):
    """Deterministic: a row's sum has one order, whichever block it is in.

    On matrix units of the step's columns.
    """
    results = [
        op.expert_gemm_gate_up(
            **problem(**SMALL, block_rows=tile["rows"], dtype=mx.bfloat16), tile=tile, backend=backend
        )
        for tile in TILES
        if tile["step"] == step
    ]
    assert len(results) == 2
    assert mx.array_equal(*results)


@pytest.mark.parametrize("tile", TILES[1:3], ids=lambda tile: "-".join(map(str, tile.values())))
def test_no_schedule_changes_a_bit(tile):
    arguments = problem(9, 192, 48, 3, 2, tile["rows"], dtype=mx.bfloat16)
    host.check_schedules(lambda: op.expert_gemm_gate_up(**arguments, tile=tile, backend="host"))


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

    def layer(x, rows, blocks, count, *parts):
        matrices = [Packed(*parts[i : i + 3], 4, 64) for i in range(0, 12, 3)]
        with backends.override("metal"):
            return op.expert_gemm_gate_up(x, rows, blocks, count, *matrices, 3)

    parts = [part for name in ("gate", "up", "shared_gate", "shared_up") for part in arguments[name][:3]]
    given = [arguments[name] for name in ("x", "rows", "blocks", "count")]
    mx.export_function(record, layer, *given, *parts)
    assert names == ["CustomKernel"]


def test_reference_is_the_formula():
    """In float64, with the numbers taken apart by hand."""
    arguments = problem(**SMALL, block_rows=16)
    h = np.array(op.expert_gemm_gate_up_reference(**arguments))
    experts = chosen_experts(np.random.default_rng(0), 21, 5, 3, "uniform")
    numbers = {name: unpacked(arguments[name]) for name in ("gate", "up", "shared_gate", "shared_up")}
    for r, place in enumerate(arguments["rows"].tolist()):
        t, slot = divmod(place, 4)
        x = np.array(arguments["x"][t], float)
        if slot == 3:
            g, u = numbers["shared_gate"] @ x, numbers["shared_up"] @ x
        else:
            g, u = numbers["gate"][experts[t, slot]] @ x, numbers["up"][experts[t, slot]] @ x
        np.testing.assert_allclose(h[r], g / (1 + np.exp(-g)) * u, rtol=1e-4, atol=1e-5)


def test_self_check_fails_where_the_kernel_is_wrong(monkeypatch):
    """It compares: with blocks that miss a row it says so."""
    real = op.expert_gemm_gate_up_reference

    def forgetful(x, rows, blocks, count, *matrices, tile, backend):
        return real(x, rows, blocks - mx.array([0, 0, 1, 0]), count, *matrices)

    monkeypatch.setattr(op, "expert_gemm_gate_up", forgetful)
    assert "off the reference" in op._self_check("host")


def test_tiles_fit():
    """Rows that routing can make, columns and sums that a lane can hold."""
    for choice in table("expert_gemm_gate_up"):
        tile = choice["tile"]
        assert tile["rows"] in (16, 32, 64, 128)
        assert 1 <= tile["simdgroups"] <= 8
        assert 2 * tile["rows"] * tile["cols"] <= 128 * 32


GOOD = problem(4, 64, 32, 5, 3, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"x": GOOD["x"][None]}, "x has shape"),
        ({"x": mx.zeros((4, 64), mx.int32)}, "x is"),
        ({"x": mx.zeros((4, 96))}, "not a multiple of 64"),
        ({"rows": GOOD["rows"][:-1]}, "rows have shape"),
        ({"rows": GOOD["rows"].astype(mx.uint32)}, "rows is"),
        ({"blocks": GOOD["blocks"][:, :3]}, "blocks have shape"),
        ({"count": GOOD["count"][:4]}, "blocks have shape"),
        ({"gate": GOOD["gate"]._replace(bits=2)}, "gate has 2 bits"),
        ({"up": GOOD["shared_up"]}, "up has shape"),
        ({"shared_gate": matrix(np.random.default_rng(0), 16, 64)}, "shared gate and gate differ"),
        ({"shared_up": matrix(np.random.default_rng(0), 32, 64, bits=8)}, "shared up and gate differ"),
        ({name: Packed(*(part[..., :8, :] for part in GOOD[name][:3]), 4, 64)
          for name in ("gate", "up", "shared_gate", "shared_up")}, "not a multiple of 16"),
    ],
)  # fmt: skip
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**GOOD, **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**GOOD) == "no GPU back-end"
