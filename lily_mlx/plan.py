"""What runs for each op of a model: a Lily kernel, or stock with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .checkpoint import Checkpoint
from .layers.fusion import why_apart
from .ops import (
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
from .ops.choice import switched_off, why_off
from .ops.packed import Packed
from .ops.tile_product import grouped_tile

PHASES = {"prefill": 2048, "decode": 1}
"""The phases and the tokens of a step in each; the prefill step is mlx_lm's default."""

_NO_KERNEL = "no Lily kernel for it yet"
_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True)
class OpPlan:
    """The path of one op in one phase.

    Attributes:
        op: the op's name; ``LILY_DISABLE`` knows those of kernels by it.
        layers: how many layers call it; 1 for what runs once.
        phase: ``prefill`` or ``decode``.
        path: ``stock``, or the back-end whose Lily kernel runs.
        why: the reason, in words.
    """

    op: str
    layers: int
    phase: str
    path: str
    why: str


def plan(checkpoint: Checkpoint, backend: str) -> Iterator[OpPlan]:
    """Yield the path of every op of a forward pass at batch 1, in the order of the model.

    A decoded token runs as described here when its caches are stock's plain ones and hold a prompt already;
    ``step.DecodeStep.why_not`` has the rest of the cases, in which single tokens run as in stock.

    Args:
        checkpoint: the model.
        backend: the resolved back-end.
    """
    for phase, tokens in PHASES.items():
        examples = _Examples(checkpoint, backend, tokens)
        for op, count, kernel, why in examples.prefill() if phase == "prefill" else examples.decode():
            if reason := (why_off(kernel) if kernel else None) or why:
                yield OpPlan(op, count, phase, "stock", reason)
            else:
                yield OpPlan(op, count, phase, backend, f"kernel {kernel}")


Row = tuple[str, int, str | None, str | None]
"""An op, how many layers call it, its kernel, and why that does not take the shape."""


