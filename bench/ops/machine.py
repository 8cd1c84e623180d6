"""What the benchmarks of ops share: options, and the machine's facts, copy bandwidth and matrix peak."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from lily_mlx.errors import BackendUnavailableError, UsageError
from lily_mlx.launch import backend as backends
from lily_mlx.launch import source

from .. import record
from ..files import check_file


def whole(least: int = 1) -> Callable[[str], int]:
    """For argparse: a whole number, at least ``least``."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least {least}")
        return value

    return number


def add_run_options(parser: argparse.ArgumentParser, *, samples: int, budget: float) -> None:
    """Add ``--samples``, ``--budget`` and ``--backend``, with defaults, and the options of records."""
    parser.add_argument("--samples", type=whole(2), default=samples, help="measurements of an arm")
    parser.add_argument(
        "--budget", type=_seconds, default=budget, help="seconds; arms not begun by then are left out"
    )
    parser.add_argument("--backend", choices=source.BACKENDS, help="default: the one in use")
    add_record_options(parser)


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` and ``--commit``, which say where lines of results go and what is in them."""
    parser.add_argument("--json", type=_file, metavar="FILE", help="append a line for each arm to this file")
    parser.add_argument("--commit", help="Lily's commit, for the lines, where there is no repository to ask")


def backend_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The back-end that the options ask for; ends the program with one line where it is not here."""
    try:
        backend: str = options.backend or backends.resolve()
    except (UsageError, BackendUnavailableError) as error:
        parser.error(str(error))
    if backend == "ops" or not backends.available(backend):
        kind = "GPU" if backend == "ops" else backend
        parser.error(f"no {kind} back-end here (--backend host tries the script on any machine)")
    return backend


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return value


def _file(text: str) -> Path:
    try:
        check_file("the file", Path(text))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def environment(backend: str, commit: str | None = None) -> record.Record:
    """The fields that every line of results has: those of ``lily-mlx bench``, of this back-end.

    Args:
        backend: that the ops run on, which may be another than the one in use.
        commit: Lily's, where there is no repository to ask.

    Returns:
        :func:`bench.record.environment`, with ``chip`` as the tile tables name it and the GPU's name as
        ``device``.
    """
    return {
        **record.environment(commit),
        "backend": backend,
        "chip": backends.chip(backend),
        "device": mx.device_info().get("device_name"),
    }


def copy_bandwidth(size: int = 64 << 20, rounds: int = 5) -> float:
    """Bytes per second read and written by an elementwise operation on ``size`` float32, the best round.

    Several in turn: launching one and waiting for it takes as long as a fast GPU needs for 256 MB.
    """
    calls = 8
    x = mx.zeros((size,), mx.float32)

    def copies() -> mx.array:
        y = x
        for _ in range(calls):
            y = y + 1
        return y

    return calls * 2 * x.nbytes / _least_seconds(copies, rounds)


def matrix_peak(size: int, calls: int = 1, rounds: int = 5) -> float:
    """FLOP a second of MLX's bfloat16 product of square matrices, the best round of ``calls`` products."""
    a, b = (mx.random.normal((size, size)).astype(mx.bfloat16) for _ in range(2))
    mx.eval(a, b)
    return calls * 2.0 * size**3 / _least_seconds(lambda: [a @ b for _ in range(calls)], rounds)


def _least_seconds(work: Callable[[], Any], rounds: int) -> float:
    """Of evaluating what ``work`` gives, after once to warm up."""
    mx.eval(work())
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        mx.eval(work())
        best = min(best, time.perf_counter() - start)
    return best
