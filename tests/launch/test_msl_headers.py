"""Every Metal header in the installed MLX compiles, to run and in the strict pass."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from lily_mlx.launch.hostrt import compiler
from lily_mlx.launch.msl import INCLUDE_DIR, rewrite
from lily_mlx.launch.msl.rewrite import Mode, inline_includes
from lily_mlx.settings import settings

ROOT = Path(mx.__file__).parent / "include"
FOLDER = "mlx/backend/metal/kernels"
FLAGS: dict[Mode, list[str]] = {"host": ["-std=c++20"], "strict": ["-std=c++23", "-DLILY_STRICT"]}

# What MLX's own sources include before a header that does not include it itself.
GEMM = ["steel/utils.h", "steel/gemm/gemm.h"]
NAX = ["steel/utils.h", "steel/gemm/gemm.h", "steel/gemm/gemm_nax.h"]
CONV = [*GEMM, "steel/conv/conv.h", "steel/conv/params.h"]
REDUCE = ["atomic.h", "reduction/ops.h"]
QUANTISED = [*GEMM, "quantized_utils.h"]
BEFORE = {
    "binary.h": ["binary_ops.h"],
    "binary_two.h": ["binary_ops.h"],
    "fp_quantized.h": QUANTISED,
    "fp_quantized_nax.h": [*QUANTISED, "steel/gemm/nax.h"],
    "indexing/scatter.h": [*REDUCE, "indexing/indexing.h"],
    "indexing/scatter_axis.h": REDUCE,
    "quantized.h": QUANTISED,
    "quantized_nax.h": [*QUANTISED, "steel/gemm/nax.h"],
    "reduce.h": REDUCE,
    "reduction/ops.h": ["atomic.h"],
    "reduction/reduce_all.h": REDUCE,
    "reduction/reduce_col.h": REDUCE,
    "reduction/reduce_init.h": REDUCE,
    "reduction/reduce_row.h": REDUCE,
    "scan.h": ["binary_ops.h"],
    "searchsorted.h": ["sort.h"],
    "steel/conv/loader.h": ["steel/defines.h", "steel/conv/params.h"],
    "steel/conv/loaders/loader_channel_l.h": ["steel/defines.h", "steel/conv/params.h"],
    "steel/conv/loaders/loader_channel_n.h": ["steel/defines.h", "steel/conv/params.h"],
    "steel/conv/loaders/loader_general.h": ["steel/defines.h", "steel/conv/params.h"],
    "steel/gemm/gemm_nax.h": ["steel/gemm/params.h", "steel/gemm/transforms.h", "steel/gemm/nax.h"],
    "ternary.h": ["ternary_ops.h"],
    "unary.h": ["unary_ops.h"],
    **{
        f"steel/conv/kernels/{name}.h": CONV for name in ("steel_conv", "steel_conv_3d", "steel_conv_general")
    },
    **{
        f"steel/gemm/kernels/steel_gemm_{name}.h": GEMM
        for name in ("fused", "gather", "masked", "segmented", "splitk")
    },
    **{
        f"steel/gemm/kernels/steel_gemm_{name}_nax.h": NAX
        for name in ("fused", "gather", "segmented", "splitk", "thin")
    },
}
ALL = sorted(str(path.relative_to(ROOT / FOLDER)) for path in (ROOT / FOLDER).rglob("*.h"))


@functools.cache
def source(*names: str) -> tuple[str, frozenset[str]]:
    """A Metal source that includes the headers, and the names of all headers in it."""
    seen: set[Path] = set()
    headers = ["utils.h", *(header for name in names for header in [*BEFORE.get(name, []), name])]
    text = "".join(f'#include "{FOLDER}/{header}"\n' for header in headers)
    text = inline_includes("#include <metal_stdlib>\n" + text, ROOT, seen=seen)
    return text, frozenset(str(path.relative_to((ROOT / FOLDER).resolve())) for path in seen)


def units() -> list[tuple[str, ...]]:
    """Headers to compile together. Together they contain every header of the folder.

    Those of steel/ and those with function constants or another header's kernels repeat names, so each is a
    source of its own.
    """
    tops: list[str] = []
    covered: set[str] = set()
    for name in sorted(ALL, key=lambda name: (-len(source(name)[1]), name)):
        if name not in covered:
            tops.append(name)
            covered |= source(name)[1]
    alone = [
        name
        for name in tops
        if name in ("binary_two.h", "indexing/masked_scatter.h")
        or any("steel/" in h for h in source(name)[1])
        or "function_constant" in source(name)[0]
    ]
    return [tuple(name for name in tops if name not in alone), *((name,) for name in alone)]


def test_every_header_is_in_a_unit() -> None:
    assert len(ALL) > 90
    assert set().union(*(source(*names)[1] for names in units())) == set(ALL)


@functools.cache
def language() -> str:
    digest = hashlib.sha256(Path(rewrite.__file__).read_bytes())
    for path in sorted(INCLUDE_DIR.rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def library(mode: Mode, folder: Path) -> list[str]:
    """What has clang read ``<metal_stdlib>`` precompiled."""
    header = folder / f"{mode}.h"
    header.write_text("#include <metal_stdlib>\n")
    target = header.with_suffix(".pch")
    clang, flags = compiler.find_compiler(), [*FLAGS[mode], "-w", "-ffreestanding", f"-I{INCLUDE_DIR}"]
    subprocess.run([*clang.command, *flags, "-x", "c++-header", str(header), "-o", str(target)], check=True)
    return [*flags, "-include-pch", str(target)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library")


@pytest.mark.parametrize("names", units(), ids=lambda names: names[0])
def test_headers_compile(names: tuple[str, ...], tmp_path: Path, folder: Path) -> None:
    clang = compiler.find_compiler()
    running: dict[Path, subprocess.Popen[str]] = {}
    text = source(*names)[0]
    for mode, flags in FLAGS.items():
        key = hashlib.sha256("\n".join([clang.identity, *flags, language(), text]).encode()).hexdigest()
        done = settings().cache_dir / "headers" / key  # exists when the same source has compiled before
        if not done.exists():
            path = tmp_path / f"{mode}.cpp"
            path.write_text(rewrite.translate(text, mode=mode))
            command = [*clang.command, "-x", "c++", "-fsyntax-only", *library(mode, folder), str(path)]
            running[done] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for done, process in running.items():
        _, log = process.communicate()
        assert process.returncode == 0, log
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()
