"""The linear-attention layer: stock's, in Lily's kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import gated_delta as stock_scan
from mlx_lm.models import qwen3_5 as stock

from ..launch import backend
from ..ops.choice import why_not, why_off
from ..ops.gated_delta_prepare import gated_delta_prepare
from ..ops.gated_delta_scan import faster_stock_kernel, gated_delta_scan
from ..ops.gated_delta_step import gated_delta_step
from ..ops.gated_rms_norm import gated_rms_norm
from ..ops.packed import in_one_buffer
from .projection import project

_QK_NORM_EPS = 1e-6  # added to the sum of squares, as in the model's own code


class GatedDeltaNet(stock.GatedDeltaNet):
    """Stock's gated DeltaNet layer; each part runs in Lily's kernel where that supports the case.

    The parts of a prompt are the projections, ``gated_delta_prepare``, ``gated_delta_scan`` and
    ``gated_rms_norm``; :meth:`decode` is one token of it.
    """

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
        B, T, _ = inputs.shape
        conv_state, state, lengths = (None,) * 3 if cache is None else (cache[0], cache[1], cache.lengths)
        if conv_state is None:
            conv_state = mx.zeros((B, self.conv_kernel_size - 1, self.conv_dim), dtype=inputs.dtype)
        projected = self._project(inputs)
        y, conv_state, state = self._mix(projected, conv_state, state, mask, lengths)
        if cache is not None:
            cache[0], cache[1] = conv_state, state
            cache.advance(T)
        return project(y, [self.out_proj])

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
        projected = self._project(x, norm)
        weights = (self.A_log, self.dt_bias, self.norm.weight, state)
        operands = (projected, self.conv1d.weight, conv_state, *weights)
        heads: dict[str, Any] = {"Hk": self.num_k_heads, "offsets": self._offsets()}
        if why_not("gated_delta_step", *operands, **heads) is None:
            constants = in_one_buffer([self.conv1d.weight, *weights[:3]])
            mx.eval(constants)  # now, not at every run of a compiled step
            y, conv_state, state = gated_delta_step(
                *operands, eps=self.norm.eps, constants=constants, **heads
            )
        else:
            y, conv_state, state = self._mix(projected, conv_state, state, None, None)
        return project(y, [self.out_proj], residual=x), conv_state, state

    def _project(self, x: mx.array, norm: nn.RMSNorm | None = None) -> mx.array:
        """The input projections side by side: qkv, z, b, a."""
        return project(x, [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a], norm=norm)

    def _offsets(self) -> tuple[int, int, int, int]:
        """The first columns of qkv, z, b and a."""
        b = self.conv_dim + self.value_dim
        return 0, self.conv_dim, b, b + self.num_v_heads

    def _mix(
        self,
        projected: mx.array,
        conv_state: mx.array,
        state: mx.array | None,
        mask: mx.array | None,
        lengths: mx.array | None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """From the input projections to the output projection's input [B, T, Hv Dv], and the new states."""
        q, k, v, g, beta, conv_state = self._prepare(projected, conv_state, mask, lengths)
        if state is None:
            state = mx.zeros((*v.shape[:1], *v.shape[2:], k.shape[3]), dtype=mx.float32)
        operands = (q, k, v, g, beta, state, mask)
        run = _stock_scan if why_not("gated_delta_scan", *operands) else gated_delta_scan
        y, state = run(*operands)
        z = self._offsets()[1]
        if why_not("gated_rms_norm", y, projected, self.norm.weight, offset=z) is None:
            y = gated_rms_norm(y, projected, self.norm.weight, eps=self.norm.eps, offset=z)
        else:
            gate = projected[..., z : z + self.value_dim].reshape(y.shape)
            y = self.norm(y, gate).reshape(*y.shape[:2], -1)
        return y, conv_state, state

    def _prepare(
        self,
        projected: mx.array,
        conv_state: mx.array,
        mask: mx.array | None,
        lengths: mx.array | None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]:
        """q, k, v, g, beta and the new conv state, as ``ops.gated_delta_prepare``."""
        B, T, _ = projected.shape
        Hk, Hv, Dk, Dv = self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        offsets = self._offsets()
        weights = (self.conv1d.weight, conv_state, self.A_log, self.dt_bias)
        operands: tuple[Any, ...] = (*[projected] * 3, *weights, mask, lengths)
        heads: dict[str, Any] = {"Hk": Hk, "Dk": Dk, "Dv": Dv, "offsets": (offsets[0], *offsets[2:])}
        if why_not("gated_delta_prepare", *operands, **heads) is None:
            return gated_delta_prepare(*operands, **heads)
        qkv, _, b, a = mx.split(projected, offsets[1:], axis=-1)
        if mask is not None:
            qkv = mx.where(mask[..., None], qkv, 0)
        conv_input = mx.concatenate([conv_state, qkv], axis=1)
        q, k, v = mx.split(nn.silu(self.conv1d(conv_input)), [self.key_dim, 2 * self.key_dim], axis=-1)
        q, k = stock_scan.normalize_qk(
            q.reshape(B, T, Hk, Dk), k.reshape(B, T, Hk, Dk), inv_scale=Dk**-0.5, eps=_QK_NORM_EPS
        )
        g = stock_scan.compute_g(self.A_log, a, self.dt_bias)
        keep = self.conv_kernel_size - 1
        if lengths is None:
            conv_state = mx.contiguous(conv_input[:, -keep:])
        else:  # rows padded on the right: each row's state ends where its tokens do
            positions = mx.clip(lengths, 0, T)[:, None] + mx.arange(keep)
            conv_state = mx.take_along_axis(conv_input, positions[..., None], axis=1)
        return q, k, v.reshape(B, T, Hv, Dv), g, mx.sigmoid(b), conv_state

    def why_stock(self) -> str | None:
        """None if this layer's own path runs, else the reason that stock's does."""
        if self.training:
            return "training needs the differentiable path"
        if self.sharding_group is not None:
            return "the layer is sharded"
        return "the ops back-end is MLX's own ops" if backend.resolve() == "ops" else None


def _stock_scan(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    """The recurrence without Lily: the kernel that the tile table names, else what mlx-lm runs.

    That is mlx-lm's Metal kernel where it takes the shape, else MLX ops.
    """
    faster = why_off("gated_delta_scan") is None and faster_stock_kernel(q, v, mask)
    if faster == "mx.fast.gated_delta_update":
        y, state = mx.fast.gated_delta_update(q, k, v, g, beta, state)
        return y, state
    on_metal = mx.metal.is_available() and mx.default_device() == mx.gpu
    run = stock_scan.gated_delta_kernel if on_metal and k.shape[-1] % 32 == 0 else stock_scan.gated_delta_ops
    return run(q, k, v, g, beta, state, mask)
