"""Stock's caches as the compiled steps take them: a batch's of one row, and those that others wrote to."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from lily_mlx import caches
from lily_mlx.counters import counts
from lily_mlx.step import DecodeStep, decode_step
from tests.models.test_step import assert_close, compiled_ops, decode, small_models

__all__ = ["compiled_ops"]  # a fixture

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]


def generate(model, prompts, lengths):
    """The tokens of each prompt, from stock's generator of batches."""
    generator = BatchGenerator(model, completion_batch_size=4, prefill_batch_size=4)
    uids = generator.insert(prompts, max_tokens=lengths)
    tokens = {uid: [] for uid in uids}
    while any(len(tokens[uid]) < length for uid, length in zip(uids, lengths, strict=True)):
        for response in generator.next_generated():
            tokens[response.uid].append(response.token)
    generator.close()
    return [tokens[uid] for uid in uids]


@pytest.mark.parametrize(("rows", "steps"), [(1, 23), (3, 17)])
def test_a_batchs_generator_gives_stocks_tokens(compiled_ops, monkeypatch, rows, steps):
    """A row by itself takes the decode step, also when it is what is left of a batch."""
    stock, lily = small_models()
    prompts, lengths = PROMPTS[:rows], [24, 4, 6][:rows]
    expected = generate(stock, prompts, lengths)
    taken = []
    run = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda *a: taken.append(1) or run(*a))
    assert generate(lily, prompts, lengths) == expected
    assert steps <= len(taken) <= steps + 2  # the generator is a token or two ahead


def test_a_batchs_caches_of_one_row_are_taken_and_left_whole(compiled_ops):
    stock, lily = small_models()
    prompt = mx.array([PROMPTS[0]])
    runs = []
    for model in (stock, lily):
        cache = [c.merge([c]) for c in make_prompt_cache(model)]
        model(prompt, cache=cache)
        step = decode_step(model) if model is lily else None
        assert step is None or step.why_not(mx.array([[1]]), cache) is None
        logits = decode(model, cache, range(7, 12))
        runs.append((logits, cache))
    (expected, theirs), (actual, ours) = runs
    assert_close(actual, expected)
    for one, other in zip(theirs, ours, strict=True):
        if isinstance(one, BatchKVCache):
            assert other._idx == one._idx == 11
            assert other.offset.tolist() == one.offset.tolist() == [11]
            assert_close(other.keys[..., :11, :], one.keys[..., :11, :])
        else:
            assert_close(other[1], one[1])
    assert_close(decode(stock, ours, [12, 13]), decode(lily, theirs, [12, 13]))


def test_padded_rows_are_not_taken(compiled_ops):
    _, lily = small_models()
    cache = [c.merge([c]) for c in make_prompt_cache(lily)]
    lily(mx.array([PROMPTS[0]]), cache=cache)
    assert caches.why_not(cache) is None
    padded = copy.deepcopy(cache)
    for c in padded:
        if isinstance(c, BatchKVCache):
            c.left_padding = mx.array([2])
    assert "attention layer's cache holds padded rows" in caches.why_not(padded)
    for c in padded:
        if isinstance(c, ArraysCache):
            c.left_padding = mx.array([1])
    assert "linear layer's cache holds padded rows" in caches.why_not(padded)
    assert caches.why_not(cache) is None


def test_a_row_that_is_padded_later_is_noticed(compiled_ops):
    """Stock adds padding to the array that it has: nothing but the cache's offset is another object then."""
    stock, lily = small_models()
    results = []
    for model in (stock, lily):
        cache = [c.merge([c]) for c in make_prompt_cache(model)]
        model(mx.array([PROMPTS[0]]), cache=cache)
        decode(model, cache, [5, 6])
        for c in cache:
            c.prepare(lengths=[2], right_padding=[2])
        model(mx.array([[7, 8, 0, 0]]), cache=cache)
        for c in cache:
            c.finalize()
        results.append(decode(model, cache, [9, 10, 11]))
        offsets = [c.offset.tolist() for c in cache if isinstance(c, BatchKVCache)]
        assert offsets == [[13]] * len(offsets)
    assert_close(*results[::-1])


def test_segments_of_unequal_lengths(compiled_ops):
    """Rows of a batch are equally long, then not, then again: stock pads in between."""
    segments = [
        [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [3]],
        [[4, 3, 2, 1], [6, 7], [12, 11, 10, 9], [5]],
    ]
    found = []
    for model in small_models():
        rows = []
        for parts in ([[[4] * 4] * 3] * 2, segments):  # first so that chunks of four are compiled
            generator = BatchGenerator(model, completion_batch_size=4, prefill_batch_size=4)
            generator.insert_segments(parts, max_tokens=[3] * 2)
            for _ in range(12):
                rows += [(r.uid, r.token, r.logprobs) for r in generator.next_generated()]
            generator.close()
        found.append(sorted(rows, key=lambda row: row[0]))
    assert [row[:2] for row in found[0]] == [row[:2] for row in found[1]]
    assert len(found[0]) >= 8
    for one, other in zip(*found, strict=True):
        assert mx.abs(one[2] - other[2]).max() < 1e-3


def test_reloaded_caches_are_taken(compiled_ops, tmp_path):
    stock, lily = small_models()
    cache = [c.merge([c]) for c in make_prompt_cache(lily)]
    lily(mx.array([PROMPTS[0]]), cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    reloaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    expected = decode(stock, cache, [7, 8])
    assert_close(decode(lily, reloaded, [7, 8]), expected)


def test_single_tokens_of_a_batch_run_as_in_stock(lily, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")
    model, _ = lily
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3], [4, 5, 6]]), cache=cache))
    counts.clear()
    mx.eval(model(mx.array([[7], [8]]), cache=cache))
    assert not [name for name in counts if name.startswith("op.")]


@pytest.mark.parametrize(
    ("by", "batch", "before"),
    [("lily", False, 6), ("lily", True, 6), ("stock", True, 6), ("stock", False, 300)],
)
def test_tokens_that_are_taken_back_leave_nothing(compiled_ops, by, batch, before):
    """Three tokens are decoded, two taken back, and a chunk of two brings the cache to the same length."""
    stock, lily = small_models()
    results = []
    for model in (stock, lily):
        cache = make_prompt_cache(model)
        if batch:
            cache = [c.merge([c]) for c in cache]
        model(mx.arange(before)[None] % 50, cache=cache)
        decode(model, cache, [7])
        states = [list(c.cache) if isinstance(c, ArraysCache) else None for c in cache]
        decode(model, cache, [8, 9])
        for c, state in zip(cache, states, strict=True):
            if state is None:
                c.trim(2)
            else:
                c.cache = state
        {"lily": model, "stock": stock}[by](mx.array([[20, 21]]), cache=cache)
        results.append(decode(model, cache, [10, 11, 12]))
    assert_close(*results[::-1])
