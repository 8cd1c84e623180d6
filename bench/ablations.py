"""The mechanisms of the reference engine, their switches here, and what its authors say each gains.

The figures are the reference engine's own ablations on a 40-core M5 Max with 128 GB. They stand beside our
measurements and are not ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ablation:
    """One mechanism.

    Attributes:
        mechanism: its number in the feature table.
        text: what it is.
        phase: ``prefill`` or ``decode``.
        switch: its name in ``LILY_DISABLE``; None while nothing here can be switched.
        reference: the reference engine's gain in per cent by length.
        reference_text: its figure where it gives another kind than a gain in speed.
    """

    mechanism: str
    text: str
    phase: str
    switch: str | None = None
    reference: dict[int, float] = field(default_factory=dict)
    reference_text: str = ""


ABLATIONS = (
    Ablation("P1", "4-bit experts dequantised inside the grouped product", "prefill", reference={512: 77.4}),
    Ablation("P2", "routing on the GPU", "prefill", reference={512: 89.0}),
    Ablation("P3", "tile size follows the expert load", "prefill", reference={2048: 13.2}),
    Ablation("P4", "scan with the state in registers", "prefill", "gated_delta_scan", reference={2048: 5.6}),
    Ablation("P5", "long prompts in bounded chunks", "prefill"),
    Ablation(
        "P6", "matrix accelerators", "prefill", reference_text="80 to 86 % of the matrix limit in the model"
    ),
    Ablation(
        "D1",
        "row-parallel product for one row",
        "decode",
        "qmv",
        reference_text="90.3 % of sustained read bandwidth",
    ),
    Ablation("D2", "the selected token stays on the GPU", "decode"),
    Ablation(
        "D3", "independent kernels overlap", "decode", reference_text="795 kernels a token in 555 stages"
    ),
    Ablation("D4", "gate and up with the activation", "decode", "expert_gate_up"),
    Ablation("D4", "down with routing weight and shared expert", "decode", "expert_down"),
    Ablation("D4", "q and k preparation", "decode", "qk_prepare"),
    Ablation("D4", "recurrent update with its normalisation", "decode", "gated_delta_step"),
    Ablation("D5", "coalesced reads of the KV cache", "decode", reference={3840: 2.1}),
    Ablation(
        "D6",
        "query heads share each KV row (here with D5, D7)",
        "decode",
        "attention_decode",
        reference={32768: 23.8},
    ),
    Ablation(
        "D7",
        "attention layout by context length",
        "decode",
        reference={32768: 7.7, 65536: 27.4, 131072: 40.2},
    ),
)
"""Every mechanism of the reference engine, switchable here or not."""