class _Examples:
    """Asks each op's ``supports`` about arrays of the checkpoint's shapes, which are never evaluated."""

    def __init__(self, checkpoint: Checkpoint, backend: str, tokens: int) -> None:
        self.text = checkpoint.text_config
        self.quantization = checkpoint.config.get("quantization") or {}
        self.dtype = activation_dtype(checkpoint)
        self.backend = backend
        self.tokens = tokens
        self.layers = self.text["num_hidden_layers"]
        self.attention = self.layers // (self.text.get("full_attention_interval") or 4)
        self.linear = self.layers - self.attention
        self.moe = bool(self.text.get("num_experts"))

    def prefill(self) -> list[Row]:
        feed_forward = self._experts() if self.moe else [("mlp", self.layers, None, _NO_KERNEL)]
        return [
            ("embedding", 1, None, _NO_KERNEL),
            ("DeltaNet projections", self.linear, "qmm", self._many(self._deltanet_rows())),
            ("DeltaNet conv and norms", self.linear, "gated_delta_prepare", self._prepare_scan()),
            ("DeltaNet recurrence", self.linear, "gated_delta_scan", self._scan()),
            ("DeltaNet gated norm", self.linear, "gated_rms_norm", self._norm_scan()),
            ("attention projections", self.attention, "qmm", self._many(self._attention_rows())),
            ("q and k preparation", self.attention, "qk_prepare", self._prepare()),
            ("attention", self.attention, None, _NO_KERNEL),
            ("attention output gate", self.attention, "attention_gate", self._gate()),
            *feed_forward,
            ("output head", 1, None, _NO_KERNEL),
        ]

    def decode(self) -> list[Row]:
        text = self.text
        if self.moe:
            feed_forward: list[Row] = [
                ("router", self.layers, "qmv", self._router()),
                ("routing, gate and up", self.layers, "expert_gate_up", self._gate_up()),
                ("expert down", self.layers, "expert_down", self._down()),
            ]
        else:
            width = text["intermediate_size"]
            feed_forward = [("mlp", self.layers, "qmv", self._products([width, width]))]
        return [
            ("embedding", 1, None, _NO_KERNEL),
            ("DeltaNet projections", self.linear, "qmv", self._products(self._deltanet_rows())),
            ("DeltaNet step", self.linear, "gated_delta_step", self._step()),
            ("attention projections", self.attention, "qmv", self._products(self._attention_rows())),
            ("q and k preparation", self.attention, "qk_prepare", self._prepare()),
            ("attention", self.attention, "attention_decode", self._attend()),
            *feed_forward,
            ("output head", 1, "qmv", self._products([text["vocab_size"]])),
        ]

    def _head_size(self) -> int:
        return int(self.text.get("head_dim") or self.text["hidden_size"] // self.text["num_attention_heads"])

    def _key_width(self) -> int:
        return int(self.text["linear_num_key_heads"] * self.text["linear_key_head_dim"])

    def _value_heads(self) -> int:
        return int(self.text["linear_num_value_heads"])

    def _value_width(self) -> int:
        return self._value_heads() * int(self.text["linear_value_head_dim"])

    def _conv_channels(self) -> int:
        return 2 * self._key_width() + self._value_width()

    def _conv_width(self) -> int:
        return int(self.text.get("linear_conv_kernel_dim") or 4)

    def _deltanet_rows(self) -> list[int]:
        """Columns of a DeltaNet layer's projections: qkv, z, b, a."""
        return [self._conv_channels(), self._value_width(), *[self._value_heads()] * 2]

    def _attention_rows(self) -> list[int]:
        Hq, Hk, D = self.text["num_attention_heads"], self.text["num_key_value_heads"], self._head_size()
        return [2 * Hq * D, Hk * D, Hk * D]

    def _zeros(self, *shape: int, dtype: mx.Dtype | None = None) -> mx.array:
        return mx.zeros(shape, dtype or self.dtype)

    def _packed(self, *shape: int, bits: int | None = None) -> Packed:
        """A matrix [..., N, K] as the checkpoint's default quantisation stores it."""
        bits = bits or int(self.quantization["bits"])
        group = int(self.quantization["group_size"])
        *rows, columns = shape
        scales = self._zeros(*rows, columns // group)
        return Packed(self._zeros(*rows, columns * bits // 32, dtype=mx.uint32), scales, scales, bits, group)

    def _ask(self, op: Any, *operands: Any, **options: Any) -> str | None:
        reason: str | None = op.supports(*operands, **options, backend=self.backend)
        return reason

    def _not_quantised(self) -> str | None:
        mode = self.quantization.get("mode", "affine")
        if not self.quantization:
            return "the weights are not quantised"
        return None if mode == "affine" else f"the weights are quantised as {mode}, not affine"

    def _products(self, rows: list[int], bits: int | None = None) -> str | None:
        width = self.text["hidden_size"]
        return self._not_quantised() or self._ask(
            qmv,
            self._zeros(1, 1, width),
            self._packed(sum(rows), width, bits=bits),
            norm_weight=self._zeros(width),
        )

    def _many(
        self, rows: list[int], bits: int | None = None, out_dtype: mx.Dtype | None = None
    ) -> str | None:
        width = self.text["hidden_size"]
        return self._not_quantised() or self._ask(
            qmm,
            self._zeros(self.tokens, width),
            [self._packed(sum(rows), width, bits=bits)],
            out_dtype=out_dtype,
        )

    def _experts(self) -> list[Row]:
        """A prompt's mixture of experts: stock's as a whole unless routing and both products are ours."""
        ops = {
            "router": "qmm",
            "routing": "expert_route",
            "experts' gate and up": "expert_gemm_gate_up",
            "experts' down": "expert_gemm_down",
            "experts' sum": "expert_combine",
        }
        whys = self._why_not_experts()
        whole = ("expert_gemm_gate_up", "expert_gemm_down", "expert_route")
        # Switched off, routing alone moves to the CPU; not trusted, the block is stock's.
        needed = [op for op in whole if op != "expert_route" or not switched_off(op)]
        off = [reason for op in needed if (reason := why_off(op))]
        blocks = [*off, *(reason for op in whole if (reason := whys[op]))]
        stock = f"the block is stock's: {blocks[0]}" if blocks else None
        return [(name, self.layers, op, whys[op] or stock) for name, op in ops.items()]

    def _why_not_experts(self) -> dict[str, str | None]:
        text, T, H = self.text, self.tokens, self.text["hidden_size"]
        E, M, MS = text["num_experts"], text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
        k = text["num_experts_per_tok"]
        unable = None if text.get("norm_topk_prob", True) else "norm_topk_prob is false"
        if unable := unable or self._not_quantised():
            names = ("qmm", "expert_route", "expert_gemm_gate_up", "expert_gemm_down", "expert_combine")
            return dict.fromkeys(names, unable)
        block_rows = grouped_tile(T, k, E, self.backend)["rows"]
        groups = (
            self._zeros(T * (k + 1), dtype=mx.int32),
            self._zeros(expert_route.max_blocks(T, E, k, block_rows), 4, dtype=mx.int32),
            self._zeros(8, dtype=mx.int32),
        )
        gate_up = [*[self._packed(E, M, H)] * 2, *[self._packed(MS, H)] * 2]
        down = [self._packed(E, H, M), self._packed(H, MS)]
        logits = self._zeros(T, E + 1, dtype=mx.float32)
        results = (self._zeros(T * (k + 1), H), self._zeros(T, k + 1, dtype=mx.float32))
        return {
            "qmm": self._many([E, 1], bits=8, out_dtype=mx.float32),
            "expert_route": self._ask(expert_route, logits, k, block_rows),
            "expert_gemm_gate_up": self._ask(expert_gemm_gate_up, self._zeros(T, H), *groups, *gate_up, k),
            "expert_gemm_down": self._ask(expert_gemm_down, self._zeros(T * (k + 1), M), *groups, *down, k),
            "expert_combine": self._ask(expert_combine, *results),
        }

    def _router(self) -> str | None:
        """Of one token, whose block is stock's as a whole where neither half of the experts can be joined."""
        if reason := self._products([self.text["num_experts"], 1], bits=8):
            return reason
        apart = [why_apart(matrices) for matrices in self._halves()]
        return f"the block is stock's: {apart[0]}" if all(apart) else None

    def _halves(self) -> tuple[list[Packed], list[Packed]]:
        """What is joined: the experts' and the shared expert's matrices of gate or up, and of down."""
        text, width = self.text, self.text["hidden_size"]
        E, M, MS = text["num_experts"], text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
        gate_up = [self._packed(E, M, width), self._packed(MS, width)]
        return gate_up, [self._packed(E, width, M), self._packed(width, MS)]

    def _gate_up(self) -> str | None:
        text, width = self.text, self.text["hidden_size"]
        E, M = text["num_experts"], text["moe_intermediate_size"]
        if not text.get("norm_topk_prob", True):
            return "norm_topk_prob is false"
        if reason := self._not_quantised():
            return reason
        return why_apart(self._halves()[0]) or self._ask(
            expert_gate_up,
            self._zeros(1, 1, width),
            self._zeros(width),
            self._zeros(1, 1, E + 1, dtype=mx.float32),
            self._packed(2 * (E + 1), M, width),
            text["num_experts_per_tok"],
        )

    def _down(self) -> str | None:
        text, width, k = self.text, self.text["hidden_size"], self.text["num_experts_per_tok"]
        E, M = text["num_experts"], text["moe_intermediate_size"]
        if reason := self._not_quantised():
            return reason
        return why_apart(self._halves()[1]) or self._ask(
            expert_down,
            self._zeros((k + 1) * (M + 2), dtype=mx.float32),
            self._zeros(1, 1, width),
            self._packed(E + 1, width, M),
            k,
        )

    def _step(self) -> str | None:
        Hk, Hv = self.text["linear_num_key_heads"], self._value_heads()
        Dk, Dv = self.text["linear_key_head_dim"], self.text["linear_value_head_dim"]
        channels, width = self._conv_channels(), self._conv_width()
        b = channels + self._value_width()
        return self._ask(
            gated_delta_step,
            self._zeros(1, 1, sum(self._deltanet_rows())),
            self._zeros(channels, width, 1),
            self._zeros(1, width - 1, channels),
            *[self._zeros(Hv)] * 2,
            self._zeros(Dv),
            self._zeros(1, Hv, Dv, Dk, dtype=mx.float32),
            Hk=Hk,
            offsets=(0, channels, b, b + Hv),
        )

    def _prepare(self) -> str | None:
        Hq, Hk, D = self.text["num_attention_heads"], self.text["num_key_value_heads"], self._head_size()
        rope = self.text.get("rope_parameters") or {}
        kind = rope.get("type") or rope.get("rope_type") or "default"
        if kind != "default":
            return f"rope of type {kind}"
        rotary = int(D * rope.get("partial_rotary_factor", 0.25))
        projected = self._zeros(1, self.tokens, 2 * (Hq + Hk) * D)
        return self._ask(
            qk_prepare,
            projected,
            *[self._zeros(D)] * 2,
            self._zeros(rotary // 2, dtype=mx.float32),
            self._zeros(8, dtype=mx.int32),
            Hq=Hq,
            Hk=Hk,
            offsets=(0, 2 * Hq * D, (2 * Hq + Hk) * D),
        )

    def _attend(self) -> str | None:
        Hq, Hk, D = self.text["num_attention_heads"], self.text["num_key_value_heads"], self._head_size()
        return self._ask(
            attention_decode,
            self._zeros(1, Hq, 1, D, dtype=mx.float32),
            *[self._zeros(1, Hk, 256, D)] * 2,
            self._zeros(1, 1, 2 * (Hq + Hk) * D),
            self._zeros(8, dtype=mx.int32),
        )

    def _gate(self) -> str | None:
        Hq, Hk, D = self.text["num_attention_heads"], self.text["num_key_value_heads"], self._head_size()
        return self._ask(
            attention_gate,
            self._zeros(1, Hq, self.tokens, D),
            self._zeros(1, self.tokens, 2 * (Hq + Hk) * D),
        )

    def _prepare_scan(self) -> str | None:
        Hk, Hv = self.text["linear_num_key_heads"], self._value_heads()
        channels, width = self._conv_channels(), self._conv_width()
        b = channels + self._value_width()
        return self._ask(
            gated_delta_prepare,
            *[self._zeros(1, self.tokens, sum(self._deltanet_rows()))] * 3,
            self._zeros(channels, width, 1),
            self._zeros(1, width - 1, channels),
            *[self._zeros(Hv)] * 2,
            Hk=Hk,
            Dk=self.text["linear_key_head_dim"],
            Dv=self.text["linear_value_head_dim"],
            offsets=(0, b, b + Hv),
        )

    def _norm_scan(self) -> str | None:
        Hv, Dv = self._value_heads(), self.text["linear_value_head_dim"]
        return self._ask(
            gated_rms_norm,
            self._zeros(1, self.tokens, Hv, Dv),
            self._zeros(1, self.tokens, sum(self._deltanet_rows())),
            self._zeros(Dv),
            offset=self._conv_channels(),
        )

    def _scan(self) -> str | None:
        Hk, Hv = self.text["linear_num_key_heads"], self._value_heads()
        Dk, Dv = self.text["linear_key_head_dim"], self.text["linear_value_head_dim"]
        q = self._zeros(1, self.tokens, Hk, Dk)
        return self._ask(
            gated_delta_scan,
            q,
            q,
            self._zeros(1, self.tokens, Hv, Dv),
            self._zeros(1, self.tokens, Hv, dtype=mx.float32),
            self._zeros(1, self.tokens, Hv),
            self._zeros(1, Hv, Dv, Dk, dtype=mx.float32),
        )


def activation_dtype(checkpoint: Checkpoint) -> mx.Dtype:
    """The dtype of activations: that of the embedding, or of its scales where it is quantised."""
    for suffix in (".embed_tokens.scales", ".embed_tokens.weight"):
        for name, tensor in checkpoint.tensors.items():
            if name.endswith(suffix) and tensor.dtype in _DTYPES:
                return _DTYPES[tensor.dtype]
    return mx.bfloat16
