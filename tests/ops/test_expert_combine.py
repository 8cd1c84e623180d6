"""The weighted sum of the experts' results against its fp32 reference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import expert_combine as op
from lily_mlx.tiles import table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]


def problem(T, H, slots, dtype=mx.float32, residual=None, seed=0) -> dict:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return mx.array(rng.normal(size=shape).astype(np.float32))

    return {
        "y": normal(T * slots, H).astype(dtype),
        "weights": mx.concatenate(
            [mx.softmax(normal(T, slots - 1), axis=-1), mx.sigmoid(normal(T, 1))], axis=-1
        ),
        "residual": normal(T, H).astype(residual or dtype),
    }


def check(arguments: dict, backend: str, tile=None) -> mx.array:
    assert op.supports(**arguments, backend=backend) is None
    out = op.expert_combine(**arguments, tile=tile, backend=backend)
    assert out.dtype == arguments.get("residual", arguments["y"]).dtype
    assert_close("out", out, op.expert_combine_reference(**arguments), 33 * 2.0**-24)
    return out


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 257])
def test_tokens(backend, T):
    """Lanes left over at the end, and threadgroups with the end of one token and the start of the next."""
    check(problem(T, 40, 4), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("H", "slots", "why"),
    [
        (2048, 9, "Qwen3.6-35B-A3B"),
        (256, 9, "the tiny checkpoint"),
        (8, 2, "one expert; one lane a token in bfloat16"),
        (24, 12, "the most rows read at once"),
        (24, 13, "two batches, the second not full"),
        (40, 32, "the most experts"),
    ],
)
def test_shapes(backend, H, slots, why):
    check(problem(3, H, slots, mx.bfloat16), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("residual", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_dtypes(backend, dtype, residual):
    check(problem(5, 24, 4, dtype, residual), backend, {"simdgroups": 1})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_without_a_residual(backend, dtype):
    arguments = problem(5, 24, 4, dtype)
    del arguments["residual"]
    check(arguments, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_are_summed_in_ascending_order(backend):
    """Terms whose sum depends on the order, and the residual after them."""
    y = mx.array([1.0, 1e8, -1e8, 3.0]).reshape(4, 1) * mx.ones((4, 8))
    arguments = {"y": y, "weights": mx.ones((1, 4)), "residual": mx.full((1, 8), 2.0)}
    out = op.expert_combine(**arguments, backend=backend)
    assert out.tolist() == [[5.0] * 8]
    arguments["y"] = y[::-1]
    assert op.expert_combine(**arguments, backend=backend).tolist() == [[3.0] * 8]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_do_not_see_each_other(backend):
    arguments = problem(3, 40, 4)
    want = op.expert_combine(**arguments, backend=backend)
    arguments["y"][4:8] = mx.nan
    out = op.expert_combine(**arguments, backend=backend)
    assert mx.isnan(out[1]).all()
    assert mx.array_equal(out[::2], want[::2])


def test_no_schedule_changes_a_bit():
    arguments = problem(9, 40, 4, mx.bfloat16)
    host.check_schedules(lambda: op.expert_combine(**arguments, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(9, 40, 4, mx.bfloat16), "host")


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(y, weights, residual):
        with backends.override("metal"):
            return op.expert_combine(y, weights, residual)

    mx.export_function(record, layer, *problem(2, 64, 9, mx.bfloat16).values())
    assert names == ["CustomKernel"]


def test_reference_is_the_formula():
    """In float64, slot by slot."""
    arguments = problem(3, 16, 4)
    y, weights, want = (np.array(arguments[name], dtype=np.float64) for name in ("y", "weights", "residual"))
    for token in range(3):
        for slot in range(4):
            want[token] += weights[token, slot] * y[token * 4 + slot]
    np.testing.assert_allclose(np.array(op.expert_combine_reference(**arguments)), want, rtol=1e-5, atol=1e-6)


def test_self_check_passes():
    assert op._self_check("host") is None


def test_self_check_can_fail(monkeypatch):
    reference = op.expert_combine_reference
    monkeypatch.setattr(op, "expert_combine_reference", lambda y, *rest: reference(-y, *rest))
    assert "off the reference" in op._self_check("host")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"y": mx.zeros((11, 16))}, "do not belong together"),
        ({"residual": mx.zeros((2, 16))}, "do not belong together"),
        ({"y": mx.zeros((16,))}, "must be matrices"),
        ({"residual": mx.zeros((16,))}, "do not belong together"),
        ({"y": mx.zeros((12, 16), mx.int32)}, "y is mlx.core.int32"),
        ({"weights": mx.zeros((3, 4), mx.float16)}, "not float32"),
        ({"y": mx.zeros((12, 12)), "residual": mx.zeros((3, 12))}, "H=12 is not a multiple of 8"),
        ({"y": mx.zeros((3, 16)), "weights": mx.zeros((3, 1))}, "1 rows a token"),
        ({"y": mx.zeros((99, 16)), "weights": mx.zeros((3, 33))}, "33 rows a token"),
        (
            {"y": mx.zeros((0, 16)), "weights": mx.zeros((0, 4)), "residual": mx.zeros((0, 16))},
            "no tokens",
        ),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**problem(3, 16, 4), **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**problem(3, 16, 4)) == "no GPU back-end"


def test_every_tile_of_the_table_launches():
    """A wrong tile would only show on the chip that it is for."""
    for choice in table("expert_combine"):
        check(problem(3, 64, 9, mx.bfloat16), "host", choice["tile"])
