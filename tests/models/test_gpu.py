"""The tiny checkpoint on a GPU, at lengths that only a GPU gets through in a test: against stock beside it.

Skipped where MLX has no GPU. What the host back-end can show of the same is in test_host_model and
test_small_model. Stock reads its prompts token by token: in chunks it is wrong for this checkpoint on CUDA
with MLX 0.32.4 (bench.oracle.mended_products).
"""

import time

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from bench.ab import copy_of, random_cache
from bench.gate import MAX_KL, MAX_RELATIVE_ERROR, MIN_TOP1, agreement
from bench.oracle import fp32_oracle
from lily_mlx.counters import counts
from tests.conftest import DATA

pytestmark = pytest.mark.skipif(
    not (mx.metal.is_available() or mx.cuda.is_available()), reason="MLX has no GPU here"
)
ULP = 2.0**-7
"""Of bfloat16, relative: the spacing of the numbers just above a power of two."""


@pytest.fixture
def prompt(stock):
    text = (DATA / "heldout.txt").read_text()
    return mx.array(stock[1].encode(text)[:64])[None]


def greedy(model, prompt, count):
    """Tokens and the logits [count, V] that each was chosen from."""
    cache = make_prompt_cache(model)
    for position in range(prompt.size):
        logits = model(prompt[:, position : position + 1], cache=cache)
    tokens, rows = [], []
    for _ in range(count):
        token = logits.argmax(-1)
        tokens.append(int(token))
        rows.append(logits[0, 0])
        logits = model(token, cache=cache)
    return tokens, mx.stack(rows).astype(mx.float32)


def test_256_greedy_tokens_are_stocks_or_part_at_a_tie(stock, lily, prompt):
    (theirs, logits), (ours, _) = (greedy(model, prompt, 256) for model in (stock[0], lily[0]))
    first = next((i for i, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]), None)
    if first is not None:
        best, second = (logits[first, token].item() for token in (theirs[first], ours[first]))
        print(f"token {first}: stock's logit of its own choice is {best}, of Lily's {second}")
        assert best - second <= ULP * abs(best)


@pytest.mark.parametrize(
    "context", [1, 31, 32, 33, *range(1020, 1031), *range(4095, 4098), 8191, 16384, 32769]
)
def test_a_step_at_a_context_is_stocks(stock, lily, context):
    cache = random_cache(stock[0], context, seed=context)
    token = mx.array([[7]])
    theirs, ours = (model(token, cache=copy_of(cache))[0] for model in (stock[0], lily[0]))
    assert agreement(theirs, ours).relative_error < MAX_RELATIVE_ERROR


def settled_memory():
    """Active memory once MLX, in a thread of its own, has given back what finished launches had."""
    mx.synchronize()
    found = [0, mx.get_active_memory()]
    while found[-1] != found[-2]:
        time.sleep(0.05)
        found.append(mx.get_active_memory())
    return found[-1]


def test_memory_stays_over_2000_steps(lily, prompt):
    """No step copies a cache or keeps what the one before needed.

    Between growths of the KV cache, after each 100 steps as much is there as before, and during them no more
    than the results of the two steps that may be in flight, and less than a copy of keys and values, besides.
    That is asked of one window of each size: on a busy machine MLX may give buffers back late, but a copy
    would be in all.
    """
    model = lily[0]
    cache = make_prompt_cache(model)
    token = model(prompt, cache=cache)[:, -1:].argmax(-1)
    windows = {}
    for step in range(2001):
        last, token = token, model(token, cache=cache)[:, -1:].argmax(-1)
        mx.async_eval(token)  # one step ahead, as the generation loop
        last.item()
        if step % 100 == 0:
            mx.eval(token)
            peak, active = mx.get_peak_memory(), settled_memory()
            keys = sum(c.keys.nbytes for c in cache if isinstance(c, KVCache))
            windows.setdefault(keys, []).append((peak, active))
            mx.reset_peak_memory()
    states = sum(a.nbytes for c in cache if not isinstance(c, KVCache) for a in c.cache)
    in_flight = 2 * (states + 4 * model.args.text_config["vocab_size"])
    print({"windows": windows, "in flight": in_flight})
    full = {keys: found[1:] for keys, found in windows.items() if len(found) > 4}  # the first has the growth
    assert len(full) == 2
    for keys, found in full.items():
        assert len({active for _, active in found}) == 1
        assert min(peak - active for peak, active in found) < in_flight + 2 * keys


def test_a_long_prompt_in_chunks_is_the_oracles(stock, lily):
    """Chunks of one size are compiled from the second on, and queued a few layers ahead of the GPU."""
    text = stock[1].encode((DATA / "heldout.txt").read_text())
    tokens = mx.array((text * (8192 // len(text) + 1))[:8192])[None]
    counts.clear()
    last = []
    for model in (fp32_oracle(stock[0]), lily[0]):
        cache = make_prompt_cache(model)
        for start in range(0, 8192, 2048):
            logits = model(tokens[:, start : start + 2048], cache=cache)[0]
            mx.eval(logits, [c.state for c in cache])
        last.append(logits)
    assert counts["op.expert_gemm_gate_up"] == 4 * len(lily[0].layers)
    found = agreement(*last)
    assert found.relative_error < MAX_RELATIVE_ERROR
    assert found.kl < MAX_KL
    assert found.top1 > MIN_TOP1
