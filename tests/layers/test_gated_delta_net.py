"""The DeltaNet layer in Lily's kernels, on every back-end here, against stock's layer of the same weights."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_5 as stock
from mlx_lm.models.cache import ArraysCache

from lily_mlx.counters import counts
from lily_mlx.launch import backend, source
from lily_mlx.layers import GatedDeltaNet
from lily_mlx.ops import choice
from lily_mlx.ops import gated_delta_scan as scan

WIDTH = 64
OPS = ("gated_delta_prepare", "gated_delta_scan", "gated_rms_norm")
# Unequal head counts and sizes, so that a transposed state or a wrong head would show.
CONFIG = stock.TextModelArgs(
    hidden_size=WIDTH,
    linear_num_key_heads=2,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=32,
)
# float32: the recurrence in another order of summation. bfloat16: stock rounds the conv's result, silu's, the
# normalised q and k and the norm's on the way, where the kernels round once; and its ops path multiplies
# bfloat16 q and k into the float32 state first.
TOLERANCE = {mx.float32: 2e-5, mx.bfloat16: 2e-2}


@pytest.fixture(autouse=True, params=[name for name in source.BACKENDS if backend.available(name)])
def kernels(request, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", request.param)


def layers(dtype):
    mx.random.seed(0)
    expected = stock.GatedDeltaNet(CONFIG)
    expected.set_dtype(dtype)
    expected.A_log = expected.A_log.astype(mx.float32)
    expected.eval()
    actual = GatedDeltaNet(CONFIG)
    actual.update(expected.parameters())
    actual.eval()
    return expected, actual


def inputs(B, T, dtype, seed=1):
    return mx.array(np.random.default_rng(seed).standard_normal((B, T, WIDTH)), dtype)


def assert_close(actual, expected, dtype):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    a, e = (np.array(x.astype(mx.float32)) for x in (actual, expected))
    assert np.isfinite(a).all()
    error = np.abs(a - e).max() / np.abs(e).max()
    assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("T", [1, 2, 65, 257])
def test_equals_stock(T, dtype):
    expected, actual = layers(dtype)
    x = inputs(2, T, dtype)
    counts.clear()
    ours, theirs = (ArraysCache(2), ArraysCache(2))
    assert_close(actual(x, cache=ours), expected(x, cache=theirs), dtype)
    assert all(counts[f"op.{op}"] == 1 for op in OPS)
    for i in range(2):
        assert_close(ours[i], theirs[i], dtype)


@pytest.mark.parametrize("op", OPS)
def test_each_kernel_can_be_off_alone(op, monkeypatch):
    expected, actual = layers(mx.float32)
    monkeypatch.setenv("LILY_DISABLE", op)
    x = inputs(2, 5, mx.float32)
    ours, theirs = (ArraysCache(2), ArraysCache(2))
    for cache in (ours, theirs):
        cache.prepare(lengths=[5, 3])
    mask = ours.make_mask(5)
    counts.clear()
    got = actual(x, mask=mask, cache=ours)
    assert {name for name in OPS if counts[f"op.{name}"]} == {*OPS} - {op}
    want = expected(x, mask=mask, cache=theirs)
    assert_close(got[0], want[0], mx.float32)
    assert_close(got[1, :3], want[1, :3], mx.float32)
    for i in range(2):
        assert_close(ours[i], theirs[i], mx.float32)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_any_chunking_gives_the_same(chunk):
    """Chunks shorter than the conv's window carry its state on from the state before them."""
    _, layer = layers(mx.float32)
    x = inputs(2, 11, mx.float32)
    whole, chunked = ArraysCache(2), ArraysCache(2)
    want = layer(x, cache=whole)
    parts = [layer(x[:, t : t + chunk], cache=chunked) for t in range(0, 11, chunk)]
    assert_close(mx.concatenate(parts, axis=1), want, mx.float32)
    for i in range(2):
        assert_close(chunked[i], whole[i], mx.float32)


def test_prefill_then_decode_equals_one_prefill():
    _, layer = layers(mx.float32)
    x = inputs(1, 12, mx.float32)
    cache = ArraysCache(2)
    parts = [layer(x[:, :7], cache=cache)] + [layer(x[:, t : t + 1], cache=cache) for t in range(7, 12)]
    assert_close(mx.concatenate(parts, axis=1), layer(x), mx.float32)


def test_padding_on_the_left_is_not_seen():
    _, layer = layers(mx.float32)
    x = inputs(1, 9, mx.float32)
    padded = mx.concatenate([mx.full((1, 4, WIDTH), 7.0), x], axis=1)
    cache = ArraysCache(2, left_padding=[4])
    y = layer(padded, mask=cache.make_mask(13), cache=cache)
    alone = ArraysCache(2)
    assert_close(y[:, 4:], layer(x, cache=alone), mx.float32)
    assert_close(cache[1], alone[1], mx.float32)


