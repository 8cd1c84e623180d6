"""The DeltaNet layer with Lily's scan, on every back-end here, against stock's layer of the same weights."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_5 as stock
from mlx_lm.models.cache import ArraysCache

from lily_mlx.counters import counts
from lily_mlx.launch import backend, source
from lily_mlx.layers import GatedDeltaNet

WIDTH = 64
# Unequal head counts and sizes, so that a transposed state or a wrong head would show.
CONFIG = stock.TextModelArgs(
    hidden_size=WIDTH,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=64,
    linear_value_head_dim=32,
)
# float32: the recurrence in another order of summation. bfloat16: stock's ops path keeps the state and the
# products in float32 but multiplies bfloat16 q and k into it first.
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
@pytest.mark.parametrize("T", [1, 2, 65])
def test_equals_stock(T, dtype):
    expected, actual = layers(dtype)
    x = inputs(2, T, dtype)
    counts.clear()
    ours, theirs = (ArraysCache(2), ArraysCache(2))
    assert_close(actual(x, cache=ours), expected(x, cache=theirs), dtype)
    assert counts["op.gated_delta_scan"] == 1
    for i in range(2):
        assert_close(ours[i], theirs[i], dtype)


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
    """Rows of 9 and 5 tokens in one step, as the server's batches prefill them."""
    expected, actual = layers(mx.float32)
    x = inputs(2, 9, mx.float32)
    caches = []
    for layer in (expected, actual):
        cache = ArraysCache(2)
        cache.prepare(lengths=[9, 5])
        layer(x, mask=cache.make_mask(9), cache=cache)
        caches.append(cache)
    for i in range(2):
        assert_close(caches[1][i], caches[0][i], mx.float32)


@pytest.mark.parametrize("why", ["training", "disabled"])
def test_stock_path_is_taken_and_named(why, monkeypatch, same):
    expected, actual = layers(mx.float32)
    if why == "training":
        actual.train()
        expected.train()
    else:
        monkeypatch.setenv("LILY_DISABLE", "gated_delta_scan")
    assert why in actual.why_stock().lower().replace("lily_disable", "disabled")
    counts.clear()
    x = inputs(1, 5, mx.float32)
    same(actual(x), expected(x))
    assert counts["op.gated_delta_scan"] == 0


def test_shape_that_the_kernel_does_not_take_runs_as_stock(same):
    """A head size of 48: the projections are Lily's, the recurrence stock's, and the result is stock's."""
    config = stock.TextModelArgs(
        hidden_size=WIDTH,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=48,
        linear_value_head_dim=32,
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
    assert counts["op.gated_delta_scan"] == 0
