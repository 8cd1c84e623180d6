"""The gated DeltaNet scan against its fp32 reference and against mlx-lm's own kernels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close
from mlx_lm.models import gated_delta as stock

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import gated_delta_scan as op
from lily_mlx.tiles import choose, table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

# B, T, Hk, Hv, Dk, Dv: unequal everywhere, so that a swapped axis cannot go unseen.
SMALL = (2, 5, 2, 6, 96, 64)

TILES = [
    {"lanes": 32, "rows": 1, "ahead": 1, "simdgroups": 4},
    {"lanes": 8, "rows": 2, "ahead": 4, "simdgroups": 4},
    {"lanes": 8, "rows": 2, "ahead": 1, "simdgroups": 2},
    {"lanes": 4, "rows": 1, "ahead": 2, "simdgroups": 2},
    {"lanes": 16, "rows": 4, "ahead": 3, "simdgroups": 1},
    {"lanes": 32, "rows": 8, "ahead": 2, "simdgroups": 1},
]


def problem(shape, dtype=mx.float32, beta_dtype=None, mask=None, seed=0) -> dict[str, mx.array]:
    B, T, Hk, Hv, Dk, Dv = shape
    rng = np.random.default_rng(seed)

    def normal(*axes):
        return mx.array(rng.normal(size=axes).astype(np.float32))

    def unit(x):
        return x / mx.linalg.norm(x, axis=-1, keepdims=True)

    arrays = {
        "q": (unit(normal(B, T, Hk, Dk)) * Dk**-0.5).astype(dtype),
        "k": unit(normal(B, T, Hk, Dk)).astype(dtype),
        "v": normal(B, T, Hv, Dv).astype(dtype),
        "g": mx.array(rng.uniform(0.6, 1.0, (B, T, Hv)).astype(np.float32)),
        "beta": mx.array(rng.uniform(0, 1, (B, T, Hv)).astype(np.float32)).astype(beta_dtype or dtype),
        "state": normal(B, Hv, Dv, Dk),
    }
    if mask is not None:
        arrays["mask"] = mask
    return arrays


def check(arrays: dict[str, mx.array], **options) -> tuple[mx.array, mx.array]:
    assert op.supports(**arrays, backend=options["backend"]) is None
    y, state = op.gated_delta_scan(**arrays, **options)
    want_y, want_state = op.gated_delta_scan_reference(**arrays)
    assert y.dtype == arrays["q"].dtype
    assert_close("y", y, want_y)
    assert_close("state", state, want_state)
    return y, state


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_every_layout(backend, tile):
    check(problem(SMALL), tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 257])
@pytest.mark.parametrize("tile", TILES[1:3], ids=["ahead 4", "ahead 1"])
def test_lengths(backend, T, tile):
    """Below, at and above the tokens read ahead; and the block of 64 with a remainder of either kind."""
    check(problem((1, T, 1, 2, 64, 32)), tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((1, 2, 16, 32, 128, 128), "Qwen3.6-35B-A3B"),
        ((1, 3, 1, 1, 32, 32), "the smallest"),
        ((3, 4, 2, 2, 32, 160), "as many key heads as value heads; Dv above Dk"),
        ((1, 3, 1, 4, 160, 32), "four value heads a key head; a row that is no power of two"),
        ((2, 3, 2, 4, 256, 64), "a long row"),
    ],
)
def test_shapes_with_the_tile_of_the_table(backend, shape, why):
    check(problem(shape), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("beta_dtype", [None, mx.float32], ids=["beta as q", "beta float32"])
def test_dtypes(backend, dtype, beta_dtype):
    arrays = problem(SMALL, dtype, beta_dtype)
    check(arrays, tile=TILES[1], backend=backend)
    check(arrays, tile=TILES[0], backend=backend)


MASKS = {
    "left padding": lambda B, T: mx.arange(T)[None] >= mx.array([T // 2, 0])[:B, None],
    "right padding": lambda B, T: mx.arange(T)[None] < mx.array([T, T // 3])[:B, None],
    "every other token": lambda B, T: mx.broadcast_to(mx.arange(T)[None] % 2 == 0, (B, T)),
    "nothing": lambda B, T: mx.zeros((B, T), mx.bool_),
    "everything": lambda B, T: mx.ones((B, T), mx.bool_),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES[:3], ids=["ahead 1", "ahead 4", "ahead 1, two rows"])
@pytest.mark.parametrize("pattern", MASKS)
def test_masks(backend, tile, pattern):
    B, T, *_ = shape = (2, 7, 2, 4, 64, 32)
    mask = MASKS[pattern](B, T)
    arrays = problem(shape, mask=mask)
    y, state = check(arrays, tile=tile, backend=backend)
    assert mx.all(mx.where(mask[..., None, None], 0, y) == 0)
    if pattern == "nothing":
        assert mx.array_equal(state, arrays["state"])
    if pattern == "everything":
        del arrays["mask"]
        y_without, state_without = op.gated_delta_scan(**arrays, tile=tile, backend=backend)
        assert mx.array_equal(y, y_without)
        assert mx.array_equal(state, state_without)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_masked_token_holds_does_not_matter(backend):
    """Padding may hold anything, also NaN."""
    B, T, *_ = shape = (2, 6, 1, 2, 32, 32)
    mask = MASKS["left padding"](B, T)
    arrays = problem(shape, mask=mask)
    want = op.gated_delta_scan(**arrays, backend=backend)
    for name in ("q", "k", "v", "g", "beta"):
        keep = mask.reshape(B, T, *[1] * (arrays[name].ndim - 2))
        arrays[name] = mx.where(keep, arrays[name], mx.nan)
    got = op.gated_delta_scan(**arrays, backend=backend)
    assert mx.array_equal(got[0], want[0])
    assert mx.array_equal(got[1], want[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [(1, 1, 9), (4, 7), (10, 1)])
def test_splitting_a_sequence_gives_the_same_bits(backend, dtype, cuts):
    arrays = problem((2, 11, 2, 4, 64, 32), dtype)
    tile = TILES[1]
    whole_y, whole_state = op.gated_delta_scan(**arrays, tile=tile, backend=backend)
    state, parts, start = arrays["state"], [], 0
    for length in cuts:
        piece = {name: arrays[name][:, start : start + length] for name in ("q", "k", "v", "g", "beta")}
        y, state = op.gated_delta_scan(**piece, state=state, tile=tile, backend=backend)
        parts.append(y)
        start += length
    assert mx.array_equal(mx.concatenate(parts, axis=1), whole_y)
    assert mx.array_equal(state, whole_state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_rows_do_not_see_each_other(backend):
    arrays = problem((3, 5, 2, 4, 32, 64))
    y, state = op.gated_delta_scan(**arrays, backend=backend)
    for row in range(3):
        alone = {name: array[row : row + 1] for name, array in arrays.items()}
        y_alone, state_alone = op.gated_delta_scan(**alone, backend=backend)
        assert mx.array_equal(y_alone, y[row : row + 1])
        assert mx.array_equal(state_alone, state[row : row + 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_are_read_as_what_they_show(backend):
    """q, k and v are slices of one array, as after the convolution; the state is a transposed view."""
    B, T, Hk, Hv, Dk, Dv = shape = (2, 4, 2, 4, 32, 64)
    arrays = problem(shape)
    flat = [arrays[name].reshape(B, T, -1) for name in ("q", "k", "v")]
    mixed = mx.concatenate(flat, axis=-1)
    q, k, v = mx.split(mixed, [Hk * Dk, 2 * Hk * Dk], axis=-1)
    arrays["q"], arrays["k"] = q.reshape(B, T, Hk, Dk), k.reshape(B, T, Hk, Dk)
    arrays["v"] = v.reshape(B, T, Hv, Dv)
    arrays["state"] = mx.contiguous(arrays["state"].swapaxes(-1, -2)).swapaxes(-1, -2)
    check(arrays, backend=backend)


@pytest.mark.parametrize("tile", TILES[:3], ids=["ahead 1", "ahead 4", "ahead 1, two rows"])
def test_no_schedule_changes_a_bit(tile):
    arrays = problem((1, 6, 1, 2, 64, 32), mask=mx.array([[True, False, True, True, True, False]]))
    host.check_schedules(lambda: op.gated_delta_scan(**arrays, tile=tile, backend="host"))


@pytest.mark.parametrize("prelude", ["metal"])
def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch, prelude):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, prelude))
    check(problem(SMALL, mx.bfloat16), tile=TILES[1], backend="host")


@pytest.fixture
def stock_kernels(monkeypatch):
    """mlx-lm's own kernels, made as on a Mac but run by the host launcher."""
    with monkeypatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(mx.fast, "metal_kernel", lambda **description: description)
        packed, masked = (
            stock._make_gated_delta_packed_kernel(),
            stock._make_gated_delta_kernel(has_mask=True),
        )
    monkeypatch.setattr(stock, "_gated_delta_kernel_packed", host.metal_kernel(**packed))
    monkeypatch.setattr(stock, "_gated_delta_kernel_masked", host.metal_kernel(**masked))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["packed", "masked"])
