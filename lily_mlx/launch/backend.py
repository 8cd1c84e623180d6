"""Which back-end runs Lily's kernels on this machine."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

from ..errors import BackendUnavailableError
from ..settings import BACKENDS, settings

_override: ContextVar[str | None] = ContextVar("lily_backend", default=None)


def resolve() -> str:
    """The back-end in use: ``metal``, ``cuda``, ``host`` or ``ops``.

    ``auto`` picks the GPU that MLX has, unless MLX's default device is the CPU; else ``ops``.

    Raises:
        BackendUnavailableError: ``LILY_BACKEND`` names one that this machine lacks.
    """
    if (forced := _override.get()) is not None:
        return forced
    asked = settings().backend
    if asked == "auto":
        import mlx.core as mx

        if mx.default_device().type != mx.DeviceType.gpu:
            return "ops"
        return next((name for name in ("metal", "cuda") if available(name)), "ops")
    if not available(asked):
        raise BackendUnavailableError(
            f"LILY_BACKEND is {asked!r}, but MLX finds no {asked} device here; use auto, host or ops"
        )
    return asked


def available(backend: str) -> bool:
    """Whether MLX has a GPU of this kind here; ``host`` and ``ops`` need none."""
    if backend in ("host", "ops"):
        return True

    import mlx.core as mx

    return {"metal": mx.metal, "cuda": mx.cuda}[backend].is_available()


@contextmanager
def override(backend: str) -> Iterator[None]:
    """Make :func:`resolve` answer ``backend`` inside the block, whether this machine has it or not.

    For traces: under an export trace a Metal kernel can be called on any machine.
    """
    if backend not in BACKENDS or backend == "auto":
        raise BackendUnavailableError(f"no back-end is called {backend!r}")
    token = _override.set(backend)
    try:
        yield
    finally:
        _override.reset(token)


def chip(backend: str) -> str:
    """The back-end and the GPU's architecture, the key of tile tables: ``metal-applegpu_g16s``.

    Just the back-end's name where this machine has no such GPU (``host``, or a trace for Metal).
    """
    if backend not in ("metal", "cuda") or not available(backend):
        return backend

    import mlx.core as mx

    return f"{backend}-{mx.device_info(mx.gpu).get('architecture', 'unknown')}"


@cache
def neural_accelerators() -> tuple[bool | None, str]:
    """Whether MLX runs matrix products on the GPU's neural accelerators, None if that is not known, and why.

    MLX does so from macOS 26.2 and GPU generation 17 (M5; on phones 18) if it was built for macOS 26.2; it
    has no call that says so, hence the same conditions here.
    """
    if not available("metal"):
        return False, "no Apple GPU"

    import mlx.core as mx

    architecture = str(mx.device_info(mx.gpu).get("architecture", ""))
    generation = re.fullmatch(r"applegpu_g(\d+)([a-z])", architecture)
    if not generation:
        return None, f"the GPU's architecture is {architecture!r}, whose generation is not known"
    least = 18 if generation[2] == "p" else 17
    if int(generation[1]) < least:
        return False, f"{architecture} is older than generation {least}"
    version = tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2])
    if version < (26, 2):
        return False, f"macOS {platform.mac_ver()[0]} is older than 26.2"
    built_for = _wheel_macos()
    if built_for is None:
        return None, "the wheel does not say for which macOS MLX was built"
    if built_for < 26:
        return False, f"MLX was built for macOS {built_for}, without them"
    return True, f"{architecture}, macOS {platform.mac_ver()[0]}, MLX built for macOS {built_for}"


def _wheel_macos() -> int | None:
    """The macOS that MLX's wheel was built for."""
    for name in ("mlx-metal", "mlx"):
        try:
            tags = distribution(name).read_text("WHEEL") or ""
        except PackageNotFoundError:
            continue
        if found := re.search(r"macosx_(\d+)_", tags):
            return int(found[1])
    return None
