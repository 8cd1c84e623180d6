"""The experts' down projections against their fp32 reference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close
from packed_problems import ACCUMULATED, matrix, unpacked, vector

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import expert_down as op
from lily_mlx.ops.expert_gate_up import Chosen
from lily_mlx.ops.packed import Packed

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

TILES = [{"rows": 16, "ahead": 1}, {"rows": 8, "ahead": 2}, {"rows": 32, "ahead": 4}]

SMALL = {"N": 64, "M": 96, "E": 11, "top_k": 7, "group": 32}


def problem(N, M, E, top_k, bits=4, group=64, dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    experts = mx.array([*rng.permutation(E)[:top_k].tolist(), E], dtype=mx.int32)
    weights = mx.array(rng.uniform(0.1, 1, top_k + 1).astype(np.float32))
    return {
        "chosen": Chosen(vector(rng, top_k + 1, M), experts, weights).array,
        "residual": vector(rng, 1, 1, N, dtype=dtype),
        "matrices": matrix(rng, E + 1, N, M, bits=bits, group=group, dtype=dtype),
        "top_k": top_k,
    }


def with_choice(arguments, **change):
    """The same problem with other ``experts`` or ``weights``."""
    chosen = Chosen.of(arguments["chosen"], arguments["top_k"])
    return {**arguments, "chosen": chosen._replace(**change).array}


def check(arguments, **options) -> mx.array:
    assert op.supports(**arguments, backend=options["backend"]) is None
    y = op.expert_down(**arguments, **options)
    assert y.dtype == arguments["residual"].dtype
    # As many sums as there are experts, each with an error of its own.
    assert_close("y", y, op.expert_down_reference(**arguments), ACCUMULATED)
    return y


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
@pytest.mark.parametrize("width", [512, 1536])
def test_every_layout(backend, tile, width):
    """One chunk of an expert's width, and three."""
    check(problem(64, width, 3, 2), tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"N": 64, "M": 512, "E": 32, "top_k": 8}, "Qwen3.6-35B-A3B, fewer rows and experts"),
        ({"N": 256, "M": 64, "E": 32, "top_k": 8}, "the tiny checkpoint"),
        (SMALL, "one lane a row"),
        ({"N": 32, "M": 768, "E": 4, "top_k": 3}, "three chunks"),
        ({"N": 96, "M": 128, "E": 37, "top_k": 3, "group": 128, "bits": 8}, "8 bits"),
        ({"N": 32, "M": 32, "E": 2, "top_k": 1, "group": 32}, "one expert"),
        ({"N": 32, "M": 1024, "E": 11, "top_k": 10}, "ten experts"),
    ],
)
def test_shapes_with_the_tile_of_the_table(backend, shape, why):
    check(problem(**shape), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_dtypes(backend, dtype):
    check(problem(**SMALL, dtype=dtype), tile=TILES[1], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_chosen_twice_counts_twice(backend):
    arguments = problem(**SMALL)
    experts = Chosen.of(arguments["chosen"], 7).experts
    experts[3] = experts[0]
    check(with_choice(arguments, experts=experts), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slot", range(8))
def test_a_weight_of_zero_leaves_the_expert_out(backend, slot):
    """Each simdgroup's part is its expert's: what the others hold does not matter to it."""
    weights = (mx.arange(8) == slot).astype(mx.float32)
    check(with_choice(problem(**SMALL), weights=weights), backend=backend)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_no_schedule_changes_a_bit(tile):
    arguments = problem(64, 1024, 3, 2)
    host.check_schedules(lambda: op.expert_down(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(**SMALL, dtype=mx.bfloat16), backend="host")


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem(64, 64, 9, 8, dtype=mx.bfloat16)
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(chosen, residual, buffer):
        with backends.override("metal"):
            return op.expert_down(chosen, residual, arguments["matrices"]._replace(buffer=buffer), 8)

    mx.export_function(
        record, layer, arguments["chosen"], arguments["residual"], arguments["matrices"].in_one()
    )
    assert names == ["CustomKernel"]


def test_reference_is_the_formula():
    """In float64, with the numbers taken apart by hand."""
    arguments = problem(**SMALL)
    h, experts, weights = (np.array(part) for part in Chosen.of(arguments["chosen"], 7))
    down = unpacked(arguments["matrices"])
    want = np.array(arguments["residual"][0, 0], dtype=np.float64)
    for slot, expert in enumerate(experts):
        want += weights[slot] * (down[expert] @ h[slot].astype(np.float64))
    np.testing.assert_allclose(
        np.array(op.expert_down_reference(**arguments))[0, 0], want, rtol=1e-4, atol=1e-5
    )


def test_self_check_passes():
    assert op._self_check("host") is None


GOOD = problem(32, 64, 5, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"residual": mx.zeros((2, 32))}, "more than one vector"),
        ({"residual": mx.zeros((32,), mx.int32)}, "residual is"),
        ({"residual": mx.zeros((64,))}, "down has 32 rows, not 64"),
        ({"chosen": GOOD["chosen"][:-1]}, "not 4 experts of 64"),
        ({"chosen": GOOD["chosen"].astype(mx.float16)}, "chosen is"),
        ({"top_k": 2}, "not 3 experts of 64"),
        ({"top_k": 0}, "0 chosen experts"),
        ({"matrices": Packed(*(part[0] for part in GOOD["matrices"][:3]), 4, 64)}, "down has shape"),
        ({"matrices": GOOD["matrices"]._replace(bits=3)}, "down has 3 bits"),
        ({"matrices": GOOD["matrices"]._replace(biases=None)}, "not affine"),
        (problem(48, 64, 5, 3), "N=48 is not a multiple of 32"),
        (problem(32, 512, 13, 12), "12 chosen experts do not fit"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**GOOD, **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize(("backend", "most"), [("metal", 11), ("cuda", 31)])
def test_no_more_experts_than_a_threadgroup_has_simdgroups(backend, most):
    """On Metal 12 simdgroups, of which the shared expert has one."""
    for top_k in (most, most + 1):
        chosen, residual, matrices, _ = problem(32, 64, 33, top_k).values()
        answer = op.supports(chosen, residual, matrices, top_k, backend=backend)
        want = None if top_k == most else f"{top_k} chosen experts; 1 to {most} are possible on {backend}"
        assert answer == want


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**GOOD) == "no GPU back-end"
