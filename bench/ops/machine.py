"""What the benchmarks of single ops say of the machine: its facts, and its copy bandwidth."""

from __future__ import annotations

import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from lily_mlx.launch import backend as backends


def environment(backend: str) -> dict[str, Any]:
    """The fields that every line of results has: commit, back-end, chip, device, system, versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "commit": commit.stdout.strip() or None,
        "backend": backend,
        "chip": backends.chip(backend),
        "device": mx.device_info().get("device_name"),
        "os": platform.platform(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }


def copy_bandwidth(size: int = 64 << 20, rounds: int = 5) -> float:
    """Bytes per second read and written by an elementwise operation on ``size`` float32, the best round.

    Several in turn: launching one and waiting for it takes as long as a fast GPU needs for 256 MB.
    """
    calls = 8

    def copies() -> mx.array:
        y = x
        for _ in range(calls):
            y = y + 1
        return y

    x = mx.zeros((size,), mx.float32)
    mx.eval(copies())
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        mx.eval(copies())
        best = min(best, time.perf_counter() - start)
    return calls * 2 * x.nbytes / best
