"""What a ``lily-without-NAME`` arm switches off: an op, several ops, or a mechanism that is no op.

An op is off by its name in ``LILY_DISABLE``. A mechanism is off while one function is patched. Its name is in
``LILY_DISABLE`` then too, where no op answers to it: a function compiled meanwhile belongs to these settings
and is not found under others.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from lily_mlx import tiles
from lily_mlx.layers import attention
from lily_mlx.models import LilyModel
from lily_mlx.prompt import PromptStep
from lily_mlx.settings import OPS
from lily_mlx.step import DecodeStep

Context = contextlib.AbstractContextManager[Any]

_generate = importlib.import_module("mlx_lm.generate")  # the package's attribute of that name is a function

_SEVERAL_OPS = {"expert_gemm": ("expert_gemm_gate_up", "expert_gemm_down")}


def _fixed_tile(op: str, **sizes: int) -> Context:
    """The op's tile is always the one that the table has for these sizes."""
    fitting = tiles._fitting

    def fixed(name: str, chip: str, found: tuple[tuple[str, int], ...]) -> Any:
        return fitting(name, chip, tuple((dict(found) | sizes).items()) if name == op else found)

    return patch.object(tiles, "_fitting", fixed)


def _whole_prompt() -> Context:
    """A prompt is one chunk, whatever the prefill step."""
    stock = _generate.generate_step

    def generate_step(prompt: mx.array, model: Any, **options: Any) -> Any:
        return stock(prompt, model, **options | {"prefill_step_size": max(prompt.size, 1)})

    return patch.object(_generate, "generate_step", generate_step)


def _token_read_back() -> Context:
    """The CPU reads each token, so it begins to prepare a step only when the one before is computed."""
    call = LilyModel.__call__

    def read_first(self: Any, inputs: mx.array, *args: Any, **options: Any) -> mx.array:
        if inputs.size == 1:
            inputs = mx.array(inputs.tolist(), dtype=inputs.dtype)
        return call(self, inputs, *args, **options)

    return patch.object(LilyModel, "__call__", read_first)


def _not_taken(step: type) -> Context:
    """A compiled step takes no call."""
    return patch.object(step, "why_not", lambda self, inputs, cache: "switched off")


def _one_write_after_the_other() -> Context:
    """In a decode step a layer's values are written after its keys, as if they depended on them.

    Little else overlaps in Lily's step. MLX, CUDA graphs and Metal's barriers order launches by the buffers
    that they read and write, which ``mx.depends`` leaves as they are. So an elementwise launch carries the
    dependency: it reads keys just written and gives the rows of values unchanged, NaN included. Its time, one
    launch an attention layer, is part of what the arm loses.
    """
    write = attention._write

    def in_turn(
        keys: mx.array, values: mx.array, last_keys: mx.array, last_values: mx.array, rows: mx.array
    ) -> tuple[mx.array, mx.array]:
        written, _ = write(keys, values, last_keys, last_values, rows)
        read = written[:, :, : last_values.shape[2]]
        last_values = mx.where(read == read, last_values, last_values)
        return written, write(keys, values, last_keys, last_values, rows)[1]

    return patch.object(attention, "_write", in_turn)


_MECHANISMS: dict[str, Callable[[], Context]] = {
    "expert_tiles": lambda: _fixed_tile("expert_gemm_gate_up", load=0),
    "attention_layout": lambda: _fixed_tile("attention_decode", capacity=8192),
    "prompt_chunks": _whole_prompt,
    "token_on_gpu": _token_read_back,
    "overlap": _one_write_after_the_other,
    "prompt_step": lambda: _not_taken(PromptStep),
    "decode_step": lambda: _not_taken(DecodeStep),
}


def names() -> list[str]:
    """Every name that can be switched off."""
    return sorted({*OPS, *_SEVERAL_OPS, *_MECHANISMS})


def disabled(name: str) -> tuple[str, ...]:
    """What ``LILY_DISABLE`` names while ``name`` is off."""
    return _SEVERAL_OPS.get(name, (name,))


def off(name: str) -> Context:
    """A context in which a mechanism is off; for an op it does nothing, because ``LILY_DISABLE`` does."""
    return _MECHANISMS.get(name, contextlib.nullcontext)()
