"""The Metal launcher: ``mx.fast.metal_kernel``.

MLX compiles the text when the kernel first runs, so a call inside an export trace works on any machine, and
:func:`exact_source` can show what Apple's compiler would get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from .kernel import Kernel, Variant


def build(description: dict[str, Any], math_mode: str) -> Callable[..., list[mx.array]]:
    """MLX's kernel object for one variant.

    Args:
        description: name, input_names, output_names, header and source.
        math_mode: "safe", "relaxed" or "fast"; Metal's own default is fast, MLX's is safe.
    """
    kernel: Any = mx.fast.metal_kernel(**description, compile_options={"math_mode": math_mode})

    def call(**arguments: Any) -> list[mx.array]:
        # MLX refuses a kernel on the CPU stream; a trace on a machine without a GPU has no other default.
        if mx.default_device().type != mx.DeviceType.gpu:
            arguments["stream"] = mx.gpu
        return kernel(**arguments)

    return call


def exact_source(kernel: Kernel, variant: Variant) -> str:
    """The Metal text that MLX compiles for a variant, signature included (MLX puts its utils.h before it)."""
    from .kernel import launch

    arguments = kernel.example(variant)
    inputs = arguments.pop("inputs")
    sources: list[str] = []

    def record(node: dict[str, Any]) -> None:
        if node["type"] == "primitive" and node["name"] == "CustomKernel":
            sources.append(node["arguments"][1])

    def call(*arrays: mx.array) -> list[mx.array]:
        return launch(kernel, list(arrays), **arguments, backend="metal")

    mx.export_function(record, call, *inputs)
    (text,) = sources
    return text
