"""Linear layers: a norm, several matrices and a residual in one launch where a kernel can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from ..ops.choice import why_not
from ..ops.packed import Packed
from ..ops.qmm import qmm
from ..ops.qmv import qmv
from .fusion import join


def packed(layer: nn.Module) -> Packed | None:
    """The matrix of a layer that is nothing but an affine-quantised matrix, else None.

    A LoRA-wrapped layer, one with a bias or a global scale, or of another quantisation mode is more.
    """
    if type(layer) not in (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear):
        return None
    if layer.mode != "affine" or "bias" in layer or getattr(layer, "global_scale", None) is not None:
        return None
    return Packed.of(layer)


def joined(layers: Sequence[nn.Module]) -> Packed | None:
    """The layers' matrices behind one another, or None where one is more than that or they do not fit."""
    return join(layers) if all(packed(layer) for layer in layers) else None


def project(
    x: mx.array,
    layers: Sequence[nn.Module],
    *,
    norm: nn.RMSNorm | None = None,
    residual: mx.array | None = None,
    out_dtype: mx.Dtype | None = None,
) -> mx.array:
    """Apply linear layers to vectors: ``qmv`` for a single one, ``qmm`` for more.

    Args:
        x: [..., K].
        layers: linear layers, or an embedding used as the output head; their results are joined.
        norm: applied to x first.
        residual: [..., N], added last.
        out_dtype: of the result; by default as x.

    Returns:
        [..., N], N the sum of the layers' rows.
    """
    matrix = joined(layers)
    options: dict[str, Any] = {"residual": residual, "out_dtype": out_dtype}
    if matrix is not None and x.size == x.shape[-1]:
        options["norm_weight"] = None if norm is None else norm.weight
        if why_not("qmv", x, matrix, **options) is None:
            return qmv(x, matrix, eps=1e-6 if norm is None else norm.eps, **options)
    h = x if norm is None else norm(x)
    if matrix is not None and x.size > x.shape[-1] and why_not("qmm", h, [matrix], **options) is None:
        return qmm(h, [matrix], **options)
    applied: list[Any] = [getattr(layer, "as_linear", layer) for layer in layers]
    y = mx.concatenate([apply(h) for apply in applied], axis=-1)
    y = y if residual is None else residual + y
    return y if out_dtype is None else y.astype(out_dtype)
