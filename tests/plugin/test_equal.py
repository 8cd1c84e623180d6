"""On the ops path Lily is stock to the bit: any chunking, decode, batches, quantised and saved caches."""

import copy

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

import lily_mlx
from tests.conftest import TINY

PROMPT = "Complete this function: def add(a, b):"


@pytest.fixture(scope="module", autouse=True)
def ops_backend():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LILY_BACKEND", "ops")
        yield


def prefill(model, tokens, step, cache=None):
    """Logits of every position [1, T, V], computed in chunks of step tokens."""
    cache = cache or make_prompt_cache(model)
    parts = []
    for start in range(0, tokens.shape[1], step):
        parts.append(model(tokens[:, start : start + step], cache=cache))
        mx.eval(parts[-1], [c.state for c in cache])
    return mx.concatenate(parts, axis=1), cache


def greedy(model, prompt, count, **kwargs):
    steps = generate_step(mx.array(prompt), model, max_tokens=count, **kwargs)
    return [(token, logprobs) for token, logprobs in steps]


@pytest.fixture(scope="module")
def prompt(stock):
    return stock[1].encode(PROMPT)


@pytest.mark.parametrize("step", [1, 7, 64, 2048])
def test_prefill_in_any_chunking(stock, lily, reference, same, step):
    tokens = mx.array(reference[0][:1, :70])  # 70: more than one chunk of 64, a last chunk that is not full
    expected, _ = prefill(stock[0], tokens, step)
    actual, _ = prefill(lily[0], tokens, step)
    same(actual, expected)


def test_decode(stock, lily, prompt, same):
    expected = greedy(stock[0], prompt, 60)
    actual = greedy(lily[0], prompt, 60)
    assert [t for t, _ in actual] == [t for t, _ in expected]
    same(mx.stack([p for _, p in actual]), mx.stack([p for _, p in expected]))


def test_decode_with_quantised_kv_cache(stock, lily, prompt, same):
    options = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0}
    expected = greedy(stock[0], prompt, 24, **options)
    actual = greedy(lily[0], prompt, 24, **options)
    same(mx.stack([p for _, p in actual]), mx.stack([p for _, p in expected]))


def test_ragged_left_padded_batch(stock, lily, reference):
    prompts = [reference[0][row, :n].tolist() for row, n in enumerate((12, 3, 41))]
    options = {"max_tokens": 12, "prefill_step_size": 8, "return_token_ids": True, "return_logprobs": True}
    expected, actual = (
        batch_generate(model, tokenizer, prompts, verbose=False, **options)
        for model, tokenizer in (stock, lily)
    )
    assert all(expected.texts)
    assert all(isinstance(x, float) for row in expected.logprobs for x in row)
    assert actual.texts == expected.texts
    assert actual.token_ids == expected.token_ids
    assert actual.logprobs == expected.logprobs  # floats, each equal to the bit


@pytest.mark.parametrize("direction", ["stock to lily", "lily to stock"])
def test_saved_prompt_cache_crosses_engines(stock, lily, prompt, tmp_path, same, direction):
    writer, reader = (stock[0], lily[0]) if direction == "stock to lily" else (lily[0], stock[0])
    _, cache = prefill(writer, mx.array([prompt]), 16)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache, {"model": "tiny"})
    follow_up = mx.array([[11, 12, 13]])
    expected, _ = prefill(writer, follow_up, 3, cache)
    read = load_prompt_cache(file)
    assert [type(c) for c in read] == [type(c) for c in cache]
    actual, _ = prefill(reader, follow_up, 3, read)
    same(actual, expected)


def test_converted_model_is_lily_and_equal(stock, lily, reference, same):
    model, _ = mlx_lm.load(str(TINY))
    assert type(model) is type(stock[0])
    converted = lily_mlx.convert(model)
    assert converted is model
    assert type(model) is type(lily[0])
    assert lily_mlx.convert(model) is model
    tokens = mx.array(reference[0][:1, :9])
    same(model(tokens), stock[0](tokens))


def test_dense_model_of_random_weights_is_equal(same):
    """qwen3_5 without experts: the same DeltaNet and attention around a plain MLP."""
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3_5 as stock_module

    from lily_mlx.models import qwen3_5 as lily_module

    mx.random.seed(3)
    args = stock_module.ModelArgs.from_dict(dense_config())
    expected, actual = stock_module.Model(args), lily_module.Model(copy.deepcopy(args))
    actual.load_weights(tree_flatten(expected.parameters()), strict=True)
    tokens = mx.array(np.random.default_rng(0).integers(0, 512, (2, 33)))
    same(prefill(actual, tokens, 16)[0], prefill(expected, tokens, 16)[0])


def dense_config():
    """A flat config of a small dense model."""
    return {
        "model_type": "qwen3_5",
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }


def test_agrees_with_hugging_face(lily, reference):
    """4-bit weights against the unquantised reference: mean KL near 5.5e-2, top-1 near 89 %."""
    tokens, logits = reference
    rows, length = 2, 96  # half of the sequences, half of their length, to keep the CPU run short
    ours = np.array(prefill(lily[0], mx.array(tokens[:rows, :length]), 96)[0].astype(mx.float32))
    ours, theirs = log_softmax(ours), log_softmax(logits[:rows, :length])
    kl = (np.exp(theirs) * (theirs - ours)).sum(-1).mean()
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).mean()
    assert kl < 8e-2
    assert agreement > 0.85


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
