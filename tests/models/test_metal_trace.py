"""What a Metal machine would run for a step of the tiny checkpoint, traced here."""

import re
from collections import Counter

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from lily_mlx.launch import backend, trace

STEPS = {"prefill": 7, "decode": 1}


@pytest.mark.parametrize("phase", STEPS)
def test_recurrence_is_one_primitive_per_layer(lily, monkeypatch, phase):
    model, _ = lily
    cache = make_prompt_cache(model)
    monkeypatch.setenv("LILY_BACKEND", "ops")
    model(mx.array([[1, 2, 3]]), cache=cache)
    mx.eval([c.state for c in cache])
    monkeypatch.delenv("LILY_BACKEND")
    tokens = mx.array([list(range(STEPS[phase]))])
    with backend.override("metal"):
        found = trace.primitives(lambda x: model(x, cache=cache), tokens)
    stem = "gated_delta_scan" if phase == "prefill" else "gated_delta_step"
    scans = [p for p in found if p.source is not None and stem in p.name]
    assert len(scans) == sum(layer.is_linear for layer in model.layers)
    assert {p.dispatches for p in scans} == {1}, "its inputs are as the kernels before it wrote them"
    assert "[[kernel]] void" in scans[0].source


def test_a_prompt_is_read_on_the_cpu_nowhere(lily, monkeypatch):
    """A trace has no values to read: it fails where a layer would. Routing on the CPU shows that it does."""
    model, _ = lily
    tokens = mx.array([list(range(64))])
    with backend.override("metal"):
        found = trace.primitives(lambda x: model(x, cache=make_prompt_cache(model)), tokens)
        monkeypatch.setenv("LILY_DISABLE", "expert_route")
        with pytest.raises(trace.TraceError, match="eval"):
            trace.primitives(lambda x: model(x, cache=make_prompt_cache(model)), tokens)
    launches = Counter(re.sub("_[0-9a-f]{16}__.*", "", p.name) for p in found if p.dispatches)
    layers = len(model.layers)
    linear = sum(layer.is_linear for layer in model.layers)
    for op in ("choose", "scatter", "gemm_gate_up", "gemm_down", "combine"):
        assert launches[f"lily_expert_{op}"] == layers, op
    for op in ("gated_delta_prepare", "gated_delta_scan", "gated_rms_norm"):
        assert launches[f"lily_{op}"] == linear, op
    assert launches["lily_attention_gate"] == layers - linear
    assert launches["lily_qmm"] == 3 * layers  # into and out of the mixer, the router
    assert launches["RMSNorm"] == launches["Add"] + 1 == 2 * layers + 1
