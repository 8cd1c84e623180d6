"""The whole tiny checkpoint's prefill in Lily's kernels, on the host back-end, in fp32 against stock."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import lily_mlx
from bench import numerics
from bench.oracle import fp32_oracle
from lily_mlx.counters import counts
from tests.conftest import TINY

TOKENS = 66  # more than one chunk of 64, and a last chunk that is not full


def log_probabilities(model, tokens, step):
    """Of every position [T, V], computed in chunks of ``step`` tokens."""
    cache = make_prompt_cache(model)
    parts = []
    for start in range(0, tokens.shape[1], step):
        logits = model(tokens[:, start : start + step], cache=cache)[0].astype(mx.float32)
        parts.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(parts[-1], [c.state for c in cache])
    return np.array(mx.concatenate(parts))


@pytest.fixture(scope="module")
def in_fp32(reference):
    """Lily's model, tokens and stock's log-probabilities, all but the weights in fp32."""
    tokens = mx.array(reference[0][:1, :TOKENS])
    stock, _ = mlx_lm.load(str(TINY))
    stock.set_dtype(mx.float32)
    lily, _ = lily_mlx.load(TINY)
    lily.set_dtype(mx.float32)
    return lily, tokens, log_probabilities(stock, tokens, TOKENS)


def test_log_probabilities_are_stocks(in_fp32, monkeypatch):
    """In fp32, because rounding to bfloat16 moves this model's by more than a wrong kernel might."""
    model, tokens, expected = in_fp32
    monkeypatch.setenv("LILY_BACKEND", "host")
    counts.clear()
    actual = log_probabilities(model, tokens, 64)
    chunks, layers = 2, len(model.layers)
    linear = sum(layer.is_linear for layer in model.layers)
    for op in ("gated_delta_prepare", "gated_delta_scan", "gated_rms_norm"):
        assert counts[f"op.{op}"] == chunks * linear, op
    for op in ("qk_prepare", "attention_gate"):
        assert counts[f"op.{op}"] == chunks * (layers - linear), op
    for op in ("expert_gemm_gate_up", "expert_gemm_down", "expert_combine"):
        assert counts[f"op.{op}"] == chunks * layers, op
    assert counts["op.expert_route"] == counts["op.expert_choose"] == layers  # few tokens, many
    assert counts["op.qmm"] == chunks * 3 * layers  # into and out of the mixer, the router
    assert np.abs(actual - expected).max() < 1e-3


def test_no_farther_from_the_truth_than_stock(reference, monkeypatch):
    """The checkpoint as it is, in bfloat16, against the same weights in fp32: teacher-forced KL and top-1."""
    tokens = reference[0][0, :24]
    stock, _ = mlx_lm.load(str(TINY))
    lily, _ = lily_mlx.load(TINY)
    exact = fp32_oracle(stock)
    logits = {"oracle": numerics.teacher_forced(exact, tokens, len(tokens))}
    logits["stock"] = numerics.teacher_forced(stock, tokens, len(tokens))
    monkeypatch.setenv("LILY_BACKEND", "host")
    counts.clear()
    logits["lily"] = numerics.teacher_forced(lily, tokens, len(tokens))
    assert counts["op.expert_gemm_gate_up"] == len(lily.layers)
    theirs, ours = (numerics.compare(logits["oracle"], logits[name]) for name in ("stock", "lily"))
    assert ours["mean_kl"] <= theirs["mean_kl"]
    assert ours["top1_agreement"] >= theirs["top1_agreement"] - 2 / len(tokens)  # near ties fall either way
