"""The engines that take turns in a comparison: stock, stock+, lily, and lily with something switched off.

All arms run on one set of weights. Each has a model and layers of its own, so that no compiled function,
cache or class of one is seen by another. The modules inside the layers that hold the matrices are the same
for all: where Lily joins matrices in memory, it does so once for all arms.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import base, gated_delta, qwen3_next

import lily_mlx
from lily_mlx.errors import UsageError
from lily_mlx.launch import backend
from lily_mlx.settings import settings

from . import switches
from .oracle import bridged_scan

STOCK, STOCK_PLUS, LILY = "stock", "stock+", "lily"
WITHOUT = "lily-without-"


@dataclass(frozen=True)
class Arm:
    """One engine on the shared weights.

    Attributes:
        name: ``stock``, ``stock+``, ``lily`` or ``lily-without-NAME``.
        model: its modules.
        prepare: called with the tokens of a prefill step and the context length before measuring there.
        active: a context manager inside which the model runs as this arm.
        switches: what is switched how, as plain data.
        warm_ups: runs until the engine is as fast as it gets.
    """

    name: str
    model: nn.Module
    prepare: Callable[[int, int], None]
    active: Callable[[], contextlib.AbstractContextManager[Any]]
    switches: Callable[[], dict[str, Any]]
    warm_ups: int = 1


def parse(text: str) -> list[str]:
    """The arms of ``--arms``, in order.

    Raises:
        UsageError: a name is unknown or comes twice, or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--arms is {text!r}; it must name at least one of {STOCK}, {STOCK_PLUS}, {LILY}")
    known = switches.names()
    for name in names:
        if name not in (STOCK, STOCK_PLUS, LILY, *(WITHOUT + switch for switch in known)):
            raise UsageError(
                f"--arms names {name!r}; it must be {STOCK}, {STOCK_PLUS}, {LILY} or {WITHOUT}NAME "
                f"with NAME one of {', '.join(known)}"
            )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--arms names {twice[0]!r} twice")
    return names


def make(names: Sequence[str], model: nn.Module) -> list[Arm]:
    """The arms on the weights of a stock model, whose own class and layers stay as they are."""
    return [_make(name, _own_layers(model)) for name in names]


def _own_layers(model: nn.Module) -> nn.Module:
    """A second tree of layers over the same modules without children, and the same arrays."""
    leaves = [module for module in model.modules() if not tree_flatten(module.children())]
    arrays = [array for _, array in tree_flatten(model.parameters())]
    shared: nn.Module = copy.deepcopy(model, {id(x): x for x in (*leaves, *arrays)})
    return shared


def _make(name: str, model: nn.Module) -> Arm:
    if name == STOCK:
        return Arm(name, model, _nothing, contextlib.nullcontext, lambda: {"engine": "mlx"})
    if name == STOCK_PLUS:
        best = BestOwnOps(model)
        return Arm(name, model, best.prepare, best.active, best.switches)
    switch = name.removeprefix(WITHOUT)
    off = () if name == LILY else switches.disabled(switch)
    disabled = sorted(settings().disabled_ops.union(off))
    lily_mlx.convert(model)

    @contextlib.contextmanager
    def active() -> Iterator[None]:
        with patch.dict(os.environ, {"LILY_DISABLE": ",".join(disabled)}), switches.off(switch), _fallback():
            yield

    def switched() -> dict[str, Any]:
        return {"engine": "lily", "backend": backend.resolve(), "disabled": disabled}

    # A prompt's chunk is compiled when its size comes for the second time.
    return Arm(name, model, _nothing, active, switched, warm_ups=2)


def _nothing(step: int, length: int) -> None:
    pass


def _fallback() -> contextlib.AbstractContextManager[Any]:
    """What stands in for a Lily op that is off: stock, on CUDA with the recurrent kernel that stock lacks."""
    return bridged_scan() if backend.resolve() == "cuda" else contextlib.nullcontext()


