"""The gated DeltaNet preparation against its fp32 reference and against stock's layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close
from mlx import nn
from mlx_lm.models import gated_delta as stock

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import gated_delta_prepare as op
from lily_mlx.tiles import table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

# Hk, Hv, Dk, Dv: unequal everywhere, so that a swapped axis cannot go unseen.
SMALL = (2, 6, 96, 64)

TILES = [
    {"tokens": 8, "bytes": 16, "simdgroups": 4},
    {"tokens": 3, "bytes": 8, "simdgroups": 2},
    {"tokens": 1, "bytes": 16, "simdgroups": 1},
]


def problem(shape, B=1, T=9, dtype=mx.float32, a_log_dtype=mx.float32, seed=0) -> dict:
    Hk, Hv, Dk, Dv = shape
    C = 2 * Hk * Dk + Hv * Dv
    rng = np.random.default_rng(seed)

    def normal(*axes, scale=1.0, shift=0.0):
        return mx.array((rng.normal(size=axes) * scale + shift).astype(np.float32))

    return {
        "qkv": normal(B, T, C).astype(dtype),
        "b": normal(B, T, Hv).astype(dtype),
        "a": normal(B, T, Hv, scale=2.0, shift=-1.0).astype(dtype),
        "conv_weight": normal(C, 4, 1, scale=0.5).astype(dtype),
        "conv_state": normal(B, 3, C).astype(dtype),
        "A_log": mx.array(np.log(rng.uniform(0.5, 16, Hv)).astype(np.float32)).astype(a_log_dtype),
        "dt_bias": normal(Hv).astype(dtype),
        "Hk": Hk,
        "Dk": Dk,
        "Dv": Dv,
    }


def check(arguments: dict, backend: str, tile=None) -> tuple[mx.array, ...]:
    assert op.supports(**arguments, backend=backend) is None
    got = op.gated_delta_prepare(**arguments, tile=tile, backend=backend)
    want = op.gated_delta_prepare_reference(**arguments)
    for name, ours, theirs in zip(("q", "k", "v", "g", "beta"), got, want, strict=False):
        assert ours.dtype == (mx.float32 if name == "g" else arguments["qkv"].dtype)
        assert_close(name, ours, theirs)
    assert mx.array_equal(got[5], want[5]), "the conv state is copied, not computed"
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
    check(problem(SMALL, T=T), backend, tile)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((16, 32, 128, 128), "Qwen3.6-35B-A3B"),
        ((2, 4, 128, 128), "the tiny checkpoint"),
        ((1, 1, 32, 32), "the smallest: one head leaves most lanes of its simdgroup without one"),
        ((3, 3, 32, 160), "as many key heads as value heads; Dv above Dk; five loads a lane"),
        ((1, 5, 256, 32), "five value heads a key head; a head that fills a simdgroup"),
    ],
)
def test_shapes_with_the_tile_of_the_table(backend, shape, why):
    check(problem(shape, T=5, dtype=mx.bfloat16), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("a_log_dtype", [mx.float32, mx.bfloat16], ids=str)
def test_dtypes(backend, dtype, a_log_dtype):
    check(problem(SMALL, dtype=dtype, a_log_dtype=a_log_dtype), backend, TILES[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_projections_in_one_buffer(backend):
    """In an order of their own, b and a at odd columns, with NaN between and around them."""
    arguments = problem(SMALL, B=2, T=7, dtype=mx.bfloat16)
    want = op.gated_delta_prepare(**arguments, backend=backend)

    def gap(columns):
        return mx.full((2, 7, columns), mx.nan, mx.bfloat16)

    parts = [gap(1), arguments["a"], gap(1), arguments["qkv"], gap(3), arguments["b"], gap(7)]
    starts = np.cumsum([0] + [part.shape[2] for part in parts]).tolist()
    buffer = mx.concatenate(parts, axis=-1)
    fused = {**dict.fromkeys(("qkv", "b", "a"), buffer), "offsets": (starts[3], starts[5], starts[1])}
    got = check({**arguments, **fused}, backend)
    assert all(mx.array_equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_masked_tokens_count_as_zero(backend, tile):
    """Whatever they hold: the mask of a batch padded on the left, and one with a hole."""
    arguments = problem(SMALL, B=2, T=9)
    mask = mx.array([[False] * 4 + [True] * 5, [True] * 3 + [False] * 2 + [True] * 3 + [False]])
    arguments["qkv"] = mx.where(mask[..., None], arguments["qkv"], mx.nan)
    check({**arguments, "mask": mask}, backend, tile)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_rows_end_where_their_lengths_say(backend, tile):
    """As stock's cache counts them: below zero for a row that has ended, above T for one that goes on."""
    lengths = mx.array([-3, 0, 1, 2, 3, 8, 9, 12], dtype=mx.int32)
    arguments = problem(SMALL, B=8, T=9)
    mask = mx.arange(9) < lengths[:, None]
    *_, state = check({**arguments, "mask": mask, "lengths": lengths}, backend, tile)
    assert mx.array_equal(state[:2], arguments["conv_state"][:2])
    assert mx.array_equal(state[5:6], arguments["qkv"][5:6, 5:8])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [1, 2, 3, 8])
