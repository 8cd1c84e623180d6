"""A prompt's chunk, compiled: what Python costs is as much for a short chunk as the GPU's work.

Every layer but its attention over the cache is a function of the chunk alone, compiled once for each size.
Compiling is no faster than running layer by layer, so a size is compiled when it comes for the second time:
the chunks of a long prompt, and prompts of one length.

Prepared this fast, all layers of a chunk would be queued, each with its scratch memory, while the GPU is at
the first. So layers are handed to the GPU one by one, those of a short chunk in groups, and only some are
prepared ahead of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache

from . import caches
from .ahead import Ahead
from .compiled import Compiled, Snapshot
from .launch import backend
from .ops.choice import switched_off
from .settings import settings
from .step import CAPACITY_STEP, why_not_compiled

MAX_SIZES = 64
"""Numbers of tokens that are kept compiled; the next one starts afresh."""

TOKENS_AHEAD = 16384
"""Tokens times layers that are prepared ahead of the GPU: 8 layers of a chunk of 2,048, all of 256."""

MAX_TOGETHER = 8
"""Layers of a short chunk that the GPU is given at once: it begins while others are prepared."""

GROWTH = 8
"""A long KV cache grows by its eighth: each growth copies it, and stock's grows by every chunk."""


class PromptStep:
    """The chunks of one model's prompts.

    Args:
        model: a Lily model; its ``language_model`` is what runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._text = model.language_model
        self._snapshot = Snapshot(self._text)
        self._why_layers: str | None = None
        self._seen: set[Any] = set()
        self._compiled: dict[Any, Compiled] = {}

    def why_not(self, inputs: mx.array, cache: Sequence[Any]) -> str | None:
        """None if this step can run the call, else the reason that the model runs layer by layer.

        Args:
            inputs: tokens [B, T].
            cache: one cache a layer.
        """
        used = backend.resolve()
        if used not in ("metal", "cuda"):
            return f"nothing is compiled for the {used} back-end"
        if inputs.ndim != 2 or inputs.shape[1] < 2:
            return "not a chunk of a prompt"
        if self._text.training:
            return "training needs the differentiable path"
        if self._text.model.pipeline_size > 1:
            return "the model is in a pipeline"
        if switched_off("expert_route"):
            return "routing runs on the CPU"
        size = (inputs.shape, settings(), used)
        if size not in self._seen:
            # Layers join matrices when they first run: a snapshot before that would keep the parts in memory.
            if len(self._seen) == MAX_SIZES:
                self._seen, self._compiled = set(), {}
            self._seen.add(size)
            return "its size comes for the first time"
        if self._snapshot.renew():
            self._why_layers = why_not_compiled(self._text)
            self._compiled = {}
        return self._why_layers or caches.why_not(cache)

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        """Run a chunk and update the caches.

        Args:
            inputs: tokens [B, T].
            cache: one cache a layer, for which :meth:`why_not` is None.

        Returns:
            logits [B, T, vocabulary].
        """
        text = self._text
        x = text.model.embed_tokens(inputs)
        B, T, _ = x.shape
        layers_ahead = max(1, TOKENS_AHEAD // (B * T))
        together = max(1, min(layers_ahead // 4, MAX_TOGETHER))
        ahead = Ahead(layers_ahead // together)
        no_states: tuple[mx.array, mx.array] | None = None
        positions: dict[int, mx.array] = {}
        for index, (layer, c) in enumerate(zip(text.layers, cache, strict=True)):
            if layer.is_linear:
                states = (c[0], c[1])
                if c[0] is None:
                    states = no_states = no_states or _no_states(layer.linear_attn, x)
                x, c[0], c[1] = self._part(index, "linear", layer)(x, *states)
                c.advance(T)
            else:
                attention = layer.self_attn
                offset = caches.length(c)
                if offset not in positions:
                    positions[offset] = _positions(offset, B)
                q, keys, values, projected = self._part(index, "before", layer)(x, positions[offset])
                c.step = max(c.step, CAPACITY_STEP, offset // GROWTH)
                keys, values = c.update_and_fetch(keys, values)
                out = attention.attend(q, keys, values, "causal", c)
                x = self._part(index, "after", layer)(x, out, projected)
            if index % together == together - 1:
                ahead.start(x)
        x = text.model.norm(x)
        return text.model.embed_tokens.as_linear(x) if text.args.tie_word_embeddings else text.lm_head(x)

    def _part(self, index: int, name: str, layer: nn.Module) -> Compiled:
        key = (index, name, settings(), backend.resolve(), str(mx.default_stream(mx.default_device())))
        if key not in self._compiled:
            self._compiled[key] = Compiled(partial(_PARTS[name], layer), traced=self._snapshot.take)
        return self._compiled[key]


def prompt_step(model: nn.Module) -> PromptStep:
    """The model's prompt step, made on first use."""
    step = model.__dict__.get("_prompt_step")
    if step is None:
        step = PromptStep(model)
        object.__setattr__(model, "_prompt_step", step)
    return step


def _linear(
    layer: nn.Module, x: mx.array, conv_state: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    cache = ArraysCache(2)
    cache[0], cache[1] = conv_state, state
    return layer(x, mask=None, cache=cache), cache[0], cache[1]


def _before(layer: nn.Module, x: mx.array, position: mx.array) -> tuple[mx.array, ...]:
    before: tuple[mx.array, ...] = layer.self_attn.before(layer.input_layernorm(x), position)
    return before


def _after(layer: nn.Module, x: mx.array, out: mx.array, projected: mx.array) -> mx.array:
    h = x + layer.self_attn.after(out, projected)
    y: mx.array = h + layer.mlp(layer.post_attention_layernorm(h))
    return y


_PARTS: dict[str, Any] = {"linear": _linear, "before": _before, "after": _after}


def _positions(offset: int, B: int) -> mx.array:
    """The first token's position for each of B batch rows: int32 [B or more].

    Made on the GPU: what the CPU has written costs a page fault when a kernel on CUDA reads it.
    """
    same = mx.broadcast_to(mx.arange(offset, offset + 1, dtype=mx.int32), (max(B, 8),))
    return mx.contiguous(same)


def _no_states(layer: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    """The conv state and the recurrent state before the first chunk: zeros, the same for all layers."""
    B = x.shape[0]
    return (
        mx.zeros((B, layer.conv_kernel_size - 1, layer.conv_dim), x.dtype),
        mx.zeros((B, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim), mx.float32),
    )
