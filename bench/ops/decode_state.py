"""Check and time the decode kernels that are bound by state and cache, at the shape of Qwen3.6-35B-A3B.

    python -m bench.ops.decode_state --json results.jsonl

gated_delta_step, qk_prepare, and attention_decode with attention_combine, batch 1, bfloat16. Every arm is
checked against the fp32 reference before it is timed; one that is wrong or does not compile is reported and
left out. An arm is a compiled chain of calls, each waiting for the one before, over buffers that together
exceed the GPU cache; its time includes the launches, so qk_prepare, which moves 45 KB, shows what one costs.
Arms take turns, sample by sample.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # references are fp32

import mlx.core as mx

from lily_mlx.ops import attention_decode, gated_delta_scan, gated_delta_step, qk_prepare

from .arrays import normal, relative_error
from .machine import add_run_options, backend_of, copy_bandwidth, environment, whole

Hk_LINEAR, Hv, Dk, Dv = 16, 32, 128, 128
Hq, Hk, D, ROTARY = 16, 2, 256, 64
CACHE_BYTES = 60e6  # of the GPU, about: the buffers of a chain are more than this together

# The most promising first: compiling may use up the budget.
STEP_TILES = [(8, 16), (16, 16), (8, 8), (4, 8), (4, 16), (32, 16)]  # lanes, simdgroups

# In one pass, PASS_FIELDS in order. In blocks, TILE_FIELDS of the first pass, columns and simdgroups of the
# second.
PASS_FIELDS = ("simdgroups", "heads", "columns")
PASS_TILES = [(16, 1, 64), (16, 2, 64), (16, 1, 128), (12, 2, 32)]
TILE_FIELDS = ("simdgroups", "block_rows", "threadgroups")
ATTENTION_TILES = [(4, 0, 132), (8, 0, 132), (4, 0, 264), (8, 0, 264), (4, 0, 396), (4, 512, 0), (4, 1024, 0)]
COMBINE_TILES = [(1, 8), (2, 8), (1, 16)]


@dataclass
class Arm:
    """One way to compute something.

    Attributes:
        name: for the table.
        errors: runs it once; the largest error of each result, relative to its largest value.
        chain: the calls, for mx.compile.
        inputs: of the chain.
        calls: in the chain.
        bytes: that a call must read and write.
        dispatches: of a call.
        tolerance: of each error.
    """

    name: str
    errors: Callable[[], list[float]]
    chain: Callable[..., Any]
    inputs: Sequence[Any]
    calls: int
    bytes: int
    dispatches: int
    tolerance: Sequence[float]
    record: dict[str, Any] = field(default_factory=dict)
    run: Callable[[], float] | None = None


def step_arms(backend: str, layers: int) -> Iterator[Arm]:
    C = 2 * Hk_LINEAR * Dk + Hv * Dv
    weights = {
        "conv_weight": normal(C, 4, 1, scale=0.5),
        "A_log": mx.random.uniform(-1.0, 2.7, (Hv,)),
        "dt_bias": normal(Hv),
        "norm_weight": normal(Dv),
    }
    mx.eval(weights)
    fused = normal(1, 1, C + Hv * Dv + 2 * Hv)  # qkv, z, b and a one after another
    heads: dict[str, Any] = {"Hk": Hk_LINEAR, "offsets": (0, C, C + Hv * Dv, C + Hv * Dv + Hv)}
    conv_state = normal(1, 3, C)
    states = [normal(1, Hv, Dv, Dk, dtype=mx.float32) for _ in range(layers)]

    def call(conv_state: mx.array, state: mx.array, **options: Any):
        recurrent = {"conv_state": conv_state, "state": state}
        return gated_delta_step.gated_delta_step(fused, **weights, **recurrent, **heads, **options)

    want = gated_delta_step.gated_delta_step_reference(
        fused, **weights, conv_state=conv_state, state=states[0], **heads
    )
    mx.eval(want)
    moved = 2 * states[0].nbytes + 2 * conv_state.nbytes + 2 * (C + 2 * Hv * Dv + 4 * C)

    for lanes, simdgroups in STEP_TILES:
        options = {"tile": {"lanes": lanes, "simdgroups": simdgroups}, "backend": backend}

        def errors(options=options) -> list[float]:
            got = call(conv_state, states[0], **options)
            return [relative_error(g, w) for g, w in zip(got, want, strict=True)]

        # Each layer's conv state is the next one's: it has the size, and each call waits for the one before.
        def chain(conv_state, states, options=options):
            results = []
            for state in states:
                y, conv_state, state = call(conv_state, state, **options)
                results += [y, state]
            return conv_state, results

        yield Arm(
            f"lanes {lanes}, simdgroups {simdgroups}",
            errors,
            chain,
            (conv_state, states),
            layers,
            moved,
            1,
            (2.0**-7, 0.0, 1e-4),
        )

    # What rows split over 1,024 threadgroups take, without conv, norms and gates: the scan at one token.
    q, k = normal(1, 1, Hk_LINEAR, Dk, scale=0.1), normal(1, 1, Hk_LINEAR, Dk, scale=0.1)
    v, beta = normal(1, 1, Hv, Dv), normal(1, 1, Hv)
    g = mx.random.uniform(0.8, 1.0, (1, 1, Hv))
    mx.eval(g)
    want_y, want_state = gated_delta_scan.gated_delta_scan_reference(q, k, v, g, beta, states[0])

    def scan_errors() -> list[float]:
        got = gated_delta_scan.gated_delta_scan(q, k, v, g, beta, states[0], backend=backend)
        return [relative_error(x, w) for x, w in zip(got, (want_y, want_state), strict=True)]

    def scan_chain(v, states):
        results = []
        for state in states:
            v, state = gated_delta_scan.gated_delta_scan(q, k, v, g, beta, state, backend=backend)
            results.append(state)
        return v, results

    yield Arm(
        "the scan at T = 1, recurrence only",
        scan_errors,
        scan_chain,
        (v, states),
        layers,
        2 * states[0].nbytes,
        1,
        (2.0**-7, 1e-4),
    )


def prepare_arms(backend: str, calls: int) -> Iterator[Arm]:
    fused = normal(1, 1, (2 * Hq + 2 * Hk) * D)
    rows = normal(1, Hk, 2, D), normal(1, Hk, 2, D)
    frequencies = qk_prepare.rope_frequencies(ROTARY, 1e7)
    arrays = (fused, normal(D), normal(D), frequencies, mx.array([4095] * 8, dtype=mx.int32))
    heads: dict[str, Any] = {"Hq": Hq, "Hk": Hk, "offsets": (0, 2 * Hq * D, (2 * Hq + Hk) * D)}

    def errors() -> list[float]:
        got = qk_prepare.qk_prepare(*arrays, **heads, before=rows, backend=backend)
        want = qk_prepare.qk_prepare_reference(*arrays, **heads, before=rows)
        return [relative_error(g, w) for g, w in zip(got, want, strict=True)]

    def chain(k, v):
        queries = []
        for _ in range(calls):
            q, k, v = qk_prepare.qk_prepare(*arrays, **heads, before=(k, v), backend=backend)
            queries.append(q)
        return k, v, queries

    moved = 2 * (Hq + 2 * Hk) * D + 4 * Hq * D + 2 * 6 * Hk * D
    yield Arm("the tile of the table", errors, chain, rows, calls, moved, 1, (1e-3, 2.0**-7, 0.0))


def attention_arms(backend: str, context: int, calls: int | None) -> Iterator[Arm]:
    moved = 2 * Hk * context * D * 2
    buffers = max(2, min(128, -int(-CACHE_BYTES // moved)))
    calls = calls or max(8, buffers)
    buffers = min(buffers, calls)
    keys = [normal(1, Hk, context, D) for _ in range(buffers)]
    values = [normal(1, Hk, context, D) for _ in range(buffers)]
    q = normal(1, Hq, 1, D)
    projected = normal(1, 1, 2 * Hq * D)
    position = mx.array([context - 1, context, 0, 0, 0, 0, 0, 0], dtype=mx.int32)
    want = attention_decode.attention_decode_reference(q, keys[0], values[0], projected, position)
    mx.eval(want)
    tolerance = (2.0**-7,)

    # In one pass; one second pass with every first pass; then the other second passes with the first one.
    pairs: list[tuple[tuple[int, int, int], tuple[int, int] | None]] = []
    if context <= 4096:
        pairs += [(numbers, None) for numbers in PASS_TILES]
    pairs += [(numbers, COMBINE_TILES[0]) for numbers in ATTENTION_TILES]
    pairs += [(ATTENTION_TILES[0], combine) for combine in COMBINE_TILES[1:]]
    for numbers, combine in pairs:
        options: dict[str, Any] = {"backend": backend}
        name = "-".join(map(str, numbers))
        if combine is None:
            options["tile"] = dict(zip(PASS_FIELDS, numbers, strict=True))
        else:
            options["tile"] = dict(zip(TILE_FIELDS, numbers, strict=True))
            options["combine_tile"] = dict(zip(("columns", "simdgroups"), combine, strict=True))
            name += " + " + "-".join(map(str, combine))

        def errors(options=options) -> list[float]:
            got = attention_decode.attention_decode(q, keys[0], values[0], projected, position, **options)
            return [relative_error(got, want)]

        def chain(q, keys, values, options=options):
            for i in range(calls):
                j = i % buffers
                out = attention_decode.attention_decode(q, keys[j], values[j], projected, position, **options)
                q = out.reshape(1, Hq, 1, D)
            return q

        dispatches = 1 if combine is None else 2
        yield Arm(name, errors, chain, (q, keys, values), calls, moved, dispatches, tolerance)

    gate = mx.split(projected.reshape(1, Hq, 2, D), 2, axis=2)[1].reshape(1, Hq, 1, D)
    mx.eval(gate)

    def stock(q: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=D**-0.5)
        return out * mx.sigmoid(gate)

    def stock_errors() -> list[float]:
        return [relative_error(stock(q, keys[0], values[0]).reshape(1, 1, -1), want)]

    def stock_chain(q, keys, values):
        for i in range(calls):
            q = stock(q, keys[i % buffers], values[i % buffers])
        return q

    # Stock computes in bfloat16: its rounding is not ours to judge.
    yield Arm(
        "mx.fast attention and gate", stock_errors, stock_chain, (q, keys, values), calls, moved, 2, (0.1,)
    )


def prepare(arm: Arm, deadline: float) -> None:
    """Check the arm and compile its chain; what is wrong goes to its record."""
    if time.perf_counter() > deadline:
        arm.record["failure"] = "out of time"
        return
    try:
        arm.record["errors"] = errors = arm.errors()
        if any(not e <= limit for e, limit in zip(errors, arm.tolerance, strict=True)):
            arm.record["failure"] = "wrong"
            return
        compiled = mx.compile(arm.chain)

        def run() -> float:
            start = time.perf_counter()
            mx.eval(compiled(*arm.inputs))
            return (time.perf_counter() - start) / arm.calls

        run()
        run()
        arm.run = run
    except Exception as failure:  # a layout that a compiler refuses must not end the others' run
        arm.record["failure"] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contexts", type=whole(), nargs="*", default=[256, 4096, 32768, 131072])
    parser.add_argument("--calls", type=whole(), help="in a chain; default: enough to exceed the GPU's cache")
    add_run_options(parser, samples=15, budget=75.0)
    options = parser.parse_args()

    backend = backend_of(parser, options)
    if backend == "host":
        mx.disable_compile()  # the host launcher needs values
    began = time.perf_counter()
    about = environment(backend, options.commit)
    peak = copy_bandwidth()
    mx.random.seed(1)
    print(f"{about['device']} ({about['chip']}), mlx {about['mlx']}: copy {peak / 1e9:,.0f} GB/s")
    fields = "-".join(PASS_FIELDS), "-".join(TILE_FIELDS)
    print("attention: {}, or {} + columns-simdgroups of the second pass".format(*fields))

    groups: list[tuple[str, int, Callable[[], Iterator[Arm]]]] = [
        ("gated_delta_step", 0, lambda: step_arms(backend, options.calls or 24)),
        ("qk_prepare", 0, lambda: prepare_arms(backend, options.calls or 64)),
        *(
            (
                "attention_decode",
                context,
                lambda context=context: attention_arms(backend, context, options.calls),
            )
            for context in options.contexts
        ),
    ]
    wrong = 0
    for op, context, make in groups:
        print(f"\n{op}" + (f", context {context}" if context else ""))
        columns = f"{'median us':>10} {'p10':>8} {'p90':>8} {'launches':>8} {'GB/s':>7} {'of copy':>8}"
        print(f"{'arm':>44} {columns}  errors")
        arms: list[Arm] = []
        try:
            for arm in make():
                prepare(arm, began + options.budget)
                arms.append(arm)
        except Exception as failure:  # the group's reference or arrays; the next group may do better
            print(f"  {type(failure).__name__}: {failure}")
            wrong += 1
        samples: dict[str, list[float]] = {arm.name: [] for arm in arms}
        for _ in range(options.samples):
            for arm in arms:
                if arm.run:
                    samples[arm.name].append(arm.run())
        for arm in arms:
            record = {"op": op, "arm": arm.name, "context": context, "dtype": "bfloat16", **arm.record}
            errors = ", ".join(f"{e:.1e}" for e in record.get("errors", []))
            if times := samples[arm.name]:
                low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
                median = statistics.median(times)
                record |= {"median_s": median, "p10_s": low, "p90_s": high, "samples": len(times)}
                record |= {"calls": arm.calls, "bytes": arm.bytes, "copy_bytes_per_s": peak}
                rate = arm.bytes / median
                print(
                    f"{arm.name:>44} {median * 1e6:>10.2f} {low * 1e6:>8.2f} {high * 1e6:>8.2f} "
                    f"{arm.dispatches:>8} {rate / 1e9:>7,.0f} {rate / peak:>8.1%}  {errors}"
                )
            else:
                wrong += record["failure"] != "out of time"
                print(f"{arm.name:>44} {record['failure']}  {errors}")
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({**record, **about}) + "\n")
        sys.stdout.flush()
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
