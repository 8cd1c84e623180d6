"""The attention layer in Lily's kernels, on every back-end here, against stock's of the same weights."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_5 as stock
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from lily_mlx.counters import counts
from lily_mlx.launch import backend, source
from lily_mlx.layers import Attention

WIDTH = 96
OPS = ("qk_prepare", "attention_gate")
# Unequal head counts and sizes, so that a swapped axis or a wrong head would show.
CONFIG = stock.TextModelArgs(
    hidden_size=WIDTH, num_attention_heads=6, num_key_value_heads=2, head_dim=64, attention_bias=False
)
# bfloat16: stock rounds the norms, the rotation and the gate on the way, where the kernels round once.
TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 2e-2}


@pytest.fixture(autouse=True, params=[name for name in source.BACKENDS if backend.available(name)])
def kernels(request, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", request.param)


def layers(dtype, config=CONFIG):
    mx.random.seed(0)
    expected = stock.Attention(config)
    for norm in (expected.q_norm, expected.k_norm):
        norm.weight = mx.random.uniform(0.5, 1.5, norm.weight.shape)
    expected.set_dtype(dtype)
    expected.eval()
    actual = Attention(config)
    actual.update(expected.parameters())
    actual.eval()
    return expected, actual


def inputs(B, T, dtype=mx.float32, seed=1):
    return mx.array(np.random.default_rng(seed).standard_normal((B, T, WIDTH)), dtype)


def assert_close(actual, expected, dtype=mx.float32):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    a, e = (np.array(x.astype(mx.float32)) for x in (actual, expected))
    assert np.isfinite(a).all()
    error = np.abs(a - e).max() / np.abs(e).max()
    assert error < TOLERANCE[dtype], error


def steps(layer, x, cache, sizes):
    """The layer's results of steps of the given sizes, one after another."""
    ends = np.cumsum(sizes).tolist()
    assert ends[-1] == x.shape[1]
    parts = []
    for part in mx.split(x, ends[:-1], axis=1):
        parts.append(layer(part, mask=create_attention_mask(part, cache), cache=cache))
        mx.eval(parts[-1])
    return mx.concatenate(parts, axis=1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [[1], [2], [65], [7, 7, 3], [5, 1, 1]], ids=str)
def test_equals_stock(sizes, dtype):
    expected, actual = layers(dtype)
    x = inputs(2, sum(sizes), dtype)
    ours, theirs = KVCache(), KVCache()
    counts.clear()
    assert_close(steps(actual, x, ours, sizes), steps(expected, x, theirs, sizes), dtype)
    assert {name: counts[f"op.{name}"] for name in OPS} == dict.fromkeys(OPS, len(sizes))
    for mine, its in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
        assert_close(mine, its, dtype)


def test_without_a_cache():
    expected, actual = layers(mx.float32)
    x = inputs(1, 6)
    assert_close(actual(x, mask="causal"), expected(x, mask="causal"))


@pytest.mark.parametrize("op", OPS)
def test_each_kernel_can_be_off_alone(op, monkeypatch):
    expected, actual = layers(mx.float32)
    monkeypatch.setenv("LILY_DISABLE", op)
    x = inputs(2, 9)
    counts.clear()
    got = steps(actual, x, KVCache(), [4, 5])
    assert {name for name in OPS if counts[f"op.{name}"]} == {*OPS} - {op}
    assert_close(got, steps(expected, x, KVCache(), [4, 5]))


def test_padding_on_the_left_is_not_seen():
    """Stock's batched cache: each row has its own position, below zero in the padding."""
    expected, actual = layers(mx.float32)
    x = inputs(2, 9)
    got = steps(actual, x, BatchKVCache([0, 3]), [6, 2, 1])
    want = steps(expected, x, BatchKVCache([0, 3]), [6, 2, 1])
    assert_close(got[0], want[0])
    assert_close(got[1, 3:], want[1, 3:])
    assert_close(got[1:, 3:], steps(actual, x[1:, 3:], KVCache(), [3, 2, 1]))


def test_quantised_cache():
    expected, actual = layers(mx.float32)
    x = inputs(1, 8)
    if mx.cuda.is_available():
        pytest.skip("MLX 0.32.4 has no product with these quantised keys on CUDA")
    want = steps(expected, x, QuantizedKVCache(group_size=64, bits=8), [5, 3])
    got = steps(actual, x, QuantizedKVCache(group_size=64, bits=8), [5, 3])
    # A last bit of a key can move it to the next of 255 levels.
    error = mx.abs(got - want).max() / mx.abs(want).max()
    assert error.item() < 1e-2


def test_a_rope_of_another_type_runs_as_stock():
    config = stock.TextModelArgs(
        hidden_size=WIDTH,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters={
            "type": "yarn",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    expected, actual = layers(mx.float32, config)
    x = inputs(2, 9)
    counts.clear()
    got = steps(actual, x, KVCache(), [4, 5])
    assert counts["op.qk_prepare"] == 0
    assert_close(got, steps(expected, x, KVCache(), [4, 5]))


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
    x = inputs(1, 5)
    same(actual(x, mask="causal"), expected(x, mask="causal"))
    assert not counts


def test_gradients_in_training_are_stocks(same):
    expected, actual = layers(mx.float32)
    x = inputs(1, 5)
    grads = []
    for layer in (expected, actual):
        layer.train()
        grads.append(mx.grad(lambda x, layer=layer: layer(x, mask="causal").sum())(x))
    assert mx.abs(grads[0]).max() > 0
    same(grads[1], grads[0])
