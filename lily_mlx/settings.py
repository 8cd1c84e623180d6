"""Lily's settings: the only place that reads ``LILY_*`` variables and ``MLX_LM_ENGINE``.

``LILY_DISABLE_HOOK`` is the one exception: the line in ``lily_mlx.pth`` tests it before this package is
imported at all.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import UsageError

BACKENDS = ("auto", "metal", "cuda", "host", "ops")
ENGINES = ("mlx", "lily", "auto")
OPS = (
    "attention_decode",
    "attention_gate",
    "expert_combine",
    "expert_down",
    "expert_gate_up",
    "expert_gemm_down",
    "expert_gemm_gate_up",
    "expert_route",
    "gated_delta_prepare",
    "gated_delta_scan",
    "gated_delta_step",
    "gated_rms_norm",
    "qk_prepare",
    "qmm",
    "qmv",
)
"""The ops that have a kernel, which ``LILY_DISABLE`` may name."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for through the environment.

    Attributes:
        backend: ``LILY_BACKEND``, one of :data:`BACKENDS`; ``auto`` picks the best this machine has.
        disabled_ops: names in ``LILY_DISABLE`` (comma separated), of :data:`OPS`; those take the stock path.
        cache_dir: folder for compiled host kernels and check results; ``LILY_CACHE_DIR`` or the
            platform's user cache folder.
        stats: ``LILY_STATS=1``, print at exit which classes and kernels ran.
    """

    backend: str
    disabled_ops: frozenset[str]
    cache_dir: Path
    stats: bool


def settings() -> Settings:
    """Read the environment. Two microseconds, so that layers can ask at every call.

    Raises:
        UsageError: a variable holds a value that is not one of its choices.
    """
    get = os.environ.get
    return _settings(get("LILY_BACKEND"), get("LILY_DISABLE"), get("LILY_CACHE_DIR"), get("LILY_STATS"))


@lru_cache(maxsize=64)
def _settings(
    backend: str | None, disabled: str | None, cache_dir: str | None, stats: str | None
) -> Settings:
    backend = backend or "auto"
    if backend not in BACKENDS:
        raise UsageError(f"LILY_BACKEND is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    return Settings(
        backend=backend,
        disabled_ops=frozenset(name.strip() for name in (disabled or "").split(",") if name.strip()),
        cache_dir=Path(cache_dir).expanduser() if cache_dir else _user_cache_dir(),
        stats=stats == "1",
    )


def default_engine() -> str | None:
    """``MLX_LM_ENGINE``, the default of ``--engine``, as it is; None when unset."""
    return os.environ.get("MLX_LM_ENGINE") or None


def _user_cache_dir() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lily-mlx"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lily-mlx"
