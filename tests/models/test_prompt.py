"""The compiled chunks of a prompt: stock's results and caches, and new when the model changes."""

import itertools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from lily_mlx import prompt
from lily_mlx.ahead import Ahead
from lily_mlx.launch import backend
from lily_mlx.launch.kernel import all_kernels
from lily_mlx.layers import attention
from lily_mlx.prompt import MAX_SIZES, prompt_step
from lily_mlx.step import CAPACITY_STEP
from tests.models.test_step import assert_close, small_models

CHUNKS = [mx.array([[1, 2, 3, 4, 5]]), mx.array([[6, 7, 8, 9, 10]]), mx.array([[11, 12, 13, 14, 15]])]


@pytest.fixture
def compiled_ops(monkeypatch):
    """Chunks as a GPU would compile them, with every op on MLX's own: what can be compiled without a GPU.

    Without ``expert_route`` routing would read on the CPU; without the products that need it, it is not run.
    """
    names = [kernel.stem for kernel in all_kernels() if kernel.stem != "expert_route"]
    monkeypatch.setenv("LILY_DISABLE", ",".join(names))
    with backend.override("metal"):
        yield


def run(model, chunks, cache):
    return mx.concatenate([model(chunk, cache=cache).astype(mx.float32) for chunk in chunks], axis=1)


def watch(model, monkeypatch) -> list[bool]:
    """Notes for each call of the model's prompt step whether it was taken."""
    step, taken = prompt_step(model), []
    why_not = step.why_not

    def noted(inputs, cache):
        why = why_not(inputs, cache)
        taken.append(why is None)
        return why

    monkeypatch.setattr(step, "why_not", noted)
    return taken


@pytest.mark.usefixtures("compiled_ops")
@pytest.mark.parametrize("quantise", [False, True])
def test_equals_stock_and_leaves_stocks_caches(monkeypatch, quantise):
    stock, lily = small_models(quantise)
    taken = watch(lily, monkeypatch)
    theirs, ours = make_prompt_cache(stock), make_prompt_cache(lily)
    assert_close(run(lily, CHUNKS, ours), run(stock, CHUNKS, theirs))
    assert taken == [False, True, True]  # a size is compiled when it comes for the second time
    assert [type(c) for c in ours] == [type(c) for c in theirs]
    assert [c.offset for c in ours if isinstance(c, KVCache)] == [15]
    # crosswise, a chunk and then a token
    for tokens in (CHUNKS[0], mx.array([[3]])):
        assert_close(run(stock, [tokens], ours), run(lily, [tokens], theirs))


@pytest.mark.usefixtures("compiled_ops")
@pytest.mark.parametrize(("tokens_ahead", "together", "waiting"), [(5, 1, 1), (40, 2, 4), (10_000, 8, 250)])
def test_layers_are_given_to_the_gpu_in_groups(monkeypatch, tokens_ahead, together, waiting):
    """The GPU begins while a short chunk is prepared, and only so many layers of any wait for it."""
    _, lily = small_models()
    assert len(lily.layers) % 2 == 0
    starts = []

    class Noted(Ahead):
        def __init__(self, count):
            super().__init__(count)
            starts.append(count)

        def start(self, result):
            super().start(result)
            starts.append(result)

    monkeypatch.setattr(prompt, "Ahead", Noted)
    monkeypatch.setattr(prompt, "TOKENS_AHEAD", tokens_ahead)
    run(lily, CHUNKS[:2], make_prompt_cache(lily))
    assert starts[0] == waiting
    assert len(starts) == 1 + len(lily.layers) // together


@pytest.mark.usefixtures("compiled_ops")
def test_a_prompts_cache_has_room_for_an_answer():
    """Or the first token would copy every layer's keys and values into larger arrays."""
    _, lily = small_models()
    cache = make_prompt_cache(lily)
    run(lily, CHUNKS[:1], make_prompt_cache(lily))
    run(lily, CHUNKS[1:2], cache)
    assert {c.keys.shape[2] for c in cache if isinstance(c, KVCache)} == {CAPACITY_STEP}


