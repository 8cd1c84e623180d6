"""The GEMV over quantised matrices against its fp32 reference."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close
from packed_problems import ACCUMULATED, matrix, unpacked, vector

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import MAX_THREADGROUP_BYTES, host_options
from lily_mlx.ops import qmv as op
from lily_mlx.ops.packed import Packed
from lily_mlx.tiles import choose, table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [
    {"rows": 4, "repeat": 1, "ahead": 2, "simdgroups": 8},
    {"rows": 1, "repeat": 1, "ahead": 4, "simdgroups": 4},
    {"rows": 2, "repeat": 3, "ahead": 1, "simdgroups": 2},
    {"rows": 8, "repeat": 2, "ahead": 2, "simdgroups": 1},
]


def problem(K, N, bits=4, group=64, dtype=mx.float32, scales=None, norm=False, residual=False, seed=0):
    """Arguments of the op."""
    rng = np.random.default_rng(seed)
    arguments = {
        "x": vector(rng, 1, 1, K, dtype=dtype),
        "matrix": matrix(rng, N, K, bits=bits, group=group, dtype=scales or dtype),
    }
    if norm:
        arguments["norm_weight"] = vector(rng, K, dtype=dtype)
    if residual:
        arguments["residual"] = vector(rng, 1, 1, N, dtype=dtype)
    return arguments


def check(arguments, **options) -> mx.array:
    asked = {key: options[key] for key in ("out_dtype",) if key in options}
    assert op.supports(**arguments, **asked, backend=options["backend"]) is None
    y = op.qmv(**arguments, **options)
    assert y.dtype == options.get("out_dtype", arguments["x"].dtype)
    assert_close("y", y, op.qmv_reference(**arguments), ACCUMULATED)
    return y


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
@pytest.mark.parametrize("bits", [4, 8])
def test_every_layout(backend, tile, bits):
    """Rows that fill no block, a norm and a residual."""
    check(problem(2048, 37, bits, norm=True, residual=True), tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"K": 2048, "N": 184, "norm": True}, "DeltaNet input, fewer rows"),
        ({"K": 4096, "N": 33, "residual": True}, "output projection, fewer rows"),
        ({"K": 2048, "N": 257, "bits": 8, "norm": True}, "router and shared-expert gate"),
        ({"K": 256, "N": 33, "bits": 8, "norm": True}, "the same of the tiny checkpoint"),
        ({"K": 256, "N": 108, "norm": True}, "eight lanes a row"),
        ({"K": 1024, "N": 50, "residual": True}, "one load of every lane"),
        ({"K": 96, "N": 64, "group": 32, "residual": True}, "one lane a row; three groups"),
        ({"K": 32, "N": 3, "group": 32}, "fewer rows than a lane takes"),
        ({"K": 64, "N": 1}, "a single row"),
        ({"K": 640, "N": 20, "group": 128}, "four lanes a row, five loads each"),
    ],
)
def test_shapes_with_the_tile_of_the_table(backend, arguments, why):
    check(problem(**arguments), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_dtypes(backend, dtype):
    arguments = problem(512, 20, dtype=dtype, norm=True, residual=True)
    y = check(arguments, tile=TILES[0], backend=backend)
    wide = check(arguments, tile=TILES[0], out_dtype=mx.float32, backend=backend)
    assert mx.array_equal(wide.astype(dtype), y)  # rounded once, at the end


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_and_norm_weight_of_other_dtypes(backend):
    arguments = problem(512, 20, dtype=mx.float16, scales=mx.bfloat16, norm=True)
    arguments["norm_weight"] = arguments["norm_weight"].astype(mx.float32)
    check(arguments, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_joined_matrix_give_the_same_bits_alone(backend):
    """Also as views, which is what modules hold of a joined matrix."""
    arguments = problem(256, 90, 8, norm=True)
    together = op.qmv(**arguments, tile=TILES[1], backend=backend)
    joined = arguments.pop("matrix")
    ends = [0, 13, 14, 84, 90]
    alone = [
        op.qmv(
            **arguments,
            matrix=Packed(*(part[start:end] for part in joined[:3]), joined.bits, joined.group_size),
            tile=TILES[1],
            backend=backend,
        )
        for start, end in itertools.pairwise(ends)
    ]
    assert mx.array_equal(together, mx.concatenate(alone, axis=-1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_number_counts_where_it_stands(backend, bits):
    """With a one at a single place, scale 1 and bias 0, the result is the number stored there."""
    K, N, group = 64, 16, 32
    rng = np.random.default_rng(1)
    weight = mx.array(rng.integers(0, 2**32, (N, K * bits // 32), dtype=np.uint32))
    packed = Packed(weight, mx.ones((N, 2)), mx.zeros((N, 2)), bits, group)
    want = unpacked(packed)
    for k in range(K):
        x = (mx.arange(K) == k).astype(mx.float32)
        y = op.qmv(x, packed, tile=TILES[1], backend=backend)
        assert np.array_equal(np.array(y, dtype=np.float64), want[:, k])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("bits", [4, 8])
def test_accuracy_against_float64(backend, mean, bits):
    """Sums start from a multiple of sum(x); it must not show, also where sum(x) is large."""
    arguments = problem(2048, 64, bits)
    arguments["x"] = arguments["x"] + mean
    weights = unpacked(arguments["matrix"])
    want = weights @ np.array(arguments["x"][0, 0], float)
    error = np.abs(np.array(op.qmv(**arguments, backend=backend))[0, 0] - want)
    scale = np.abs(want).max() + mean * np.abs(weights).sum(-1).max()
    assert (error <= ACCUMULATED * scale).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_are_read_as_what_they_show(backend):
    """x and the residual are parts of another result."""
    arguments = problem(256, 40, residual=True)
    before = mx.concatenate([arguments["residual"], arguments["x"], arguments["residual"]], axis=-1)
    arguments["x"], arguments["residual"] = before[..., 40:296], before[..., :40]
    check(arguments, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_x_reaches_every_result(backend):
    arguments = problem(256, 20, norm=True)
    arguments["x"][0, 0, 7] = mx.nan
    assert mx.isnan(op.qmv(**arguments, backend=backend)).all()


@pytest.mark.parametrize("tile", TILES[:3], ids=["rows 4", "rows 1", "repeat"])
def test_no_schedule_changes_a_bit(tile):
    arguments = problem(256, 37, norm=True, residual=True)
    host.check_schedules(lambda: op.qmv(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    arguments = problem(512, 20, dtype=mx.bfloat16, norm=True, residual=True)
    check(arguments, tile=TILES[0], backend="host")


@pytest.mark.parametrize(("norm", "residual"), [(True, True), (True, False), (False, True)])
def test_on_metal_it_is_one_dispatch_of_what_is_there(norm, residual):
    """Traced on any machine: nothing is copied, padded or converted, and nothing absent passed."""
    arguments = problem(256, 32, dtype=mx.bfloat16, norm=norm, residual=residual)
    optional = [name for name in ("norm_weight", "residual") if name in arguments]
    found: list[tuple[str, int]] = []

    def record(node):
        if node["type"] == "primitive":
            found.append((node["name"], len(node["inputs"])))

    def layer(x, buffer, *rest):
        options = dict(zip(optional, rest, strict=True))
        with backends.override("metal"):
            return op.qmv(x, arguments["matrix"]._replace(buffer=buffer), **options)

    rest = [arguments[name] for name in optional]
    mx.export_function(record, layer, arguments["x"], arguments["matrix"].in_one(), *rest)
    assert found == [("CustomKernel", 2 + len(optional))]


@pytest.mark.parametrize("bits", [4, 8])
def test_reference_is_the_product(bits):
    """Norm, product and residual in float64, with the numbers taken apart by hand."""
    arguments = problem(96, 12, bits, group=32, norm=True, residual=True)
    x = np.array(arguments["x"][0, 0], dtype=np.float64)
    x = x / np.sqrt((x * x).mean() + 1e-6) * np.array(arguments["norm_weight"], dtype=np.float64)
    want = unpacked(arguments["matrix"]) @ x
    want += np.array(arguments["residual"][0, 0], dtype=np.float64)
    got = np.array(op.qmv_reference(**arguments))[0, 0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", table("qmv"), ids=lambda choice: str(choice["when"]))
@pytest.mark.parametrize("K", [256, 2048, 4096, 5120])
def test_every_tile_of_the_table_fits(choice, K):
    """Within the limits of threadgroups and their memory, and whole steps of the loads ahead."""
    template = op._template(
        mx.bfloat16, mx.bfloat16, mx.bfloat16, None, 257, K, 64, 8, 0.0, False, choice["tile"]
    )
    assert op.KERNEL.threadgroup_bytes(template) <= MAX_THREADGROUP_BYTES
    _, (threads, _, _) = op._threads(template)
    assert threads <= 1024


def test_a_head_has_another_tile_than_a_router():
    assert choose("qmv", "host", N=248320, K=2048, bits=4) != choose("qmv", "host", N=257, K=2048, bits=8)


def test_self_check_passes():
    assert op._self_check("host") is None


GOOD = problem(64, 8)


def changed(**fields):
    return {"matrix": GOOD["matrix"]._replace(**fields)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"x": mx.zeros((2, 64))}, "more than one vector"),
        ({"x": mx.zeros((64,), mx.int32)}, "x is"),
        ({"out_dtype": mx.int32}, "the result cannot be"),
        ({"x": mx.zeros((128,))}, "the matrix has 64 columns, not 128"),
        ({"x": mx.zeros((48,))}, "not a multiple of 32"),
        ({"x": mx.zeros((8192,))}, "threadgroup memory"),
        (changed(bits=3), "the matrix has 3 bits"),
        (changed(group_size=16), "groups of 16"),
        (changed(biases=None), "the matrix is not affine"),
        (changed(weight=mx.zeros((8, 8))), "not uint32"),
        (changed(weight=mx.zeros((2, 8, 8), mx.uint32)), "the matrix has shape"),
        (changed(scales=mx.zeros((8, 2))), "scales (8, 2)"),
        (changed(scales=mx.zeros((8, 1), mx.float16)), "scales are"),
        ({"norm_weight": mx.zeros((32,))}, "norm_weight is"),
        ({"residual": mx.zeros((1, 1, 9))}, "residual is"),
        ({"residual": mx.zeros((1, 1, 8), mx.float16)}, "residual is"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**GOOD, **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**GOOD) == "no GPU back-end"
