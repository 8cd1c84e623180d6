"""Self-checks: a kernel is trusted on a GPU after it gave the right result there once.

Kernels are tested on the CPU and on other GPUs, but the user's chip and compiler may be ones that nobody
tried. So before an op's kernel is used on a GPU, it runs on a small problem, with every tile that the op's
table can choose on this chip, and is compared with the op's fp32 reference. If it does not compile or launch,
or is wrong, the op takes the stock path and one line on stderr says so. What passed is remembered in the
cache folder for this chip, system, MLX, Lily, kernel text and tables.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from .. import __version__, tiles
from ..launch import backend as backends
from ..launch import source
from ..settings import settings

SelfCheck = Callable[[str], "str | None"]
"""Takes a back-end, runs the op's kernel there on a small problem, returns None or what is wrong."""

_checks: dict[str, SelfCheck] = {}

A = TypeVar("A")
B = TypeVar("B")


def self_check(op: str) -> Callable[[SelfCheck], SelfCheck]:
    """Register the decorated function as the self-check of an op."""

    def register(check: SelfCheck) -> SelfCheck:
        _checks[op] = check
        return check

    return register


def paired(first: Sequence[A], second: Sequence[B]) -> list[tuple[A, B]]:
    """Each of the first with one of the second and the other way round: as few pairs, to compile, as do."""
    pairs = max(len(first), len(second))
    return [(first[i % len(first)], second[i % len(second)]) for i in range(pairs)]


def off_reference(got: mx.array, want: mx.array, bound: float) -> str | None:
    """None if the error is at most ``bound`` of the reference's largest value, else how far off it is."""
    error: Any = (mx.abs(got.astype(mx.float32) - want).max() / mx.abs(want).max()).item()
    return None if error <= bound else f"{error:.1e} off the reference, allowed {bound:.1e}"


@cache
def distrust(op: str, backend: str) -> str | None:
    """None if the op's kernel may be used on the back-end, else what its self-check found.

    Only GPUs are checked: ``host`` is where tests run, and a trace for a GPU that is not here runs nothing.
    """
    if backend not in ("metal", "cuda") or not backends.available(backend) or op not in _checks:
        return None
    key = _key(op, backend)
    if key in _remembered():
        return None
    try:
        found = _checks[op](backend)
    except Exception as error:  # a compiler's or driver's complaint comes as any exception
        found = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if found is None:
        _remember(key)
        return None
    reason = f"failed its self-check on this GPU: {found}"
    print(f"lily-mlx: {op} {reason}; running stock's op instead", file=sys.stderr)
    return reason


_TEXTS = (".metal", ".h", ".toml")


def _key(op: str, backend: str) -> str:
    folders = (source.KERNELS, Path(tiles.__file__).parent)
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in _TEXTS]
    text = b"".join(path.read_bytes() for path in files)
    facts = (
        op,
        backends.chip(backend),
        platform.platform(),
        version("mlx"),
        __version__,
        hashlib.sha256(text).hexdigest(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _file() -> Path:
    return settings().cache_dir / "self-checks.json"


def _remembered() -> list[str]:
    with suppress(OSError, ValueError):
        found = json.loads(_file().read_text())
        if isinstance(found, list):
            return found
    return []


def _remember(key: str) -> None:
    """Add to the file, whole or not at all. A cache folder that cannot be written costs only the memory."""
    with suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=_file().parent)
        with os.fdopen(handle, "w") as file:
            json.dump(sorted({*_remembered(), key}), file)
        os.replace(name, _file())
