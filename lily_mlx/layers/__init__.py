"""Layers that call Lily's ops where those support the case, and are stock's layers everywhere else."""

from __future__ import annotations

from mlx_lm.models import qwen3_5 as stock

from .attention import Attention
from .feed_forward import MLP, SparseMoeBlock
from .gated_delta_net import GatedDeltaNet

LAYER_CLASSES: dict[type, type] = {
    stock.GatedDeltaNet: GatedDeltaNet,
    stock.Attention: Attention,
    stock.SparseMoeBlock: SparseMoeBlock,
    stock.MLP: MLP,
}
"""Stock layer class -> the Lily class that subclasses it."""
