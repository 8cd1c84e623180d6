"""Time the weight-bound decode kernels, tile by tile, beside MLX's own ops.

    python -m bench.ops.decode_gemv --json results.jsonl

qmv, expert_gate_up and expert_down at the shapes of Qwen3.6-35B-A3B, one token, bfloat16, 4 bits (router
8), group 64. Every arm is first compared with the fp32 reference; one that is wrong or does not compile is
reported and left out. A sample is a chain of calls in one compiled function, each call depending on the one
before and reading other weights, so that weights come from memory and not from the cache. Two times are
given for a call:

- ``chain``: the chain's time over its calls, MLX's own work for each launch included;
- ``gpu``: what the chain adds to a long matrix product that the GPU is busy with while MLX prepares the
  chain, so the time of the GPU alone. Bandwidth is computed from it.

MLX's arms get the routing for nothing: they start from given experts and weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lily_mlx.launch import backend as backends
from lily_mlx.ops import expert_down, expert_gate_up, qmv
from lily_mlx.ops.packed import Packed

from .machine import copy_bandwidth, environment

Tile = dict[str, int]
Step = Callable[[mx.array, int], mx.array]
"""(what the previous call gave, number of the call) -> what the next call starts from."""

DTYPE = mx.bfloat16
GROUP = 64
TOP_K = 8
ROUNDING = 2.0**-8  # largest relative error of rounding to bfloat16


@dataclass(frozen=True)
class Shape:
    """Hidden size, expert width, experts, vocabulary; Qwen3.6-35B-A3B's unless shrunk."""

    K: int = 2048
    M: int = 512
    E: int = 256
    V: int = 248320
    rotation: int = 160_000_000  # bytes of weights to go through; an H200's cache has 50 MB

    def shrunk(self, by: int) -> Shape:
        if by == 1:
            return self
        return Shape(self.K // by, self.M // by, max(16, self.E // by), self.V // by, rotation=0)


@dataclass
class Job:
    """A kernel at a shape.

    Attributes:
        name: for the table.
        nbytes: what a call reads of weights, scales and biases.
        start: what the first call starts from.
        step: tile -> a call of ours; tile None -> MLX's ops.
        error: tile -> largest error of ours, relative to the largest value.
        tolerance: of that error.
        tiles: candidates, the most promising first.
    """

    name: str
    nbytes: int
    start: mx.array
    step: Callable[[Tile | None], Step]
    error: Callable[[Tile], float]
    tolerance: float
    tiles: list[Tile]


def random_matrix(*shape: int, bits: int = 4) -> Packed:
    """A matrix whose product keeps the size of its input, made as it is stored."""
    *leading, columns = shape
    weight = mx.random.randint(-(2**31), 2**31 - 1, (*leading, columns * bits // 32)).view(mx.uint32)
    groups = (*leading, columns // GROUP)
    spread = (2**bits - 1) / math.sqrt(12)
    scales = mx.random.uniform(0.5, 1.5, groups) / (spread * math.sqrt(columns))
    scales = scales.astype(DTYPE)
    packed = Packed(weight, scales, (scales * (-(2**bits - 1) / 2)).astype(DTYPE), bits, GROUP)
    return packed._replace(buffer=packed.in_one())


def relative_error(got: mx.array, want: mx.array) -> float:
    difference = mx.abs(got.astype(mx.float32) - want)
    return float(mx.where(mx.isnan(difference), mx.inf, difference).max() / mx.abs(want).max())


def stock_product(x: mx.array, matrix: Packed) -> mx.array:
    return mx.quantized_matmul(x, *matrix[:3], transpose=True, group_size=GROUP, bits=matrix.bits)


def rows(matrices: Packed, expert: int) -> Packed:
    return Packed(*(part[expert] for part in matrices[:3]), matrices.bits, matrices.group_size)


def tiles(names: str, *values: tuple[int, ...]) -> list[Tile]:
    return [dict(zip(names.split(), value, strict=True)) for value in values]


def qmv_job(
    name: str,
    columns: int,
    rows: list[int],
    candidates: list[Tile],
    backend: str,
    shape: Shape,
    *,
    bits: int = 4,
    norm: bool,
) -> Job:
    """With a norm the first values of y are the next x, without one y is the next residual.

    Ours is one product of the joined matrix, MLX's are products of the parts.
    """
    N = sum(rows)
    nbytes = random_matrix(N, columns, bits=bits).nbytes
    count = max(2, math.ceil(shape.rotation / nbytes))
    joined = [random_matrix(N, columns, bits=bits) for _ in range(count)]
    ends = list(itertools.accumulate(rows, initial=0))
    parts = [
        [
            Packed(*(array[start:end] for array in matrix[:3]), matrix.bits, matrix.group_size)
            for start, end in itertools.pairwise(ends)
        ]
        for matrix in joined
    ]
    norm_weight = mx.random.uniform(0.5, 1.5, (columns,)).astype(DTYPE) if norm else None
    x = mx.random.normal((1, 1, columns)).astype(DTYPE)
    feeds_x = columns <= N
    residual = None if feeds_x else mx.random.normal((1, 1, N)).astype(DTYPE)
    mx.eval(joined, parts, norm_weight, x, residual)

    def step(tile: Tile | None) -> Step:
        def run(value: mx.array, call: int) -> mx.array:
            before, added = (value[..., :columns], None) if feeds_x else (x, value)
            if tile:
                matrix = joined[call % count]
                return qmv.qmv(
                    before, matrix, norm_weight=norm_weight, residual=added, tile=tile, backend=backend
                )
            if norm_weight is not None:
                before = mx.fast.rms_norm(before, norm_weight, 1e-6)
            y = mx.concatenate([stock_product(before, part) for part in parts[call % count]], axis=-1)
            return y if added is None else added + y

        return run

    def error(tile: Tile) -> float:
        options = {"norm_weight": norm_weight, "residual": residual}
        got = qmv.qmv(x, joined[0], **options, tile=tile, backend=backend)
        return relative_error(got, qmv.qmv_reference(x, joined[0], **options))

    start = x if feeds_x else residual
    assert start is not None
    return Job(f"qmv {name}", nbytes, start, step, error, ROUNDING + 2e-5, candidates)


def gate_up_job(candidates: list[Tile], backend: str, shape: Shape) -> Job:
    """The first values of h are the next logits, so every call chooses other experts."""
    K, M, E = shape.K, shape.M, shape.E
    count = 3
    layers = [random_matrix(2 * (E + 1), M, K) for _ in range(count)]
    x = mx.random.normal((1, 1, K)).astype(DTYPE)
    norm_weight = mx.random.uniform(0.5, 1.5, (K,)).astype(DTYPE)
    logits = mx.random.normal((E + 1,))
    chosen = [mx.random.permutation(E)[:TOP_K].reshape(1, 1, TOP_K).astype(mx.uint32) for _ in range(64)]
    mx.eval(layers, x, norm_weight, logits, chosen)

    def step(tile: Tile | None) -> Step:
        def run(value: mx.array, call: int) -> mx.array:
            matrices = layers[call % count]
            if tile:
                return expert_gate_up.expert_gate_up(
                    x, norm_weight, value[: E + 1], matrices, TOP_K, tile=tile, backend=backend
                )
            before = x if value.size < K else value[:K].reshape(1, 1, K).astype(DTYPE)
            n = mx.fast.rms_norm(before, norm_weight, 1e-6)
            g, u = (
                mx.gather_qmm(
                    n[..., None, :],
                    *matrices[:3],
                    rhs_indices=chosen[call % 64] + first,
                    transpose=True,
                    group_size=GROUP,
                    bits=4,
                )
                for first in (0, E + 1)
            )
            shared_g, shared_u = (stock_product(n, rows(matrices, expert)) for expert in (E, 2 * E + 1))
            routed = nn.silu(g) * u
            shared = nn.silu(shared_g) * shared_u
            return mx.concatenate([routed.reshape(-1), shared.reshape(-1)])

        return run

    def error(tile: Tile) -> float:
        arguments = (x, norm_weight, logits, layers[0], TOP_K)
        got, want = (
            expert_gate_up.Chosen.of(array, TOP_K)
            for array in (
                expert_gate_up.expert_gate_up(*arguments, tile=tile, backend=backend),
                expert_gate_up.expert_gate_up_reference(*arguments),
            )
        )
        if got.experts.tolist() != want.experts.tolist():
            return math.inf
        return max(relative_error(got.h, want.h), relative_error(got.weights, want.weights))

    nbytes = layers[0].nbytes // (E + 1) * (TOP_K + 1)
    return Job("expert_gate_up", nbytes, logits, step, error, 4e-5, candidates)


def down_job(candidates: list[Tile], backend: str, shape: Shape) -> Job:
    """y is the next residual."""
    K, M, E = shape.K, shape.M, shape.E
    count = 3
    layers = [random_matrix(E + 1, K, M) for _ in range(count)]
    h = mx.random.normal((TOP_K + 1, M))
    stock_h = h.astype(DTYPE)
    weights = mx.softmax(mx.random.normal((TOP_K + 1,)))
    residual = mx.random.normal((1, 1, K)).astype(DTYPE)
    chosen = [
        mx.concatenate([mx.random.permutation(E)[:TOP_K], mx.array([E])]).astype(mx.int32) for _ in range(64)
    ]
    passed_on = [expert_gate_up.Chosen(h, experts, weights).array for experts in chosen]
    mx.eval(layers, h, stock_h, weights, residual, chosen, passed_on)

    def step(tile: Tile | None) -> Step:
        def run(value: mx.array, call: int) -> mx.array:
            down = layers[call % count]
            experts = chosen[call % 64]
            if tile:
                return expert_down.expert_down(
                    passed_on[call % 64], value, down, TOP_K, tile=tile, backend=backend
                )
            routed = mx.gather_qmm(
                stock_h[:TOP_K].reshape(1, 1, TOP_K, 1, M),
                *down[:3],
                rhs_indices=experts[:TOP_K].reshape(1, 1, TOP_K),
                transpose=True,
                group_size=GROUP,
                bits=4,
            ).squeeze(-2)
            y = (routed * weights[:TOP_K, None].astype(DTYPE)).sum(-2)
            shared_y = stock_product(stock_h[TOP_K:].reshape(1, 1, M), rows(down, E))
            return value + (y + weights[TOP_K].astype(DTYPE) * shared_y)

        return run

    def error(tile: Tile) -> float:
        arguments = (passed_on[0], residual, layers[0], TOP_K)
        got = expert_down.expert_down(*arguments, tile=tile, backend=backend)
        return relative_error(got, expert_down.expert_down_reference(*arguments))

    nbytes = layers[0].nbytes // (E + 1) * (TOP_K + 1)
    return Job("expert_down", nbytes, residual, step, error, ROUNDING + 2e-5, candidates)


QMV = "rows repeat ahead simdgroups"


def makers(backend: str, shape: Shape) -> dict[str, Callable[[], Job]]:
    """The jobs by name; making one makes its weights."""
    K = shape.K
    wide = tiles(
        QMV,
        (4, 1, 2, 8),
        (4, 1, 2, 4),
        (8, 1, 2, 4),
        (2, 1, 2, 8),
        (4, 2, 2, 4),
        (8, 1, 1, 8),
        (4, 1, 1, 8),
        (8, 1, 2, 2),
    )
    deep = tiles(QMV, (2, 1, 4, 4), (2, 1, 2, 8), (4, 1, 4, 4), (1, 1, 4, 8), (2, 1, 4, 8), (4, 1, 2, 2))
    few = tiles(QMV, (1, 1, 4, 4), (1, 1, 4, 2), (1, 1, 4, 8), (1, 1, 2, 4))
    many = tiles(QMV, (4, 4, 2, 8), (8, 4, 2, 8), (4, 16, 2, 8), (8, 1, 2, 4), (4, 4, 2, 4), (8, 8, 1, 8))
    gate_up = tiles(
        "rows ahead simdgroups", (2, 2, 8), (2, 2, 4), (1, 2, 8), (4, 2, 4), (4, 1, 8), (1, 2, 16)
    )
    down = tiles("rows ahead", (16, 1), (8, 1), (32, 1), (4, 1))

    def product(
        name: str, columns: int, rows: list[int], tiles: list[Tile], **options: Any
    ) -> Callable[[], Job]:
        return lambda: qmv_job(name, columns, rows, tiles, backend, shape, **options)

    return {
        "qmv DeltaNet in": product("DeltaNet in", K, [4 * K, 2 * K, 32, 32], wide, norm=True),
        "qmv out": product("out", 2 * K, [K], deep, norm=False),
        "expert_gate_up": lambda: gate_up_job(gate_up, backend, shape),
        "expert_down": lambda: down_job(down, backend, shape),
        "qmv head": product("head", K, [shape.V], many, norm=True),
        "qmv router": product("router", K, [shape.E, 1], few, bits=8, norm=True),
        "qmv attention in": product("attention in", K, [4 * K, K // 4, K // 4], wide[:4], norm=True),
    }


class Clock:
    """Times chains, with and without a matrix product that occupies the GPU before them."""

    def __init__(self, size: int) -> None:
        self.a = mx.random.normal((size, size)).astype(DTYPE)
        mx.eval(self.a)
        self.product_seconds = min(self._seconds(lambda: self._occupied(16)) / 16 for _ in range(4))

    def _occupied(self, products: int) -> mx.array:
        b = self.a
        for _ in range(products):
            b = (self.a @ b) * self.a.shape[0] ** -0.5
        return b[0, 0] * 0

    @staticmethod
    def _seconds(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        mx.eval(call())
        return time.perf_counter() - start

    def sample(
        self, chain: Callable[[mx.array], mx.array], start: mx.array, calls: int
    ) -> tuple[float, float]:
        """(seconds a call in the chain alone, seconds of the GPU a call)."""
        alone = self._seconds(lambda: chain(start))
        products = math.ceil(1.5 * alone / self.product_seconds)
        empty = self._seconds(lambda: start + self._occupied(products).astype(start.dtype))
        full = self._seconds(lambda: chain(start + self._occupied(products).astype(start.dtype)))
        return alone / calls, (full - empty) / calls


def chain_of(step: Step, calls: int, backend: str) -> Callable[[mx.array], mx.array]:
    def chain(value: mx.array) -> mx.array:
        for call in range(calls):
            value = step(value, call)
        return value

    return chain if backend == "host" else mx.compile(chain)


def measure(job: Job, clock: Clock, backend: str, samples: int, deadline: float) -> Iterator[dict[str, Any]]:
    """A record for each arm of a job: MLX's ops first, then ours."""
    calls = 4 if backend == "host" else max(4, min(96, math.ceil(1.2e9 / job.nbytes)))
    arms: dict[str, Callable[[mx.array], mx.array]] = {}
    records: dict[str, dict[str, Any]] = {}
    for tile in (None, *job.tiles):
        name = "mlx" if tile is None else "-".join(map(str, tile.values()))
        records[name] = record = {
            "job": job.name,
            "arm": name,
            "tile": tile,
            "bytes": job.nbytes,
            "calls": calls,
        }
        if time.perf_counter() > deadline:
            record["failure"] = "out of time"
            continue
        try:
            if tile is not None:
                record["error"] = job.error(tile)
                if not record["error"] <= job.tolerance:
                    record["failure"] = f"wrong: error {record['error']:.1e}"
                    continue
            chain = chain_of(job.step(tile), calls, backend)
            mx.eval(chain(job.start), chain(job.start))
            arms[name] = chain
        except Exception as failure:  # a tile that a compiler refuses must not end the others' run
            reason = " ".join(str(failure).split())
            record["failure"] = f"{type(failure).__name__}: {reason[:400]}"
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for sample in range(samples + 1):
        for name, chain in arms.items():
            measured = clock.sample(chain, job.start, calls)
            if sample:  # the first round warms every arm
                times[name].append(measured)
    for name, record in records.items():
        if measured := times.get(name):
            chain_times, gpu_times = zip(*measured, strict=True)
            record["chain_s"], record["gpu_s"] = statistics.median(chain_times), statistics.median(gpu_times)
            record["gpu_low_s"], record["gpu_high_s"] = min(gpu_times), max(gpu_times)
        yield record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=[""], help="parts of names of jobs; default: all")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument(
        "--budget", type=float, default=75.0, help="seconds; arms not begun by then are left out"
    )
    parser.add_argument("--backend", help="default: the one in use")
    parser.add_argument("--json", type=Path, help="append a line for each arm to this file")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes, to try the script")
    options = parser.parse_args()

    backend = options.backend or backends.resolve()
    if backend == "ops":
        parser.error("no GPU back-end here (--backend host tries the script on any machine)")
    began = time.perf_counter()
    mx.random.seed(0)
    about = environment(backend)
    peak = copy_bandwidth((256 << 20) // options.shrink**2, rounds=8)
    clock = Clock(4096 // options.shrink)
    print(f"{about['device']} ({about['chip']}), mlx {about['mlx']}: copy {peak / 1e9:,.0f} GB/s")
    columns = f"{'job':>17} {'tile':>9} {'chain us':>9} {'gpu us':>8} {'low':>8} {'high':>8}"
    print(f"{columns} {'GB/s':>6} {'of copy':>8}  error")

    wrong = 0
    todo = [
        make
        for name, make in makers(backend, Shape().shrunk(options.shrink)).items()
        if any(part in name for part in options.jobs)
    ]
    for number, make in enumerate(todo, start=1):
        job = make()
        deadline = began + options.budget * number / len(todo)  # so that each job has its share
        for record in measure(job, clock, backend, options.samples, deadline):
            if "failure" in record:
                wrong += record["failure"] != "out of time"
                print(f"{job.name:>17} {record['arm']:>9} {record['failure']}")
            else:
                rate = job.nbytes / record["gpu_s"]
                figures = [record[key] * 1e6 for key in ("chain_s", "gpu_s", "gpu_low_s", "gpu_high_s")]
                error = f"{record['error']:.1e}" if "error" in record else ""
                print(
                    f"{job.name:>17} {record['arm']:>9} {figures[0]:>9.2f} "
                    + " ".join(f"{figure:>8.2f}" for figure in figures[1:])
                    + f" {rate / 1e9:>6,.0f} {rate / peak:>8.1%}  {error}"
                )
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({**record, "copy_bytes_per_s": peak, **about}) + "\n")
        sys.stdout.flush()
    print(f"{time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
