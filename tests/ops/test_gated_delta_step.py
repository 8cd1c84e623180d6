"""The gated DeltaNet decode step against its fp32 reference and against stock's layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close
from mlx import nn
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import gated_delta_step as op
from lily_mlx.ops.packed import in_one_buffer
from lily_mlx.tiles import choose, table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

# Hk, Hv, Dk, Dv: unequal everywhere, so that a swapped axis cannot go unseen.
SMALL = (2, 6, 96, 64)

TILES = [
    {"lanes": 8, "simdgroups": 16},
    {"lanes": 8, "simdgroups": 1},
    {"lanes": 4, "simdgroups": 2},
    {"lanes": 1, "simdgroups": 1},
]


PARTS = ("qkv", "z", "b", "a")


def packed(arguments: dict, order=PARTS, gap: int = 0) -> dict:
    """The same arguments with the four parts in one array, ``gap`` NaN around each of them."""
    rest = {name: array for name, array in arguments.items() if name not in PARTS}
    nan = mx.full((gap,), mx.nan, arguments["qkv"].dtype)
    pieces, starts, size = [nan], {}, gap
    for name in order:
        starts[name] = size
        pieces += [arguments[name].reshape(-1), nan]
        size += arguments[name].size + gap
    return {"projected": mx.concatenate(pieces), **rest, "offsets": tuple(starts[name] for name in PARTS)}


def parts(shape, dtype=mx.float32, a_log_dtype=mx.float32, seed=0) -> dict:
    Hk, Hv, Dk, Dv = shape
    C = 2 * Hk * Dk + Hv * Dv
    rng = np.random.default_rng(seed)

    def normal(*axes, scale=1.0, shift=0.0):
        return mx.array((rng.normal(size=axes) * scale + shift).astype(np.float32))

    return {
        "qkv": normal(1, 1, C).astype(dtype),
        "z": normal(1, 1, Hv * Dv).astype(dtype),
        "b": normal(1, 1, Hv).astype(dtype),
        "a": normal(1, 1, Hv, scale=2.0, shift=-1.0).astype(dtype),
        "conv_weight": normal(C, 4, 1, scale=0.5).astype(dtype),
        "conv_state": normal(1, 3, C).astype(dtype),
        "A_log": mx.array(np.log(rng.uniform(0.5, 16, Hv)).astype(np.float32)).astype(a_log_dtype),
        "dt_bias": normal(Hv).astype(dtype),
        "norm_weight": normal(Dv, scale=0.1, shift=1.0).astype(dtype),
        "state": normal(1, Hv, Dv, Dk),
        "Hk": Hk,
    }


def problem(*shape_and_dtypes) -> dict:
    return packed(parts(*shape_and_dtypes))


def check(arguments: dict, backend: str, tile=None) -> tuple[mx.array, mx.array, mx.array]:
    assert op.supports(**{k: v for k, v in arguments.items() if k != "eps"}, backend=backend) is None
    y, conv_state, state = op.gated_delta_step(**arguments, tile=tile, backend=backend)
    want_y, want_conv_state, want_state = op.gated_delta_step_reference(**arguments)
    assert y.dtype == arguments["projected"].dtype
    assert_close("y", y, want_y)
    assert_close("state", state, want_state)
    assert mx.array_equal(conv_state, want_conv_state), "the conv state is copied, not computed"
    return y, conv_state, state


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_every_layout(backend, tile):
    check(problem(SMALL), backend, tile)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((16, 32, 128, 128), "Qwen3.6-35B-A3B"),
        ((2, 4, 128, 128), "the tiny checkpoint"),
        ((1, 1, 32, 32), "the smallest"),
        ((3, 3, 32, 160), "as many key heads as value heads; Dv above Dk"),
        ((1, 5, 160, 32), "five value heads a key head; a row that is no power of two"),
    ],
)
def test_shapes_with_the_tile_of_the_table(backend, shape, why):
    check(problem(shape), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("a_log_dtype", [mx.float32, mx.bfloat16], ids=str)
def test_dtypes(backend, dtype, a_log_dtype):
    check(problem(SMALL, dtype, a_log_dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_in_any_order_at_odd_elements(backend):
    """With NaN between and around them."""
    arguments = parts(SMALL, mx.bfloat16)
    want = op.gated_delta_step(**packed(arguments), backend=backend)
    got = check(packed(arguments, ("a", "qkv", "b", "z"), gap=3), backend)
    assert all(mx.array_equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_epsilon_of_the_norm(backend):
    arguments = {**problem(SMALL), "eps": 0.5}
    y, *_ = check(arguments, backend)
    smaller, *_ = op.gated_delta_step(**{**arguments, "eps": 1e-6}, backend=backend)
    assert mx.abs(y).sum() < 0.99 * mx.abs(smaller).sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [-40.0, -9.0, 0.0, 9.0, 100.0])
def test_gates_far_from_zero(backend, value):
    """softplus must keep the digits of exp(x) where x is far below zero, and not overflow above."""
    arguments = parts(SMALL)
    arguments |= {name: mx.full(arguments[name].shape, value) for name in ("a", "b", "z")}
    *_, state = check(packed(arguments), backend)
    decay = np.exp(-np.exp(np.array(arguments["A_log"], dtype=np.float64)) * np.logaddexp(value, 0))
    if value == -40.0:  # beta is 4e-18: the state only decays
        want = decay[:, None, None] * np.array(arguments["state"][0])
        np.testing.assert_allclose(np.array(state[0]), want, rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_give_zeros(backend):
    """The first token of a model whose projection is zero: no norm may divide by zero."""
    arguments = parts(SMALL)
    arguments |= {name: mx.zeros_like(arguments[name]) for name in ("qkv", "conv_state", "state")}
    y, _, state = op.gated_delta_step(**packed(arguments), backend=backend)
    assert not mx.any(y != 0)
    assert not mx.any(state != 0)


def test_no_schedule_changes_a_bit():
    arguments = problem((1, 2, 32, 64))
    host.check_schedules(
        lambda: op.gated_delta_step(**arguments, tile={"lanes": 8, "simdgroups": 4}, backend="host")
    )


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(SMALL, mx.bfloat16), "host")


def stock_layer(shape) -> qwen3_5.GatedDeltaNet:
    Hk, Hv, Dk, Dv = shape
    layer = qwen3_5.GatedDeltaNet(
        qwen3_5.TextModelArgs(
            hidden_size=64,
            linear_num_key_heads=Hk,
            linear_num_value_heads=Hv,
            linear_key_head_dim=Dk,
            linear_value_head_dim=Dv,
        )
    )
    layer.norm.weight = mx.random.uniform(0.5, 1.5, (Dv,))
    layer.dt_bias = mx.random.normal((Hv,))
    layer.out_proj = nn.Identity()
    layer.train()  # MLX ops on every machine, not stock's Metal kernel
    return layer


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_steps_of_stocks_layer(backend):
    """Stock's own layer and cache in fp32, from an empty state on."""
    mx.random.seed(1)
    Hk, Hv, Dk, Dv = shape = (2, 4, 64, 32)
    layer = stock_layer(shape)
    cache = ArraysCache(2)
    conv_state = mx.zeros((1, 3, layer.conv_dim))
    state = mx.zeros((1, Hv, Dv, Dk))
    for _ in range(3):
        x = mx.random.normal((1, 1, 64))
        want = layer(x, cache=cache)
        qkv, z, b, a = (layer[f"in_proj_{name}"](x) for name in PARTS)
        y, conv_state, state = op.gated_delta_step(
            mx.concatenate([qkv, z, b, a], axis=-1),
            layer.conv1d.weight,
            conv_state,
            layer.A_log,
            layer.dt_bias,
            layer.norm.weight,
            state,
            Hk=Hk,
            offsets=np.cumsum([0, qkv.size, z.size, b.size]).tolist(),
            eps=layer.norm.eps,
            backend=backend,
        )
        assert_close("y", y, want)
        assert_close("state", state, cache[1])
        assert mx.array_equal(conv_state, cache[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_errors_do_not_grow_over_five_turns(backend, dtype):
    """A kernel that is wrong only in what it leaves behind is right for a turn and wrong in the next."""
    shape = (1, 2, 32, 32)
    first = {**parts(shape, dtype), "A_log": mx.array([-5.0, -3.0])}  # what was seen stays in the state
    carried = [first["conv_state"], first["state"]]
    exact = list(carried)
    errors = []
    with host_options(check=False):
        for token in range(5 * 8):
            new = {**first, **{name: parts(shape, dtype, seed=token)[name] for name in PARTS}}
            new["conv_state"], new["state"] = carried
            y, *carried = op.gated_delta_step(**packed(new), backend=backend)
            new["conv_state"], new["state"] = exact
            want, *exact = op.gated_delta_step_reference(**packed(new))
            assert_close("y", y, want, 2e-5)
            assert mx.array_equal(carried[0], exact[0])
            errors.append(float(mx.abs(carried[1] - exact[1]).max() / mx.abs(exact[1]).max()))
    turns = np.array(errors).reshape(5, 8).max(1)
    assert turns.max() < 1e-6
    assert turns[-1] < 4 * turns[0]


def test_the_reference_against_stocks_ops():
    """The gates and norms of the reference are stock's, also where silu and rms_norm are MLX's own."""
    arguments = parts(SMALL)
    Hk, Hv, Dk, Dv = SMALL
    y, _, state = op.gated_delta_step_reference(**packed(arguments))
    window = mx.concatenate([arguments["conv_state"], arguments["qkv"]], axis=1)
    mixed = nn.silu(mx.conv1d(window, arguments["conv_weight"], groups=window.shape[-1]))
    q, k, v = mx.split(mixed, [Hk * Dk, 2 * Hk * Dk], axis=-1)
    q, k = qwen3_5.normalize_qk(
        q.reshape(1, 1, Hk, Dk), k.reshape(1, 1, Hk, Dk), inv_scale=Dk**-0.5, eps=1e-6
    )
    readout, want_state = qwen3_5.gated_delta_update(
        q,
        k,
        v.reshape(1, 1, Hv, Dv),
        arguments["a"],
        arguments["b"],
        arguments["A_log"],
        arguments["dt_bias"],
        arguments["state"],
        use_kernel=False,
    )
    norm = qwen3_5.RMSNormGated(Dv)
    norm.weight = arguments["norm_weight"]
    want_y = norm(readout, arguments["z"].reshape(1, 1, Hv, Dv)).reshape(1, 1, -1)
    assert_close("y", y, want_y)
    assert_close("state", state, want_state)


def test_on_metal_it_is_one_dispatch():
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem((4, 8, 64, 32), mx.bfloat16)
    options = {name: arguments.pop(name) for name in ("Hk", "offsets")}
    names = ("conv_weight", "A_log", "dt_bias", "norm_weight")
    constants = in_one_buffer([arguments[name] for name in names])
    found: list[tuple[str, int]] = []

    def record(node):
        if node["type"] == "primitive":
            found.append((node["name"], len(node["inputs"])))

    def layer(projected, conv_state, constants, state):
        changing = {"projected": projected, "conv_state": conv_state, "state": state}
        with backends.override("metal"):
            return op.gated_delta_step(**{**arguments, **changing}, constants=constants, **options)

    values = (arguments["projected"], arguments["conv_state"], constants, arguments["state"])
    mx.export_function(record, layer, *values)
    assert found == [("CustomKernel", 4)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"state": mx.zeros((2, 6, 64, 96))}, "state has shape"),
        ({"state": mx.zeros((1, 6, 64, 96), mx.bfloat16)}, "not float32"),
        ({"state": mx.zeros((1, 6, 64, 80))}, "multiples of 32"),
        ({"Hk": 4}, "Hv=6 is not a multiple of Hk=4"),
        ({"conv_weight": mx.zeros((768, 3, 1))}, "conv_weight has shape"),
        ({"conv_state": mx.zeros((1, 4, 768))}, "conv_state has shape"),
        ({"A_log": mx.zeros((4,))}, "A_log has shape"),
        ({"A_log": mx.zeros((6,), mx.int32)}, "A_log is"),
        ({"norm_weight": mx.zeros((96,))}, "norm_weight has shape"),
        ({"offsets": (397, 0, 0, 0)}, "projected has 1164 elements; qkv needs 768 from 397"),
        ({"offsets": (0, 0, 0, -1)}, "a needs 6 from -1"),
        ({"dt_bias": mx.zeros((6,), mx.float16)}, "dt_bias is mlx.core.float16"),
        ({"projected": mx.zeros((1164,), mx.int32)}, "projected is mlx.core.int32"),
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
    assert choose("gated_delta_step", "host", Hv=4, Dk=64, Dv=32) == table("gated_delta_step")[-1]["tile"]
    for choice in table("gated_delta_step"):
        check(problem((1, 2, 64, 32), mx.bfloat16), "host", choice["tile"])


def test_the_self_check_passes_and_can_fail(monkeypatch):
    assert op._self_check("host") is None
    reference = op.gated_delta_step_reference

    def wrong(*operands, **options):
        y, conv_state, state = reference(*operands, **options)
        return y, conv_state, state * 1.001

    monkeypatch.setattr(op, "gated_delta_step_reference", wrong)
    assert "the state is" in op._self_check("host")
