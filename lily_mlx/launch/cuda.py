"""The CUDA launcher: a kernel through prelude/cuda.h, compiled once and kept.

What differs from Metal and where it is settled:

- a launch is whole blocks, where Metal cuts the last threadgroup: ``launch`` takes whole threadgroups only;
- every input is a pointer, also a 0-d one: run-time scalars come in one int32 array on every back-end;
- threadgroup memory is ``__shared__``, static, and at most 32 KB as on Metal: prelude and ``launch``;
- ``mx.fast.cuda_kernel`` compiles a kernel again in every process, some seconds each. So kernels are compiled
  here, the code kept in the cache folder under a digest of the text, and launched with
  ``mx.fast.precompiled_cuda_kernel``. nvcc is preferred, because it compresses, and MLX hashes the code
  at every launch; else the runtime compiler that MLX itself loads. Without either, MLX's own way is taken.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import BackendUnavailableError
from ..settings import settings
from .source import assemble

if TYPE_CHECKING:
    from .kernel import Kernel, TemplateValue, Variant


def build(
    description: dict[str, Any],
    input_dtypes: Sequence[mx.Dtype],
    output_dtypes: Sequence[mx.Dtype],
    template: Mapping[str, TemplateValue],
) -> Callable[..., list[mx.array]]:
    """A function that launches one variant, with the keywords of MLX's kernel objects.

    Args:
        description: name, input_names, output_names, header and source.
        input_dtypes, output_dtypes: of the buffers.
        template: values of the template parameters.

    Raises:
        BackendUnavailableError: MLX was built without CUDA.
        RuntimeError: the text does not compile.
    """
    if not mx.cuda.is_available():
        raise BackendUnavailableError("the cuda back-end needs MLX with CUDA and an NVIDIA GPU")
    if _nvcc() is None and _nvrtc() is None:
        kernel: Any = mx.fast.cuda_kernel(**description)
        return kernel
    name = description["name"]
    text = (
        _PRELUDE
        + description["header"]
        + _function(
            name,
            [
                *_parameters(description["input_names"], input_dtypes, "const "),
                *_parameters(description["output_names"], output_dtypes, ""),
            ],
            template,
            description["source"],
        )
    )
    code = compiled(name, text, mx.device_info(mx.gpu)["architecture"])

    def call(inputs: list[mx.array], template: Any, **arguments: Any) -> list[mx.array]:
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=code,
            inputs=inputs,
            scalars=[],
            ensure_row_contiguous=True,
            **arguments,
        )

    return call


def compiled(name: str, text: str, architecture: Any) -> bytes:
    """The machine code of a kernel, from the cache folder if it is there.

    Args:
        name: of the kernel, for the file.
        text: a complete CUDA source.
        architecture: of the GPU, "sm_90".

    Raises:
        RuntimeError: the text does not compile; the compiler's log.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = settings().cache_dir / "cuda" / f"{name}-{digest}-{architecture}"
    with suppress(OSError):
        return path.read_bytes()
    compile_ = _compile_with_nvrtc if _nvcc() is None else _compile_with_nvcc
    code = compile_(name, text, str(architecture))
    with suppress(OSError):  # a cache folder that cannot be written costs only time
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, path)
    return code


def _compile_with_nvcc(name: str, text: str, architecture: str) -> bytes:
    """A compressed fat binary with the code of one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / f"{name}.cu", Path(folder) / f"{name}.fatbin"
        source.write_text(text)
        virtual = architecture.replace("sm", "compute")
        done = subprocess.run(
            [
                *(str(_nvcc()), "-fatbin", "-gencode", f"arch={virtual},code={architecture}"),
                *("-Xfatbin", "-compress-all", "-o", str(binary), str(source)),
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{name} does not compile: {done.stderr}")
        return binary.read_bytes()


def _compile_with_nvrtc(name: str, text: str, architecture: str) -> bytes:
    library = _nvrtc()
    assert library is not None
    program = ctypes.c_void_p()
    options = [f"--gpu-architecture={architecture}", *(f"--include-path={path}" for path in _includes())]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        failed = library.nvrtcCompileProgram(program, len(options), arguments)
        what = "ProgramLog" if failed else "CUBIN"
        size = ctypes.c_size_t()
        getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, data)
        if failed:
            raise RuntimeError(f"{name} does not compile: {data.value.decode(errors='replace')}")
        return data.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvcc() -> str | None:
    """The CUDA compiler's path: on PATH, or where MLX looks for CUDA."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


@cache
def _nvrtc() -> ctypes.CDLL | None:
    """NVIDIA's runtime compiler: the one that MLX has loaded, for MLX links to it."""
    for version in (13, 12):
        with suppress(OSError):
            return ctypes.CDLL(f"libnvrtc.so.{version}")
    return None


def _includes() -> list[Path]:
    """Folders with cuda_bf16.h: where MLX looks for them, and in NVIDIA's Python packages."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / "include" for home in homes if home]
    for entry in sys.path:
        folders += [Path(entry) / "nvidia" / part / "include" for part in ("cu13", "cuda_runtime")]
    return [folder for folder in folders if (folder / "cuda_bf16.h").is_file()][:1]


_PRELUDE = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#else
#include <stdint.h>
#endif
"""

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
    """A ``.cu`` file that nvcc compiles where no GPU is, with the signatures of :func:`build`.

    Args:
        kernel: the kernel.
        variants: each becomes a function ``<stem>_<index>``.
    """
    header, body = assemble(kernel, "cuda")
    parts = [_PRELUDE, header]
    for index, variant in enumerate(variants):
        arguments = kernel.example(variant)
        parameters = [
            *_parameters(
                [buffer.name for buffer in kernel.inputs],
                [array.dtype for array in arguments["inputs"]],
                "const ",
            ),
            *_parameters([buffer.name for buffer in kernel.outputs], arguments["output_dtypes"], ""),
        ]
        parts.append(_function(f"{kernel.stem}_{index}", parameters, variant.template, body))
    return "".join(parts)


def _parameters(names: Sequence[str], dtypes: Sequence[mx.Dtype], qualifier: str) -> list[str]:
    return [f"{qualifier}{_TYPES[dtype]}* {name}" for name, dtype in zip(names, dtypes, strict=True)]


def _function(name: str, parameters: list[str], template: Mapping[str, TemplateValue], body: str) -> str:
    lines = [f'extern "C" __global__ void {name}({", ".join(parameters)}) {{\n']
    for parameter, value in template.items():
        if isinstance(value, mx.Dtype):
            lines.append(f"  using {parameter} = {_TYPES[value]};\n")
        elif isinstance(value, bool):
            lines.append(f"  constexpr bool {parameter} = {str(value).lower()};\n")
        else:
            lines.append(f"  constexpr int {parameter} = {value};\n")
    return "".join([*lines, body, "}\n"])
