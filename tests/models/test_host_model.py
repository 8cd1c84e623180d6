"""The whole tiny checkpoint with every kernel engaged, on the host back-end."""

import mlx.core as mx
from mlx_lm.generate import generate_step

from lily_mlx.counters import counts
from lily_mlx.settings import OPS

PROMPT = "Complete this function: def add(a, b):"
DECODE = {"qmv", "gated_delta_step", "qk_prepare", "attention_decode", "expert_gate_up", "expert_down"}


def test_generates_with_every_kernel_engaged(stock, lily, monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")
    model, tokenizer = lily
    chat = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)

    def tokens(model):
        return [int(token) for token, _ in generate_step(mx.array(chat), model, max_tokens=20)]

    counts.clear()
    ours = tokens(model)
    steps = counts["model.qwen3_5_moe"]
    assert steps >= 20
    linear = sum(layer.is_linear for layer in model.layers)
    # The prompt's steps run the scan, each decoded token the step.
    assert counts["op.gated_delta_scan"] + counts["op.gated_delta_step"] == steps * linear
    for op in DECODE:
        assert counts[f"op.{op}"] >= 19 * (len(model.layers) - linear), op
    for op in set(OPS) - DECODE:
        assert counts[f"op.{op}"] > 0, op
    assert ours == tokens(stock[0])
    assert "def add(a, b)" in tokenizer.decode(ours)
