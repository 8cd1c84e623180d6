"""Attention's output gate against its fp32 reference and against stock's expression."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close, with_both_widths

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import attention_gate as op
from lily_mlx.tiles import table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [{"units": 4, "simdgroups": 4}, {"units": 3, "simdgroups": 2}, {"units": 1, "simdgroups": 1}]


def problem(Hq, D, B=1, T=5, dtype=mx.float32, before=0, after=0, seed=0) -> dict:
    """The gates in a projection, with NaN before, after and in the place of the queries."""
    rng = np.random.default_rng(seed)

    def normal(*axes, scale=1.0):
        return mx.array((rng.normal(size=axes) * scale).astype(np.float32)).astype(dtype)

    heads = mx.stack([mx.full((B, T, Hq, D), mx.nan, dtype), normal(B, T, Hq, D, scale=3.0)], axis=3)
    gaps = [mx.full((B, T, size), mx.nan, dtype) for size in (before, after)]
    projected = mx.concatenate([gaps[0], heads.reshape(B, T, 2 * Hq * D), gaps[1]], axis=-1)
    return {"x": normal(B, Hq, T, D), "projected": projected, "offset": before}


def check(arguments: dict, backend: str, tile=None) -> mx.array:
    assert op.supports(**arguments, backend=backend) is None
    got = op.attention_gate(**arguments, tile=tile, backend=backend)
    assert got.dtype == arguments["x"].dtype
    assert_close("out", got, op.attention_gate_reference(**arguments))
    return got


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_every_layout_and_length(backend, tile, T):
    check(problem(3, 64, B=2, T=T, before=16, after=24), backend, tile)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("Hq", "D", "why", "dtype"),
    with_both_widths(
        [
            (16, 256, "Qwen3.6-35B-A3B"),
            (8, 256, "the tiny checkpoint"),
            (5, 96, "sizes that are no powers of two"),
            (1, 32, "the smallest: most of a simdgroup is past the end"),
        ]
    ),
)
def test_shapes_with_the_tile_of_the_table(backend, dtype, Hq, D, why):
    check(problem(Hq, D, T=3, dtype=dtype, after=8), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-6, 30.0, 1e4])
def test_gates_far_from_zero(backend, size):
    """The fast sigmoid where it is nearly 0 or 1, and where exp overflows."""
    arguments = problem(2, 64)
    check({**arguments, "projected": arguments["projected"] * size}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_as_stock(backend):
    """Stock's attention in fp32: split the projection, transpose the heads, multiply."""
    arguments = problem(3, 64, B=2, T=7)
    _, gate = mx.split(arguments["projected"].reshape(2, 7, 3, 128), 2, axis=-1)
    want = arguments["x"].transpose(0, 2, 1, 3).reshape(2, 7, -1) * mx.sigmoid(gate.reshape(2, 7, -1))
    assert_close("out", op.attention_gate(**arguments, backend=backend), want)


def test_no_schedule_changes_a_bit():
    arguments = problem(3, 64)
    tile = {"units": 2, "simdgroups": 2}
    host.check_schedules(lambda: op.attention_gate(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(8, 256, dtype=mx.bfloat16), "host", TILES[0])


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem(2, 64, T=70, dtype=mx.bfloat16, before=8)
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(x, projected):
        with backends.override("metal"):
            return op.attention_gate(x, projected, offset=arguments["offset"])

    mx.export_function(record, layer, arguments["x"], arguments["projected"])
    assert names == ["CustomKernel"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"x": mx.zeros((1, 5, 192))}, "not [B, Hq, T, D]"),
        ({"x": mx.zeros((1, 3, 5, 48))}, "D=48 is not a multiple of 32"),
        ({"projected": mx.zeros((1, 4, 384))}, "not [1, 5, columns]"),
        ({"offset": 8}, "projected has 384 columns; needs 384 from 8"),
        ({"offset": -8}, "projected has 384 columns; needs 384 from -8"),
        ({"projected": mx.zeros((1, 5, 400)), "offset": 2}, "the offset of projected, 2, is not a multiple"),
        ({"projected": mx.zeros((1, 5, 386))}, "the columns of projected, 386, is not a multiple"),
        ({"projected": mx.zeros((1, 5, 384), mx.float16)}, "projected is mlx.core.float16"),
        ({"x": mx.zeros((1, 3, 5, 64), mx.int32)}, "x is mlx.core.int32"),
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
    for choice in table("attention_gate"):
        check(problem(4, 128, T=3, dtype=mx.bfloat16), "host", choice["tile"])


def test_the_self_check_passes_and_can_fail(monkeypatch):
    assert op._self_check("host") is None
    reference = op.attention_gate_reference
    monkeypatch.setattr(op, "attention_gate_reference", lambda *a, **k: 1.1 * reference(*a, **k))
    assert "off the reference" in op._self_check("host")