def test_same_numbers_as_stock(stock_kernels, dtype, masked):
    B, T, *_ = shape = (2, 9, 1, 2, 128, 32)
    arrays = problem(shape, dtype)
    if masked:
        arrays["mask"] = MASKS["left padding"](B, T)
    want_y, want_state = stock.gated_delta_kernel(**arrays)
    for tile in TILES[:3]:
        y, state = op.gated_delta_scan(**arrays, tile=tile, backend="host")
        # Both round y to the dtype, so two results next to a rounding boundary differ by twice the roundoff.
        tolerance = 1e-5 if dtype == mx.float32 else 2.0**-7
        scale = mx.abs(want_y.astype(mx.float32)).max().item()
        difference = mx.abs(y.astype(mx.float32) - want_y.astype(mx.float32)).max().item()
        assert difference <= tolerance * scale
        assert mx.abs(state - want_state).max().item() <= 1e-5 * mx.abs(want_state).max().item()


@pytest.mark.parametrize("T", [1, 64])
def test_on_metal_it_is_one_dispatch(T):
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arrays = problem((1, T, 2, 8, 64, 32), mx.bfloat16)
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(*values):
        with backends.override("metal"):
            return op.gated_delta_scan(*values)

    mx.export_function(record, layer, *arrays.values())
    assert names == ["CustomKernel"]


