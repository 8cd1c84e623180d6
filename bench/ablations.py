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
        mechanism: its number in the feature table; more than one where a switch turns off several, "-" where
            the reference engine has none of it.
        text: what it is.
        phase: ``prefill`` or ``decode``.
        switch: its name in ``lily-without-NAME`` (:mod:`.switches`); None if nothing can be timed without it.
        reference: the reference engine's gain in per cent by length; of D5 and D6 one each.
        reference_text: its figure where it gives another kind than a gain in speed.
        why_no_switch: in words, if there is none.
    """

    mechanism: str
    text: str
    phase: str
    switch: str | None = None
    reference: dict[int, float] = field(default_factory=dict)
    reference_text: str = ""
    why_no_switch: str = ""


ABLATIONS = (
    Ablation(
        "P1",
        "4-bit experts dequantised inside the grouped product",
        "prefill",
        "expert_gemm",
        {512: 77.4},
    ),
    Ablation("P2", "routing on the GPU", "prefill", "expert_route", {512: 89.0}),
    Ablation("P3", "tile size follows the expert load", "prefill", "expert_tiles", {2048: 13.2}),
    Ablation(
        "P4",
        "scan with the state in registers",
        "prefill",
        "gated_delta_scan",
        {2048: 5.6},
    ),
    Ablation(
        "P5",
        "long prompts in bounded chunks",
        "prefill",
        "prompt_chunks",
    ),
    Ablation(
        "P6",
        "matrix accelerators",
        "prefill",
        reference_text="80 to 86 % of the matrix limit in the model",
        why_no_switch="no switch; see the share of the limit",
    ),
    Ablation("-", "a prompt's chunks compiled", "prefill", "prompt_step"),
    Ablation(
        "D1",
        "row-parallel product for one row",
        "decode",
        "qmv",
        reference_text="90.3 % of sustained read bandwidth",
    ),
    Ablation("D2", "the selected token stays on the GPU", "decode", "token_on_gpu"),
    Ablation(
        "D3",
        "independent kernels overlap (off: a launch more an attention layer)",
        "decode",
        "overlap",
        reference_text="795 kernels a token in 555 stages",
    ),
    Ablation("D4", "gate and up with the activation", "decode", "expert_gate_up"),
    Ablation("D4", "down with routing weight and shared expert", "decode", "expert_down"),
    Ablation("D4", "q and k preparation", "decode", "qk_prepare"),
    Ablation("D4", "recurrent update with its normalisation", "decode", "gated_delta_step"),
    Ablation(
        "D5, D6",
        "coalesced KV rows, shared by query heads",
        "decode",
        "attention_decode",
        {3840: 2.1, 32768: 23.8},
    ),
    Ablation(
        "D7",
        "attention layout by context length",
        "decode",
        "attention_layout",
        {32768: 7.7, 65536: 27.4, 131072: 40.2},
    ),
    Ablation("-", "a token's step compiled", "decode", "decode_step"),
)
"""Every mechanism of the reference engine, switchable here or not, and two of Lily's own."""
