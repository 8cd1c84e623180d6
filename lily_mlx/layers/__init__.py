"""Layers that call Lily's ops where those support the case, and are stock's layers everywhere else."""

from __future__ import annotations

from mlx_lm.models import qwen3_5 as stock

from .gated_delta_net import GatedDeltaNet

LAYER_CLASSES: dict[type, type] = {stock.GatedDeltaNet: GatedDeltaNet}
"""Stock layer class -> the Lily class that subclasses it."""
