"""Time the gated DeltaNet scan: our layouts, mlx-lm's packed kernel and MLX's op on the same arrays.

    python -m bench.ops.gated_delta_scan --json results.jsonl

Shapes are one layer of Qwen3.6-35B-A3B (16 key heads, 32 value heads, sizes 128), batch 1, bfloat16. Every
arm is checked against the fp32 reference before it is timed; one of ours that is wrong or does not compile is
reported and left out. Arms take turns, sample by sample; a sample is a chain of calls, each starting from
the state of the one before, and its time includes the launches. On CUDA mlx-lm has no kernel: see bridge.py;
nor has MLX for ``mx.fast.gated_delta_update``, which runs as a loop of other ops there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from lily_mlx.ops import gated_delta_scan as op

from ..bridge import packed_scan
from .arrays import relative_error
from .machine import add_run_options, backend_of, copy_bandwidth, environment, whole

Arrays = dict[str, mx.array]
Arm = Callable[..., tuple[mx.array, mx.array]]

# (lanes, rows, ahead, simdgroups), the most promising first: compiling may use up the budget.
# Layouts that differ in the simdgroups of a threadgroup only share their compiled code.
DECODE_LAYOUTS = [(32, 1, 1, 4), (32, 1, 1, 8), (32, 4, 1, 1), (16, 1, 1, 4), (8, 2, 4, 4)]
PREFILL_LAYOUTS = [
    (8, 2, 4, 4),
    (8, 2, 4, 2),
    (8, 2, 4, 1),
    (8, 2, 2, 4),
    (8, 1, 2, 4),
    (16, 2, 4, 4),
    (16, 4, 2, 4),
    (32, 1, 2, 4),
    (4, 1, 1, 4),
]


def problem(T: int, heads: tuple[int, int], size: int, dtype: mx.Dtype) -> Arrays:
    Hk, Hv = heads
    mx.random.seed(T)

    def unit(x: mx.array) -> mx.array:
        return x / mx.linalg.norm(x, axis=-1, keepdims=True)

    arrays = {
        "q": (unit(mx.random.normal((1, T, Hk, size))) * size**-0.5).astype(dtype),
        "k": unit(mx.random.normal((1, T, Hk, size))).astype(dtype),
        "v": mx.random.normal((1, T, Hv, size)).astype(dtype),
        "g": mx.random.uniform(0.8, 1.0, (1, T, Hv)),
        "beta": mx.random.uniform(0.0, 1.0, (1, T, Hv)).astype(dtype),
        "state": mx.random.normal((1, Hv, size, size)),
    }
    mx.eval(arrays)
    return arrays


def our_arm(layout: tuple[int, int, int, int], backend: str) -> Arm:
    tile = dict(zip(("lanes", "rows", "ahead", "simdgroups"), layout, strict=True))
    return lambda **arrays: op.gated_delta_scan(**arrays, tile=tile, backend=backend)


def mlx_arm(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    y, state = mx.fast.gated_delta_update(q, k, v, g, beta, state)
    return y, state


def chain(arm: Arm, arrays: Arrays, calls: int) -> float:
    """Seconds a call, over a chain of calls."""
    start = time.perf_counter()
    state = arrays["state"]
    results = []
    for _ in range(calls):
        y, state = arm(**{**arrays, "state": state})
        results.append(y)
    mx.eval(results, state)
    return (time.perf_counter() - start) / calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=whole(), nargs="+", default=[2048, 64, 1])
    parser.add_argument("--heads", type=whole(), nargs=2, default=(16, 32), metavar=("HK", "HV"))
    parser.add_argument("--size", type=whole(32), default=128, help="Dk and Dv; the packed kernel needs 128")
    add_run_options(parser, samples=15, budget=50.0)
    options = parser.parse_args()

    Hk, Hv = options.heads
    if Hv % Hk:
        parser.error(f"--heads is {Hk} {Hv}; the second must be a multiple of the first")
    if options.size % 32:
        parser.error(f"--size is {options.size}; it must be a multiple of 32")
    backend = backend_of(parser, options)
    began = time.perf_counter()
    about = environment(backend, options.commit)
    peak = copy_bandwidth()
    print(f"{about['device']} ({about['chip']}), mlx {about['mlx']}: copy {peak / 1e9:,.0f} GB/s")
    columns = f"{'T':>6} {'arm':>16} {'median us':>10} {'p10':>9} {'p90':>9} {'ns/token':>9} {'of copy':>8}"
    print(f"{columns}  error y, state")

    wrong = 0
    for T in options.tokens:
        arrays = problem(T, tuple(options.heads), options.size, mx.bfloat16)
        want_y, want_state = op.gated_delta_scan_reference(**arrays)
        mx.eval(want_y, want_state)
        layouts = DECODE_LAYOUTS if T == 1 else PREFILL_LAYOUTS
        makers: dict[str, Callable[[], Arm]] = {
            "mlx-lm packed": lambda: packed_scan(backend),
            "mx.fast": lambda: mlx_arm,
        }
        makers |= {"-".join(map(str, x)): lambda x=x: our_arm(x, backend) for x in layouts}

        arms: dict[str, Arm] = {}
        records: dict[str, dict[str, Any]] = {}
        for name, make in makers.items():
            records[name] = record = {"op": "gated_delta_scan", "arm": name, "T": T, "dtype": "bfloat16"}
            if time.perf_counter() - began > options.budget:
                record["failure"] = "out of time"
                continue
            try:
                arm = make()
                y, state = arm(**arrays)
                record["error_y"] = relative_error(y, want_y)
                record["error_state"] = relative_error(state, want_state)
            except Exception as failure:  # a layout that a compiler refuses must not end the others' run
                reason = " ".join(str(failure).split())
                record["failure"] = f"{type(failure).__name__}: {reason[:400]}"
                wrong += 1
                continue
            # y is rounded to bfloat16; the state is not. MLX's op may round within and is timed all the same.
            if name != "mx.fast" and (record["error_y"] > 2.0**-8 or record["error_state"] > 1e-4):
                record["failure"] = "wrong"
                wrong += 1
                continue
            arms[name] = arm

        calls = max(2, min(64, 4096 // T))
        samples: dict[str, list[float]] = {name: [] for name in arms}
        for sample in range(options.samples + 2):
            for name, arm in arms.items():
                seconds = chain(arm, arrays, calls)
                if sample >= 2:  # two rounds warm every arm
                    samples[name].append(seconds)

        # What one call must read and write.
        moved = sum(x.nbytes for x in arrays.values()) + arrays["state"].nbytes + arrays["v"].nbytes
        for name, record in records.items():
            if times := samples.get(name):
                low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
                median = statistics.median(times)
                record |= {
                    "median_s": median,
                    "p10_s": low,
                    "p90_s": high,
                    "calls": calls,
                    "samples": len(times),
                }
                record |= {"bytes": moved, "copy_bytes_per_s": peak}
                print(
                    f"{T:>6} {name:>16} {median * 1e6:>10.1f} {low * 1e6:>9.1f} {high * 1e6:>9.1f} "
                    f"{median / T * 1e9:>9.1f} {moved / median / peak:>8.1%}  "
                    f"{record['error_y']:.1e}, {record['error_state']:.1e}"
                )
            else:
                errors = {key: record[key] for key in ("error_y", "error_state") if key in record}
                print(f"{T:>6} {name:>16} {record['failure']} {errors or ''}")
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({**record, **about}) + "\n")
        sys.stdout.flush()
    print(f"{time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
