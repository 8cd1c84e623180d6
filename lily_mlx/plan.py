"""What runs for each op of a model: a Lily kernel, or stock with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .checkpoint import Checkpoint
from .ops import gated_delta_scan
from .ops.choice import why_off

PHASES = {"prefill": 2048, "decode": 1}
"""The phases and the tokens of a step in each; the prefill step is mlx_lm's default."""

_NO_KERNEL = "no Lily kernel for it yet"
_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True)
class OpPlan:
    """The path of one op in one phase.

    Attributes:
        op: the op's name; ``LILY_DISABLE`` knows those of kernels by it.
        layers: how many layers call it; 1 for what runs once.
        phase: ``prefill`` or ``decode``.
        path: ``stock``, or the back-end whose Lily kernel runs.
        why: the reason, in words.
    """

    op: str
    layers: int
    phase: str
    path: str
    why: str


def plan(checkpoint: Checkpoint, backend: str) -> Iterator[OpPlan]:
    """Yield the path of every op of a forward pass at batch 1, in the order of the model.

    Args:
        checkpoint: the model.
        backend: the resolved back-end.
    """
    text = checkpoint.text_config
    dtype = activation_dtype(checkpoint)
    layers = text["num_hidden_layers"]
    attention = layers // text.get("full_attention_interval", 4)
    linear = layers - attention
    scan = gated_delta_scan.KERNEL.stem
    mlp = ["routing", "experts", "shared expert"] if text.get("num_experts") else ["mlp"]
    ops = [
        ("embedding", 1),
        ("DeltaNet projections", linear),
        ("DeltaNet conv and norms", linear),
        (scan, linear),
        ("DeltaNet gated norm", linear),
        ("attention projections", attention),
        ("q and k preparation", attention),
        ("attention", attention),
        *((op, layers) for op in mlp),
        ("output head", 1),
    ]
    for phase, tokens in PHASES.items():
        for op, count in ops:
            why = why_off(op) or (_why_not_scan(text, dtype, tokens, backend) if op == scan else _NO_KERNEL)
            if why:
                yield OpPlan(op, count, phase, "stock", why)
            else:
                yield OpPlan(op, count, phase, backend, "Lily's kernel supports the shape")


def activation_dtype(checkpoint: Checkpoint) -> mx.Dtype:
    """The dtype of activations: that of the embedding, or of its scales where it is quantised."""
    for suffix in (".embed_tokens.scales", ".embed_tokens.weight"):
        for name, tensor in checkpoint.tensors.items():
            if name.endswith(suffix) and tensor.dtype in _DTYPES:
                return _DTYPES[tensor.dtype]
    return mx.bfloat16


def _why_not_scan(text: dict[str, Any], dtype: mx.Dtype, tokens: int, backend: str) -> str | None:
    Hk, Hv = text["linear_num_key_heads"], text["linear_num_value_heads"]
    Dk, Dv = text["linear_key_head_dim"], text["linear_value_head_dim"]

    def example(*shape: int, dtype: mx.Dtype = dtype) -> mx.array:
        return mx.zeros(shape, dtype)  # never evaluated

    q = example(1, tokens, Hk, Dk)
    return gated_delta_scan.supports(
        q,
        q,
        example(1, tokens, Hv, Dv),
        example(1, tokens, Hv, dtype=mx.float32),
        example(1, tokens, Hv),
        example(1, Hv, Dv, Dk, dtype=mx.float32),
        backend=backend,
    )
