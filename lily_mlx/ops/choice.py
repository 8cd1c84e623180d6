"""Whether an op's kernel runs: wanted at all, trusted on this GPU, and made for these arrays."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..launch import backend
from ..settings import settings
from .trust import distrust

_MATRIX_PRODUCTS = {"qmm", "expert_gemm_gate_up", "expert_gemm_down"}
_STOCK_PRODUCTS = (
    "this chip has neural accelerators; stock's product is the default until ours is measured faster here"
)


def switched_off(op: str) -> bool:
    """Whether ``LILY_DISABLE`` names the op, as measurements of what it gains do."""
    return op in settings().disabled_ops


def why_off(op: str) -> str | None:
    """None if the kernel of ``op`` may run here, else the reason it does not.

    Args:
        op: the op's name, as in ``LILY_DISABLE`` and in ``lily-mlx explain``.
    """
    if switched_off(op):
        return f"LILY_DISABLE names {op}"
    used = backend.resolve()
    if used == "ops":
        return "the ops back-end is MLX's own ops"
    if op in _MATRIX_PRODUCTS and used == "metal" and backend.neural_accelerators()[0]:
        return _STOCK_PRODUCTS
    return distrust(op, used)


def why_not(op: str, *operands: Any, **options: Any) -> str | None:
    """None if the kernel of ``op`` runs for these operands here, else the reason it does not.

    Args:
        op: the op's name.
        operands, options: what ``ops.<op>.supports`` takes.
    """
    return why_off(op) or import_module(f"lily_mlx.ops.{op}").supports(*operands, **options)
