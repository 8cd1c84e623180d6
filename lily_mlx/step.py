"""The decode step: one token through the whole model, compiled once per capacity of the caches.

Building the graph of a token in Python costs milliseconds, so ``mx.compile`` keeps it. The arrays of stock's
own caches are its inputs, and its results are put back into them: stock can go on from them at any time.

MLX updates an array in place if nobody else holds it. But the generation loop prepares a token while the one
before is computed, and what is being computed holds its keys and values: they would be copied at every token.
So each KV cache has two pairs of arrays, which tokens update in turn: a token writes its own row and the one
before into the pair that the last token but one has left. The cache always holds the newer, complete pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import ArraysCache

from . import caches
from .compiled import Compiled, Snapshot, why_not_constants
from .launch import backend
from .layers import LAYER_CLASSES
from .layers.projection import project
from .settings import settings

CAPACITY_STEP = 1024
"""Capacities are multiples of it: the step is compiled for each, and keys and values are copied into them."""

_LILY_CLASSES = frozenset(LAYER_CLASSES.values())


@dataclass
class Turn:
    """What a token leaves for the next one of the same KV cache.

    Attributes:
        left: keys and values [1, Hk, capacity, D] as the cache has them.
        spare: the pair before, which lacks the last row.
        rows: the last two rows [1, Hk, 2, D] of keys and of values.
        offset: the cache's own object, as it was put there: who else writes to the cache puts another. (Of
            numbers up to 256 Python has one each, so those say no more than the length.)
    """

    left: tuple[mx.array, mx.array]
    spare: tuple[mx.array, mx.array]
    rows: tuple[mx.array, mx.array]
    offset: Any


class DecodeStep:
    """The decode step of one model.

    Args:
        model: a Lily model; its ``language_model`` is what runs.

    Attributes:
        turns: what the last token of each cache of keys and values has left.
    """

    def __init__(self, model: nn.Module) -> None:
        self._text = model.language_model
        self._snapshot = Snapshot(self._text)
        self._why_layers: str | None = None
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.turns: WeakKeyDictionary[Any, Turn] = WeakKeyDictionary()

    def why_not(self, inputs: mx.array, cache: Sequence[Any]) -> str | None:
        """None if this step can run the call, else the reason that it does not.

        Args:
            inputs: tokens [B, T].
            cache: one cache a layer.
        """
        if inputs.shape != (1, 1):
            return f"{inputs.shape[0]} rows of {inputs.shape[1]} tokens, not one token"
        if backend.resolve() == "ops":
            return "the ops back-end is MLX's own ops"
        if self._text.training:
            return "training needs the differentiable path"
        if self._text.model.pipeline_size > 1:
            return "the model is in a pipeline"
        # Before the snapshot: with empty caches no layer may have run yet. Layers join matrices when they
        # first do, and a snapshot would keep the parts in memory.
        if why := _why_not_caches(cache):
            return why
        if self._snapshot.renew():
            self._why_layers = why_not_compiled(self._text)
            self._compiled = {}
        return self._why_layers

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        """Run one token and update the caches.

        Args:
            inputs: the token [1, 1]; need not be evaluated.
            cache: one cache a layer, for which :meth:`why_not` is None.

        Returns:
            logits [1, 1, vocabulary] float32.
        """
        arrays = [self._arrays(c) for c in cache]
        kv: Any = next((c for c in cache if caches.is_kv(c)), None)
        offset, capacity = (0, 0) if kv is None else (caches.length(kv), kv.keys.shape[2])
        position = _positions(max(capacity, 1))[8 * offset : 8 * offset + 8]  # a view, no launch
        logits, *results = self._function()(inputs, position, *chain.from_iterable(arrays))
        rest = iter(results)
        for c, group in zip(cache, arrays, strict=True):
            new = tuple(next(rest) for _ in group)
            if caches.is_kv(c):
                keys, values, *rows = new
                spare = (c.keys, c.values)
                caches.put(c, keys, values)
                self.turns[c] = Turn((keys, values), spare, (rows[0], rows[1]), c.offset)
            else:
                c[0], c[1] = new
                c.advance(1)
        return logits

    def forget(self, cache: Sequence[Any]) -> None:
        """Take nothing of what earlier tokens left for a cache: something else of the model writes to it."""
        for c in cache:
            if caches.is_kv(c):
                self.turns.pop(c, None)

    def _arrays(self, cache: Any) -> tuple[mx.array, ...]:
        """What the step takes of a layer's cache: its two arrays, or what it writes keys and values into."""
        if isinstance(cache, ArraysCache):
            return cache[0], cache[1]
        offset, capacity = caches.length(cache), cache.keys.shape[2]
        turn = self.turns.get(cache)
        if turn is not None and turn.offset is cache.offset and offset < capacity:
            keys, values = turn.left
            if keys is cache.keys and values is cache.values:
                return *turn.spare, *turn.rows
        # Whole steps: any length of a prompt would be a capacity of its own, for which the step is compiled.
        if room := -(-max(offset + 1, capacity) // CAPACITY_STEP) * CAPACITY_STEP - capacity:
            B, Hk, _, D = cache.keys.shape
            zeros = mx.zeros((B, Hk, room, D), cache.keys.dtype)
            cache.keys = mx.concatenate([cache.keys, zeros], axis=2)
            cache.values = mx.concatenate([cache.values, zeros], axis=2)
        return cache.keys, cache.values, *(_last_rows(a, offset) for a in (cache.keys, cache.values))

    def _function(self) -> Callable[..., Any]:
        """The step for the settings of now."""
        used = backend.resolve()
        key = (used, settings(), str(mx.default_stream(mx.default_device())))
        if key not in self._compiled:
            # The host back-end needs arrays with values, which a compiled graph does not have. Layers join
            # matrices when they first run, so the snapshot is taken again after a trace.
            compiled = Compiled(self._forward, traced=self._snapshot.take)
            self._compiled[key] = self._forward if used == "host" else compiled
        return self._compiled[key]

    def _forward(self, inputs: mx.array, position: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
        text = self._text
        x = text.model.embed_tokens(inputs)
        new: list[mx.array] = []
        rest = iter(arrays)
        for layer in text.layers:
            if layer.is_linear:
                state = (next(rest), next(rest))
                x, *results = layer.linear_attn.decode(x, layer.input_layernorm, *state)
            else:
                kv = (next(rest), next(rest), next(rest), next(rest))
                x, *results = layer.self_attn.decode(x, layer.input_layernorm, *kv, position)
            new += results
            x = layer.mlp.decode(x, layer.post_attention_layernorm)
        head = text.model.embed_tokens if text.args.tie_word_embeddings else text.lm_head
        return project(x, [head], norm=text.model.norm, out_dtype=mx.float32), *new


def decode_step(model: nn.Module) -> DecodeStep:
    """The model's decode step, made on first use."""
    step = model.__dict__.get("_decode_step")
    if step is None:
        step = DecodeStep(model)
        object.__setattr__(model, "_decode_step", step)
    return step


def why_not_compiled(text: nn.Module) -> str | None:
    """None if every layer is Lily's and whole in this process, and weights are constants, else the reason.

    Args:
        text: a Lily model's ``language_model``.
    """
    for layer in text.layers:
        for module in (layer.linear_attn if layer.is_linear else layer.self_attn, layer.mlp):
            if type(module) not in _LILY_CLASSES:
                return f"a layer is {type(module).__name__}"
            if getattr(module, "sharding_group", None) is not None:
                return "the model is sharded"
    return why_not_constants(text)


def _why_not_caches(cache: Sequence[Any]) -> str | None:
    if why := caches.why_not(cache):
        return why
    places = set()
    for c in cache:
        if not caches.is_kv(c):
            if c[0] is None:
                return "a linear layer's cache is empty"
        elif c.keys is None or caches.length(c) == 0:
            return "an attention layer's cache is empty"
        else:
            places.add((caches.length(c), c.keys.shape[2]))
    return "the KV caches differ in length" if len(places) > 1 else None


@lru_cache(maxsize=2)
def _positions(capacity: int) -> mx.array:
    """The ``position`` [8] int32 of every offset, one after another.

    Made once: an array that the CPU writes for each token costs a page fault when a kernel on CUDA reads it,
    150 us a token on an H200.
    """
    table = np.zeros((capacity, 8), np.int32)
    offset = np.arange(capacity)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = offset, capacity, offset - 1, offset
    return mx.array(table.reshape(-1))


def _last_rows(array: mx.array, offset: int) -> mx.array:
    """The two rows [B, Hk, 2, D] before ``offset``; zeros before the first."""
    rows = array[:, :, max(offset - 2, 0) : offset]
    return rows if offset > 1 else mx.pad(rows, [(0, 0), (0, 0), (1, 0), (0, 0)])
