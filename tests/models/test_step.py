"""The decode step: compiled, its caches stock's, its result new when anything about the model changes."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5_moe as stock_module
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

import lily_mlx
from lily_mlx.counters import counts
from lily_mlx.launch import backend
from lily_mlx.launch.kernel import all_kernels
from lily_mlx.step import CAPACITY_STEP, decode_step
from tests.plugin.test_cases import small_moe

EVERY_OP = ",".join(kernel.stem for kernel in all_kernels())


@pytest.fixture
def compiled_ops(monkeypatch):
    """The step as a GPU would compile it, with every op on MLX's own: what can be compiled without a GPU."""
    monkeypatch.setenv("LILY_DISABLE", EVERY_OP)
    with backend.override("metal"):
        yield


def small_models(quantise=False):
    """A seeded small stock model and Lily's of the same weights."""
    models = []
    for _ in range(2):
        mx.random.seed(6)
        model = stock_module.Model(stock_module.ModelArgs.from_dict(small_moe()))
        if quantise:
            nn.quantize(model, group_size=32, bits=4)
        model.eval()
        models.append(model)
    return models[0], lily_mlx.convert(models[1])


def decode(model, cache, tokens):
    return mx.concatenate(
        [model(mx.array([[token]]), cache=cache).astype(mx.float32) for token in tokens], axis=1
    )


def assert_close(actual, expected, bound=1e-4):
    error = np.abs(np.array(actual) - np.array(expected)).max() / np.abs(np.array(expected)).max()
    assert error < bound, error


PROMPT = mx.array([[1, 2, 3, 4, 5]])


def test_equals_stock_and_stock_goes_on_from_its_caches(compiled_ops):
    stock, lily = small_models()
    theirs, ours = make_prompt_cache(stock), make_prompt_cache(lily)
    stock(PROMPT, cache=theirs)
    lily(PROMPT, cache=ours)
    assert_close(decode(lily, ours, range(6, 16)), decode(stock, theirs, range(6, 16)))
    assert [type(c) for c in ours] == [type(c) for c in theirs]
    assert [c.offset for c in ours if isinstance(c, KVCache)] == [15]
    # crosswise: each engine continues from the other's caches
    assert_close(decode(stock, ours, [16, 17]), decode(lily, theirs, [16, 17]))


def test_is_compiled_once_per_capacity(compiled_ops, monkeypatch):
    _, lily = small_models()
    traces = []
    step = decode_step(lily)
    forward = step._forward
    monkeypatch.setattr(step, "_forward", lambda *arrays: traces.append(1) or forward(*arrays))
    cache = make_prompt_cache(lily)
    lily(PROMPT, cache=cache)
    decode(lily, cache, [6])
    assert {c.keys.shape[2] for c in cache if isinstance(c, KVCache)} == {CAPACITY_STEP}  # stock's has 256
    for one in cache:
        if isinstance(one, KVCache):
            one.offset = CAPACITY_STEP - 2  # two rows before it is full
    decode(lily, cache, range(4))
    assert len(traces) == 2
    assert {c.keys.shape[2] for c in cache if isinstance(c, KVCache)} == {2 * CAPACITY_STEP}


def test_gradients_are_stocks(compiled_ops):
    """A compiled step would have the weights as constants, of which no gradient comes."""
    gradients = []
    for model in small_models():
        cache = make_prompt_cache(model)
        model(PROMPT, cache=cache)
        decode(model, copy.deepcopy(cache), [6])

        def loss(model, cache=cache):
            cache = copy.deepcopy(cache)
            return decode(model, cache, [7, 8]).square().mean()

        gradients.append(nn.value_and_grad(model, loss)(model)[1]["language_model"]["lm_head"]["weight"])
    assert mx.abs(gradients[0]).max() > 0
    assert_close(gradients[1], gradients[0])


def test_weights_are_computed_once(compiled_ops, monkeypatch):
    """Also those that nothing has asked for when the step is compiled: later it finds them computed."""
    stock, lily = small_models()
    for model in (stock, lily):
        head = model.language_model.lm_head
        head.weight = head.weight * 2
    caches = [make_prompt_cache(model) for model in (stock, lily)]
    for model, cache in zip((stock, lily), caches, strict=True):
        mx.eval(model.language_model.model(PROMPT, cache))
    asked = []
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *trees: asked.append(trees) or evaluate(*trees))
    actual = decode(lily, caches[1], [6, 7])
    assert len(asked) == 1
    assert any(array is lily.language_model.lm_head.weight for array in asked[0][0])
    assert_close(actual, decode(stock, caches[0], [6, 7]))


@pytest.mark.parametrize("change", ["weights", "lora"])
def test_sees_a_changed_model(compiled_ops, change):
    stock, lily = small_models()
    caches = [make_prompt_cache(m) for m in (stock, lily)]
    for model, cache in zip((stock, lily), caches, strict=True):
        model(PROMPT, cache=cache)
        decode(model, cache, [6])
        mx.random.seed(8)
        if change == "weights":
            layer = model.layers[0].linear_attn
            layer.out_proj.weight = layer.out_proj.weight * 2
        else:
            linear_to_lora_layers(model, 2, {"rank": 2, "scale": 4.0, "dropout": 0.0})
            for module in model.modules():
                if "lora_b" in module:
                    module.lora_b = mx.random.normal(module.lora_b.shape)
            model.eval()
    assert_close(decode(lily, caches[1], [7, 8]), decode(stock, caches[0], [7, 8]))


def test_why_not(lily, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")
    model, _ = lily
    step = decode_step(model)
    token = mx.array([[1]])
    cache = make_prompt_cache(model)
    assert "empty" in step.why_not(token, cache)
    mx.eval(model(PROMPT, cache=cache))
    assert step.why_not(token, cache) is None
    assert "2 rows" in step.why_not(mx.array([[1], [2]]), cache)
    assert "5 tokens" in step.why_not(PROMPT, cache)
    quantised = [c.to_quantized(bits=8) if isinstance(c, KVCache) else c for c in cache]
    assert "QuantizedKVCache" in step.why_not(token, quantised)
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert "ops back-end" in step.why_not(token, cache)


@pytest.mark.parametrize("op", ["qmv", "expert_gate_up", "expert_down", "gated_delta_step", "qk_prepare"])
def test_each_op_can_be_switched_off(stock, lily, monkeypatch, op):
    """The tiny checkpoint on the host: one op on MLX's own, the others in kernels, as near to stock."""
    monkeypatch.setenv("LILY_BACKEND", "host")
    monkeypatch.setenv("LILY_DISABLE", op)
    (theirs, _), (ours, _) = stock, lily
    caches = [make_prompt_cache(m) for m in (theirs, ours)]
    for model, cache in zip((theirs, ours), caches, strict=True):
        mx.eval(model(PROMPT, cache=cache))
    counts.clear()
    actual, expected = decode(ours, caches[1], [6]), decode(theirs, caches[0], [6])
    assert counts[f"op.{op}"] == 0
    assert counts["op.attention_decode"] == 2
    # bfloat16 alone moves this checkpoint's logits by 5 % of the largest (bench/gate.py)
    assert_close(actual, expected, 0.15)


def test_generation_loop_uses_it(compiled_ops):
    stock, lily = small_models(quantise=True)

    def tokens(model):
        return [int(token) for token, _ in generate_step(PROMPT[0], model, max_tokens=12)]

    assert tokens(lily) == tokens(stock)
