"""Which back-end runs Lily's kernels on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
