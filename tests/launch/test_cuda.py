"""Every kernel through nvcc: no GPU is needed to see that it compiles, and what it takes."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from test_preludes import PRIMITIVES, TILE_PRODUCT

from lily_mlx.errors import BackendUnavailableError
from lily_mlx.launch import cuda
from lily_mlx.launch.kernel import Buffer, Kernel, Variant, all_kernels

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

ONE = (32, 1, 1)
TEST_KERNELS = (
    dataclasses.replace(
        PRIMITIVES,
        variants=tuple(
            Variant({"T": dtype, "S": half, "N": 64}, {}, (64, 1, 1), (64, 1, 1))
            for dtype, half in ((mx.float32, mx.float16), (mx.bfloat16, mx.bfloat16))
        ),
    ),
    dataclasses.replace(
        TILE_PRODUCT,
        variants=tuple(
            Variant(
                {"T": dtype, "M": 32, "N": 64, "K": 64, "B_IS_KN": b_is_kn, "SIMDGROUPS": 1}, {}, ONE, ONE
            )
            for dtype in (mx.float32, mx.bfloat16, mx.float16)
            for b_is_kn in (False, True)
        ),
    ),
)


def compile_with_nvcc(kernel: Kernel, folder: Path) -> dict[int, dict[str, int]]:
    """What ptxas says of each variant: registers, spilled and shared bytes."""
    path = folder / f"{kernel.stem}.cu"
    path.write_text(cuda.offline_source(kernel, kernel.variants))
    result = subprocess.run(
        ["nvcc", "-arch=sm_90", "-Xptxas", "-v", "-cubin", "-o", str(path.with_suffix(".cubin")), str(path)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = {}
    for part in result.stderr.split("Compiling entry function")[1:]:
        index = int(re.search(rf"{kernel.stem}_(\d+)'", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        found[index] = {
            "registers": int(re.search(r"Used (\d+) registers", part)[1]),
            "spilled": int(re.search(r"(\d+) bytes spill stores", part)[1]),
            "shared": int(shared[1]) if shared else 0,
        }
    assert found.keys() == set(range(len(kernel.variants)))
    return found


@needs_nvcc
@pytest.mark.parametrize("kernel", [*all_kernels(), *TEST_KERNELS], ids=lambda kernel: kernel.stem)
def test_every_variant_compiles(kernel, tmp_path):
    for index, used in compile_with_nvcc(kernel, tmp_path).items():
        template = kernel.variants[index].template
        assert used["spilled"] == 0, f"{template} spills"
        # Arrays start at multiples of 16 bytes, so there may be gaps between them.
        declared = kernel.threadgroup_bytes(template)
        assert declared <= used["shared"] <= declared + 64, f"{template} declares {declared} bytes"


@needs_nvcc
def test_an_error_names_the_line_of_the_metal_file(tmp_path):
    (tmp_path / "broken.metal").write_text("// one\n// two\nint three = no_such_name;\n// ---- body ----\n")
    kernel = Kernel("broken", (), (Buffer("y", "8", "float32"),), (), (Variant({}, {}, ONE, ONE),))
    kernel = dataclasses.replace(kernel, folder=tmp_path)
    with pytest.raises(AssertionError, match=r"broken\.metal\(3\)"):
        compile_with_nvcc(kernel, tmp_path)


@pytest.mark.skipif(mx.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda_the_launcher_says_so():
    description = {"name": "probe", "input_names": [], "output_names": ["y"], "header": "", "source": ""}
    with pytest.raises(BackendUnavailableError, match="NVIDIA"):
        cuda.build(description, [], [mx.float32], {})
