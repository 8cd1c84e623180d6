"""Layers that call Lily's ops where those support the case, and are stock's layers everywhere else."""

from __future__ import annotations

LAYER_CLASSES: dict[type, type] = {}
"""Stock layer class -> the Lily class that subclasses it."""
