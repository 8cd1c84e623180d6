"""Time the decode kernels alone on an NVIDIA GPU: what the GPU takes for one, without MLX's launch.

    python -m bench.ops.alone --json results.jsonl

The shapes are those of one layer of Qwen3.6-35B-A3B and its output head, batch 1, bfloat16, 4 bits (router
8), group 64. Each job is timed with the tile of the chip's table and with some others. An arm is first run
through MLX and compared with the op's fp32 reference; one that is wrong or does not compile is reported and
left out. Then the very code that MLX launched, with the same arguments, is launched many times in one CUDA
graph. What comes from memory in a decode step (weights, cache, states) is there in so many copies that the
GPU's cache holds none of them when its turn comes again; the rest stays in the cache, as in a step, where
the kernel before has just written it. The time includes the launch from within the graph. GB/s are of the
bytes that come from memory, beside those of a copy within the device, which reads and writes.

It needs nvcc, or what MLX itself compiles with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # references are fp32

import mlx.core as mx
import numpy as np

from lily_mlx.errors import UsageError
from lily_mlx.launch import backend as backends
from lily_mlx.launch import cuda
from lily_mlx.tiles import choose

from .arrays import relative_error
from .cuda_driver import Driver
from .decode_jobs import Job, Results, Tile, all_jobs
from .machine import add_record_options, environment

LEAST_CALLS = 64  # in a graph, so that what its start and end take does not count

TOLERANCES = {mx.bfloat16: 2.0**-7, mx.float32: 1e-4, mx.int32: 0.0}
"""Largest error relative to the largest value, by the result's dtype: bfloat16 is rounded once."""


def arms(job: Job, chip: str, which: str) -> list[Tile]:
    """The table's tile, and with ``which`` "all" the candidates."""
    chosen = dict(choose(job.op, chip, **job.sizes))
    return [chosen, *(tile for tile in job.tiles if tile != chosen and which == "all")]


@dataclass(frozen=True)
class Launch:
    """What MLX is given to launch: grid in blocks, block in threads, bytes of each output."""

    name: str
    code: bytes
    inputs: Results
    output_bytes: list[int]
    grid: list[int]
    block: Sequence[int]


def recorded(op: str, call: Callable[[], Results]) -> tuple[Results, Launch]:
    """What the call gives, and how it launches the op's kernel."""
    found = {}
    launch = mx.fast.precompiled_cuda_kernel

    def record(**given: Any) -> list[mx.array]:
        outputs = zip(given["output_shapes"], given["output_dtypes"], strict=True)
        found[given["name"].removeprefix("lily_").rpartition("_")[0]] = Launch(
            given["name"],
            given["compiled_source"],
            given["inputs"],
            [math.prod(shape) * dtype.size for shape, dtype in outputs],
            [threads // size for threads, size in zip(given["grid"], given["threadgroup"], strict=True)],
            given["threadgroup"],
        )
        return launch(**given)

    with patch.object(mx.fast, "precompiled_cuda_kernel", record):
        results = call()
    if op not in found:
        raise RuntimeError("MLX compiled the kernel itself, for there is no nvcc")
    return results, found[op]


class _NotCompiled(Exception):  # noqa: N818 - it is no error
    """The arguments of the compiler."""


def compile_together(calls: Sequence[Callable[[], Any]]) -> None:
    """Compile what the calls launch, several at a time; they would compile it one after another.

    What does not compile is left to the call, which says so.
    """
    ready: dict[tuple[Any, ...], bytes] = {}

    def look_up(*arguments: Any) -> bytes:
        if arguments not in ready:
            raise _NotCompiled(*arguments)
        return ready[arguments]

    def compile_(arguments: tuple[Any, ...]) -> None:
        with suppress(RuntimeError):
            ready[arguments] = compiler(*arguments)

    compiler = cuda.compiled
    for _ in range(2):  # a call gets to its second kernel when the first is there
        wanted = set()
        with patch.object(cuda, "compiled", look_up):
            for call in calls:
                try:
                    call()
                except _NotCompiled as needed:
                    wanted.add(needed.args)
                except Exception:  # the call will say it again
                    continue
        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_, wanted))


def bytes_of(array: mx.array) -> np.ndarray:
    return np.ascontiguousarray(np.array(array.view(mx.uint8)))


