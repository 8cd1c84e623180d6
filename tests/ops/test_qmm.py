"""The product of many vectors with quantised matrices against its fp32 reference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close, with_both_widths
from packed_problems import as_unquantised, matrix, unpacked, vector

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import qmm as op
from lily_mlx.ops.packed import Packed

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [
    {"rows": 16, "cols": 16, "step": 64, "simdgroups": 1},
    {"rows": 32, "cols": 32, "step": 128, "simdgroups": 2},
    {"rows": 16, "cols": 64, "step": 64, "simdgroups": 8},
    {"rows": 64, "cols": 16, "step": 128, "simdgroups": 4},
]


def problem(T, K, rows, bits=4, group=64, dtype=mx.float32, scales=None, residual=False, seed=0):
    """Arguments of the op; ``bits`` is one number or one for each matrix."""
    rng = np.random.default_rng(seed)
    each = [bits] * len(rows) if isinstance(bits, int) else bits
    matrices = [
        matrix(rng, n, K, bits=b, group=group, dtype=scales or dtype) for n, b in zip(rows, each, strict=True)
    ]
    arguments = {"x": vector(rng, 1, T, K, dtype=dtype), "matrices": matrices}
    if residual:
        arguments["residual"] = vector(rng, 1, T, sum(rows), dtype=dtype)
    return arguments


def check(arguments, **options) -> mx.array:
    asked = {key: options[key] for key in ("out_dtype",) if key in options}
    assert op.supports(**arguments, **asked, backend=options["backend"]) is None
    y = op.qmm(**arguments, **options)
    dtype = arguments["x"].dtype
    assert y.dtype == options.get("out_dtype", dtype)
    # That numbers are rounded to the activations' dtype is part of what the op means; fp32 sums remain.
    rounded = [as_unquantised(packed, dtype) for packed in arguments["matrices"]]
    want = mx.concatenate([arguments["x"].astype(mx.float32) @ numbers.T for numbers in rounded], axis=-1)
    if "residual" in arguments:
        want = arguments["residual"].astype(mx.float32) + want
    assert_close("y", y, want)
    return y


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_every_layout(backend, tile):
    """Edges in rows and columns, matrices smaller than a tile, both widths, a residual."""
    check(problem(37, 128, [50, 8, 20], [4, 8, 4], residual=True), tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 15, 63, 64, 65, 130, 257])
def test_lengths_with_the_tile_of_the_table(backend, T):
    check(problem(T, 64, [24], dtype=mx.bfloat16), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "why", "dtype"),
    with_both_widths(
        [
            ({"T": 17, "K": 256, "rows": [80, 40, 32, 32]}, "DeltaNet input, narrower"),
            (
                {"T": 17, "K": 256, "rows": [256, 1], "bits": 8},
                "router and shared-expert gate, an odd column",
            ),
            ({"T": 9, "K": 192, "rows": [1], "group": 32, "residual": True}, "one column; two groups a step"),
            ({"T": 9, "K": 256, "rows": [40], "group": 128, "bits": 8}, "two steps a group"),
        ]
    ),
)
def test_shapes_and_dtypes(backend, arguments, why, dtype):
    check(problem(**arguments, dtype=dtype), tile=TILES[1], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_and_result_of_other_dtypes(backend):
    arguments = problem(20, 128, [24], dtype=mx.float16, scales=mx.bfloat16, residual=True)
    y = check(arguments, tile=TILES[0], backend=backend)
    wide = check(arguments, tile=TILES[0], out_dtype=mx.float32, backend=backend)
    assert mx.array_equal(wide.astype(mx.float16), y)  # rounded once, at the end


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_matrix_gives_the_same_bits_alone(backend):
    """Columns are neither lost nor mixed up where one matrix ends and the next begins."""
    arguments = problem(33, 128, [13, 1, 70, 6], 8, dtype=mx.bfloat16)
    together = op.qmm(**arguments, tile=TILES[1], backend=backend)
    alone = [op.qmm(arguments["x"], [one], tile=TILES[1], backend=backend) for one in arguments["matrices"]]
    assert mx.array_equal(together, mx.concatenate(alone, axis=-1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_see_each_other(backend):
    """A row's bits depend neither on its place, nor on its neighbours, nor on how many there are."""
    arguments = problem(40, 128, [24], dtype=mx.bfloat16)
    y = op.qmm(**arguments, tile=TILES[1], backend=backend)
    poisoned = arguments["x"] + mx.where(mx.arange(40) == 5, mx.nan, 0.0)[None, :, None].astype(mx.bfloat16)
    z = op.qmm(poisoned, arguments["matrices"], tile=TILES[1], backend=backend)
    assert mx.isnan(z[:, 5]).all()
    assert mx.array_equal(z[:, 6:], y[:, 6:])
    assert mx.array_equal(op.qmm(poisoned[:, 30:], arguments["matrices"], backend=backend), y[:, 30:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_every_number_counts_where_it_stands(backend, bits, dtype):
    """With the unit vectors, scale 1 and bias 0, the result is the stored numbers: exact in every dtype."""
    K, N, group = 128, 24, 32
    rng = np.random.default_rng(1)
    weight = mx.array(rng.integers(0, 2**32, (N, K * bits // 32), dtype=np.uint32))
    packed = Packed(weight, mx.ones((N, K // group), dtype), mx.zeros((N, K // group), dtype), bits, group)
    y = op.qmm(mx.eye(K, dtype=dtype), [packed], tile=TILES[1], backend=backend)
    assert np.array_equal(np.array(y.astype(mx.float32), dtype=np.float64), unpacked(packed).T)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_rounded_once(backend, dtype, bits):
    """The unit vectors give back the dequantised numbers, rounded to the activations' dtype."""
    packed = matrix(np.random.default_rng(3), 16, 64, bits=bits, group=32, dtype=dtype)
    y = op.qmm(mx.eye(64, dtype=dtype), [packed], tile=TILES[0], backend=backend)
    assert mx.array_equal(y, packed.dequantised().T.astype(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_no_further_from_fp32_than_rounded_numbers_put_it(backend, dtype):
    """A product with numbers rounded to 16 bits, summed in float64, is what stock's kernels aim at."""
    arguments = problem(16, 512, [48], dtype=dtype)
    exact = np.array(op.qmm_reference(**arguments))[0]
    y = op.qmm(**arguments, tile=TILES[1], out_dtype=mx.float32, backend=backend)
    numbers = np.array(as_unquantised(arguments["matrices"][0], dtype), float)
    rounded = np.array(arguments["x"][0].astype(mx.float32), float) @ numbers.T
    rms = [np.sqrt(((got - exact) ** 2).mean()) for got in (np.array(y)[0], rounded)]
    assert 0 < rms[0] <= 1.001 * rms[1]


@pytest.mark.parametrize("tile", TILES[1:3], ids=lambda tile: "-".join(map(str, tile.values())))
def test_no_schedule_changes_a_bit(tile):
    arguments = problem(20, 192, [40, 6], [4, 8], dtype=mx.bfloat16)
    host.check_schedules(lambda: op.qmm(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    arguments = problem(17, 64, [20, 8], [4, 8], group=32, dtype=mx.bfloat16)
    check(arguments, tile={"rows": 16, "cols": 16, "step": 64, "simdgroups": 2}, backend="host")


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem(20, 64, [24, 16], dtype=mx.bfloat16)
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(x, *parts):
        with backends.override("metal"):
            return op.qmm(x, [Packed(*parts[:3], 4, 64), Packed(*parts[3:], 4, 64)])

    parts = [part for packed in arguments["matrices"] for part in packed[:3]]
    mx.export_function(record, layer, arguments["x"][0], *parts)
    assert [name for name in names if name not in ("Reshape", "Flatten", "Unflatten")] == ["CustomKernel"]


def test_reference_is_the_formula():
    """In float64, with the numbers taken apart by hand."""
    arguments = problem(5, 64, [8, 6], [4, 8], residual=True)
    want = np.array(arguments["x"][0], float) @ np.concatenate(
        [unpacked(packed) for packed in arguments["matrices"]]
    ).T + np.array(arguments["residual"][0], float)
    np.testing.assert_allclose(np.array(op.qmm_reference(**arguments))[0], want, rtol=1e-4, atol=1e-5)


def test_self_check_fails_where_the_kernel_is_wrong(monkeypatch):
    """It compares: with a result that is a little too large it says so."""
    monkeypatch.setattr(op, "qmm", lambda x, matrices, **options: 1.02 * op.qmm_reference(x, matrices))
    assert "off the reference" in op._self_check("host")


GOOD = problem(4, 64, [16, 8])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"x": mx.zeros((4, 64), mx.int32)}, "x is"),
        ({"x": mx.zeros((0, 64))}, "no vector"),
        ({"x": mx.zeros((4, 96))}, "not a multiple of 64"),
        ({"x": mx.zeros((4, 128))}, "matrix 0 has 64 columns"),
        ({"matrices": []}, "0 matrices"),
        ({"matrices": GOOD["matrices"] * 3}, "6 matrices"),
        ({"matrices": [GOOD["matrices"][0]._replace(bits=2)]}, "2 bits"),
        ({"matrices": problem(1, 64, [8], group=32)["matrices"] + GOOD["matrices"]}, "group sizes differ"),
        ({"residual": mx.zeros((4, 23))}, "residual is"),
        ({"out_dtype": mx.int32}, "cannot be"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**GOOD, **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**GOOD) == "no GPU back-end"
