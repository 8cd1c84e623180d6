"""The linear-attention layer: stock's, with the recurrence in Lily's kernel."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import gated_delta as stock_scan
from mlx_lm.models import qwen3_5 as stock

from ..ops import gated_delta_scan as scan
from ..ops.choice import why_not, why_off
from ..ops.gated_delta_step import gated_delta_step
from .projection import project

_QK_NORM_EPS = 1e-6  # added to the sum of squares, as in the model's own code


class GatedDeltaNet(stock.GatedDeltaNet):
    """Stock's gated DeltaNet layer; ``gated_delta_scan`` runs the recurrence where it supports the case."""

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """Apply the layer.

        Args:
            inputs: [B, T, hidden size].
            mask: [B, T] bool, false at padding; None where every token counts.
            cache: stock's ArraysCache of the conv state [B, width - 1, channels] and the recurrent state
                [B, Hv, Dv, Dk] float32, or None.

        Returns:
            [B, T, hidden size].
        """
        if self.why_stock():
            return super().__call__(inputs, mask, cache)
        conv_input = self._conv_input(inputs, mask, cache)
        state = cache[1] if cache is not None else None
        gates = (self.in_proj_z(inputs), self.in_proj_b(inputs), self.in_proj_a(inputs))
        y, state = self._recurrence(conv_input, *gates, state, mask)
        if cache is not None:
            cache[1] = state
            cache.advance(inputs.shape[1])
        return self.out_proj(y)

    def decode(
        self, x: mx.array, norm: nn.RMSNorm, conv_state: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """One token: norm, layer and residual.

        Args:
            x: [1, 1, hidden size].
            norm: the layer's input norm.
            conv_state: [1, width - 1, channels].
            state: [1, Hv, Dv, Dk] float32.

        Returns:
            (x, conv_state, state).
        """
        projected = project(x, [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a], norm=norm)
        offsets = (
            0,
            self.conv_dim,
            self.conv_dim + self.value_dim,
            self.conv_dim + self.value_dim + self.num_v_heads,
        )
        weights = (self.A_log, self.dt_bias, self.norm.weight, state)
        operands = (projected, self.conv1d.weight, conv_state, *weights)
        heads: dict[str, Any] = {"Hk": self.num_k_heads, "offsets": offsets}
        if why_not("gated_delta_step", *operands, **heads) is None:
            y, conv_state, state = gated_delta_step(*operands, eps=self.norm.eps, **heads)
        else:
            qkv, z, b, a = mx.split(projected, offsets[1:], axis=-1)
            conv_input = mx.concatenate([conv_state, qkv], axis=1)
            y, state = self._recurrence(conv_input, z, b, a, state, None)
            conv_state = mx.contiguous(conv_input[:, 1:])
        return project(y, [self.out_proj], residual=x), conv_state, state

    def _recurrence(
        self,
        conv_input: mx.array,
        z: mx.array,
        b: mx.array,
        a: mx.array,
        state: mx.array | None,
        mask: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """From the projections to the input of the output projection [B, T, Hv Dv], and the new state."""
        B, T, _ = z.shape
        Hk, Hv, Dk, Dv = self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        qkv = nn.silu(self.conv1d(conv_input))
        q, k, v = mx.split(qkv, [self.key_dim, 2 * self.key_dim], axis=-1)
        q, k = stock_scan.normalize_qk(
            q.reshape(B, T, Hk, Dk), k.reshape(B, T, Hk, Dk), inv_scale=Dk**-0.5, eps=_QK_NORM_EPS
        )
        g = stock_scan.compute_g(self.A_log, a, self.dt_bias)
        if state is None:
            state = mx.zeros((B, Hv, Dv, Dk), dtype=mx.float32)
        operands = (q, k, v.reshape(B, T, Hv, Dv), g, mx.sigmoid(b), state, mask)
        run = _stock_scan if why_not(scan.KERNEL.stem, *operands) else scan.gated_delta_scan
        y, state = run(*operands)
        return self.norm(y, z.reshape(B, T, Hv, Dv)).reshape(B, T, -1), state

    def why_stock(self) -> str | None:
        """None if this layer's own path runs, else the reason that stock's does."""
        if self.training:
            return "training needs the differentiable path"
        if self.sharding_group is not None:
            return "the layer is sharded"
        return why_off(scan.KERNEL.stem)

    def _conv_input(self, inputs: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        """The conv state and qkv, [B, width - 1 + T, channels]; the cache gets the new conv state."""
        qkv = self.in_proj_qkv(inputs)
        if mask is not None:
            qkv = mx.where(mask[..., None], qkv, 0)
        keep = self.conv_kernel_size - 1
        state = cache[0] if cache is not None else None
        if state is None:
            state = mx.zeros((inputs.shape[0], keep, self.conv_dim), dtype=inputs.dtype)
        conv_input = mx.concatenate([state, qkv], axis=1)
        if cache is None:
            return conv_input
        if cache.lengths is None:
            cache[0] = mx.contiguous(conv_input[:, -keep:])
        else:  # rows padded on the right: each row's state ends where its tokens do
            ends = mx.clip(cache.lengths, 0, inputs.shape[1])
            positions = ends[:, None] + mx.arange(keep)
            cache[0] = mx.take_along_axis(conv_input, positions[..., None], axis=1)
        return conv_input


def _stock_scan(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    """The recurrence as stock runs it: its Metal kernel where that takes the shape, else MLX ops."""
    on_metal = mx.metal.is_available() and mx.default_device() == mx.gpu
    run = stock_scan.gated_delta_kernel if on_metal and k.shape[-1] % 32 == 0 else stock_scan.gated_delta_ops
    return run(q, k, v, g, beta, state, mask)
