"""Lily's model classes: stock's, with Lily's layer classes inside.

A Lily class adds no parameter and no state. It is therefore enough to change the class of a stock model's
modules, which is what both loading (:mod:`.qwen3_5_moe`, :mod:`.qwen3_5`) and ``lily_mlx.convert`` do.
"""

from __future__ import annotations

from mlx import nn

from ..layers import LAYER_CLASSES


def adopt(model: nn.Module) -> None:
    """Change the class of every stock layer in the model to the Lily class that subclasses it."""
    for module in model.modules():
        if replacement := LAYER_CLASSES.get(type(module)):
            module.__class__ = replacement


def lily_class(cls: type) -> type | None:
    """The Lily class for a stock model class (or for itself), None if there is none."""
    from . import qwen3_5, qwen3_5_moe

    for lily in (qwen3_5_moe.Model, qwen3_5.Model):
        if cls in (lily, *lily.__bases__):
            return lily
    return None
