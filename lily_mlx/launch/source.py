"""One source for every back-end: prelude, common files and a ``.metal`` file become header and body.

A kernel's file has two regions. Above :data:`BODY_MARK` lies the header: template functions, and
``#include "common/<file>.h"`` for what kernels share. Below it lies the body of the kernel function, whose
signature MLX writes. Nothing is generated: the text that a compiler sees is the text of the files.

The three preludes define one list of primitives. :func:`check_preludes` compares the lists,
:func:`check_intrinsics` finds code that names a primitive of one back-end, or a function whose precision each
back-end's compiler chooses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .kernel import Kernel

BODY_MARK = "// ---- body ----"
BACKENDS = ("metal", "cuda", "host")

ATTRIBUTES = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
)
"""The thread attributes a body may name: MLX's signature has them on Metal, prelude/cuda.h on CUDA."""


def _kernels_folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed = package / "custom_kernels"  # in a wheel; beside the package in a checkout
    return installed if installed.is_dir() else package.parent / "custom_kernels"


KERNELS = _kernels_folder()
"""The folder of Lily's kernels, with ``prelude/`` and ``common/``."""

_INCLUDE = re.compile(r'\s*#include\s+"([^"]+)"\s*$')
# MLX adds a parameter for every input whose name is followed by one of these anywhere in the body.
_SHAPE_SUFFIXES = ("_shape", "_strides", "_ndim")


def assemble(kernel: Kernel, backend: str) -> tuple[str, str]:
    """The texts that MLX's custom kernels take as ``header`` and ``source``.

    A process reads a file once, as it builds a kernel once: an edit is seen by the next process.

    Args:
        kernel: the kernel; its file is ``<folder>/<stem>.metal``.
        backend: ``metal``, ``cuda`` or ``host``.

    Returns:
        (header, body), with ``#line`` directives, so that errors point into the files.

    Raises:
        ValueError: the file has no body, or its body names an input in a way that changes MLX's signature.
    """
    header, body = _assemble(kernel.folder / f"{kernel.stem}.metal", backend)
    for name in (buffer.name for buffer in kernel.inputs):
        for suffix in _SHAPE_SUFFIXES:
            if name + suffix in body:
                raise ValueError(
                    f"{kernel.stem}: the body contains {name + suffix!r}, to which MLX adds a parameter"
                )
    return header, body


def prelude(backend: str) -> str:
    """The text of a prelude with its includes, for kernels that are not Lily's."""
    return "\n".join(_read(KERNELS / "prelude" / f"{backend}.h", set())) + "\n"


@lru_cache
def _assemble(path: Path, backend: str) -> tuple[str, str]:
    if backend not in BACKENDS:
        raise ValueError(f"no kernel source for back-end {backend!r}; there is one for {', '.join(BACKENDS)}")
    lines = path.read_text().splitlines()
    if lines.count(BODY_MARK) != 1:
        raise ValueError(f"{path.name}: needs one line {BODY_MARK!r}")
    mark = lines.index(BODY_MARK)
    included: set[Path] = set()
    header = [
        *_read(KERNELS / "prelude" / f"{backend}.h", included),
        *_expand(path, lines[:mark], included),
        '#line 1 "signature"',
    ]
    body = [f'#line {mark + 2} "{_label(path)}"', *lines[mark + 1 :]]
    return "\n".join(header) + "\n", "\n".join(body) + "\n"


def _read(path: Path, included: set[Path]) -> Iterator[str]:
    included.add(path)
    yield from _expand(path, path.read_text().splitlines(), included)


def _expand(path: Path, lines: list[str], included: set[Path]) -> Iterator[str]:
    """The lines, with each file of ours in the place of its first include."""
    yield f'#line 1 "{_label(path)}"'
    for number, line in enumerate(lines, start=1):
        if match := _INCLUDE.match(line):
            target = KERNELS / match[1]
            if target not in included:
                yield from _read(target, included)
            yield f'#line {number + 1} "{_label(path)}"'
        else:
            yield line


