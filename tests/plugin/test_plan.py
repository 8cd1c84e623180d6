"""`lily-mlx explain` says what the layers do: its decisions against the kernels that a real step launches."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from lily_mlx.checkpoint import read_checkpoint
from lily_mlx.counters import counts
from lily_mlx.plan import plan
from tests.conftest import TINY


def test_plan_is_what_runs(lily, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")
    model, _ = lily
    planned = [op for op in plan(read_checkpoint(TINY), "host") if op.path == "host"]
    for phase, tokens in (("prefill", [[1, 2, 3]]), ("decode", [[4]])):
        if phase == "prefill":
            cache = make_prompt_cache(model)
        counts.clear()
        mx.eval(model(mx.array(tokens), cache=cache))
        ran = {name.removeprefix("op.") for name in counts if name.startswith("op.")}
        ran.discard("attention_combine")  # attention's second pass, not an op of its own in the plan
        assert {op.why.removeprefix("kernel ") for op in planned if op.phase == phase} == ran


def test_a_switched_off_op_is_named(monkeypatch):
    monkeypatch.setenv("LILY_DISABLE", "expert_down")
    found = {op.op: op for op in plan(read_checkpoint(TINY), "host") if op.phase == "decode"}
    assert found["expert down"].path == "stock"
    assert "LILY_DISABLE names expert_down" in found["expert down"].why


def test_reasons_come_from_the_shapes(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")
    checkpoint = read_checkpoint(TINY)
    checkpoint.config["quantization"] = {"mode": "mxfp4", "bits": 4, "group_size": 32}
    found = {op.op: op for op in plan(checkpoint, "host") if op.phase == "decode"}
    assert "mxfp4" in found["DeltaNet projections"].why
    assert found["attention"].path == "host"
