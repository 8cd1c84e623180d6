"""Time the kernels of a prompt, one op at a time, beside MLX's own ops and the machine's limits.

    python -m bench.ops.prefill --json results.jsonl

The shapes are those of one layer of Qwen3.6-35B-A3B, batch 1, bfloat16, 4 bits (router 8), group 64; tiles
are those of the tables. Both arms are first compared with the op's fp32 reference; one that is wrong is
reported and left out. The experts' products come with four loads: ``uniform`` (random logits), ``half``
(one expert in half of the tokens), ``zipf`` (experts chosen as 1 / rank) and ``eight`` (all tokens to the
same eight).

A sample is a chain of calls, each waiting for the one before; Lily's is one compiled function, as in a
prompt, MLX's runs op by op, as stock's layers do. ``chain`` is its time over its calls, MLX's own work for
each launch included; ``gpu`` is what the chain adds to a long matrix product that the GPU is busy with
meanwhile. The rate is computed from ``gpu``: TFLOP/s against the measured matrix peak for products, GB/s
against the measured copy bandwidth for the rest. MLX's arm gets sorted experts for nothing where the
routing is not what is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # references are fp32

import mlx.core as mx
from mlx import nn
from mlx_lm.models import gated_delta as stock_scan
from mlx_lm.models.activations import swiglu

from lily_mlx.ops import (
    attention_gate,
    expert_combine,
    expert_gemm_down,
    expert_gemm_gate_up,
    expert_route,
    gated_delta_prepare,
    gated_rms_norm,
    qk_prepare,
    qmm,
)
from lily_mlx.ops.packed import Packed
from lily_mlx.ops.tile_product import grouped_tile

from .arrays import DTYPE, GROUP, TOP_K, normal, random_matrix, relative_error
from .machine import add_run_options, backend_of, copy_bandwidth, environment, matrix_peak, whole

Step = Callable[[mx.array], mx.array]
"""What the previous call gave -> what the next call starts from."""

ROUNDED = 2.0**-7  # operands and result are bfloat16
MLX_ROUNDED = 0.1  # MLX rounds in between too: its rounding is not ours to judge
AHEAD = 20.0  # of logits that are to win, and others still have probabilities above zero
LOADS = ("uniform", "half", "zipf", "eight")


@dataclass(frozen=True)
class Shape:
    """Hidden size, expert width, experts, and heads; Qwen3.6-35B-A3B's unless shrunk."""

    K: int = 2048
    M: int = 512
    E: int = 256
    Hq: int = 16
    Hk: int = 2
    D: int = 256
    key_heads: int = 16
    value_heads: int = 32

    def shrunk(self, by: int) -> Shape:
        if by == 1:
            return self
        heads = (max(2, 16 // by), 2, 64, max(2, 16 // by), max(4, 32 // by))
        return Shape(max(128, self.K // by), max(64, self.M // by), max(16, self.E // by), *heads)


@dataclass
class Arm:
    """One way to compute an op.

    Attributes:
        step: a call.
        results: of one call, to be compared with the reference.
    """

    step: Step
    results: Callable[[], Sequence[mx.array]]


@dataclass
class Job:
    """An op at a shape.

    Attributes:
        op, variant: its name, and the matrix or load.
        tokens: of the prompt.
        flops: of a call; zero for an op that is bound by memory.
        nbytes: that a call must read and write.
        start: what the first call starts from.
        arms: ``lily`` and ``mlx``.
        want: the reference's results.
        tolerance: of each of them, relative to its largest value.
    """

    op: str
    variant: str
    tokens: int
    flops: float
    nbytes: int
    start: mx.array
    arms: dict[str, Arm]
    want: Sequence[mx.array]
    tolerance: Sequence[float]


def size_of(*arrays: mx.array) -> int:
    return sum(array.nbytes for array in arrays)


def waited_for(result: mx.array) -> mx.array:
    """A zero [1] that is there when the result is."""
    return result.reshape(-1)[:1].astype(mx.float32) * 0


def after(value: mx.array, operand: mx.array) -> mx.array:
    """The operand, once ``value``, a zero, is there."""
    return operand + value.astype(operand.dtype)


def stock_product(x: mx.array, matrix: Packed) -> mx.array:
    return mx.quantized_matmul(x, *matrix[:3], transpose=True, group_size=GROUP, bits=matrix.bits)


# --- Products -----------------------------------------------------------------------------------------------


def qmm_job(name: str, T: int, K: int, N: int, backend: str, bits: int = 4) -> Job:
    """Where N >= K, the first numbers of y are the next x; else y is the next residual."""
    matrix = random_matrix(N, K, bits=bits)
    x = normal(T, K)
    feeds_x = N >= K
    residual = None if feeds_x else normal(T, N)
    mx.eval(matrix[:3])

    def chained(product: Callable[[mx.array, mx.array | None], mx.array]) -> Arm:
        def step(value: mx.array) -> mx.array:
            if not feeds_x:
                return product(x, value)
            return product(value, None).reshape(-1)[: T * K].reshape(T, K)

        return Arm(step, lambda: [product(x, residual)])

    def lily(x: mx.array, residual: mx.array | None) -> mx.array:
        return qmm.qmm(x, [matrix], residual=residual, backend=backend)

    def mlx(x: mx.array, residual: mx.array | None) -> mx.array:
        y = stock_product(x, matrix)
        return y if residual is None else residual + y

    nbytes = matrix.nbytes + size_of(x) + 2 * T * N * (1 if feeds_x else 2)
    return Job(
        "qmm",
        name,
        T,
        2.0 * T * K * N,
        nbytes,
        x if residual is None else residual,
        {"lily": chained(lily), "mlx": chained(mlx)},
        [qmm.qmm_reference(x, [matrix], residual=residual)],
        [ROUNDED],
    )


def logits_of(load: str, T: int, E: int) -> mx.array:
    """Router logits [T, E + 1] that choose experts with this load."""
    logits, experts = mx.random.normal((T, E + 1)), mx.arange(E + 1)
    if load == "half":
        logits += AHEAD * ((mx.arange(T) % 2 == 0)[:, None] & (experts == E // 3))
    elif load == "zipf":  # the largest of these are a sample without replacement, weighted by 1 / rank
        logits = mx.random.gumbel((T, E + 1)) - mx.log(experts + 1.0)
    elif load == "eight":
        logits += AHEAD * (experts < TOP_K)
    mx.eval(logits)
    return logits


@dataclass
class Routed:
    """A routing, for both arms: MLX's takes the routed rows' experts, in order, and tokens."""

    routing: expert_route.Routing
    experts: mx.array
    tokens: mx.array
    used_experts: int

    @classmethod
    def of(cls, load: str, T: int, E: int, backend: str) -> Routed:
        block_rows = grouped_tile(T, TOP_K, E, backend)["rows"]
        routing = expert_route.expert_route_reference(logits_of(load, T, E), TOP_K, block_rows)
        experts = mx.sort(routing.experts.reshape(-1))
        tokens = routing.rows[: T * TOP_K] // (TOP_K + 1)
        mx.eval(routing, experts, tokens)
        return cls(routing, experts, tokens, len(set(experts.tolist())))

    @property
    def groups(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.routing.rows, self.routing.blocks, self.routing.count


def grouped_product(x: mx.array, matrices: Packed, experts: mx.array) -> mx.array:
    """x [rows, K] by each row's expert: [rows, N]."""
    return mx.gather_qmm(
        x[:, None],
        *matrices[:3],
        rhs_indices=experts,
        transpose=True,
        group_size=GROUP,
        bits=matrices.bits,
        sorted_indices=True,
    )[:, 0]


def gate_up_job(load: str, T: int, shape: Shape, backend: str) -> Job:
    K, M, E = shape.K, shape.M, shape.E
    matrices = [random_matrix(E, M, K), random_matrix(E, M, K), random_matrix(M, K), random_matrix(M, K)]
    gate, up, shared_gate, shared_up = matrices
    x, routed = normal(T, K), Routed.of(load, T, E, backend)
    rows, blocks, count = routed.groups
    mx.eval([matrix[:3] for matrix in matrices])

    def lily(count: mx.array) -> mx.array:
        return expert_gemm_gate_up.expert_gemm_gate_up(
            x, rows, blocks, count, *matrices, TOP_K, backend=backend
        )

    def mlx(experts: mx.array) -> tuple[mx.array, mx.array]:
        n = x[routed.tokens]
        h = swiglu(grouped_product(n, gate, experts), grouped_product(n, up, experts))
        return h, swiglu(stock_product(x, shared_gate), stock_product(x, shared_up))

    def mlx_step(value: mx.array) -> mx.array:
        h, shared = mlx(after(value, routed.experts))
        return waited_for(h) + waited_for(shared)

    R = T * (TOP_K + 1)
    one = shared_gate.nbytes + shared_up.nbytes
    return Job(
        "expert_gemm_gate_up",
        load,
        T,
        2.0 * R * K * 2 * M,
        one * (routed.used_experts + 1) + size_of(x) + 2 * R * M,
        mx.zeros(1),
        {
            "lily": Arm(lambda value: waited_for(lily(after(value, count))), lambda: [lily(count)]),
            "mlx": Arm(mlx_step, lambda: [mx.concatenate(mlx(routed.experts))]),
        },
        [expert_gemm_gate_up.expert_gemm_gate_up_reference(x, rows, blocks, count, *matrices, TOP_K)],
        [2 * ROUNDED],  # both factors are products
    )


def down_job(load: str, T: int, shape: Shape, backend: str) -> Job:
    K, M, E = shape.K, shape.M, shape.E
    down, shared_down = random_matrix(E, K, M), random_matrix(K, M)
    R = T * (TOP_K + 1)
    h, routed = normal(R, M), Routed.of(load, T, E, backend)
    rows, blocks, count = routed.groups
    by_token = mx.argsort(rows)
    mx.eval(down[:3], shared_down[:3], by_token)

    def lily(count: mx.array) -> mx.array:
        return expert_gemm_down.expert_gemm_down(
            h, rows, blocks, count, down, shared_down, TOP_K, backend=backend
        )

    def mlx(experts: mx.array) -> mx.array:
        y = [grouped_product(h[: T * TOP_K], down, experts), stock_product(h[T * TOP_K :], shared_down)]
        return mx.concatenate(y)[by_token]

    return Job(
        "expert_gemm_down",
        load,
        T,
        2.0 * R * M * K,
        shared_down.nbytes * (routed.used_experts + 1) + size_of(h) + 2 * R * K,
        mx.zeros(1),
        {
            "lily": Arm(lambda value: waited_for(lily(after(value, count))), lambda: [lily(count)]),
            "mlx": Arm(
                lambda value: waited_for(mlx(after(value, routed.experts))),
                lambda: [mlx(routed.experts)],
            ),
        },
        [expert_gemm_down.expert_gemm_down_reference(h, rows, blocks, count, down, shared_down, TOP_K)],
        [ROUNDED],
    )


# --- Routing and combining ----------------------------------------------------------------------------------


def route_job(load: str, T: int, shape: Shape, backend: str) -> Job:
    """Each call's time includes an addition to the logits, which makes it wait."""
    E = shape.E
    logits = logits_of(load, T, E)
    block_rows = grouped_tile(T, TOP_K, E, backend)["rows"]
    want = expert_route.expert_route_reference(logits, TOP_K, block_rows)

    def lily(logits: mx.array) -> expert_route.Routing:
        return expert_route.expert_route(logits, TOP_K, block_rows, backend=backend)

    def mlx(logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Weights and experts as stock's layer finds them, and the order in which its results come."""
        probabilities = mx.softmax(logits[:, :E], axis=-1, precise=True)
        experts = mx.argpartition(probabilities, kth=-TOP_K, axis=-1)[:, -TOP_K:]
        weights = mx.take_along_axis(probabilities, experts, axis=-1)
        order = mx.argsort(experts.reshape(-1))
        return weights / weights.sum(axis=-1, keepdims=True), experts, mx.argsort(order)

    def lily_step(value: mx.array) -> mx.array:
        routing = lily(after(value, logits))
        return waited_for(routing.weights) + waited_for(routing.rows)

    def mlx_step(value: mx.array) -> mx.array:
        weights, _, inverse = mlx(after(value, logits))
        return waited_for(weights) + waited_for(inverse)

    return Job(
        "expert_route",
        load,
        T,
        0.0,
        size_of(logits, want.weights, want.rows, want.blocks, want.experts),
        mx.zeros(1),
        {
            "lily": Arm(lily_step, lambda: [*lily(logits)]),
            "mlx": Arm(mlx_step, lambda: [mx.sort(mlx(logits)[1], axis=-1)]),
        },
        [*want],
        [1e-6, 0.0, 0.0, 0.0, 0.0],
    )


def combine_job(T: int, shape: Shape, backend: str) -> Job:
    """out is the next residual."""
    slots, H = TOP_K + 1, shape.K
    y, weights = normal(T * slots, H), mx.softmax(mx.random.normal((T, slots)), axis=-1)
    residual = normal(T, H)
    mx.eval(weights)

    def lily(residual: mx.array) -> mx.array:
        return expert_combine.expert_combine(y, weights, residual, backend=backend)

    def mlx(residual: mx.array) -> mx.array:
        rows, w = y.reshape(T, slots, H), weights.astype(DTYPE)[..., None]
        return residual + ((rows[:, :TOP_K] * w[:, :TOP_K]).sum(-2) + w[:, TOP_K] * rows[:, TOP_K])

    return Job(
        "expert_combine",
        "",
        T,
        0.0,
        size_of(y, weights, residual, residual),
        residual,
        {
            name: Arm(lambda value, run=run: run(value), lambda run=run: [run(residual)])
            for name, run in (("lily", lily), ("mlx", mlx))
        },
        [expert_combine.expert_combine_reference(y, weights, residual)],
        [ROUNDED],
    )


# --- Gated DeltaNet and attention ---------------------------------------------------------------------------


def prepare_scan_job(T: int, shape: Shape, backend: str) -> Job:
    """The conv state is the next one's, so each call waits for the one before."""
    Hk, Hv, D = shape.key_heads, shape.value_heads, 128
    key, value_width = Hk * D, Hv * D
    C = 2 * key + value_width
    offsets = (0, C + value_width, C + value_width + Hv)
    projected, conv_state = normal(1, T, C + value_width + 2 * Hv), normal(1, 3, C)
    weights = (normal(C, 4, 1, scale=0.5), normal(Hv), normal(Hv))  # conv, A_log, dt_bias
    heads: dict[str, Any] = {"Hk": Hk, "Dk": D, "Dv": D, "offsets": offsets}
    conv = nn.Conv1d(C, C, 4, bias=False, groups=C)
    conv.weight = weights[0]

    def lily(conv_state: mx.array) -> Sequence[mx.array]:
        return gated_delta_prepare.gated_delta_prepare(
            *[projected] * 3, weights[0], conv_state, *weights[1:], **heads, backend=backend
        )

    def mlx(conv_state: mx.array) -> Sequence[mx.array]:
        qkv, _, b, a = mx.split(projected, [C, *offsets[1:]], axis=-1)
        conv_input = mx.concatenate([conv_state, qkv], axis=1)
        q, k, v = mx.split(nn.silu(conv(conv_input)), [key, 2 * key], axis=-1)
        q, k = stock_scan.normalize_qk(
            q.reshape(1, T, Hk, D), k.reshape(1, T, Hk, D), inv_scale=D**-0.5, eps=1e-6
        )
        g = stock_scan.compute_g(weights[1], a, weights[2])
        return q, k, v.reshape(1, T, Hv, D), g, mx.sigmoid(b), mx.contiguous(conv_input[:, -3:])

    def step(run: Callable[[mx.array], Sequence[mx.array]]) -> Step:
        def waiting(value: mx.array) -> mx.array:
            *results, conv_state = run(value)
            return mx.depends(conv_state, results)  # so that nothing is left out

        return waiting

    moved = 2 * (T * (C + 2 * Hv) + C * (4 + 3)) + 2 * T * (C + Hv) + 4 * T * Hv + 2 * 3 * C
    return Job(
        "gated_delta_prepare",
        "",
        T,
        0.0,
        moved,
        conv_state,
        {
            name: Arm(step(run), lambda run=run: run(conv_state))
            for name, run in (("lily", lily), ("mlx", mlx))
        },
        gated_delta_prepare.gated_delta_prepare_reference(
            *[projected] * 3, weights[0], conv_state, *weights[1:], **heads
        ),
        [ROUNDED, ROUNDED, ROUNDED, 1e-4, ROUNDED, 0.0],
    )


def gated_norm_job(T: int, shape: Shape, backend: str) -> Job:
    """out is the next y."""
    Hv, D = shape.value_heads, 128
    C = 2 * shape.key_heads * D + Hv * D
    projected, y, weight = normal(1, T, C + Hv * D + 2 * Hv), normal(1, T, Hv, D), normal(D)
    z = projected[..., C : C + Hv * D].reshape(1, T, Hv, D)

    def lily(y: mx.array) -> mx.array:
        return gated_rms_norm.gated_rms_norm(y, projected, weight, offset=C, backend=backend)

    def mlx(y: mx.array) -> mx.array:
        return swiglu(z, mx.fast.rms_norm(y, weight, 1e-6)).reshape(1, T, -1)

    return Job(
        "gated_rms_norm",
        "",
        T,
        0.0,
        3 * y.nbytes,
        y,
        {
            name: Arm(lambda value, run=run: run(value).reshape(y.shape), lambda run=run: [run(y)])
            for name, run in (("lily", lily), ("mlx", mlx))
        },
        [gated_rms_norm.gated_rms_norm_reference(y, projected, weight, offset=C)],
        [ROUNDED],
    )


def attention_gate_job(T: int, shape: Shape, backend: str) -> Job:
    """out, its numbers taken as [1, Hq, T, D], is the next x."""
    Hq, D = shape.Hq, shape.D
    x, projected = normal(1, Hq, T, D), normal(1, T, 2 * (Hq + shape.Hk) * D)

    def lily(x: mx.array) -> mx.array:
        return attention_gate.attention_gate(x, projected, backend=backend)

    def mlx(x: mx.array) -> mx.array:
        gate = projected[..., : 2 * Hq * D].reshape(1, T, Hq, 2, D)[..., 1, :].reshape(1, T, Hq * D)
        return x.transpose(0, 2, 1, 3).reshape(1, T, Hq * D) * mx.sigmoid(gate)

    return Job(
        "attention_gate",
        "",
        T,
        0.0,
        3 * x.nbytes,
        x,
        {
            name: Arm(lambda value, run=run: run(value).reshape(x.shape), lambda run=run: [run(x)])
            for name, run in (("lily", lily), ("mlx", mlx))
        },
        [attention_gate.attention_gate_reference(x, projected)],
        [ROUNDED],
    )


def qk_prepare_job(T: int, shape: Shape, backend: str) -> Job:
    """The first numbers of q are the next norm's weight."""
    Hq, Hk, D = shape.Hq, shape.Hk, shape.D
    rotary, theta, first = D // 4, 1e7, 4096
    offsets = (0, 2 * Hq * D, (2 * Hq + Hk) * D)
    projected, q_weight, k_weight = normal(1, T, 2 * (Hq + Hk) * D), normal(D), normal(D)
    operands = (qk_prepare.rope_frequencies(rotary, theta), mx.array([first] * 8, dtype=mx.int32))
    heads: dict[str, Any] = {"Hq": Hq, "Hk": Hk, "offsets": offsets}

    def lily(weight: mx.array) -> Sequence[mx.array]:
        return qk_prepare.qk_prepare(
            projected, weight, k_weight, *operands, **heads, q_dtype=DTYPE, backend=backend
        )

    def mlx(weight: mx.array) -> Sequence[mx.array]:
        q, k, v = mx.split(projected, offsets[1:], axis=-1)
        q, k, v = q.reshape(1, T, Hq, 2, D)[..., 0, :], k.reshape(1, T, Hk, D), v.reshape(1, T, Hk, D)
        q, k = (
            mx.fast.rope(
                mx.fast.rms_norm(x, w, 1e-6).transpose(0, 2, 1, 3),
                rotary,
                traditional=False,
                base=theta,
                scale=1.0,
                offset=first,
            )
            for x, w in ((q, weight), (k, k_weight))
        )
        return q, k, mx.contiguous(v.transpose(0, 2, 1, 3))

    def step(run: Callable[[mx.array], Sequence[mx.array]]) -> Step:
        def waiting(value: mx.array) -> mx.array:
            q, k, v = run(value)
            return mx.depends(q.reshape(-1)[:D], [k, v])

        return waiting

    return Job(
        "qk_prepare",
        "",
        T,
        0.0,
        2 * 2 * T * (Hq + 2 * Hk) * D,
        q_weight,
        {name: Arm(step(run), lambda run=run: run(q_weight)) for name, run in (("lily", lily), ("mlx", mlx))},
        qk_prepare.qk_prepare_reference(projected, q_weight, k_weight, *operands, **heads),
        [ROUNDED, ROUNDED, 0.0],
    )


# --- Measuring ----------------------------------------------------------------------------------------------


def makers(T: int, shape: Shape, backend: str) -> dict[str, Callable[[], Job]]:
    """The jobs by name, the most telling first; making one makes its arrays."""
    K, D = shape.K, shape.D
    linear = (2 * shape.key_heads + 2 * shape.value_heads) * 128 + 2 * shape.value_heads
    attention = 2 * (shape.Hq + shape.Hk) * D
    found: dict[str, Callable[[], Job]] = {}
    for load in LOADS:
        found[f"expert_gemm_gate_up {load}"] = lambda load=load: gate_up_job(load, T, shape, backend)
        found[f"expert_gemm_down {load}"] = lambda load=load: down_job(load, T, shape, backend)
    for name, columns, rows, bits in (
        ("DeltaNet in", K, linear, 4),
        ("attention in", K, attention, 4),
        ("out", 2 * K, K, 4),
        ("router", K, shape.E + 1, 8),
    ):
        found[f"qmm {name}"] = lambda n=name, c=columns, r=rows, b=bits: qmm_job(n, T, c, r, backend, b)
    for load in LOADS:
        found[f"expert_route {load}"] = lambda load=load: route_job(load, T, shape, backend)
    for op, make in (
        ("gated_delta_prepare", prepare_scan_job),
        ("gated_rms_norm", gated_norm_job),
        ("qk_prepare", qk_prepare_job),
        ("attention_gate", attention_gate_job),
        ("expert_combine", combine_job),
    ):
        found[op] = lambda make=make: make(T, shape, backend)
    return found


def errors(arm: str, job: Job) -> tuple[list[float], bool]:
    """The largest error of each result, and whether all are within the limits."""
    if arm == "mlx" and job.op == "expert_route":  # of stock's results the experts alone are comparable
        found = [0.0 if mx.array_equal(job.arms[arm].results()[0], job.want[-1]) else math.inf]
        return found, found == [0.0]
    found = [relative_error(g, w) for g, w in zip(job.arms[arm].results(), job.want, strict=True)]
    limits = [MLX_ROUNDED] * len(found) if arm == "mlx" else job.tolerance
    return found, all(e <= limit for e, limit in zip(found, limits, strict=True))


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


def chain_of(step: Step, calls: int, compiled: bool) -> Callable[[mx.array], mx.array]:
    def chain(value: mx.array) -> mx.array:
        for _ in range(calls):
            value = step(value)
        return value

    return mx.compile(chain) if compiled else chain


def measure(job: Job, clock: Clock, backend: str, samples: int, deadline: float) -> list[dict[str, Any]]:
    """A record for each arm of a job."""
    calls = 2 if backend == "host" else 6 if job.flops else 24
    chains: dict[str, Callable[[mx.array], mx.array]] = {}
    records: dict[str, dict[str, Any]] = {}
    for name, arm in job.arms.items():
        records[name] = record = {"op": job.op, "variant": job.variant, "T": job.tokens, "arm": name}
        record |= {"flops": job.flops, "bytes": job.nbytes, "calls": calls}
        if time.perf_counter() > deadline:
            record["failure"] = "out of time"
            continue
        try:
            record["errors"], right = errors(name, job)
            if not right:
                record["failure"] = f"wrong: errors {', '.join(f'{e:.1e}' for e in record['errors'])}"
                continue
            compiled = name == "lily" and backend != "host"
            chain = chain_of(arm.step, calls, compiled)
            mx.eval(chain(job.start))
            chains[name] = chain
        except Exception as failure:  # what a compiler or a missing kernel refuses must not end the run
            reason = " ".join(str(failure).split())
            record["failure"] = f"{type(failure).__name__}: {reason[:400]}"
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in chains}
    for sample in range(samples + 1):
        for name, chain in chains.items():
            measured = clock.sample(chain, job.start, calls)
            if sample:  # the first round warms every arm
                times[name].append(measured)
    for name, measured in times.items():
        chain_times, gpu_times = zip(*measured, strict=True)
        records[name] |= {"chain_s": statistics.median(chain_times), "gpu_s": statistics.median(gpu_times)}
        records[name] |= {"gpu_low_s": min(gpu_times), "gpu_high_s": max(gpu_times), "samples": samples}
    return list(records.values())


def line(record: dict[str, Any], peaks: tuple[float, float], beside: dict[tuple[str, int], float]) -> str:
    """A row of the table.

    Args:
        record: of an arm.
        peaks: FLOP and bytes a second.
        beside: seconds of the arms measured so far at the uniform load, by op and arm, and tokens.
    """
    name = f"{record['op']} {record['variant']}".strip()
    if "failure" in record:
        return f"{record['T']:>5} {name:>29} {record['arm']:>5} {record['failure']}"
    figures = [record[key] * 1e6 for key in ("chain_s", "gpu_s", "gpu_low_s", "gpu_high_s")]
    rate, peak = record["flops"] / record["gpu_s"], peaks[0]
    unit, scale = "TFLOP/s", 1e12
    if not record["flops"]:
        rate, peak, unit, scale = record["bytes"] / record["gpu_s"], peaks[1], "GB/s", 1e9
    key = (f"{record['op']} {record['arm']}", record["T"])
    if record["variant"] == "uniform":
        beside[key] = record["gpu_s"]
    skew = record["gpu_s"] / beside[key] if key in beside else None
    return (
        f"{record['T']:>5} {name:>29} {record['arm']:>5} "
        + " ".join(f"{figure:>9.1f}" for figure in figures)
        + f" {rate / scale:>8,.1f} {unit:<7} {rate / peak:>6.1%} "
        + (f"{skew:>7.2f}" if skew else f"{'':>7}")
        + f"  {max(record['errors']):.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=whole(), nargs="+", default=[2048, 512])
    parser.add_argument("--jobs", nargs="+", default=[""], help="parts of names of jobs; default: all")
    add_run_options(parser, samples=5, budget=90.0)
    parser.add_argument(
        "--shrink", type=int, choices=(1, 2, 4, 8, 16), default=1, help="divide sizes, to try the script"
    )
    options = parser.parse_args()

    backend = backend_of(parser, options)
    began = time.perf_counter()
    mx.random.seed(0)
    about = environment(backend, options.commit)
    peaks = (
        matrix_peak(8192 // options.shrink),
        copy_bandwidth((256 << 20) // options.shrink**2, rounds=8),
    )
    clock = Clock(4096 // options.shrink)
    print(f"{about['device']} ({about['chip']}), mlx {about['mlx']}: ", end="")
    print(f"matrix peak {peaks[0] / 1e12:,.4g} TFLOP/s, copy {peaks[1] / 1e9:,.4g} GB/s")
    print(
        f"{'T':>5} {'job':>29} {'arm':>5} {'chain us':>9} {'gpu us':>9} {'low':>9} {'high':>9} "
        f"{'rate':>8} {'':7} {'of peak':>6} {'/uniform':>7}  error"
    )

    shape = Shape().shrunk(options.shrink)
    jobs = [
        make
        for T in options.tokens
        for name, make in makers(T, shape, backend).items()
        if any(part in name for part in options.jobs)
    ]
    if not jobs:
        parser.error(f"--jobs {' '.join(options.jobs)} is part of no job's name")
    wrong = 0
    beside: dict[tuple[str, int], float] = {}
    for make in jobs:
        if time.perf_counter() - began > options.budget:
            print(f"{options.budget:g} s are over; {len(jobs) - jobs.index(make)} jobs are left out")
            break
        for record in measure(make(), clock, backend, options.samples, began + options.budget):
            wrong += record.get("failure", "out of time") != "out of time"
            print(line(record, peaks, beside))
            if options.json:
                limits = {"matrix_peak": peaks[0], "copy_bytes_per_s": peaks[1]}
                with options.json.open("a") as file:
                    file.write(json.dumps({**record, **limits, **about}) + "\n")
        mx.clear_cache()
        sys.stdout.flush()
    print(f"{time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
