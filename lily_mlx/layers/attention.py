"""The full-attention layer: stock's, with everything around MLX's attention in Lily's kernels."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_next as stock

from ..ahead import Ahead
from ..launch import backend
from ..ops.attention_decode import attention_decode
from ..ops.attention_gate import attention_gate
from ..ops.choice import why_not
from ..ops.qk_prepare import qk_prepare, rope_frequencies
from .projection import project

MAX_PAIRS = 2**24
"""Queries by keys of a launch of attention, all batch rows: 2,048 by 8,192, 0.5 GB of scores of 16 heads."""

PIECES_AHEAD = 2
"""Such launches that wait for the GPU, each with its scores."""


class Attention(stock.Qwen3NextAttention):
    """Stock's gated attention layer; each part runs in Lily's kernel where that supports the case.

    The parts of a prompt are the projections, ``qk_prepare``, MLX's attention and ``attention_gate``;
    :meth:`decode` is one token of it.
    """

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Apply the layer.

        Args:
            x: [B, T, hidden size].
            mask: as stock's ``create_attention_mask`` gives it.
            cache: any of stock's KV caches, or None.

        Returns:
            [B, T, hidden size].
        """
        if self.why_stock():
            return super().__call__(x, mask, cache)
        q, keys, values, projected = self.before(x, 0 if cache is None else cache.offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        return self.after(self.attend(q, keys, values, mask, cache), projected)

    def before(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Up to attention: q [B, Hq, T, D], k and v [B, Hk, T, D], and the projections with the gate.

        Args:
            x: [B, T, hidden size].
            offset: the first token's position, or int32 [P], P at least B, with that of each batch row.
        """
        projected = project(x, [self.q_proj, self.k_proj, self.v_proj])
        return *self._prepare(projected, offset, x.dtype), projected

    def attend(self, q: mx.array, keys: Any, values: Any, mask: Any, cache: Any = None) -> mx.array:
        """MLX's attention [B, Hq, T, D], over no more than :data:`MAX_PAIRS` pairs of tokens at once.

        So neither the scores that MLX may keep nor the time of a launch grow with the context. The pieces are
        rows of the result. Each depends on the one before, and only some wait for the GPU, or the scores of
        all would be kept at once.

        Args:
            q: [B, Hq, T, D].
            keys, values: [B, Hk, S, D], or a quantised cache's tuples.
            mask: "causal", None, or an array that broadcasts to [B, Hq, T, S].
            cache: whose keys and values they are.
        """
        attention = partial(stock.scaled_dot_product_attention, cache=cache, scale=self.scale)
        B, _, T, D = q.shape
        quantised = not isinstance(keys, mx.array)
        S = (keys[0] if quantised else keys).shape[2]
        rows = max(1, MAX_PAIRS // (B * S))
        if rows >= T or T > S:
            return attention(q, keys, values, mask=mask)
        rows = -(-T // -(-T // rows))  # as many for each piece
        before = S - T  # tokens that the first query sees besides itself
        spelt_out = _keeps_scores(D) and not quantised
        ahead = Ahead(PIECES_AHEAD)
        pieces: list[mx.array] = []
        for start in range(0, T, rows):
            end = min(start + rows, T)
            part = q[:, :, start:end]
            if pieces:
                part = mx.depends(part, pieces[-1])
            if mask is None or isinstance(mask, mx.array):
                piece = attention(part, keys, values, mask=_rows(mask, start, end))
            elif spelt_out:
                piece = _causal_attention(part, keys, values, self.scale, before + start)
            elif quantised:
                seen = mx.arange(before + start, before + end)[:, None] >= mx.arange(S)
                piece = attention(part, keys, values, mask=seen)
            else:
                piece = attention(part, keys[:, :, : before + end], values[:, :, : before + end], mask=mask)
            pieces.append(piece)
            ahead.start(piece)
        return mx.concatenate(pieces, axis=2)

    def after(self, out: mx.array, projected: mx.array) -> mx.array:
        """From attention [B, Hq, T, D] on: output gate and projection, [B, T, hidden size]."""
        return project(self._gate(out, projected), [self.o_proj])

    def decode(
        self,
        x: mx.array,
        norm: nn.RMSNorm,
        keys: mx.array,
        values: mx.array,
        last_keys: mx.array,
        last_values: mx.array,
        position: mx.array,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """One token: norm, attention and residual.

        Args:
            x: [1, 1, hidden size].
            norm: the layer's input norm.
            keys, values: [1, Hk, capacity, D], filled up to the token before the last.
            last_keys, last_values: [1, Hk, 2, D], the last two rows.
            position: [8] int32: the token's position, at least 1, capacity, the rows that are written.

        Returns:
            (x, keys, values, last_keys, last_values) with the last token's row and this one's.
        """
        projected = project(x, [self.q_proj, self.k_proj, self.v_proj], norm=norm)
        q, last_keys, last_values = self._prepare(projected, position, mx.float32, (last_keys, last_values))
        keys, values = _write(keys, values, last_keys, last_values, position[2:4])
        if why_not("attention_decode", q, keys, values, projected, position) is None:
            out = attention_decode(q, keys, values, projected, position)
        else:
            seen = mx.arange(keys.shape[2]) <= position[0]
            out = mx.fast.scaled_dot_product_attention(
                q.astype(keys.dtype), keys, values, scale=self.scale, mask=seen
            )
            out = self._gate(out, projected)
        return project(out, [self.o_proj], residual=x), keys, values, last_keys, last_values

    def why_stock(self) -> str | None:
        """None if this layer's own path runs, else the reason that stock's does."""
        if self.training:
            return "training needs the differentiable path"
        return "the ops back-end is MLX's own ops" if backend.resolve() == "ops" else None

    def _prepare(
        self,
        projected: mx.array,
        offset: int | mx.array,
        q_dtype: mx.Dtype,
        before: tuple[mx.array, mx.array] | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """q [B, Hq, T, D], k and v [B, Hk, T, D]: norms and rotary embedding applied.

        Args:
            projected: [B, T, columns], the projections side by side.
            offset: the first token's position, or int32 [P], P at least B, with that of each batch row.
            q_dtype: what the kernel gives q in; without it q has the dtype of the projections.
            before: of one token, the last two rows of keys and values; k and v then have the second first.
        """
        B, T, _ = projected.shape
        Hq, Hk, D = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        offsets = (0, 2 * Hq * D, (2 * Hq + Hk) * D)
        if type(self.rope) is nn.RoPE and not self.rope.traditional and self.rope.scale == 1:
            frequencies = rope_frequencies(self.rope.dims, self.rope.base)
            weights = (self.q_norm.weight, self.k_norm.weight)
            position = offset if isinstance(offset, mx.array) else _positions(offset, B)
            operands = (projected, *weights, frequencies, position)
            heads: dict[str, Any] = {
                "Hq": Hq,
                "Hk": Hk,
                "offsets": offsets,
                "q_dtype": q_dtype,
                "before": before,
            }
            if why_not("qk_prepare", *operands, **heads) is None:
                return qk_prepare(*operands, eps=self.q_norm.eps, **heads)
        q, k, v = mx.split(projected, offsets[1:], axis=-1)
        q = self.q_norm(q.reshape(B, T, Hq, 2, D)[..., 0, :]).transpose(0, 2, 1, 3)
        k = self.k_norm(k.reshape(B, T, Hk, D)).transpose(0, 2, 1, 3)
        v = v.reshape(B, T, Hk, D).transpose(0, 2, 1, 3)
        start = offset[:B] if isinstance(offset, mx.array) else offset
        q, k = self.rope(q, offset=start), self.rope(k, offset=start)
        if before is None:
            return q, k, v
        k, v = (mx.concatenate([b[:, :, 1:], x], axis=2) for b, x in zip(before, (k, v), strict=True))
        return q, k, v

    def _gate(self, out: mx.array, projected: mx.array) -> mx.array:
        """The output of attention [B, Hq, T, D] times the output gate: [B, T, Hq D]."""
        if why_not("attention_gate", out, projected) is None:
            return attention_gate(out, projected)
        B, Hq, T, D = out.shape
        gate = projected[..., : 2 * Hq * D].reshape(B, T, Hq, 2, D)[..., 1, :]
        return out.transpose(0, 2, 1, 3).reshape(B, T, Hq * D) * mx.sigmoid(gate.reshape(B, T, Hq * D))


def _write(
    keys: mx.array, values: mx.array, last_keys: mx.array, last_values: mx.array, rows: mx.array
) -> tuple[mx.array, mx.array]:
    """Keys and values [1, Hk, capacity, D] with new ones [1, Hk, 2, D] in ``rows`` [2] int32.

    The two writes do not depend on each other, so a GPU runs them side by side.
    """
    # Measured on an H200: a third of the time of slice_update with an array as start.
    places = mx.broadcast_to(rows[:, None], last_keys.shape)
    keys = mx.put_along_axis(keys, places, last_keys, axis=2)
    return keys, mx.put_along_axis(values, places, last_values, axis=2)


def _rows(mask: mx.array | None, start: int, end: int) -> mx.array | None:
    """A mask's rows of some queries; one that is the same for all of them stays whole."""
    if mask is None or mask.ndim == 1 or mask.shape[-2] == 1:
        return mask
    return mask[..., start:end, :]


def _keeps_scores(D: int) -> bool:
    """Whether MLX's attention of many queries by itself keeps the scores of this head size in memory."""
    return D > 128 and not (backend.resolve() == "metal" and backend.neural_accelerators()[0])


def _causal_attention(q: mx.array, keys: mx.array, values: mx.array, scale: float, first: int) -> mx.array:
    """Attention of queries from position ``first`` on: the query heads of a group are rows of one product.

    As MLX does it where it keeps the scores, only that MLX reads the keys once for each query head. On an
    H200, 131,072 keys: 172 TFLOP/s instead of 116 (128 queries at once). Every piece is multiplied with all
    keys: then the scores of all have one size, and MLX uses their memory again.
    """
    B, Hq, T, D = q.shape
    Hk, S = keys.shape[1:3]
    scores = (q * scale).reshape(B, Hk, Hq // Hk * T, D) @ keys.swapaxes(-1, -2)
    seen = mx.arange(first, first + T)[:, None]
    masked = _masked(scores.reshape(B, Hq, T, S), mx.arange(S), seen)
    weights = mx.softmax(masked, axis=-1, precise=True).reshape(B, Hk, Hq // Hk * T, S)
    return (weights @ values).reshape(B, Hq, T, D)


@mx.compile
def _masked(scores: mx.array, key: mx.array, last: mx.array) -> mx.array:
    return mx.where(key <= last, scores, mx.array(-mx.inf, scores.dtype))


@lru_cache(maxsize=16)  # one step's layers share it
def _positions(offset: int, B: int) -> mx.array:
    return mx.array([offset] * max(B, 8), dtype=mx.int32)
