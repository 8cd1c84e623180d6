"""The feed-forward layers: stock's mixture of experts and MLP, with a decode step in Lily's kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_next as stock
from mlx_lm.models.activations import swiglu

from ..launch import backend
from ..ops.choice import switched_off, why_not
from ..ops.expert_combine import expert_combine, expert_combine_reference
from ..ops.expert_down import expert_down
from ..ops.expert_gate_up import Chosen, expert_gate_up
from ..ops.expert_gemm_down import expert_gemm_down
from ..ops.expert_gemm_gate_up import expert_gemm_gate_up
from ..ops.expert_route import expert_route, expert_route_reference, max_blocks
from ..ops.packed import Packed
from ..ops.tile_product import grouped_tile
from .projection import joined, packed, project


class SparseMoeBlock(stock.Qwen3NextSparseMoeBlock):
    """Stock's mixture of experts: routing, grouped products and their sum in Lily's kernels where they can.

    Nothing of it is read on the CPU. :meth:`decode` is one token.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the layer.

        Args:
            x: [B, T, hidden size].

        Returns:
            [B, T, hidden size].
        """
        return super().__call__(x) if self.why_stock() else self._route_and_multiply(x)

    def why_stock(self) -> str | None:
        """None if this layer's own path may run, else the reason that stock's does."""
        if self.training:
            return "training needs the differentiable path"
        if backend.resolve() == "ops":
            return "the ops back-end is MLX's own ops"
        if self.sharding_group is not None:
            return "the layer is sharded"
        return None if self.norm_topk_prob else "norm_topk_prob is false"

    def _route_and_multiply(self, x: mx.array) -> mx.array:
        experts, shared, k, E = self.switch_mlp, self.shared_expert, self.top_k, self.num_experts
        gate_up: list[Any] = [
            packed(layer) for layer in (experts.gate_proj, experts.up_proj, shared.gate_proj, shared.up_proj)
        ]
        down: list[Any] = [packed(layer) for layer in (experts.down_proj, shared.down_proj)]
        rows = x.reshape(-1, x.shape[-1])
        block_rows = grouped_tile(rows.shape[0], k, E)["rows"]
        if None in gate_up or None in down or self._why_not_grouped(rows, gate_up, down, block_rows):
            return super().__call__(x)
        # float32, because rounding logits changes which experts are chosen
        logits = project(rows, [self.gate, self.shared_expert_gate], out_dtype=mx.float32)
        # Switched off, routing reads the logits on the CPU: what the kernel is measured against.
        route = expert_route_reference if switched_off("expert_route") else expert_route
        routing = route(logits, k, block_rows)
        groups = (routing.rows, routing.blocks, routing.count)
        operands: tuple[Any, ...] = (rows, *groups, *gate_up, k)
        operands = (expert_gemm_gate_up(*operands), *groups, *down, k)
        y = expert_gemm_down(*operands)
        combine = expert_combine if why_not("expert_combine", y, routing.weights) is None else _combine
        return combine(y, routing.weights).reshape(x.shape)

    def _why_not_grouped(
        self, rows: mx.array, gate_up: list[Packed], down: list[Packed], block_rows: int
    ) -> str | None:
        """None if routing and both grouped products take these arrays, else why stock's block runs.

        Asked before anything is launched: arrays that are never computed stand for what they pass on.

        Args:
            rows: [T, hidden size].
            gate_up: gate and up of the experts [E, M, hidden size], and of the shared one [M, hidden size].
            down: of the experts [E, hidden size, M], and of the shared one [hidden size, M].
            block_rows: of a block of the routing.
        """
        T, k, E = rows.shape[0], self.top_k, self.num_experts
        if not switched_off("expert_route"):
            logits = mx.zeros((T, E + 1), mx.float32)
            if reason := why_not("expert_route", logits, k, block_rows):
                return reason
        groups = [mx.zeros(n, mx.int32) for n in ((T * (k + 1),), (max_blocks(T, E, k, block_rows), 4), (8,))]
        if reason := why_not("expert_gemm_gate_up", rows, *groups, *gate_up, k):
            return reason
        h = mx.zeros((T * (k + 1), gate_up[0].rows), rows.dtype)
        return why_not("expert_gemm_down", h, *groups, *down, k)

    def decode(self, x: mx.array, norm: nn.RMSNorm) -> mx.array:
        """One token: norm, experts, shared expert and residual.

        Args:
            x: [1, 1, hidden size].
            norm: the layer's post-attention norm.

        Returns:
            [1, 1, hidden size].
        """
        experts, shared, k = self.switch_mlp, self.shared_expert, self.top_k
        gate_up = joined([experts.gate_proj, shared.gate_proj, experts.up_proj, shared.up_proj])
        down = joined([experts.down_proj, shared.down_proj])
        if gate_up is None and down is None:
            return x + self(norm(x))
        # float32, because rounding logits changes which experts are chosen
        logits = project(x, [self.gate, self.shared_expert_gate], norm=norm, out_dtype=mx.float32)
        operands: tuple[Any, ...] = (x, norm.weight, logits, gate_up, k)
        if self.norm_topk_prob and gate_up is not None and why_not("expert_gate_up", *operands) is None:
            chosen = expert_gate_up(*operands, eps=norm.eps)
        else:
            chosen = self._gate_up(norm(x), logits).array
        if down is not None and why_not("expert_down", chosen, x, down, k) is None:
            return expert_down(chosen, x, down, k)
        return x + self._down(Chosen.of(chosen, k), x.dtype)

    def _gate_up(self, n: mx.array, logits: mx.array) -> Chosen:
        """What ``ops.expert_gate_up`` does, in stock's layers; all experts are of one width."""
        E, k = self.num_experts, self.top_k
        probabilities = mx.softmax(logits[..., :E], axis=-1, precise=True)
        experts = mx.argpartition(probabilities, kth=-k, axis=-1)[..., -k:]
        weights = mx.take_along_axis(probabilities, experts, axis=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        rows = mx.expand_dims(n, (-2, -3))
        h = swiglu(self.switch_mlp.gate_proj(rows, experts), self.switch_mlp.up_proj(rows, experts))
        shared = swiglu(self.shared_expert.gate_proj(n), self.shared_expert.up_proj(n))
        return Chosen(
            mx.concatenate([h.reshape(k, -1), shared.reshape(1, -1)]),
            mx.concatenate([experts.reshape(-1), mx.array([E], experts.dtype)]),
            mx.concatenate([weights.reshape(-1), mx.sigmoid(logits[0, 0, E:])]),
        )

    def _down(self, chosen: Chosen, dtype: mx.Dtype) -> mx.array:
        """What ``ops.expert_down`` does, in stock's layers, without the residual: [1, 1, hidden size]."""
        k = self.top_k
        h = chosen.h.astype(dtype)
        y = self.switch_mlp.down_proj(h[None, None, :k, None], chosen.experts[None, None, :k]).squeeze(-2)
        shared = self.shared_expert.down_proj(h[None, k:])
        return ((y * chosen.weights[:k, None]).sum(axis=-2) + chosen.weights[k] * shared).astype(dtype)


def _combine(y: mx.array, weights: mx.array) -> mx.array:
    return expert_combine_reference(y, weights).astype(y.dtype)


class MLP(stock.Qwen3NextMLP):
    """Stock's MLP; :meth:`decode` is one token of it."""

    def decode(self, x: mx.array, norm: nn.RMSNorm) -> mx.array:
        """One token: norm, MLP and residual.

        Args:
            x: [1, 1, hidden size].
            norm: the layer's post-attention norm.

        Returns:
            [1, 1, hidden size].
        """
        gate, up = mx.split(project(x, [self.gate_proj, self.up_proj], norm=norm), 2, axis=-1)
        return project(swiglu(gate, up), [self.down_proj], residual=x)
