"""A small seeded model with every kernel engaged, on the host back-end, against stock over long runs.

In float32, where stock and Lily differ by rounding alone, so that a wrong kernel shows whatever the length.
"""

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5_moe as stock_module
from mlx_lm.models.cache import KVCache, make_prompt_cache

import lily_mlx
from lily_mlx.counters import counts
from lily_mlx.layers import attention
from lily_mlx.settings import OPS
from tests.plugin.test_cases import small_moe

VOCABULARY = 128
BOUND = 1e-3
"""Of log-probabilities, as for the tiny checkpoint; sums in another order alone move them by 1e-4."""


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")


def build(dtype=mx.float32):
    """Stock's model and Lily's of the same 4-bit weights, three DeltaNet layers and one of attention."""
    models = []
    for _ in range(2):
        mx.random.seed(6)
        sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "head_dim": 64}
        model = stock_module.Model(stock_module.ModelArgs.from_dict(small_moe(**sizes)))
        nn.quantize(model, group_size=64, bits=4)
        model.set_dtype(dtype)
        model.eval()
        models.append(model)
    return models[0], lily_mlx.convert(models[1])


@pytest.fixture(scope="module")
def models():
    return build()


def tokens_of(count):
    return mx.random.randint(0, VOCABULARY, (1, count), key=mx.random.key(count))


def forced(model, tokens, lengths, cache=None):
    """Log-probabilities [T, V] of every position, read in chunks of the lengths."""
    cache = cache or make_prompt_cache(model)
    parts, start = [], 0
    for length in lengths:
        logits = model(tokens[:, start : start + length], cache=cache)[0].astype(mx.float32)
        parts.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(parts[-1], [c.state for c in cache])
        start += length
    return np.array(mx.concatenate(parts))


def chunks(total, step):
    return [min(step, total - start) for start in range(0, total, step)]


@pytest.mark.parametrize("step", [1, 7, 64, 70, 2048])
def test_any_chunking_gives_stocks_probabilities_and_states(models, step):
    stock, lily = models
    tokens = tokens_of(70)
    caches = [make_prompt_cache(model) for model in models]
    expected = forced(stock, tokens, [70], caches[0])
    counts.clear()
    actual = forced(lily, tokens, chunks(70, step), caches[1])
    linear = sum(layer.is_linear for layer in lily.layers)
    steps = len(chunks(70, step)) * linear - (linear if step == 1 else 0)  # a first token alone is stock's
    assert counts["op.gated_delta_scan"] + counts["op.gated_delta_step"] == steps
    assert np.abs(actual - expected).max() < BOUND
    for theirs, ours in zip(*caches, strict=True):
        if isinstance(theirs, KVCache):
            assert theirs.offset == ours.offset
        pairs = list(zip(arrays_of(theirs), arrays_of(ours), strict=True))
        assert len(pairs) == 2
        for a, b in pairs:
            if isinstance(theirs, KVCache):
                a, b = (x[:, :, : theirs.offset] for x in (a, b))  # ours has more room
            assert (mx.abs(a - b).max() / mx.abs(a).max()).item() < 1e-3


def arrays_of(entry):
    """The two arrays of a layer's cache; an ArraysCache has them in a list."""
    return [array for _, array in tree_flatten(entry.state) if isinstance(array, mx.array)]


def run(model, tokens, lengths):
    """Logits [B, T, V] and what the caches hold."""
    cache, parts = make_prompt_cache(model), []
    for part in mx.split(tokens, np.cumsum(lengths)[:-1].tolist(), axis=1):
        parts.append(model(part, cache=cache))
        mx.eval(parts[-1], [entry.state for entry in cache])
    states = [array for entry in cache for array in arrays_of(entry)]
    assert len(states) == 2 * len(cache)
    return mx.concatenate(parts, axis=1), states


def test_two_runs_are_bitwise_equal(models):
    _, lily = models
    tokens, lengths = tokens_of(50), [33, 14, 1, 1, 1]
    (logits, states), (again, states_again) = (run(lily, tokens, lengths) for _ in range(2))
    assert mx.array_equal(logits, again)
    assert all(map(mx.array_equal, states, states_again))


