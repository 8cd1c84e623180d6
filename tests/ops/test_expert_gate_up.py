"""Routing and the experts' gate and up projections against their fp32 references."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close
from packed_problems import ACCUMULATED, matrix, unpacked, vector

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import expert_gate_up as op
from lily_mlx.ops.packed import Packed

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [
    {"rows": 2, "ahead": 2, "simdgroups": 8},
    {"rows": 4, "ahead": 1, "simdgroups": 2},
    {"rows": 1, "ahead": 2, "simdgroups": 4},
]

# Unequal everywhere, so that a swapped axis cannot go unseen.
SMALL = {"K": 96, "M": 40, "E": 13, "top_k": 7, "group": 32}


def problem(K, M, E, top_k, bits=4, group=64, dtype=mx.float32, logits=None, seed=0):
    """Arguments of the op; ``logits`` is their dtype or themselves."""
    rng = np.random.default_rng(seed)
    if not isinstance(logits, mx.array):
        logits = vector(rng, 1, 1, E + 1, dtype=logits or mx.float32)
    return {
        "x": vector(rng, 1, 1, K, dtype=dtype),
        "norm_weight": vector(rng, K, dtype=dtype),
        "logits": logits,
        "matrices": matrix(rng, 2 * (E + 1), M, K, bits=bits, group=group, dtype=dtype),
        "top_k": top_k,
    }


def check(arguments, **options):
    assert op.supports(**arguments, backend=options["backend"]) is None
    top_k = arguments["top_k"]
    got = op.Chosen.of(op.expert_gate_up(**arguments, **options), top_k)
    want = op.Chosen.of(op.expert_gate_up_reference(**arguments), top_k)
    assert got.experts.tolist() == want.experts.tolist()
    assert_close("weights", got.weights, want.weights, 1e-6)
    # The error of gate and of up, the latter times silu, which grows up to 1.1 times as fast as its argument.
    assert_close("h", got.h.reshape(-1), want.h.reshape(-1), 2.2 * ACCUMULATED)


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_every_layout(backend, tile):
    check(problem(**SMALL), tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"K": 2048, "M": 6, "E": 256, "top_k": 8}, "Qwen3.6-35B-A3B, fewer rows"),
        ({"K": 256, "M": 64, "E": 32, "top_k": 8}, "the tiny checkpoint"),
        ({"K": 32, "M": 1, "E": 7, "top_k": 7, "group": 32}, "all experts; one row each"),
        ({"K": 128, "M": 24, "E": 37, "top_k": 3, "group": 128, "bits": 8}, "8 bits; a second group of keys"),
        ({"K": 64, "M": 3, "E": 513, "top_k": 31}, "more groups of keys than simdgroups, and more chosen"),
        ({"K": 1280, "M": 9, "E": 9, "top_k": 2}, "five chunks of a row"),
    ],
)
def test_shapes_with_the_tile_of_the_table(backend, shape, why):
    check(problem(**shape), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_dtypes(backend, dtype):
    check(problem(**SMALL, dtype=dtype, logits=dtype), tile=TILES[0], backend=backend)


ROUTE = {"K": 32, "M": 4, "E": 37, "top_k": 7, "group": 32}


def routed(logits, backend):
    """(experts, weights) that the kernel chooses for the logits of 37 experts."""
    arguments = problem(**ROUTE, logits=mx.concatenate([logits.astype(mx.float32), mx.zeros((1,))]))
    chosen = op.expert_gate_up(**arguments, tile=TILES[2], backend=backend)
    _, experts, weights = op.Chosen.of(chosen, 7)
    assert experts[-1].item() == 37
    assert weights[-1].item() == 0.5
    return experts[:-1].tolist(), weights[:-1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_many_equal_logits(backend, seed):
    """Five different values among 37 logits: the choice by equality, ties to the lower index."""
    logits = mx.array(np.random.default_rng(seed).integers(-2, 3, 37))
    experts, weights = routed(logits, backend)
    values = logits.tolist()
    assert experts == sorted(range(37), key=lambda e: (-values[e], e))[:7]
    assert_close("weights", weights, mx.softmax(logits[mx.array(experts)].astype(mx.float32)), 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "experts"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({36: 1.0, 31: 1.0}, [31, 36, 0, 1, 2, 3, 4]),
        (dict.fromkeys(range(0, 37, 2), -0.0), [0, 1, 2, 3, 4, 5, 6]),
        ({3: -1e-40, 4: 1e-40}, [4, 0, 1, 2, 5, 6, 7]),
        (dict.fromkeys(range(30), -1.0), [30, 31, 32, 33, 34, 35, 36]),
        ({e: -float("inf") for e in range(32)}, [32, 33, 34, 35, 36, 0, 1]),
        ({0: float("nan"), 5: float("nan")}, [1, 2, 3, 4, 6, 7, 8]),
        ({e: float("nan") for e in range(35)}, [35, 36, 0, 1, 2, 3, 4]),
        ({e: float("nan") for e in range(37)}, [0, 1, 2, 3, 4, 5, 6]),
        ({7: -float("nan"), 8: float("inf")}, [8, 0, 1, 2, 3, 4, 5]),
    ],
    ids=[
        "equal",
        "two above",
        "zeros",
        "subnormal",
        "last",
        "-inf",
        "two NaN",
        "few numbers",
        "all NaN",
        "inf",
    ],
)
def test_ties_and_values_that_are_no_numbers(backend, change, experts):
    """Starting from 37 zeros. NaN ranks last, whatever its sign, and is chosen when nothing else is left."""
    logits = mx.zeros((37,))
    for expert, value in change.items():
        logits[expert] = value
    chosen, weights = routed(logits, backend)
    assert chosen == experts
    values = logits[mx.array(chosen)]
    want = mx.softmax(values)
    assert mx.array_equal(mx.isnan(weights), mx.isnan(want))
    if not mx.isnan(want).any():
        assert_close("weights", weights, want, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_are_nan_spoil_the_result(backend):
    """A step that went wrong must not look right."""
    arguments = problem(**SMALL)
    arguments["logits"] = arguments["logits"] * mx.nan
    _, experts, weights = op.Chosen.of(op.expert_gate_up(**arguments, backend=backend), 7)
    assert experts[:-1].tolist() == list(range(7))
    assert mx.isnan(weights).all()


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_no_schedule_changes_a_bit(tile):
    arguments = problem(**SMALL)
    host.check_schedules(lambda: op.expert_gate_up(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(**SMALL, dtype=mx.bfloat16), tile=TILES[0], backend="host")


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem(64, 24, 9, 8, dtype=mx.bfloat16)
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(x, norm_weight, logits, buffer):
        with backends.override("metal"):
            return op.expert_gate_up(x, norm_weight, logits, arguments["matrices"]._replace(buffer=buffer), 8)

    vectors = [arguments[name] for name in ("x", "norm_weight", "logits")]
    mx.export_function(record, layer, *vectors, arguments["matrices"].in_one())
    assert names == ["CustomKernel"]


def test_reference_is_the_formula():
    """In float64, with the numbers taken apart by hand."""
    arguments = problem(**SMALL)
    h, experts, weights = op.Chosen.of(op.expert_gate_up_reference(**arguments), 7)
    x = np.array(arguments["x"][0, 0], dtype=np.float64)
    n = x / np.sqrt((x * x).mean() + 1e-6) * np.array(arguments["norm_weight"], dtype=np.float64)
    logits = np.array(arguments["logits"][0, 0], dtype=np.float64)
    chosen = np.argsort(-logits[:-1], kind="stable")[:7]
    assert experts.tolist() == [*chosen.tolist(), 13]
    e = np.exp(logits[:-1][chosen])
    np.testing.assert_allclose(np.array(weights[:-1]), e / e.sum(), rtol=1e-6)
    np.testing.assert_allclose(weights[-1].item(), 1 / (1 + np.exp(-logits[-1])), rtol=1e-6)
    numbers = unpacked(arguments["matrices"])
    for slot, expert in enumerate([*chosen, 13]):
        g, u = numbers[expert] @ n, numbers[14 + expert] @ n
        np.testing.assert_allclose(np.array(h[slot]), g / (1 + np.exp(-g)) * u, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eps_is_the_norms(backend):
    """An eps as large as the mean square, so that another one cannot go unseen."""
    arguments = problem(**SMALL)
    got, want = (
        op.Chosen.of(array, 7).h.reshape(-1)
        for array in (
            op.expert_gate_up(**arguments, eps=1.0, tile=TILES[1], backend=backend),
            op.expert_gate_up_reference(**arguments, eps=1.0),
        )
    )
    assert_close("h", got, want, 2.2 * ACCUMULATED)


def test_what_the_halves_pass_on_is_taken_apart_and_put_together():
    chosen = op.Chosen(mx.arange(12.0).reshape(3, 4), mx.array([1023, 0, 1024]), mx.array([0.5, 0.25, 1.0]))
    again = op.Chosen.of(chosen.array, 2)
    assert again.experts.dtype == mx.int32
    assert all(mx.array_equal(*pair) for pair in zip(again, chosen, strict=True))


def test_self_check_passes():
    assert op._self_check("host") is None


GOOD = problem(64, 16, 5, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"x": mx.zeros((2, 64))}, "more than one vector"),
        ({"x": mx.zeros((64,), mx.int32)}, "x is"),
        ({"logits": mx.zeros((6,), mx.int32)}, "logits are"),
        ({"logits": mx.zeros((5,))}, "gate and up has shape"),
        ({"norm_weight": mx.zeros((32,))}, "norm_weight is"),
        ({"x": mx.zeros((48,)), "norm_weight": mx.zeros((48,))}, "not a multiple of 32"),
        ({"x": mx.zeros((8192,)), "norm_weight": mx.zeros((8192,))}, "threadgroup memory"),
        ({"top_k": 6}, "top 6 of 5"),
        ({"top_k": 0}, "top 0 of 5"),
        ({"matrices": GOOD["matrices"]._replace(bits=2)}, "gate and up has 2 bits"),
        ({"matrices": GOOD["matrices"]._replace(biases=None)}, "not affine"),
        ({"matrices": Packed(*(part[0] for part in GOOD["matrices"][:3]), 4, 64)}, "gate and up has shape"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**GOOD, **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**GOOD) == "no GPU back-end"
