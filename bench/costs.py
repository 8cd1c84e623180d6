"""What a measurement takes at least, counted from the model's arrays: FLOP and bytes of memory traffic.

Counted are products (two FLOP a weight and token), attention, the recurrence, the weights that a step needs
(of experts, those that so many tokens choose on average if all are equally likely), the KV cache and the
recurrent state. Activations are not: a fused engine need not write them.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from .ops.machine import copy_bandwidth, matrix_peak

MAX_LENGTH = 1 << 20
"""The most tokens of a prompt or context: four times what these models are trained for."""


@dataclass(frozen=True)
class Work:
    """FLOP and bytes."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def to_dict(self) -> dict[str, int]:
        return {"flops": round(self.flops), "bytes": round(self.bytes)}


def prefill(model: nn.Module, length: int, step: int) -> Work:
    """A prompt of ``length`` tokens in chunks as stock cuts them: the last token comes alone, with a head."""
    total = Work(0, 0)
    done = 0
    while done < length - 1:
        tokens = min(step, length - 1 - done)
        total += forward(model, tokens, done, head=False)
        done += tokens
    return total + forward(model, 1, done)


def decode(model: nn.Module, length: int, tokens: int) -> Work:
    """``tokens`` steps, the first at ``length`` tokens of context."""
    one = forward(model, 1, length + tokens // 2)
    return Work(one.flops * tokens, one.bytes * tokens)


def forward(model: nn.Module, tokens: int, context: int, head: bool = True) -> Work:
    """One call with ``tokens`` tokens after ``context`` tokens."""
    total = Work(0, 0)
    for path, module in model.named_modules():
        if path.endswith("lm_head") and not head:
            continue
        total += _weights(module, model, tokens)
    for layer in model.layers:
        total += _recurrence(layer, tokens) if layer.is_linear else _attention(layer, tokens, context)
    return total


def _weights(module: nn.Module, model: nn.Module, tokens: int) -> Work:
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return Work(0, 0)  # a row a token
    if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
        experts, chosen = module.num_experts, _experts_per_token(model)
        touched = 1 - (1 - chosen / experts) ** tokens
        size = module.input_dims * module.output_dims
        return Work(2 * tokens * chosen * size, touched * _nbytes(module))
    if isinstance(module, nn.Linear):
        return Work(2 * tokens * module.weight.size, _nbytes(module))
    if isinstance(module, nn.QuantizedLinear):
        outputs, words = module.weight.shape
        return Work(2 * tokens * outputs * words * 32 // module.bits, _nbytes(module))
    return Work(0, 0)


def _experts_per_token(model: nn.Module) -> int:
    return next(layer.mlp.top_k for layer in model.layers if "switch_mlp" in layer.mlp)


def _nbytes(module: nn.Module) -> int:
    return sum(value.nbytes for value in module.values() if isinstance(value, mx.array))


def _attention(layer: nn.Module, tokens: int, context: int) -> Work:
    a = layer.self_attn
    positions = context + (tokens + 1) / 2  # that a token attends to, on average
    kv_row = 2 * a.num_key_value_heads * a.head_dim * 2
    return Work(4 * tokens * positions * a.num_attention_heads * a.head_dim, (context + 2 * tokens) * kv_row)


def _recurrence(layer: nn.Module, tokens: int) -> Work:
    a = layer.linear_attn
    state = a.num_v_heads * a.head_k_dim * a.head_v_dim
    return Work(7 * tokens * state, 2 * 4 * state)  # decay 1, readout 2, update 2, output 2; fp32, in and out


def peaks() -> dict[str, float]:
    """The machine's limits as MLX reaches them: ``bandwidth`` of a copy and ``matrix_peak`` of a product.

    Returns:
        Bytes a second, read and written; FLOP a second of bfloat16.
    """
    on_gpu = mx.default_device() == mx.gpu
    return {
        "bandwidth": copy_bandwidth((64 if on_gpu else 8) << 20),
        # So many that launching them is little of the time.
        "matrix_peak": matrix_peak(4096 if on_gpu else 256, calls=8),
    }
