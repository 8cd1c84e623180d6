"""The fp32 oracle: a checkpoint's own weights, dequantised, through stock's model in fp32 arithmetic.

What an engine rounds on the way (weights times activations in bfloat16, the activations between layers, the
state's readout) this model does not, so that the distance to it says which of two engines is nearer to what
the checkpoint means. It takes no memory of its own but for one matrix: each layer dequantises its weights
when it is called and evaluates its product before the next one begins. So it runs wherever the checkpoint
does, at full size too. A pass token by token is slow and not needed: in fp32 a prefill gives the same.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from unittest.mock import patch

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from lily_mlx.errors import UsageError

from .bridge import packed_scan

__all__ = ["bridged_scan", "fp32_oracle", "mended_products", "require_fp32_products", "twin"]


def _weights(layer: nn.Module) -> mx.array:
    return mx.dequantize(
        layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode
    ).astype(mx.float32)


def _evaluated(y: mx.array) -> mx.array:
    mx.eval(y)  # frees the dequantised matrix
    return y


class ExactLinear(nn.QuantizedLinear):
    """A quantised linear layer whose product is of fp32 weights and fp32 activations."""

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., inputs] float32 to [..., outputs] float32."""
        y = x @ _weights(self).T
        return _evaluated(y + self["bias"] if "bias" in self else y)


class ExactEmbedding(nn.QuantizedEmbedding):
    """A quantised embedding of fp32 rows, also where it is the output head."""

    def __call__(self, x: mx.array) -> mx.array:
        """x [...] integers to [..., dims] float32."""
        return super().__call__(x).astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        """x [..., dims] float32 to [..., rows] float32."""
        return _evaluated(x @ _weights(self).T)


class ExactSwitchLinear(QuantizedSwitchLinear):
    """A quantised linear layer of many experts whose product is of fp32 weights and fp32 activations."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [..., 1, inputs] float32 and indices [...] of experts to [..., 1, outputs] float32."""
        weights = _weights(self).swapaxes(-1, -2)
        y = mx.gather_mm(x, weights, rhs_indices=indices, sorted_indices=sorted_indices)
        if "bias" in self:
            y = y + mx.expand_dims(self["bias"][indices], -2)
        return _evaluated(y)


_EXACT: dict[type, type] = {
    nn.QuantizedLinear: ExactLinear,
    nn.QuantizedEmbedding: ExactEmbedding,
    QuantizedSwitchLinear: ExactSwitchLinear,
}


def twin(model: nn.Module) -> nn.Module:
    """A second tree of modules over the same arrays: changing its classes leaves ``model`` alone."""
    arrays = dict(tree_flatten(model.parameters())).values()
    shared: nn.Module = copy.deepcopy(model, {id(array): array for array in arrays})
    return shared


def fp32_oracle(model: nn.Module) -> nn.Module:
    """The oracle of a stock model: a twin whose weights count as fp32 and whose products are fp32.

    Args:
        model: stock's, quantised or not; it is left as it is.

    Raises:
        UsageError: a layer is quantised in a way that has no plain dequantisation here.
    """
    exact = twin(model)
    exact.set_dtype(mx.float32)
    for name, module in exact.named_modules():
        if replacement := _EXACT.get(type(module)):
            module.__class__ = replacement
        elif "scales" in module:
            kind = type(module).__name__
            raise UsageError(
                f"{name} is a {kind}; the fp32 oracle knows {', '.join(c.__name__ for c in _EXACT)}"
            )
        if module.get("global_scale") is not None:
            raise UsageError(f"{name} has a global scale; the fp32 oracle knows quantisation without one")
    return exact


def require_fp32_products() -> None:
    """Turn off TF32 in MLX and make sure that it is off: an fp32 product must keep all 24 bits.

    MLX reads the switch once, at its first product, so this comes before any.

    Raises:
        UsageError: a product on the default device rounds its operands nevertheless.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    x = mx.full((64, 64), 1 + 2.0**-20)
    if not mx.array_equal(x @ mx.eye(64), x):
        raise UsageError(
            f"fp32 products on {mx.default_device()} are rounded to TF32; set MLX_ENABLE_TF32=0 before "
            "starting, or compute the oracle on the CPU (--oracle-device cpu)"
        )


@contextlib.contextmanager
def bridged_scan() -> Iterator[None]:
    """While open, stock's recurrence on CUDA is mlx-lm's packed Metal kernel through Lily's CUDA prelude.

    mlx-lm has no kernel there and loops over the tokens in Python; what the packed kernel does not take
    (masks, other head sizes, the CPU) still does.
    """
    kernel = packed_scan("cuda")
    loop = gated_delta.gated_delta_ops

    def scan(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        unfit = state is None or mask is not None or k.shape[-1] != 128 or v.shape[-1] % 8 or g.ndim != 3
        if unfit or mx.default_device() != mx.gpu:
            return loop(q, k, v, g, beta, state, mask)
        return kernel(q, k, v, g, beta, state)

    with patch.object(gated_delta, "gated_delta_ops", scan):
        yield


@contextlib.contextmanager
def mended_products() -> Iterator[None]:
    """While open, products over 64 inputs are spelt out: weights dequantised to the activations' type first.

    On CUDA MLX 0.32.4 gets a quantised product wrong for several rows of 64 inputs: by up to 18 times the
    largest value, where other widths are within their rounding. The shared expert of the tiny checkpoint has
    such a matrix. Its experts' products over 64 inputs are right, but a chunk of 64 tokens ended with an
    illegal memory access once the first was mended; whether they read too far is not known, so both are
    spelt out. Single tokens stay as MLX has them.
    """
    quantised, of_experts = nn.QuantizedLinear.__call__, QuantizedSwitchLinear.__call__

    def call(self: nn.QuantizedLinear, x: mx.array) -> mx.array:
        if x.shape[-1] > 64 or x.size == x.shape[-1]:
            return quantised(self, x)
        y: mx.array = x @ _weights(self).astype(x.dtype).T
        return y + self["bias"] if "bias" in self else y

    def call_experts(
        self: QuantizedSwitchLinear, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        if x.shape[-1] > 64 or not sorted_indices:  # stock sorts the rows of prompts
            return of_experts(self, x, indices, sorted_indices)
        weights = _weights(self).astype(x.dtype).swapaxes(-1, -2)
        y: mx.array = mx.gather_mm(x, weights, rhs_indices=indices, sorted_indices=True)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y

    with (
        patch.object(nn.QuantizedLinear, "__call__", call),
        patch.object(QuantizedSwitchLinear, "__call__", call_experts),
    ):
        yield