def test_padding_on_the_right_is_not_seen():
    """Rows of 9, 5 and 2 tokens in steps of 4, as the server's batches prefill them; one ends in each."""
    expected, actual = layers(mx.float32)
    x = inputs(3, 9, mx.float32)
    caches = []
    for layer in (expected, actual):
        cache = ArraysCache(2)
        cache.prepare(lengths=[9, 5, 2])
        for part in mx.split(x, [4, 8], axis=1):
            layer(part, mask=cache.make_mask(part.shape[1]), cache=cache)
        caches.append(cache)
    for i in range(2):
        assert_close(caches[1][i], caches[0][i], mx.float32)


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("kernel", ["mx.fast.gated_delta_update", "mlx-lm"])
def test_the_stock_kernel_that_the_table_takes_runs(kernel, disabled, monkeypatch):
    """As on a Mac, with other ops on MLX's own; switched off, the op is mlx-lm's, as without a table."""
    monkeypatch.setattr(choice, "distrust", lambda op, backend: None)
    monkeypatch.setattr(scan, "stock_kernel", lambda op, chip, *, T, **_: kernel if T > 4 else None)
    off = {"gated_delta_prepare", "gated_rms_norm", "qmm"} | ({"gated_delta_scan"} if disabled else set())
    monkeypatch.setenv("LILY_DISABLE", ",".join(off))
    called = []
    mlx = mx.fast.gated_delta_update
    monkeypatch.setattr(mx.fast, "gated_delta_update", lambda *a: called.append(a[0].shape[1]) or mlx(*a))
    expected, actual = layers(mx.float32)
    x = inputs(2, 7, mx.float32)
    ours, theirs = (ArraysCache(2), ArraysCache(2))
    counts.clear()
    with backend.override("metal"):
        got = actual(x, cache=ours)
    assert_close(got, expected(x, cache=theirs), mx.float32)
    for i in range(2):
        assert_close(ours[i], theirs[i], mx.float32)
    assert not counts
    assert called == ([7] if kernel == "mx.fast.gated_delta_update" and not disabled else [])


def test_a_stock_kernel_is_taken_only_where_it_is(monkeypatch):
    """MLX has both on Metal only, and no masks in its own op."""
    monkeypatch.setattr(scan, "stock_kernel", lambda op, chip, **_: "mx.fast.gated_delta_update")
    q, v, g = mx.zeros((1, 9, 2, 64)), mx.zeros((1, 9, 4, 32)), mx.zeros((1, 9, 4))
    operands = (q, q, v, g, g, mx.zeros((1, 4, 32, 64)))
    mask = mx.ones((1, 9), mx.bool_)
    assert "mx.fast.gated_delta_update for 9 tokens" in scan.supports(*operands, backend="metal")
    assert scan.supports(*operands, mask, backend="metal") is None
    assert scan.supports(*operands, backend="cuda") is None
    monkeypatch.setattr(scan, "stock_kernel", lambda op, chip, **_: "mlx-lm")
    assert "mlx-lm" in scan.supports(*operands, mask, backend="metal")


@pytest.mark.parametrize("why", ["training", "the ops back-end"])
def test_stock_path_is_taken_and_named(why, monkeypatch, same):
    expected, actual = layers(mx.float32)
    if why == "training":
        actual.train()
        expected.train()
    else:
        monkeypatch.setenv("LILY_BACKEND", "ops")
    assert why in actual.why_stock()
    counts.clear()
    x = inputs(1, 5, mx.float32)
    same(actual(x), expected(x))
    assert not counts


def test_gradients_in_training_are_stocks(same):
    expected, actual = layers(mx.float32)
    x = inputs(1, 5, mx.float32)
    grads = []
    for layer in (expected, actual):
        layer.train()
        grads.append(mx.grad(lambda x, layer=layer: layer(x).sum())(x))
    assert mx.abs(grads[0]).max() > 0
    same(grads[1], grads[0])


def test_shape_that_the_kernel_does_not_take_runs_as_stock(same):
    """Head sizes of 48: no kernel runs, and the result is stock's to the bit."""
    config = stock.TextModelArgs(
        hidden_size=WIDTH,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=48,
        linear_value_head_dim=48,
    )
    mx.random.seed(0)
    expected = stock.GatedDeltaNet(config)
    actual = GatedDeltaNet(config)
    actual.update(expected.parameters())
    for layer in (expected, actual):
        layer.eval()
    counts.clear()
    x = inputs(1, 4, mx.float32)
    same(actual(x), expected(x))
    assert not counts