def test_batch_rows_never_see_each_other(models):
    """A row beside either of two others, in a prompt and in decoding: the same bits. And what it is alone."""
    _, lily = models
    row, one, other = tokens_of(40), tokens_of(41)[:, :40], tokens_of(42)[:, :40]
    lengths = [23, 15, 1, 1]
    (logits, states), (again, states_again) = (
        run(lily, mx.concatenate([row, beside]), lengths) for beside in (one, other)
    )
    assert mx.array_equal(logits[0], again[0])
    assert not mx.array_equal(logits[1], again[1])
    assert all(mx.array_equal(a[0], b[0]) for a, b in zip(states, states_again, strict=True))
    alone, _ = run(lily, row, lengths)
    assert mx.abs(logits[0] - alone[0]).max().item() < BOUND


def test_prefill_then_decode_is_decoding_token_by_token(models):
    _, lily = models
    tokens = tokens_of(40)
    (logits, states), (token_by_token, each) = (run(lily, tokens, n) for n in ([33, *[1] * 7], [1] * 40))
    assert mx.abs(logits - token_by_token).max().item() < BOUND
    for a, b in zip(states, each, strict=True):
        assert (mx.abs(a - b).max() / mx.abs(b).max()).item() < 1e-3


def test_decoding_across_a_full_cache_is_the_full_pass(models, monkeypatch):
    """From 1,020 to 1,030 tokens: attention's second layout and the growth of the cache at 1,024."""
    stock, lily = models
    tokens = tokens_of(1030)
    expected = forced(stock, tokens, [1030])[1020:]
    cache = make_prompt_cache(lily)
    monkeypatch.setenv("LILY_BACKEND", "ops")
    forced(lily, tokens[:, :1020], [1020], cache)
    monkeypatch.setenv("LILY_BACKEND", "host")
    counts.clear()
    actual = forced(lily, tokens[:, 1020:], [1] * 10, cache)
    assert counts["op.attention_decode"] == 10
    # Sums in another order move them by 3e-5, one key of all these left out by 4e-4.
    assert np.abs(actual - expected).max(axis=-1) == pytest.approx(np.zeros(10), abs=2e-4)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (240, 16),  # the cache is full after each turn: the next one makes it anew
        (64, 10),  # the next turn's prompt is written into it
    ],
)
def test_a_chat_does_not_drift_from_turn_to_turn(models, prompt, answer):
    """Five turns through one cache."""
    caches = [make_prompt_cache(model) for model in models]
    linear = sum(layer.is_linear for layer in models[1].layers)
    for turn in range(5):
        tokens = tokens_of(256 + turn)[:, : prompt + answer]
        lengths = [prompt, *[1] * answer]
        counts.clear()
        p, q = (forced(m, tokens, lengths, c) for m, c in zip(models, caches, strict=True))
        assert (counts["op.gated_delta_scan"], counts["op.gated_delta_step"]) == (linear, answer * linear)
        assert counts["op.attention_decode"] == answer * (len(models[1].layers) - linear)
        assert np.abs(p - q).max() < BOUND, turn
        divergence = (np.exp(p) * (p - q)).sum(-1).mean()
        assert abs(divergence) < 1e-6, turn
        assert (p.argmax(-1) == q.argmax(-1)).mean() > 0.99, turn  # near ties aside


def test_float16_runs_in_the_kernels():
    """Activations and scales in float16; as far from float32 as stock's float16 is."""
    stock, lily = build(mx.float16)
    exact, _ = build()
    tokens, lengths = tokens_of(70), [60, 2, *[1] * 8]  # many tokens are routed in other launches than few
    expected = forced(exact, tokens, lengths)
    counts.clear()
    actual = forced(lily, tokens, lengths)
    assert {op for op in OPS if counts[f"op.{op}"]} == set(OPS)
    stocks = np.abs(forced(stock, tokens, lengths) - expected)
    ours = np.abs(actual - expected)
    assert ours.mean() < 1.5 * stocks.mean()
    assert ours.max() < 2 * stocks.max()