@pytest.mark.usefixtures("compiled_ops")
def test_a_batch_of_one_length(monkeypatch):
    stock, lily = small_models()
    taken = watch(lily, monkeypatch)
    chunks = [mx.concatenate([a, b]) for a, b in itertools.pairwise(CHUNKS)]
    caches = [make_prompt_cache(m) for m in (lily, stock)]
    assert_close(run(lily, chunks, caches[0]), run(stock, chunks, caches[1]))
    assert taken == [False, True]


@pytest.mark.usefixtures("compiled_ops")
@pytest.mark.parametrize("change", ["weights", "lora"])
def test_sees_a_changed_model(change):
    stock, lily = small_models()
    caches = [make_prompt_cache(m) for m in (stock, lily)]
    for model, cache in zip((stock, lily), caches, strict=True):
        run(model, CHUNKS[:2], cache)
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
    assert_close(run(lily, CHUNKS, caches[1]), run(stock, CHUNKS, caches[0]))


@pytest.mark.usefixtures("compiled_ops")
def test_why_not(monkeypatch):
    _, lily = small_models()
    step = prompt_step(lily)
    cache = make_prompt_cache(lily)
    assert "first time" in step.why_not(CHUNKS[0], cache)
    assert step.why_not(CHUNKS[0], cache) is None
    assert "not a chunk" in step.why_not(mx.array([[1]]), cache)
    padded = [BatchKVCache([1]) if isinstance(c, KVCache) else c for c in cache]
    assert "padded rows" in step.why_not(CHUNKS[0], padded)
    with backend.override("host"):
        assert "host" in step.why_not(CHUNKS[0], cache)
    monkeypatch.setenv("LILY_DISABLE", "qmm")  # other settings are another computation
    assert "first time" in step.why_not(CHUNKS[0], cache)
    monkeypatch.setenv("LILY_DISABLE", "expert_route")
    assert "on the CPU" in step.why_not(CHUNKS[0], cache)


@pytest.mark.usefixtures("compiled_ops")
def test_only_so_many_sizes_are_kept():
    _, lily = small_models()
    step = prompt_step(lily)
    cache = make_prompt_cache(lily)
    for tokens in range(2, MAX_SIZES + 3):
        step.why_not(mx.zeros((1, tokens), mx.int32), cache)
    assert len(step._seen) <= MAX_SIZES


@pytest.mark.usefixtures("compiled_ops")
@pytest.mark.parametrize("tokens", [CHUNKS[0], mx.array([[1]])])
def test_a_first_call_keeps_no_weights_in_memory(tokens):
    """It joins matrices: who holds the parts afterwards holds the model twice."""
    _, lily = small_models()
    mx.eval(lily.parameters(), run(lily, [tokens], make_prompt_cache(lily)))
    embedding = lily.language_model.model.embed_tokens
    before = mx.get_active_memory()
    embedding.weight = embedding.weight + 0
    mx.eval(embedding.weight)
    assert mx.get_active_memory() < before + embedding.weight.nbytes


def attention_problem(T, S, B=2):
    """An attention layer, and queries, keys and values for it."""
    _, lily = small_models()
    layer = next(layer.self_attn for layer in lily.layers if not layer.is_linear)
    Hq, Hk, D = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    q = mx.random.normal((B, Hq, T, D))
    return layer, q, *(mx.random.normal((B, Hk, S, D)) for _ in range(2))


