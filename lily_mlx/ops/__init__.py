"""Lily's operations. Importing this package declares every kernel."""

from __future__ import annotations

from . import (
    attention_combine,
    attention_decode,
    expert_down,
    expert_gate_up,
    gated_delta_scan,
    gated_delta_step,
    qk_prepare,
    qmv,
)

__all__ = [
    "attention_combine",
    "attention_decode",
    "expert_down",
    "expert_gate_up",
    "gated_delta_scan",
    "gated_delta_step",
    "qk_prepare",
    "qmv",
]