def test_the_default_prefill_step_engages_the_kernels_to_the_last_chunk(models):
    """A chunk of 2,048 and one of 19; the prompt's last token is the first step of decoding."""
    stock, lily = models
    tokens = tokens_of(2048 + 19 + 1)
    counts.clear()
    ((token, _),) = generate_step(tokens[0], lily, max_tokens=1)
    layers = len(lily.layers)
    linear = sum(layer.is_linear for layer in lily.layers)
    for op in ("gated_delta_prepare", "gated_delta_scan", "gated_rms_norm"):
        assert counts[f"op.{op}"] == 2 * linear, op
    for op in ("expert_gemm_gate_up", "expert_gemm_down", "expert_combine"):
        assert counts[f"op.{op}"] == 2 * layers, op
    assert counts["op.expert_choose"] + counts["op.expert_route"] == 2 * layers
    assert counts["op.qmm"] == 2 * 3 * layers  # into and out of the mixer, the router
    assert counts["op.attention_gate"] == 2 * (layers - linear)
    assert int(token) == int(stock(tokens)[0, -1].argmax())


def cache_of(model, context):
    """A prompt's cache after ``context`` tokens: keys and values at random, states after four tokens."""
    cache = make_prompt_cache(model)
    model(tokens_of(4), cache=cache)
    for entry in cache:
        if isinstance(entry, KVCache):
            _, heads, _, size = entry.keys.shape
            entry.keys = entry.values = None
            entry.offset = 0
            shape = (2, 1, heads, context, size)
            entry.update_and_fetch(*mx.random.normal(shape, key=mx.random.key(context)))
    mx.eval([entry.state for entry in cache])
    return cache


def memory_of_two_chunks(model, context):
    """Bytes that two chunks of 64 tokens after ``context`` others take at most, and keep."""
    cache, tokens = cache_of(model, context), tokens_of(128)
    mx.eval(tokens, model.parameters())
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for chunk in mx.split(tokens, 2, axis=1):
        mx.eval(model(chunk, cache=cache), [entry.state for entry in cache])
    return mx.get_peak_memory() - before, mx.get_active_memory() - before


@pytest.fixture
def evaluation_in_step():
    """Over its limit of memory MLX waits before it starts an op, so that a peak does not depend on timing."""
    before = mx.set_memory_limit(1)
    yield
    mx.set_memory_limit(before)


@pytest.mark.usefixtures("evaluation_in_step")
def test_peak_memory_grows_with_the_context_no_faster_than_stocks(models):
    """Between contexts at which keys, values and scores are what takes most in both."""
    contexts = (2048, 4096)
    (stock, stock_keeps), (lily, lily_keeps) = (
        zip(*(memory_of_two_chunks(model, context) for context in contexts), strict=True) for model in models
    )
    keys_and_values = 2 * 2 * 64 * 4 * (4096 - 2048)
    assert stock[1] - stock[0] > 0.9 * keys_and_values, "what is measured grows with the context"
    assert lily[1] - lily[0] < 1.1 * (stock[1] - stock[0])
    assert lily[1] < 1.1 * stock[1]
    assert max(lily_keeps) < 1.1 * min(stock_keeps)  # of a chunk's scratch nothing stays


@pytest.mark.usefixtures("evaluation_in_step")
def test_scores_do_not_grow_with_the_context(models, monkeypatch):
    """Attention in pieces: what grows is one copy of keys and values, which the cache makes as it grows."""
    _, lily = models
    monkeypatch.setattr(attention, "MAX_PAIRS", 64 * 256)
    shorter, longer = (memory_of_two_chunks(lily, context)[0] for context in (1024, 2048))
    keys_and_values = 2 * 2 * 64 * 4 * (2048 - 1024)
    assert longer - shorter < 1.1 * keys_and_values
