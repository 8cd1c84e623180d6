"""The Metal launcher under an export trace, which works on any machine."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from lily_mlx.launch import metal
from lily_mlx.launch.kernel import Variant, all_kernels, launch


def traced(kernel, variant: Variant) -> dict[str, Any]:
    """The one CustomKernel node of a launch."""
    arguments = kernel.example(variant)
    inputs = arguments.pop("inputs")
    nodes: list[dict[str, Any]] = []
    mx.export_function(
        lambda node: nodes.append(node) if node["type"] == "primitive" else None,
        lambda *arrays: launch(kernel, list(arrays), **arguments, backend="metal"),
        *inputs,
    )
    (node,) = [node for node in nodes if node["name"] == "CustomKernel"]
    return node


@pytest.mark.parametrize("kernel", all_kernels(), ids=lambda kernel: kernel.stem)
def test_a_launch_is_one_primitive_with_the_declared_signature(kernel):
    assert kernel.variants_on("metal")
    for variant in kernel.variants_on("metal"):
        name, source, *rest = traced(kernel, variant)["arguments"]
        assert f"lily_{kernel.stem}_" in name
        assert tuple(rest[:6]) == (*variant.grid, *variant.threadgroup)
        signature = source.rsplit("[[kernel]] void", 1)[1]
        for index, buffer in enumerate(kernel.inputs):
            assert f"* {buffer.name} [[buffer({index})]]" in signature
        for index, buffer in enumerate(kernel.outputs, start=len(kernel.inputs)):
            assert f"* {buffer.name} [[buffer({index})]]" in signature
        assert "constant " not in signature, "an input in constant address space"
        assert metal.exact_source(kernel, variant) == source


def test_the_math_mode_reaches_mlx():
    (kernel,) = [kernel for kernel in all_kernels() if kernel.stem == "gated_delta_scan"]
    assert kernel.math_mode == "safe"
    modes = {}
    for mode in ("safe", "fast"):
        call = metal.build(
            {
                "name": f"probe_{mode}",
                "input_names": ["x"],
                "output_names": ["y"],
                "header": "",
                "source": "",
            },
            mode,
        )
        nodes: list[dict[str, Any]] = []
        mx.export_function(
            nodes.append,
            lambda x, call=call: call(
                inputs=[x],
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[(8,)],
                output_dtypes=[mx.float32],
            ),
            mx.zeros((8,)),
        )
        (node,) = [node for node in nodes if node["type"] == "primitive"]
        modes[mode] = node["arguments"][-1]
    assert modes["safe"] != modes["fast"]


def test_variants_have_names_of_their_own():
    (kernel,) = [kernel for kernel in all_kernels() if kernel.stem == "gated_delta_scan"]
    names = {traced(kernel, variant)["arguments"][0].split("__")[0] for variant in kernel.variants}
    assert len(names) == len(kernel.variants)