@dataclass
class BestOwnOps:
    """Stock with the fastest of MLX's own ops for each shape, found by timing them.

    The recurrence: mlx-lm's Metal kernel or ``mx.fast.gated_delta_update``; on CUDA mlx-lm's kernel through
    Lily's prelude, because MLX has none there. Attention: MLX's own choice of kernel, or ``force_fused``.
    """

    model: nn.Module
    chosen: dict[str, dict[int, str]] = field(default_factory=lambda: {"gated_delta": {}, "attention": {}})

    def prepare(self, step: int, length: int) -> None:
        """Choose for one token and for ``step`` tokens, both at ``length`` tokens of context."""
        if mx.default_device() != mx.gpu:
            return
        for tokens in {1, step}:
            self._choose("attention", tokens, _attention_calls(self.model, tokens, length))
            if mx.metal.is_available():
                self._choose("gated_delta", tokens, _scan_calls(self.model, tokens))

    def _choose(self, op: str, tokens: int, calls: dict[str, Callable[[], Any]]) -> None:
        seconds = {name: _time(call) for name, call in calls.items()}
        self.chosen[op][tokens] = min(seconds, key=lambda name: seconds[name])

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(qwen3_next, "scaled_dot_product_attention", self._attention))
            stack.enter_context(patch.object(gated_delta, "gated_delta_kernel", self._scan))
            if backend.resolve() == "cuda":
                stack.enter_context(bridged_scan())
            yield

    def switches(self) -> dict[str, Any]:
        scan = "bridged mlx-lm kernel" if backend.resolve() == "cuda" else self.chosen["gated_delta"]
        return {"engine": "mlx", "gated_delta": scan, "attention": self.chosen["attention"]}

    def _attention(self, queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        # Chunks of other sizes than the two prepared, such as the last of a prompt, take MLX's choice.
        if self.chosen["attention"].get(queries.shape[2]) != "force_fused" or hasattr(
            options["cache"], "bits"
        ):
            return base.scaled_dot_product_attention(queries, keys, values, **options)
        options.pop("cache")
        return mx.fast.scaled_dot_product_attention(queries, keys, values, force_fused=True, **options)

    def _scan(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        if mask is None and self.chosen["gated_delta"].get(q.shape[1]) == "mx.fast.gated_delta_update":
            y, state = mx.fast.gated_delta_update(q, k, v, g, beta, state)
            return y, state
        return _STOCK_SCAN(q, k, v, g, beta, state, mask)


_STOCK_SCAN = gated_delta.gated_delta_kernel


def _time(call: Callable[[], Any]) -> float:
    """Median seconds of a call; infinite if MLX has no kernel for it."""
    try:
        mx.eval(call())
    except (RuntimeError, ValueError):  # force_fused without a fused kernel
        return float("inf")
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        mx.eval([call() for _ in range(4)])
        samples.append(time.perf_counter() - start)
    return sorted(samples)[2]


def _attention_calls(model: nn.Module, tokens: int, length: int) -> dict[str, Callable[[], Any]]:
    layer = next(layer.self_attn for layer in model.layers if not layer.is_linear)
    D, Hq, Hkv = layer.head_dim, layer.num_attention_heads, layer.num_key_value_heads
    context = max(length, tokens)
    q = mx.random.normal((1, Hq, tokens, D)).astype(mx.bfloat16)
    k, v = (mx.random.normal((1, Hkv, context, D)).astype(mx.bfloat16) for _ in range(2))
    mask = None if tokens == 1 else "causal"

    def call(**options: Any) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=layer.scale, mask=mask, **options)

    mx.eval(q, k, v)
    return {"default": call, "force_fused": lambda: call(force_fused=True)}


def _scan_calls(model: nn.Module, tokens: int) -> dict[str, Callable[[], Any]]:
    layer = next(layer.linear_attn for layer in model.layers if layer.is_linear)
    Hk, Hv, Dk, Dv = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    q, k = (mx.random.normal((1, tokens, Hk, Dk)).astype(mx.bfloat16) * Dk**-0.5 for _ in range(2))
    v = mx.random.normal((1, tokens, Hv, Dv)).astype(mx.bfloat16)
    g = mx.random.uniform(0.9, 1.0, (1, tokens, Hv))
    beta = mx.random.uniform(0.0, 1.0, (1, tokens, Hv)).astype(mx.bfloat16)
    operands = (q, k, v, g, beta, mx.zeros((1, Hv, Dv, Dk)))
    mx.eval(operands)
    calls = {"mlx-lm kernel": lambda: _STOCK_SCAN(*operands)}
    if hasattr(mx.fast, "gated_delta_update"):
        calls["mx.fast.gated_delta_update"] = lambda: mx.fast.gated_delta_update(*operands)
    return calls
