"""Qwen3.5/3.6 dense models: a drop-in for ``mlx_lm.models.qwen3_5``."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_5 as stock

from ..counters import counts
from . import adopt

ModelArgs = stock.ModelArgs


class Model(stock.Model):
    """Stock's model with Lily's layers; parameter names, caches and methods are stock's."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        adopt(self)

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        counts["model.qwen3_5"] += 1
        return super().__call__(*args, **kwargs)


def __getattr__(name: str) -> Any:
    # Whoever imports something else from the module that this one stands in for gets stock's.
    return getattr(stock, name)
