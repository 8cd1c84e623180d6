"""Lily's model classes: stock's, with Lily's layer classes inside.

A Lily class adds no parameter, and makes what it compiles on first use. It is therefore enough to change the
class of a stock model's modules, which is what both loading (:mod:`.qwen3_5_moe`, :mod:`.qwen3_5`) and
``lily_mlx.convert`` do.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
from mlx import nn

from ..counters import counts
from ..launch import backend
from ..launch.kernel import host_options
from ..layers import LAYER_CLASSES
from ..prompt import prompt_step
from ..step import decode_step


class LilyModel(nn.Module):
    """What Lily's model classes share; each puts it before a stock class."""

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Run tokens through the model.

        Args:
            inputs: tokens [B, T].
            cache: one cache a layer, as ``make_cache`` gives them, or None.
            input_embeddings: [B, T, hidden size] to use in place of the tokens' own.

        Returns:
            logits [B, T, vocabulary]; float32 from the decode step, in the model's dtype otherwise.
        """
        counts[f"model.{self.args.model_type}"] += 1
        if backend.resolve() == "host":
            with host_options(check=False):  # a whole model is too slow with every launch run twice
                return self._run(inputs, cache, input_embeddings)
        return self._run(inputs, cache, input_embeddings)

    def _run(self, inputs: mx.array, cache: Any, input_embeddings: mx.array | None) -> mx.array:
        decode, prompt = decode_step(self), prompt_step(self)
        if cache is not None:
            if input_embeddings is None and decode.why_not(inputs, cache) is None:
                return decode(inputs, cache)
            decode.forget(cache)
            if input_embeddings is None and prompt.why_not(inputs, cache) is None:
                return prompt(inputs, cache)
        # Single tokens that the decode step does not take, such as those of a batch, run as in stock:
        # prepared layer by layer, Lily's launches would cost more than they save.
        tokens = inputs if input_embeddings is None else input_embeddings
        with backend.override("ops") if tokens.shape[1] == 1 else nullcontext():
            return super().__call__(inputs, cache=cache, input_embeddings=input_embeddings)


def adopt(model: nn.Module) -> None:
    """Change the class of every stock layer in the model to the Lily class that subclasses it."""
    for module in model.modules():
        if replacement := LAYER_CLASSES.get(type(module)):
            module.__class__ = replacement


def lily_class(cls: type) -> type | None:
    """The Lily class for a stock model class (or for itself), None if there is none."""
    from . import qwen3_5, qwen3_5_moe

    for lily in (qwen3_5_moe.Model, qwen3_5.Model):
        if cls in (lily, *lily.__bases__):
            return lily
    return None
