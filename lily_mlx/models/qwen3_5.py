"""Qwen3.5/3.6 dense models: a drop-in for ``mlx_lm.models.qwen3_5``."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import qwen3_5 as stock

from . import LilyModel, adopt

ModelArgs = stock.ModelArgs


class Model(LilyModel, stock.Model):
    """Stock's model with Lily's layers; parameter names, caches and methods are stock's."""

    def __init__(self, args: Any) -> None:
        stock.Model.__init__(self, args)
        adopt(self)


def __getattr__(name: str) -> Any:
    # Whoever imports something else from the module that this one stands in for gets stock's.
    return getattr(stock, name)