def time_arm(
    job: Job, tile: Tile, want: Results, cold: dict[int, list[int]], driver: Driver
) -> dict[str, Any]:
    """The fields of an arm: its errors, and its times or why it has none.

    Args:
        want: the reference's results.
        cold: the addresses of the copies of each of the job's cold inputs, by its ``id``.
    """
    results, launch = recorded(job.op, partial(job.call, tile))
    limits = [TOLERANCES[result.dtype] for result in results]
    errors = [relative_error(*pair) for pair in zip(results, want, strict=True)]
    fields: dict[str, Any] = {"kernel": launch.name, "errors": errors}
    if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
        return fields | {"failure": f"wrong: errors {', '.join(f'{error:.1e}' for error in errors)}"}
    copies = max(map(len, cold.values()), default=1)
    states = {array.nbytes for array in job.cold}  # an output of this size is a state's next one
    buffers = [
        *(
            cold[id(array)] if id(array) in cold else driver.upload(bytes_of(array))
            for array in launch.inputs
        ),
        *([driver.allocate(n) for _ in range(copies if n in states else 1)] for n in launch.output_bytes),
    ]
    function = driver.function(launch.code, launch.name)
    calls = max(LEAST_CALLS, copies)

    def launch_all() -> None:
        for call in range(calls):
            addresses = [buffer[call % len(buffer)] for buffer in buffers]
            driver.launch(function, launch.grid, launch.block, addresses)

    runs = [seconds / calls for seconds in driver.seconds(launch_all)]
    return fields | {
        "gpu_s": statistics.median(runs),
        "gpu_low_s": min(runs),
        "gpu_high_s": max(runs),
        "samples": len(runs),
        "calls": calls,
        "copies": copies,
        "threadgroups": math.prod(launch.grid),
        "registers": function.registers,
        "local_bytes": function.local_bytes,
    }


def measure(job: Job, tiles: Sequence[Tile], driver: Driver) -> Iterable[dict[str, Any]]:
    """A record for each tile."""
    copies = max(2, math.ceil(4 * driver.cache_bytes / job.nbytes))
    want, cold = job.want(), {id(array): driver.upload(bytes_of(array), copies) for array in job.cold}
    for tile in tiles:
        record = {"op": job.op, "job": job.name, "tile": tile, "bytes": job.nbytes}
        try:
            yield record | time_arm(job, tile, want, cold, driver)
        except (RuntimeError, ValueError) as failure:  # a tile that a compiler refuses must not end the run
            yield record | {"failure": f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"}
    driver.release()
    mx.clear_cache()


def line(record: dict[str, Any], peak: float) -> str:
    """A row of the table; ``peak`` in bytes a second."""
    start = f"{record['job']:>23} {'-'.join(map(str, record['tile'].values())):>9}"
    if "failure" in record:
        return f"{start} {record['failure']}"
    rate = record["bytes"] / record["gpu_s"]
    times = " ".join(f"{record[key] * 1e6:>8.2f}" for key in ("gpu_s", "gpu_low_s", "gpu_high_s"))
    return (
        f"{start} {times} {rate / 1e9:>7,.0f} {rate / peak:>8.1%} {record['registers']:>9} "
        f"{record['local_bytes']:>7} {record['threadgroups']:>12}  {max(record['errors']):.1e}"
    )


def selected(jobs: list[Job], names: str | None) -> list[Job]:
    """The jobs whose name contains one of the names, which commas separate; all without names.

    Raises:
        UsageError: no job's name contains one of them.
    """
    if names is None:
        return jobs
    parts = [name.strip() for name in names.split(",")]
    for part in parts:
        if not part or not any(part in job.name for job in jobs):
            known = ", ".join(job.name for job in jobs)
            raise UsageError(f"--jobs names {part!r}; it must be part of one of {known}")
    return [job for job in jobs if any(part in job.name for part in parts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", metavar="NAME,...", help="parts of names of jobs; default: all")
    parser.add_argument(
        "--tiles", choices=("table", "all"), default="all", help="the table's tile only, or others beside it"
    )
    add_record_options(parser)
    options = parser.parse_args()

    began = time.perf_counter()
    mx.random.seed(0)
    try:
        jobs = selected(all_jobs(), options.jobs)
    except UsageError as error:
        parser.error(str(error))
    if not backends.available("cuda"):
        parser.error("MLX has no NVIDIA GPU here; kernels are timed alone with CUDA's driver only")

    about, chip = environment("cuda", options.commit), backends.chip("cuda")
    todo = {job.name: arms(job, chip, options.tiles) for job in jobs}
    compile_together([partial(job.call, tile) for job in jobs for tile in todo[job.name]])
    driver = Driver()
    peak = driver.copy_bandwidth()
    print(f"{about['device']} ({chip}), mlx {about['mlx']}: copy {peak / 1e9:,.0f} GB/s; ", end="")
    print(f"kernels compiled after {time.perf_counter() - began:.0f} s")
    columns = f"{'job':>23} {'tile':>9} {'gpu us':>8} {'low':>8} {'high':>8} {'GB/s':>7} {'of copy':>8}"
    print(f"{columns} {'registers':>9} {'local B':>7} {'threadgroups':>12}  error")
    wrong = 0
    for job in jobs:
        for record in measure(job, todo[job.name], driver):
            wrong += "failure" in record
            print(line(record, peak), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({**record, "copy_bytes_per_s": peak, **about}) + "\n")
    print(f"{time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
