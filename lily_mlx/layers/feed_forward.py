"""The feed-forward layers: stock's mixture of experts and MLP, with a decode step in Lily's kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_next as stock
from mlx_lm.models.activations import swiglu

from ..ops.choice import why_not
from ..ops.expert_down import expert_down
from ..ops.expert_gate_up import expert_gate_up
from .projection import packed, project


class SparseMoeBlock(stock.Qwen3NextSparseMoeBlock):
    """Stock's mixture of experts; :meth:`decode` is one token of it."""

    def decode(self, x: mx.array, norm: nn.RMSNorm) -> mx.array:
        """One token: norm, experts, shared expert and residual.

        Args:
            x: [1, 1, hidden size].
            norm: the layer's post-attention norm.

        Returns:
            [1, 1, hidden size].
        """
        # float32, because rounding logits changes which experts are chosen
        logits = project(x, [self.gate, self.shared_expert_gate], norm=norm, out_dtype=mx.float32)
        h, experts, weights, width = self._gate_up(x, norm, logits)
        down: list[Any] = [packed(self.switch_mlp.down_proj), packed(self.shared_expert.down_proj)]
        operands: tuple[Any, ...] = (h, experts, weights, x, *down)
        if None not in down and why_not("expert_down", *operands) is None:
            return expert_down(*operands)
        k = self.top_k
        y = self.switch_mlp.down_proj(h[: k * width].astype(x.dtype).reshape(k, 1, width), experts[:k])
        shared = self.shared_expert.down_proj(h[k * width :].astype(x.dtype))
        y = (y.reshape(k, -1) * weights[:k, None]).sum(axis=0) + weights[k] * shared
        return x + y.astype(x.dtype).reshape(x.shape)

    def _gate_up(
        self, x: mx.array, norm: nn.RMSNorm, logits: mx.array
    ) -> tuple[mx.array, mx.array, mx.array, int]:
        """h [top_k * M + MS] float32, experts and weights [top_k + 1], as ``ops.expert_gate_up``; and M."""
        matrices: list[Any] = [
            packed(self.switch_mlp.gate_proj),
            packed(self.switch_mlp.up_proj),
            packed(self.shared_expert.gate_proj),
            packed(self.shared_expert.up_proj),
        ]
        operands: tuple[Any, ...] = (x, norm.weight, logits, *matrices, self.top_k)
        if self.norm_topk_prob and None not in matrices and why_not("expert_gate_up", *operands) is None:
            return *expert_gate_up(*operands, eps=norm.eps), matrices[0].rows
        E, k = self.num_experts, self.top_k
        n = norm(x)
        probabilities = mx.softmax(logits[0, 0, :E], axis=-1, precise=True)
        experts = mx.argpartition(probabilities, kth=-k)[-k:]
        weights = probabilities[experts]
        if self.norm_topk_prob:
            weights = weights / weights.sum()
        rows = n.reshape(1, 1, -1)
        h = swiglu(self.switch_mlp.gate_proj(rows, experts), self.switch_mlp.up_proj(rows, experts))
        shared = swiglu(self.shared_expert.gate_proj(n), self.shared_expert.up_proj(n))
        return (
            mx.concatenate([h.reshape(-1), shared.reshape(-1)]).astype(mx.float32),
            mx.concatenate([experts, mx.array([E], experts.dtype)]).astype(mx.int32),
            mx.concatenate([weights, mx.sigmoid(logits[0, 0, E:])]),
            h.shape[-1],
        )


class MLP(stock.Qwen3NextMLP):
    """Stock's MLP; :meth:`decode` is one token of it."""

    def decode(self, x: mx.array, norm: nn.RMSNorm) -> mx.array:
        """One token [1, 1, hidden size]: norm, MLP and residual."""
        gate, up = mx.split(project(x, [self.gate_proj, self.up_proj], norm=norm), 2, axis=-1)
        return project(swiglu(gate, up), [self.down_proj], residual=x)
