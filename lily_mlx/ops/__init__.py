"""Lily's operations. Importing this package declares every kernel."""

from __future__ import annotations

from . import (
    attention_combine,
    attention_decode,
    attention_gate,
    expert_combine,
    expert_down,
    expert_gate_up,
    expert_gemm_down,
    expert_gemm_gate_up,
    expert_route,
    gated_delta_prepare,
    gated_delta_scan,
    gated_delta_step,
    gated_rms_norm,
    qk_prepare,
    qmm,
    qmv,
)

__all__ = [
    "attention_combine",
    "attention_decode",
    "attention_gate",
    "expert_combine",
    "expert_down",
    "expert_gate_up",
    "expert_gemm_down",
    "expert_gemm_gate_up",
    "expert_route",
    "gated_delta_prepare",
    "gated_delta_scan",
    "gated_delta_step",
    "gated_rms_norm",
    "qk_prepare",
    "qmm",
    "qmv",
]
