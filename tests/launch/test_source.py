"""Assembly of prelude, common files and a .metal file, and the checks on what the files may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from lily_mlx.launch import source
from lily_mlx.launch.kernel import Buffer, Kernel, all_kernels


def kernel_at(folder: Path, text: str, stem: str = "probe") -> Kernel:
    (folder / f"{stem}.metal").write_text(text)
    return Kernel(
        stem,
        inputs=(Buffer("x", "N", "float32"),),
        outputs=(Buffer("y", "N", "float32"),),
        template=("N",),
        variants=(),
        folder=folder,
    )


@pytest.mark.parametrize("backend", source.BACKENDS)
def test_header_and_body_are_the_files_text(tmp_path, backend):
    kernel = kernel_at(tmp_path, f"int helper();\n{source.BODY_MARK}\ny[0] = x[0];\n")
    header, body = source.assemble(kernel, backend)
    prelude = (source.KERNELS / "prelude" / f"{backend}.h").read_text()
    assert prelude.splitlines()[-1] in header
    assert header.index("lily_tile") < header.index("int helper();")
    assert body == '#line 3 "probe.metal"\ny[0] = x[0];\n'


def test_line_directives_name_the_line_of_the_file(tmp_path):
    text = f'// one\n#include "common/row_sum.h"\nint third_line();\n{source.BODY_MARK}\ny[0] = x[0];\n'
    header, _ = source.assemble(kernel_at(tmp_path, text), "host")
    lines = header.splitlines()
    place = lines.index("int third_line();")
    assert lines[place - 1] == '#line 3 "probe.metal"'
    assert '#line 1 "custom_kernels/common/row_sum.h"' in lines[:place]


def test_a_file_is_included_once(tmp_path):
    text = f'#include "common/row_sum.h"\n#include "common/row_sum.h"\n{source.BODY_MARK}\n'
    header, _ = source.assemble(kernel_at(tmp_path, text), "cuda")
    assert header.count("f32 lily_row_sum(f32 x)") == 1


@pytest.mark.parametrize("text", ["no body", f"{source.BODY_MARK}\n{source.BODY_MARK}\n"])
def test_a_file_needs_one_body(tmp_path, text):
    with pytest.raises(ValueError, match=r"probe\.metal: needs one line"):
        source.assemble(kernel_at(tmp_path, text), "host")


@pytest.mark.parametrize("suffix", ["_shape", "_strides", "_ndim"])
def test_a_body_that_would_change_the_signature_is_refused(tmp_path, suffix):
    kernel = kernel_at(tmp_path, f"{source.BODY_MARK}\nint max{suffix} = 0;\n")
    with pytest.raises(ValueError, match=f"x{suffix}"):
        source.assemble(kernel, "host")


def test_unknown_backend(tmp_path):
    with pytest.raises(ValueError, match="'ops'"):
        source.assemble(kernel_at(tmp_path, source.BODY_MARK), "ops")


def test_every_kernel_assembles_and_there_is_at_least_one():
    kernels = all_kernels()
    assert "gated_delta_scan" in [kernel.stem for kernel in kernels]
    assert {path.stem for path in source.KERNELS.glob("*.metal")} == {kernel.stem for kernel in kernels}
    for kernel in kernels:
        for backend in source.BACKENDS:
            _, body = source.assemble(kernel, backend)
            assert kernel.stem in body


def test_no_kernel_names_a_primitive_of_one_backend():
    assert source.check_intrinsics() == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("x = simd_sum(x);", "simd_sum"),
        ("x = simd_shuffle_xor(x, 1);", "simd_shuffle_xor"),
        ("simdgroup_barrier();", "simdgroup_barrier"),
        ("simdgroup_matrix<float, 8, 8> m;", "simdgroup_matrix"),
        ("x = quad_sum(x);", "quad_sum"),
        ("threadgroup_barrier(f);", "threadgroup_barrier"),
        ("auto f = mem_flags::mem_device;", "mem_flags"),
        ("x = as_type<float>(y);", "as_type"),
        ("x = metal::exp(x);", "metal::exp"),
        ("x = precise::exp(x);", "precise::exp"),
        ("x = fast::exp(x);", "fast::exp"),
        ("x = cos(x);", "cos"),
        ("x = y * rsqrt (x);", "rsqrt"),
        ("x = 1.0f / expf(-x);", "expf"),
        ("x = pow(x, 2.0f);", "pow"),
        ("x = log2(x);", "log2"),
        ("atomic_uint* p;", "atomic_uint"),
        ("device float* p;", "device"),
        ("threadgroup float* p;", "threadgroup"),
        ("bfloat x;", "bfloat"),
        ("half4 x;", "half4"),
        ("x = __shfl_xor_sync(m, x, 1);", "__shfl_xor_sync"),
        ("__syncthreads();", "__syncthreads"),
        ("int i = threadIdx.x;", "threadIdx"),
        ("atomicAdd(p, 1);", "atomicAdd"),
        ('asm("nop;");', "asm"),
        ("#include <metal_stdlib>", "#include <"),
        ("#pragma unroll", "#pragma"),
    ],
)
def test_intrinsics_are_found_with_their_line(tmp_path, line, name):
    path = tmp_path / "planted.metal"
    path.write_text(f"// simd_sum in a comment\n/* two\n lines of asm */ int a;\n{line}\n")
    assert source.check_intrinsics([path]) == [f"planted.metal:4: {name}"]


@pytest.mark.parametrize(
    "line",
    [
        "x = lily_simd_sum(x);",
        "x = lily_cos(lily_fast_exp2(x));",
        "f32 exp = 1.0f, pow;",
        "f32 cosine = f32(cosine_of(x));",
        "lily_threadgroup_barrier();",
        "LILY_DEVICE const f32* p;",
        "uint s = simdgroup_index_in_threadgroup;",
        "int threads_per_device = 0;",
        "f32 fast = 1.0f;",
        "bool simd = true;",
    ],
)
def test_ordinary_code_is_not_accused(tmp_path, line):
    path = tmp_path / "clean.metal"
    path.write_text(f"{line}\n")
    assert source.check_intrinsics([path]) == []