def test_reference_is_the_recurrence():
    """Two tokens of one head by hand, in float64."""
    arrays = problem((1, 2, 1, 1, 32, 32))
    y, state = op.gated_delta_scan_reference(**arrays)
    q, k, v, g, beta, S = (np.array(arrays[name], dtype=np.float64)[0] for name in arrays)
    S = S[0]
    for t in range(2):
        S = g[t, 0] * S
        S = S + beta[t, 0] * np.outer(v[t, 0] - S @ k[t, 0], k[t, 0])
        np.testing.assert_allclose(np.array(y)[0, t, 0], S @ q[t, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.array(state)[0, 0], S, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"q": mx.zeros((2, 5, 2))}, "q and v must have 4 axes"),
        ({"k": mx.zeros((2, 5, 1, 96))}, "k has shape"),
        ({"v": mx.zeros((2, 4, 6, 64))}, "v has shape"),
        ({"g": mx.zeros((2, 5, 6, 96))}, "g has shape"),
        ({"beta": mx.zeros((2, 5))}, "beta has shape"),
        ({"state": mx.zeros((2, 6, 96, 64))}, "state has shape"),
        ({"mask": mx.zeros((2, 6), mx.bool_)}, "mask has shape"),
        ({"mask": mx.zeros((2, 5))}, "mask is"),
        ({"q": mx.zeros((2, 5, 2, 96), mx.float16)}, "differ in dtype"),
        ({"beta": mx.zeros((2, 5, 6), mx.float16)}, "beta is"),
        ({"g": mx.zeros((2, 5, 6), mx.float16)}, "g and state must be float32"),
        ({"state": mx.zeros((2, 6, 64, 96), mx.bfloat16)}, "g and state must be float32"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**problem(SMALL), **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((1, 2, 1, 2, 48, 32), "multiples of 32"),
        ((1, 2, 1, 2, 32, 48), "multiples of 32"),
        ((1, 2, 2, 3, 32, 32), "Hv=3 is not a multiple of Hk=2"),
        ((1, 0, 1, 2, 32, 32), "length zero"),
    ],
)
def test_supports_refuses_shapes(shape, reason):
    assert reason in op.supports(**problem(shape), backend="host")


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**problem(SMALL)) == "no GPU back-end"


def test_integers_are_refused():
    arrays = {name: mx.zeros(array.shape, mx.int32) for name, array in problem(SMALL).items()}
    assert op.supports(**arrays, backend="host") == "q is mlx.core.int32"


def test_every_tile_of_the_table_launches():
    """A wrong tile would only show on the chip that it is for."""
    for choice in table("gated_delta_scan"):
        T = choice["when"].get("T", [6])[0]
        check(problem((1, T, 1, 2, 64, 32), mx.bfloat16), tile=choice["tile"], backend="host")


def test_the_table_chooses_by_chip_and_length():
    one = choose("gated_delta_scan", "cuda-sm_90", T=1)
    many = choose("gated_delta_scan", "cuda-sm_90", T=2)
    assert one != many
    assert choose("gated_delta_scan", "metal-applegpu_g16s", T=2048) != many
    assert choose("gated_delta_scan", "host", T=7) == table("gated_delta_scan")[-1]["tile"]
