"""The gated RMSNorm against its fp32 reference and against stock's layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close, with_both_widths
from mlx_lm.models import qwen3_5

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import gated_rms_norm as op
from lily_mlx.tiles import table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [{"rows": 4, "simdgroups": 4}, {"rows": 3, "simdgroups": 2}, {"rows": 1, "simdgroups": 1}]


def problem(Hv, Dv, B=1, T=5, dtype=mx.float32, before=0, after=0, seed=0) -> dict:
    """z in a projection with columns of NaN before and after it."""
    rng = np.random.default_rng(seed)

    def normal(*axes, scale=1.0, shift=0.0):
        return mx.array((rng.normal(size=axes) * scale + shift).astype(np.float32)).astype(dtype)

    parts = [mx.full((B, T, before), mx.nan, dtype), normal(B, T, Hv * Dv, scale=3.0)]
    parts.append(mx.full((B, T, after), mx.nan, dtype))
    return {
        "y": normal(B, T, Hv, Dv),
        "z": mx.concatenate(parts, axis=-1),
        "weight": normal(Dv, scale=0.2, shift=1.0),
        "offset": before,
    }


def check(arguments: dict, backend: str, tile=None, **options) -> mx.array:
    assert op.supports(**arguments, backend=backend) is None
    got = op.gated_rms_norm(**arguments, **options, tile=tile, backend=backend)
    assert got.dtype == arguments["y"].dtype
    assert_close("out", got, op.gated_rms_norm_reference(**arguments, **options))
    return got


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 257])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_every_layout_and_length(backend, tile, T):
    check(problem(6, 64, B=2, T=T, before=16, after=24), backend, tile)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("Hv", "Dv", "why", "dtype"),
    with_both_widths(
        [
            (32, 128, "Qwen3.6-35B-A3B"),
            (4, 128, "the tiny checkpoint"),
            (5, 96, "several loads a lane; heads that do not fill a simdgroup"),
            (1, 32, "the smallest"),
            (3, 256, "a head that fills a simdgroup"),
        ]
    ),
)
def test_shapes_with_the_tile_of_the_table(backend, dtype, Hv, Dv, why):
    check(problem(Hv, Dv, T=3, dtype=dtype, after=8), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-6, 30.0, 1e4])
def test_gates_far_from_zero(backend, size):
    """The fast sigmoid where it is nearly 0 or 1, and where exp overflows."""
    arguments = problem(2, 64)
    check({**arguments, "z": arguments["z"] * size}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_epsilon_of_the_norm(backend):
    arguments = problem(2, 64)
    larger = check(arguments, backend, eps=0.5)
    assert mx.abs(larger).sum() < 0.99 * mx.abs(check(arguments, backend)).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_give_zeros(backend):
    arguments = problem(2, 64)
    out = op.gated_rms_norm(**{**arguments, "y": mx.zeros_like(arguments["y"])}, backend=backend)
    assert not mx.any(out != 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_the_same_as_stock(backend, dtype):
    """Stock rounds the norm once more; a bfloat16 result may be two roundings away."""
    arguments = problem(3, 64, B=2, dtype=dtype)
    norm = qwen3_5.RMSNormGated(64, eps=1e-6)
    norm.weight = arguments["weight"]
    want = norm(arguments["y"], arguments["z"].reshape(2, 5, 3, 64)).reshape(2, 5, -1)
    got = op.gated_rms_norm(**arguments, backend=backend)
    assert_close("out", got, want.astype(mx.float32), 1e-5 if dtype == mx.float32 else 2.0**-7)


def test_no_schedule_changes_a_bit():
    arguments = problem(3, 64)
    tile = {"rows": 2, "simdgroups": 2}
    host.check_schedules(lambda: op.gated_rms_norm(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(4, 128, dtype=mx.bfloat16), "host", TILES[0])


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem(2, 64, T=70, dtype=mx.bfloat16, before=8)
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(y, z, weight):
        with backends.override("metal"):
            return op.gated_rms_norm(y, z, weight, offset=arguments["offset"])

    mx.export_function(record, layer, arguments["y"], arguments["z"], arguments["weight"])
    assert names == ["CustomKernel"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"y": mx.zeros((1, 5, 192))}, "not [B, T, Hv, Dv]"),
        ({"y": mx.zeros((1, 5, 3, 48))}, "Dv=48 is not a multiple of 32"),
        ({"weight": mx.zeros((32,))}, "weight has shape"),
        ({"z": mx.zeros((1, 4, 192))}, "not [1, 5, columns]"),
        ({"offset": 8}, "z has 192 columns; needs 192 from 8"),
        ({"offset": -8}, "z has 192 columns; needs 192 from -8"),
        ({"z": mx.zeros((1, 5, 196)), "offset": 2}, "the offset of z, 2, is not a multiple of 16 bytes"),
        ({"z": mx.zeros((1, 5, 194))}, "the columns of z, 194, is not a multiple of 16 bytes"),
        ({"z": mx.zeros((1, 5, 192), mx.float16)}, "z is mlx.core.float16"),
        ({"y": mx.zeros((1, 5, 3, 64), mx.int32)}, "y is mlx.core.int32"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**problem(3, 64), **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**problem(3, 64)) == "no GPU back-end"


def test_every_tile_of_the_table_launches():
    """A wrong tile would only show on the chip that it is for."""
    for choice in table("gated_rms_norm"):
        check(problem(4, 128, T=3, dtype=mx.bfloat16), "host", choice["tile"])


def test_the_self_check_passes_and_can_fail(monkeypatch):
    assert op._self_check("host") is None
    reference = op.gated_rms_norm_reference
    monkeypatch.setattr(op, "gated_rms_norm_reference", lambda *a, **k: reference(*a, **k, eps=0.5))
    assert "off the reference" in op._self_check("host")