def test_a_split_sequence_gives_the_same_bits(backend, split):
    arguments = problem(SMALL, B=2, T=11, dtype=mx.bfloat16)
    tile = {"tokens": 4, "bytes": 16, "simdgroups": 2}
    whole = op.gated_delta_prepare(**arguments, tile=tile, backend=backend)
    parts = []
    for piece in (slice(None, split), slice(split, None)):
        pieces = {name: arguments[name][:, piece] for name in ("qkv", "b", "a")}
        *outputs, state = op.gated_delta_prepare(**{**arguments, **pieces}, tile=tile, backend=backend)
        arguments["conv_state"] = state
        parts.append(outputs)
    for first, second, both in zip(*parts, whole[:5], strict=True):
        assert mx.array_equal(mx.concatenate([first, second], axis=1), both)
    assert mx.array_equal(state, whole[5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_rows_never_see_each_other(backend):
    arguments = problem(SMALL, B=3, T=5)
    together = op.gated_delta_prepare(**arguments, backend=backend)
    rows = {name: arguments[name][1:2] for name in ("qkv", "b", "a", "conv_state")}
    alone = op.gated_delta_prepare(**{**arguments, **rows}, backend=backend)
    assert all(mx.array_equal(x[1:2], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [-40.0, -9.0, 0.0, 9.0, 100.0])
def test_gates_far_from_zero(backend, value):
    """softplus must keep the digits of exp(x) where x is far below zero, and not overflow above."""
    arguments = problem(SMALL, T=2)
    arguments |= {name: mx.full(arguments[name].shape, value) for name in ("a", "b")}
    *_, g, beta, _ = check(arguments, backend)
    rate = np.exp(np.array(arguments["A_log"], dtype=np.float64))
    softplus = np.logaddexp(value + np.array(arguments["dt_bias"], dtype=np.float64), 0)
    np.testing.assert_allclose(np.array(g[0, 0]), np.exp(-rate * softplus), rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(np.array(beta[0, 0]), 1 / (1 + np.exp(-value)), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0, 1e4])
def test_silu_far_from_zero(backend, size):
    """The fast sigmoid where it is nearly 0 or 1, and where exp overflows."""
    arguments = problem(SMALL, T=4)
    arguments["qkv"] = arguments["qkv"] * size
    arguments["conv_state"] = arguments["conv_state"] * size
    check(arguments, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_give_zeros(backend):
    """The first token of a model whose projection is zero: no norm may divide by zero."""
    arguments = problem(SMALL, T=2)
    arguments |= {name: mx.zeros_like(arguments[name]) for name in ("qkv", "conv_state")}
    q, k, v, *_ = op.gated_delta_prepare(**arguments, backend=backend)
    assert not any(mx.any(x != 0) for x in (q, k, v))


def test_no_schedule_changes_a_bit():
    arguments = problem((1, 2, 32, 64), T=7)
    arguments["mask"] = mx.arange(7)[None] != 3
    tile = {"tokens": 3, "bytes": 16, "simdgroups": 2}
    host.check_schedules(lambda: op.gated_delta_prepare(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem((2, 4, 128, 128), dtype=mx.bfloat16), "host", TILES[0])


def test_the_reference_against_stocks_ops():
    """The gates and norms of the reference are stock's, in fp32."""
    arguments = problem(SMALL, B=2, T=6)
    Hk, Hv, Dk, Dv = SMALL
    q, k, v, g, beta, _ = op.gated_delta_prepare_reference(**arguments)
    tokens = mx.concatenate([arguments["conv_state"], arguments["qkv"]], axis=1)
    mixed = nn.silu(mx.conv1d(tokens, arguments["conv_weight"], groups=tokens.shape[-1]))
    want_q, want_k, want_v = mx.split(mixed, [Hk * Dk, 2 * Hk * Dk], axis=-1)
    want_q, want_k = stock.normalize_qk(
        want_q.reshape(2, 6, Hk, Dk), want_k.reshape(2, 6, Hk, Dk), inv_scale=Dk**-0.5, eps=1e-6
    )
    assert_close("q", q, want_q)
    assert_close("k", k, want_k)
    assert_close("v", v, want_v.reshape(2, 6, Hv, Dv))
    want_g = stock.compute_g(arguments["A_log"], arguments["a"], arguments["dt_bias"])
    assert_close("g", g, want_g)
    assert_close("beta", beta, mx.sigmoid(arguments["b"]))


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem((4, 8, 64, 32), T=5, dtype=mx.bfloat16)
    arguments["b"] = arguments["a"] = arguments["qkv"]
    heads = {name: arguments.pop(name) for name in ("Hk", "Dk", "Dv")}
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(*values):
        with backends.override("metal"):
            return op.gated_delta_prepare(*values, **heads)

    mx.export_function(record, layer, *arguments.values())
    assert names == ["CustomKernel"]


def test_another_length_is_the_same_code():
    """No compilation for a length: the kernel's text and template do not name T."""
    functions = set()
    for T in (65, 700):
        arguments = problem((1, 2, 32, 32), T=T)
        templates: list[tuple] = []

        def record(node, templates=templates):
            if node["type"] == "primitive" and node["name"] == "CustomKernel":
                templates.append(node["arguments"][:2])

        heads = {name: arguments.pop(name) for name in ("Hk", "Dk", "Dv")}

        def layer(*values, heads=heads):
            with backends.override("metal"):
                return op.gated_delta_prepare(*values, **heads)

        mx.export_function(record, layer, *arguments.values())
        functions.add(str(templates))
    assert len(functions) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"qkv": mx.zeros((9, 768))}, "qkv must have 3 axes"),
        ({"Dk": 80}, "multiples of 32"),
        ({"Hk": 4}, "Hv=6 is not a multiple of Hk=4"),
        ({"Hk": 0}, "an axis of length zero"),
        ({"conv_weight": mx.zeros((768, 3, 1))}, "conv_weight has shape"),
        ({"conv_state": mx.zeros((1, 4, 768))}, "conv_state has shape"),
        ({"dt_bias": mx.zeros((4,))}, "dt_bias has shape"),
        ({"A_log": mx.zeros((6,), mx.int32)}, "A_log is"),
        ({"mask": mx.zeros((1, 8), mx.bool_)}, "mask has shape"),
        ({"mask": mx.zeros((1, 9))}, "not bool"),
        ({"lengths": mx.zeros((2,), mx.int32)}, "lengths has shape"),
        ({"lengths": mx.zeros((1,))}, "not int32"),
        ({"offsets": (4, 0, 0)}, "qkv has 768 columns; needs 768 from 4"),
        ({"offsets": (0, 0, -1)}, "a has 6 columns; needs 6 from -1"),
        ({"b": mx.zeros((1, 8, 6))}, "b has shape (1, 8, 6), not [1, 9, columns]"),
        ({"qkv": mx.zeros((1, 9, 770))}, "the columns of qkv, 770, is not a multiple of 16 bytes"),
        ({"qkv": mx.zeros((1, 9, 800)), "offsets": (2, 0, 0)}, "the offset of qkv, 2, is not a multiple"),
        ({"b": mx.zeros((1, 9, 6), mx.float16)}, "b is mlx.core.float16"),
        ({"qkv": mx.zeros((1, 9, 768), mx.int32)}, "qkv is mlx.core.int32"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**problem(SMALL), **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**problem(SMALL)) == "no GPU back-end"


def test_every_tile_of_the_table_launches():
    """A wrong tile would only show on the chip that it is for."""
    for choice in table("gated_delta_prepare"):
        check(problem((1, 2, 128, 128), T=10, dtype=mx.bfloat16), "host", choice["tile"])


def test_the_self_check_passes_and_can_fail(monkeypatch):
    assert op._self_check("host") is None
    monkeypatch.setattr(op, "QK_NORM_EPS", 10.0)
    assert "off the reference" in op._self_check("host")
