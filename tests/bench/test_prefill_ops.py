"""bench.ops.prefill: the loads that it makes, and that both arms of an op are held against its reference."""

import numpy as np
import pytest

from bench.ops import prefill

T, E = 512, 64


@pytest.mark.parametrize("load", prefill.LOADS)
def test_loads(load):
    prefill.mx.random.seed(0)
    routed = prefill.Routed.of(load, T, E, "host")
    rows = np.bincount(np.array(routed.experts), minlength=E)
    assert rows.sum() == T * prefill.TOP_K
    assert (np.array(routed.tokens) < T).all()
    mean = T * prefill.TOP_K / E
    if load == "uniform":
        assert 0.5 * mean < rows.min() < rows.max() < 1.5 * mean
    elif load == "half":
        assert T / 2 <= rows[E // 3] < 0.6 * T
    elif load == "zipf":
        assert rows[:4].mean() > 4 * rows[E // 2 :].mean() > 0
    else:
        assert rows[: prefill.TOP_K].tolist() == [T] * prefill.TOP_K
        assert routed.used_experts == prefill.TOP_K


def test_an_arm_that_is_wrong_has_no_time():
    prefill.mx.random.seed(0)
    job = prefill.attention_gate_job(6, prefill.Shape().shrunk(16), "host")
    clock = prefill.Clock(32)
    job.arms["mlx"].results = lambda: [job.want[0] * 1.5]
    lily, mlx = prefill.measure(job, clock, "host", 1, float("inf"))
    assert lily["errors"][0] <= prefill.ROUNDED
    assert "gpu_s" in lily
    assert mlx["failure"].startswith("wrong")
    assert "gpu_s" not in mlx
    late = prefill.measure(job, clock, "host", 1, 0.0)
    assert [record["failure"] for record in late] == ["out of time"] * 2
