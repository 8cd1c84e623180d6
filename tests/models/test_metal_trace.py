"""What a Metal machine would run for a step of the tiny checkpoint, traced here."""

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
