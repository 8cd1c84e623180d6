"""Whether an op's kernel is wanted at all, before anyone looks at shapes."""

from __future__ import annotations

from ..launch import backend
from ..settings import settings
from .trust import distrust


def why_off(op: str) -> str | None:
    """None if the kernel of ``op`` may run here, else the reason it does not.

    Args:
        op: the op's name, as in ``LILY_DISABLE`` and in ``lily-mlx explain``.
    """
    if op in settings().disabled_ops:
        return f"LILY_DISABLE names {op}"
    used = backend.resolve()
    if used == "ops":
        return "the ops back-end is MLX's own ops"
    return distrust(op, used)
