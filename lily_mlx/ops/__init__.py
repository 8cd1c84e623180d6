"""Lily's operations. Importing this package declares every kernel."""

from __future__ import annotations

from . import (
    gated_delta_scan,
    gated_delta_step,
    qk_prepare,
    qmv,
)

__all__ = [
    "gated_delta_scan",
    "gated_delta_step",
    "qk_prepare",
    "qmv",
]
