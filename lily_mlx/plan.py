"""What runs for each op of a model: a Lily kernel, or stock with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .checkpoint import Checkpoint

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class OpPlan:
    """The path of one op in one phase.

    Attributes:
        op: the op's name.
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
    """Yield the path of every op of a forward pass, in the order of the model.

    Args:
        checkpoint: the model.
        backend: the resolved back-end.
    """
    text = checkpoint.text_config
    layers = text["num_hidden_layers"]
    attention = layers // text.get("full_attention_interval", 4)
    moe = bool(text.get("num_experts"))
    ops = [
        ("embedding", 1),
        ("deltanet input projections", layers - attention),
        ("deltanet conv and norms", layers - attention),
        ("gated_delta_scan", layers - attention),
        ("deltanet gated norm and output", layers - attention),
        ("attention input projections", attention),
        ("q and k preparation", attention),
        ("attention", attention),
        ("attention output", attention),
        *([("routing", layers), ("experts", layers), ("shared expert", layers)] if moe else [("mlp", layers)]),
        ("output head", 1),
    ]
    for phase in PHASES:
        for op, count in ops:
            yield OpPlan(op, count, phase, "stock", _why_stock(op, backend))


def _why_stock(op: str, backend: str) -> str:
    if backend == "ops":
        return "the ops back-end is MLX's own ops"
    return "no Lily kernel for it yet"