def _label(path: Path) -> str:
    """How errors name a file: from custom_kernels on, or the bare name."""
    if path.is_relative_to(KERNELS):
        return f"custom_kernels/{path.relative_to(KERNELS).as_posix()}"
    return path.name


# ---- checks ----------------------------------------------------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_MACRO = re.compile(r"^#define (LILY_\w+)(\([^)]*\))?", re.MULTILINE)
_TYPE = re.compile(r"^(?:using|struct) (?!namespace)(\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"LILY_INLINE\s+([\w<>, ]+?)\s+(\w+)\(([^)]*)\)\s*\{")
_ADDRESS_SPACE = re.compile(r"\b(?:device|threadgroup|thread|constant)\b\s*")
_PRIVATE = ("detail_", "lily_detail_")

_INTRINSIC = re.compile(
    r"\b(?:"
    r"simd_\w+|simdgroup_(?!index_in_threadgroup\b)\w+|quad_\w+|threadgroup_barrier|mem_flags|"  # Metal
    r"atomic_\w+|as_type|metal::\w+|precise::\w+|fast::\w+|memory_order\w*|"
    r"device|threadgroup|thread|constant|half\d?|bfloat\d?|bfloat16_t|kernel|"
    r"__\w+|blockIdx|threadIdx|blockDim|gridDim|atomic[A-Z]\w*|asm|mma|ldmatrix|cg::\w+|"  # CUDA
    r"make_u?int\d|make_float\d|"
    # Bare functions of floats, whose precision is up to each compiler's options.
    r"(?:a?(?:cos|sin|tan)(?:h|pi)?|atan2|sincos|exp(?:2|10|m1)?|log(?:2|10|1p|b)?|pow[nr]?|r?sqrt|divide)f?(?=\s*\()"
    r")\b|#\s*include\s*<|#\s*pragma|_Pragma"
)


def prelude_names(backend: str) -> frozenset[str]:
    """What a prelude defines for kernels: macros, types, and functions with parameters and template.

    Address spaces are left out, so overloads that differ in nothing else are one name.
    """
    text = _COMMENT.sub("", prelude(backend))
    names = {f"#define {name}{parameters or ''}" for name, parameters in _MACRO.findall(text)}
    names |= {f"type {name}" for name in _TYPE.findall(text) if not name.startswith(_PRIVATE)}
    for result, name, parameters in _FUNCTION.findall(text):
        if not name.startswith(_PRIVATE):
            parameters = " ".join(_ADDRESS_SPACE.sub("", parameters).split())
            names.add(f"{result} {name}({parameters})")
    return frozenset(names)


def check_preludes() -> list[str]:
    """Differences between the three preludes, one a line; empty when they define the same list."""
    names = {backend: prelude_names(backend) for backend in BACKENDS}
    every = frozenset().union(*names.values())
    problems = [
        f"prelude/{backend}.h lacks {name}" for backend in BACKENDS for name in sorted(every - names[backend])
    ]
    cuda = (KERNELS / "prelude" / "cuda.h").read_text()
    problems += [
        f"prelude/cuda.h lacks attribute {name}" for name in ATTRIBUTES if f"#define {name} " not in cuda
    ]
    return problems


def check_intrinsics(paths: Iterable[Path] | None = None) -> list[str]:
    """Primitives of a single back-end and bare ``cos`` and the like outside prelude/, as ``file:line: name``.

    Args:
        paths: files to check; by default every kernel and common file of Lily.
    """
    if paths is None:
        paths = sorted([*KERNELS.glob("*.metal"), *KERNELS.glob("common/*.h")])
    problems = []
    for path in paths:
        # A comment keeps its line breaks, so that lines stay numbered.
        code = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), path.read_text())
        for number, line in enumerate(code.splitlines(), start=1):
            problems += [f"{_label(path)}:{number}: {match[0]}" for match in _INTRINSIC.finditer(line)]
    return problems
