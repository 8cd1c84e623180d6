"""The CUDA launcher: ``mx.fast.cuda_kernel`` through prelude/cuda.h.

What differs from Metal and where it is settled:

- a launch is whole blocks, where Metal cuts the last threadgroup: ``launch`` takes whole threadgroups only;
- every input is a pointer, also a 0-d one: run-time scalars come in one int32 array on every back-end;
- threadgroup memory is ``__shared__``, static, and at most 32 KB as on Metal: prelude and ``launch``;
- MLX keeps compiled code by name, on disk too: the name holds a digest of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import BackendUnavailableError
from .source import assemble

if TYPE_CHECKING:
    from .kernel import Kernel, Variant


def build(description: dict[str, Any]) -> Callable[..., list[mx.array]]:
    """MLX's kernel object for one variant.

    Args:
        description: name, input_names, output_names, header and source.

    Raises:
        BackendUnavailableError: MLX was built without CUDA.
    """
    if not mx.cuda.is_available():
        raise BackendUnavailableError("the cuda back-end needs MLX with CUDA and an NVIDIA GPU")
    kernel: Any = mx.fast.cuda_kernel(**description)
    return kernel


_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
}


def offline_source(kernel: Kernel, variants: Sequence[Variant]) -> str:
    """A ``.cu`` file that nvcc compiles where no GPU is, with the signatures that MLX would write.

    Args:
        kernel: the kernel.
        variants: each becomes a function ``<stem>_<index>``.
    """
    header, body = assemble(kernel, "cuda")
    parts = [
        "#include <cooperative_groups.h>\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n",
        "#include <stdint.h>\n",
        header,
        "namespace mlx::core::cu {\n",
    ]
    for index, variant in enumerate(variants):
        arguments = kernel.example(variant)
        parameters = [
            f"const {_TYPES[array.dtype]}* {buffer.name}"
            for buffer, array in zip(kernel.inputs, arguments["inputs"], strict=True)
        ] + [
            f"{_TYPES[dtype]}* {buffer.name}"
            for buffer, dtype in zip(kernel.outputs, arguments["output_dtypes"], strict=True)
        ]
        parts.append(f"__global__ void {kernel.stem}_{index}({', '.join(parameters)}) {{\n")
        for name, value in variant.template.items():
            if isinstance(value, mx.Dtype):
                parts.append(f"  using {name} = {_TYPES[value]};\n")
            elif isinstance(value, bool):
                parts.append(f"  constexpr bool {name} = {str(value).lower()};\n")
            else:
                parts.append(f"  constexpr int {name} = {value};\n")
        parts.append(f"{body}}}\n")
    parts.append("}\n")
    return "".join(parts)