@pytest.mark.parametrize(
    "kind",
    ["causal", "none", "rows", "one row", "batch", "numbers", "quantised", "quantised, causal"],
)
@pytest.mark.parametrize("context", [0, 9])
def test_attention_in_pieces_is_the_same(monkeypatch, kind, context):
    """Also under the masks of padded batches, and over quantised caches."""
    T, S = 7, context + 7
    layer, q, keys, values = attention_problem(T, S)
    rows = mx.arange(context, S)[:, None] >= mx.arange(S)
    mask = {
        "causal": "causal",
        "none": None,
        "one row": mx.arange(S)[None] > 0,
        "batch": rows & (mx.arange(S) > mx.array([0, 2])[:, None, None, None]),
        "numbers": mx.where(rows, mx.random.normal(rows.shape), -1e9),
        "quantised, causal": "causal",
    }.get(kind, rows)
    cache = None
    if kind.startswith("quantised"):
        cache = QuantizedKVCache(group_size=32, bits=8)
        keys, values = cache.update_and_fetch(keys, values)
    whole = layer.attend(q + 0, keys, values, mask, cache)  # stock scales its queries in place
    calls = []
    inner = attention.stock.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.stock,
        "scaled_dot_product_attention",
        lambda q, *a, **k: calls.append(q.shape[2]) or inner(q, *a, **k),
    )
    monkeypatch.setattr(attention, "MAX_PAIRS", 3 * 2 * S)
    assert_close(layer.attend(q, keys, values, mask, cache), whole, 1e-6)
    assert calls == [3, 3, 1]


@pytest.mark.parametrize("context", [0, 9])
def test_attention_spelt_out_is_the_same_and_its_scores_have_one_size(monkeypatch, context):
    T, S = 8, context + 8
    layer, q, keys, values = attention_problem(T, S)
    whole = layer.attend(q, keys, values, "causal")
    shapes = []
    inner = attention._masked
    monkeypatch.setattr(attention, "_masked", lambda s, *a: shapes.append(s.shape) or inner(s, *a))
    monkeypatch.setattr(attention, "_keeps_scores", lambda D: True)
    monkeypatch.setattr(attention, "MAX_PAIRS", 3 * 2 * S)
    assert_close(layer.attend(q, keys, values, "causal"), whole, 1e-6)
    Hq = layer.num_attention_heads
    assert shapes == [(2, Hq, 3, S)] * 2 + [(2, Hq, 2, S)]


@pytest.mark.parametrize("spelt_out", [False, True])
def test_more_queries_than_keys_are_stocks(monkeypatch, spelt_out):
    layer, q, keys, values = attention_problem(7, 4, B=1)
    whole = layer.attend(q, keys, values, "causal")
    monkeypatch.setattr(attention, "_keeps_scores", lambda D: spelt_out)
    monkeypatch.setattr(attention, "MAX_PAIRS", 8)
    assert mx.array_equal(layer.attend(q, keys, values, "causal"), whole)


@pytest.mark.usefixtures("compiled_ops")
def test_few_layers_are_prepared_ahead_of_the_gpu(monkeypatch):
    """What a layer waits for is the one before: then scratch memory is that of two layers."""
    stock, lily = small_models()
    queued, waited = [], []
    start, wait = mx.async_eval, mx.eval
    monkeypatch.setattr(prompt, "TOKENS_AHEAD", 5)
    monkeypatch.setattr(mx, "async_eval", lambda x: (queued.append(x), start(x)))
    monkeypatch.setattr(
        mx, "eval", lambda *x: (waited.extend(a for a in x if isinstance(a, mx.array)), wait(*x))
    )
    theirs, ours = make_prompt_cache(stock), make_prompt_cache(lily)
    found = run(lily, CHUNKS[:2], ours)
    layers = len(lily.layers)
    assert [id(x) for x in waited] == [id(x) for x in queued[:-1]]
    assert len(queued) == layers > 1
    assert_close(found, run(stock, CHUNKS[:2], theirs))


@pytest.mark.usefixtures("compiled_ops")
def test_a_chunk_inside_a_transformation(monkeypatch):
    stock, lily = small_models()
    monkeypatch.setattr(prompt, "TOKENS_AHEAD", 5)
    run(lily, CHUNKS[:1], make_prompt_cache(lily))
    compiled = mx.compile(lambda chunk: lily(chunk, cache=make_prompt_cache(lily)))
    assert_close(compiled(CHUNKS[1]), run(stock, CHUNKS[1:2], make_prompt_cache(stock)))
