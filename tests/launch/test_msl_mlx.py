"""Kernels of the installed MLX, called from a small body on the CPU, against fp32 references.

The headers come out of the wheel and are not touched. Where a kernel takes a struct of parameters the body
builds it in thread memory, which only the host accepts in place of constant memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.launch import host
from lily_mlx.launch.msl.rewrite import function_constants

KERNELS = "mlx/backend/metal/kernels"
# Relative RMS error of one result that was rounded to the type once.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 5e-4, mx.bfloat16: 4e-3, mx.complex64: 2e-6}
ATTRIBUTES = """
    uint3 tid = threadgroup_position_in_grid;
    uint3 lid = thread_position_in_threadgroup;
    uint thread_id = thread_index_in_threadgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint lane = thread_index_in_simdgroup;
"""


def run(
    headers: list[str],
    body: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[tuple[int, ...], mx.Dtype]],
    *,
    threadgroups: tuple[int, int, int] = (1, 1, 1),
    threads: tuple[int, int, int] = (32, 1, 1),
    constants: Mapping[int, Any] | None = None,
    template: list[tuple[str, Any]] | None = None,
    **options: Any,
) -> list[mx.array]:
    """Run a body after including MLX's headers; Python numbers among the inputs become int32 constants."""
    includes = "".join(f'#include "{KERNELS}/{name}"\n' for name in headers)
    arrays = [x if isinstance(x, mx.array) else mx.array(x, mx.int32) for x in inputs.values()]
    kernel = host.metal_kernel(
        "from_mlx",
        list(inputs),
        list(outputs),
        ATTRIBUTES + body,
        "#include <metal_stdlib>\n" + function_constants(constants or {}) + includes,
    )
    return kernel(
        inputs=arrays,
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        grid=tuple(g * t for g, t in zip(threadgroups, threads, strict=True)),
        threadgroup=threads,
        template=template,
        **options,
    )


def agree(got: mx.array, want: mx.array, factor: float = 1.0) -> None:
    assert got.shape == want.shape
    tolerance = factor * TOLERANCE[got.dtype]
    got = got if got.dtype == mx.complex64 else got.astype(mx.float32)
    error = mx.sqrt(mx.mean(mx.abs(got - want) ** 2)) / mx.sqrt(mx.mean(mx.abs(want) ** 2))
    assert error.item() < tolerance


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (scale * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


# ------------------------------------------------------------------------------------- quantised products

QUANTISED = ["steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"]


def weights(*shape: int, bits: int, dtype: mx.Dtype, transposed: bool = True) -> tuple[mx.array, ...]:
    """A quantised weight (packed, scales, biases) and its fp32 values; groups of 64."""
    w, scales, biases = mx.quantize(normal(*shape, seed=1).astype(dtype), group_size=64, bits=bits)
    values = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=64, bits=bits)
    return w, scales, biases, values


@pytest.mark.parametrize(
    ("function", "K", "bits"), [("qmv_fast_impl", 512, 4), ("qmv_fast_impl", 512, 3), ("qmv_impl", 192, 4)]
)
def test_qmv(function: str, K: int, bits: int) -> None:
    N, M = 24, 2
    w, scales, biases, values = weights(N, K, bits=bits, dtype=mx.bfloat16)
    x = normal(M, K, seed=2, dtype=mx.bfloat16)
    (y,) = run(
        QUANTISED,
        f"{function}<T, 64, {bits}>(w, scales, biases, x, y, K, N, tid, sg, lane);",
        {"w": w, "scales": scales, "biases": biases, "x": x, "K": K, "N": N},
        {"y": ((M, N), mx.bfloat16)},
        threadgroups=(M, N // 8, 1),
        threads=(32, 2, 1),
        template=[("T", mx.bfloat16)],
    )
    agree(y, x.astype(mx.float32) @ values.T)


def test_qvm() -> None:
    N, K, M = 128, 64, 2
    w, scales, biases, values = weights(K, N, bits=4, dtype=mx.float16)
    x = normal(M, K, seed=2, dtype=mx.float16)
    (y,) = run(
        QUANTISED,
        "qvm_impl<half, 64, 4>(w, scales, biases, x, y, K, N, K, tid, sg, lane);",
        {"w": w, "scales": scales, "biases": biases, "x": x, "K": K, "N": N},
        {"y": ((M, N), mx.float16)},
        threadgroups=(M, N // 64, 1),
        threads=(32, 2, 1),
    )
    agree(y, x.astype(mx.float32) @ values)


# Rows with a remainder, and without.
@pytest.mark.parametrize(("transposed", "M"), [(True, 40), (True, 32), (False, 40)])
def test_qmm(transposed: bool, M: int) -> None:
    N, K = 64, 128
    w, scales, biases, values = weights(*((N, K) if transposed else (K, N)), bits=4, dtype=mx.bfloat16)
    x = normal(M, K, seed=2, dtype=mx.bfloat16)
    call = (
        "qmm_t_impl<T, 64, 4, true>(w, scales, biases, x, y, Xs, Ws, K, N, M, K, tid, thread_id, sg, lane);"
        if transposed
        else "qmm_n_impl<T, 64, 4>(w, scales, biases, x, y, Xs, Ws, K, N, M, tid, thread_id, sg, lane);"
    )
    (y,) = run(
        QUANTISED,
        "threadgroup T Xs[32 * 40]; threadgroup T Ws[32 * 40];\n" + call,
        {"w": w, "scales": scales, "biases": biases, "x": x, "K": K, "N": N, "M": M},
        {"y": ((M, N), mx.bfloat16)},
        threadgroups=(N // 32, (M + 31) // 32, 1),
        threads=(32, 2, 2),
        template=[("T", mx.bfloat16)],
    )
    agree(y, x.astype(mx.float32) @ (values.T if transposed else values))


GATHER = "(x, w, scales, biases, offsets, y, M, N, K, num_groups, tid, sg, lane);"


def gather_inputs(E: int, N: int, K: int) -> tuple[dict[str, Any], mx.array]:
    """Rows sorted by expert, one expert without rows, and the product per row."""
    counts = [5, 0, 20, 8]
    M = sum(counts)
    w, scales, biases, values = weights(E, N, K, bits=4, dtype=mx.bfloat16)
    x = normal(M, K, seed=2, dtype=mx.bfloat16)
    experts = mx.array([e for e, count in enumerate(counts) for _ in range(count)])
    offsets = mx.array([sum(counts[:e]) for e in range(E)], mx.int32)
    want = (x.astype(mx.float32)[:, None, :] @ values[experts].swapaxes(-1, -2))[:, 0]
    inputs = {"x": x, "w": w, "scales": scales, "biases": biases, "offsets": offsets}
    return {**inputs, "M": M, "N": N, "K": K, "num_groups": E}, want


def test_gather_qmm_rhs() -> None:
    inputs, want = gather_inputs(4, 64, 128)
    (y,) = run(
        QUANTISED,
        "affine_gather_qmm_rhs<bfloat16_t, 64, 4, 16, 32, 32, 1, 2, true>" + GATHER,
        inputs,
        {"y": (want.shape, mx.bfloat16)},
        threadgroups=(2, 33 // 16 + 4, 1),
        threads=(32, 1, 2),
        constants={201: True, 202: True},
    )
    agree(y, want)


def test_gather_qmm_rhs_on_tensor_operations() -> None:
    inputs, want = gather_inputs(4, 64, 128)
    (y,) = run(
        ["quantized_utils.h", "steel/utils.h", "steel/gemm/nax.h", "steel/gemm/loader.h", "quantized_nax.h"],
        "affine_gather_qmm_rhs_nax<bfloat16_t, 64, 4, 64, 64, 64, 2, 2, true>" + GATHER,
        inputs,
        {"y": (want.shape, mx.bfloat16)},
        threadgroups=(1, 5, 1),
        threads=(32, 2, 2),
        constants={201: True, 202: True},
    )
    agree(y, want)


@pytest.mark.parametrize(("mode", "group", "bits"), [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)])
def test_fp_qmv(mode: str, group: int, bits: int) -> None:
    N, K = 16, 512
    w, scales = mx.quantize(normal(N, K, seed=1), mode=mode)[:2]
    values = mx.dequantize(w, scales, mode=mode, dtype=mx.float32)
    x = normal(1, K, seed=2, dtype=mx.float16)
    (y,) = run(
        ["steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h"],
        f"fp_qmv_fast_impl<half, {group}, {bits}>(w, scales, global, x, y, K, N, tid, sg, lane);",
        {"w": w, "scales": scales, "global": mx.ones(8), "x": x, "K": K, "N": N},
        {"y": ((1, N), mx.float16)},
        threadgroups=(1, N // 8, 1),
        threads=(32, 2, 1),
    )
    agree(y, x.astype(mx.float32) @ values.T)


# ------------------------------------------------------------------------------------------------ attention


def attention_reference(q: mx.array, k: mx.array, v: mx.array, scale: float, causal: bool) -> mx.array:
    """[B, H, L, D] in fp32; key heads are repeated."""
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    k, v = (mx.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.swapaxes(-1, -2)
    if causal:
        last = mx.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
        scores = mx.where(mx.arange(k.shape[2])[None] <= last, scores, -mx.inf)
    return mx.softmax(scores, -1) @ v


def attention_inputs(Hq: int, Hk: int, L: int, N: int, D: int) -> tuple[mx.array, mx.array, mx.array]:
    return (
        normal(1, Hq, L, D, seed=1, dtype=mx.bfloat16),
        normal(1, Hk, N, D, seed=2, dtype=mx.bfloat16),
        normal(1, Hk, N, D, seed=3, dtype=mx.bfloat16),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_vector(causal: bool) -> None:
    Hq, Hk, L, N, D = 4, 2, 2, 45, 64
    q, k, v = attention_inputs(Hq, Hk, L, N, D)
    strides = [mx.array(n, mx.uint64) for n in (N * D, D)]
    (out,) = run(
        ["sdpa_vector.h"],
        """sdpa_vector<bfloat16_t, 64>(q, k, v, out, gqa, N, head_stride, row_stride, head_stride, row_stride,
               scale, nullptr, nullptr, N, N, N, nullptr, N, tid, threadgroups_per_grid, sg, lane);""",
        {
            "q": q,
            "k": k,
            "v": v,
            "gqa": Hq // Hk,
            "N": N,
            "head_stride": strides[0],
            "row_stride": strides[1],
            "scale": mx.array(D**-0.5),
        },
        {"out": (q.shape, mx.bfloat16)},
        threadgroups=(Hq, L, 1),
        threads=(1024, 1, 1),
        constants={22: causal},
    )
    agree(out, attention_reference(q, k, v, D**-0.5, causal))


def test_sdpa_vector_in_two_passes() -> None:
    Hq, Hk, N, D, blocks = 4, 2, 100, 64, 32
    q, k, v = attention_inputs(Hq, Hk, 1, N, D)
    partial, sums, maxs = run(
        ["sdpa_vector.h"],
        """sdpa_vector_2pass_1<bfloat16_t, 64>(q, k, v, partial, sums, maxs, N, head_stride, row_stride,
               head_stride, row_stride, scale, nullptr, nullptr, N, N, N, nullptr, threads_per_threadgroup,
               lid, tid, threadgroups_per_grid, lane);""",
        {
            "q": q,
            "k": k,
            "v": v,
            "N": N,
            "head_stride": mx.array(N * D, mx.uint64),
            "row_stride": mx.array(D, mx.uint64),
            "scale": mx.array(D**-0.5),
        },
        {
            "partial": ((Hq, blocks, D), mx.bfloat16),
            "sums": ((Hq, blocks), mx.float32),
            "maxs": ((Hq, blocks), mx.float32),
        },
        threadgroups=(Hk, 1, blocks),
        threads=(32, Hq // Hk, 1),
        constants={26: blocks},
    )
    (out,) = run(
        ["sdpa_vector.h"],
        """uint3 groups = threadgroups_per_grid;
        sdpa_vector_2pass_2<bfloat16_t, 64>(partial, sums, maxs, out, n, tid, groups, sg, lane);""",
        {"partial": partial, "sums": sums, "maxs": maxs, "n": blocks},
        {"out": (q.shape, mx.bfloat16)},
        threadgroups=(Hq, 1, 1),
        threads=(1024, 1, 1),
    )
    agree(out, attention_reference(q, k, v, D**-0.5, False))


def attention_parameters(Hq: int, Hk: int, L: int, N: int, D: int, BQ: int, BK: int) -> str:
    return f"""
    AttnParams params = {{1, {Hq}, {D}, {L}, {N}, {Hq // Hk}, {D**-0.5}f, {-(-L // BQ)}, {-(-N // BK)},
        {L // BQ}, {N // BK}, {L % BQ}, {N % BK}, {N - L},
        {{{Hq * L * D}, {L * D}, {D}}}, {{{Hk * N * D}, {N * D}, {D}}},
        {{{Hk * N * D}, {N * D}, {D}}}, {{{Hq * L * D}, {L * D}, {D}}}}};
    """


@pytest.mark.parametrize(("nax", "causal"), [(False, True), (True, True), (True, False)])
def test_steel_attention(nax: bool, causal: bool) -> None:
    Hq, Hk, L, N, D = 2, 1, 40, 53, 64
    q, k, v = attention_inputs(Hq, Hk, L, N, D)
    name, BQ, BK = ("attention_nax", 64, 32) if nax else ("attention", 32, 32)
    (out,) = run(
        [f"steel/attn/kernels/steel_{name}.h"],
        attention_parameters(Hq, Hk, L, N, D, BQ, BK)
        + f"""{name}<bfloat16_t, {BQ}, {BK}, 64, 64, 4, 1, bool>(
            q, k, v, out, &params, nullptr, nullptr, nullptr, nullptr, lane, sg, tid, lid);""",
        {"q": q, "k": k, "v": v},
        {"out": (q.shape, mx.bfloat16)},
        threadgroups=(-(-L // BQ), Hq, 1),
        threads=(32, 4, 1),
        constants={301: causal},
    )
    agree(out, attention_reference(q, k, v, D**-0.5, causal), 1.5)  # the weights are rounded to bf16 too


# --------------------------------------------------------------------------------------------- steel products


def gemm_parameters(M: int, N: int, K: int, BM: int, BN: int, BK: int, ta: bool, tb: bool) -> str:
    return f"""
    GEMMParams params = {{{M}, {N}, {K}, {M if ta else K}, {K if tb else N}, {N},
        {-(-N // BN)}, {-(-M // BM)}, 0, 0, 0, 0, {K // BK}, 1}};
    """


@pytest.mark.parametrize(
    ("nax", "ta", "tb"), [(False, False, True), (False, True, False), (True, False, True)]
)
def test_steel_gemm(nax: bool, ta: bool, tb: bool) -> None:
    M, N, K = 37, 50, 72  # a remainder in each
    BM, BN, BK = (64, 64, 64) if nax else (32, 32, 16)
    a = normal(K, M, seed=1, dtype=mx.float16) if ta else normal(M, K, seed=1, dtype=mx.float16)
    b = normal(N, K, seed=2, dtype=mx.float16) if tb else normal(K, N, seed=2, dtype=mx.float16)
    headers = ["steel/utils.h", "steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h"]
    if nax:
        headers[1:] = ["steel/gemm/params.h", "steel/gemm/transforms.h", "steel/gemm/gemm_nax.h"]
        headers.append("steel/gemm/kernels/steel_gemm_fused_nax.h")
    (d,) = run(
        headers,
        gemm_parameters(M, N, K, BM, BN, BK, ta, tb)
        + f"""gemm<half, {BM}, {BN}, {BK}, 2, 2, {str(ta).lower()}, {str(tb).lower()}>(
            a, b, nullptr, d, &params, nullptr, nullptr, nullptr, {"" if nax else "lane, "}sg, tid{
            "" if nax else ", lid"
        });""",
        {"a": a, "b": b},
        {"d": ((M, N), mx.float16)},
        threadgroups=(-(-N // BN), -(-M // BM), 1),
        threads=(32, 2, 2),
    )
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    agree(d, (a.T if ta else a) @ (b.T if tb else b))


def test_thin_gemm_on_tensors() -> None:
    M, N, K = 20, 70, 200  # a remainder in each
    a, b = normal(M, K, seed=1, dtype=mx.bfloat16), normal(N, K, seed=2, dtype=mx.bfloat16)
    (d,) = run(
        [
            "steel/utils.h",
            "steel/gemm/params.h",
            "steel/gemm/transforms.h",
            "steel/gemm/nax.h",
            "steel/gemm/kernels/steel_gemm_thin_nax.h",
        ],
        f"""GEMMParams params = {{{M}, {N}, {K}, {K}, {K}, {N}, 2, 2, 0, 0, 0, 0, 2, 1}};
        gemm_thin_nax<bfloat16_t, 1, 2, 1, 2, 2, true>(a, b, nullptr, d, &params, nullptr, sg, tid);""",
        {"a": a, "b": b},
        {"d": ((M, N), mx.bfloat16)},
        threadgroups=(4, 1, 1),
        threads=(128, 1, 1),
    )
    agree(d, a.astype(mx.float32) @ b.astype(mx.float32).T)


# ---------------------------------------------------------------------------------- gated delta, in chunks

# kernel: headers, rows of the value dimension per simdgroup
DELTA = {
    "gated_delta_fused_chunk<bfloat16_t, 64, 32, 1, 2, 8>": ("gated_delta_update.h", 8),
    "gated_delta_seq<bfloat16_t, 64, 32, 1, 2, 64>": ("gated_delta_update.h", 1),
    "gated_delta_fused_nax<bfloat16_t, 64, 32, 1, 2, 16, 64>": ("gated_delta_update_nax.h", 16),
}


@pytest.mark.parametrize("call", DELTA)
def test_gated_delta(call: str) -> None:
    T, Hk, Hv, Dk, Dv = 21, 1, 2, 64, 32  # T leaves a remainder of every chunk
    q, k = (normal(T, Hk, Dk, seed=s, scale=Dk**-0.5, dtype=mx.bfloat16) for s in (1, 2))
    v = normal(T, Hv, Dv, seed=3, dtype=mx.bfloat16)
    g = mx.random.uniform(0.5, 1.0, (T, Hv), key=mx.random.key(4)).astype(mx.bfloat16)
    beta = mx.random.uniform(0.0, 1.0, (T, Hv), key=mx.random.key(5)).astype(mx.bfloat16)
    state = normal(Hv, Dv, Dk, seed=6)
    header, rows = DELTA[call]
    last = {"gated_delta_s": "nullptr, ", "gated_delta_fused_n": "nullptr, mats, deltas, "}
    extra = next((text for start, text in last.items() if call.startswith(start)), "")
    chunks = (T + 15) // 16
    y, new, *_ = run(
        [header],
        f"""uint3 position = thread_position_in_grid;
        {call}(q, k, v, state, g, beta, y, new_state, T, {extra}position, lid, lane);""",
        {"q": q, "k": k, "v": v, "state": state, "g": g, "beta": beta, "T": T},
        {
            "y": (v.shape, mx.bfloat16),
            "new_state": (state.shape, mx.float32),
            "mats": ((Hv, chunks, 3, 256), mx.float32),
            "deltas": ((Hv, chunks, 16, Dv), mx.float32),
        },
        threadgroups=(1, Dv // rows // 2, Hv),
        threads=(32, 2, 1),
        init_value=0,
    )
    q, k = (mx.repeat(x.astype(mx.float32), Hv // Hk, 1) for x in (q, k))
    v, g, beta = (x.astype(mx.float32) for x in (v, g, beta))
    outputs = []
    for t in range(T):
        state = state * g[t, :, None, None]
        delta = (v[t] - (state * k[t, :, None]).sum(-1)) * beta[t, :, None]
        state = state + delta[..., None] * k[t, :, None]
        outputs.append((state * q[t, :, None]).sum(-1))
    agree(y, mx.stack(outputs))
    agree(new, state, 3)  # the chunked forms go through logarithms of the gates


# ------------------------------------------------------------------------------------ rows, scans and sorts


@pytest.mark.parametrize("looped", [False, True])
def test_softmax(looped: bool) -> None:
    rows, n = 3, 1000
    x = normal(rows, n, seed=1, scale=3, dtype=mx.bfloat16)
    call = (
        "softmax_looped<bfloat16_t, float>(x, y, n, tid.x, lid.x, threads_per_threadgroup.x, lane, sg);"
        if looped
        else "softmax_single_row<bfloat16_t, float>(x, y, n, tid.x, lid.x, lane, sg);"
    )
    (y,) = run(
        ["softmax.h"],
        call,
        {"x": x, "n": n},
        {"y": ((rows, n), mx.bfloat16)},
        threadgroups=(rows, 1, 1),
        threads=(1024 if looped else 256, 1, 1),
    )
    agree(y, mx.softmax(x.astype(mx.float32), -1))


def test_logsumexp() -> None:
    rows, n = 3, 1000
    x = normal(rows, n, seed=1, scale=3)
    (y,) = run(
        ["logsumexp.h"],
        "logsumexp<float>(x, y, n, tid.x, lid.x, lane, sg);",
        {"x": x, "n": n},
        {"y": ((rows,), mx.float32)},
        threadgroups=(rows, 1, 1),
        threads=(256, 1, 1),
    )
    agree(y, mx.logsumexp(x, -1))


REDUCE = ["atomic.h", "reduction/ops.h", "reduction/reduce_row.h"]


@pytest.mark.parametrize(
    ("T", "op", "want"),
    [("float", "Sum", mx.sum), ("int32_t", "Max", mx.max), ("complex64_t", "Sum", mx.sum)],
)
def test_row_reduction(T: str, op: str, want: Any) -> None:
    rows, n = 5, 150
    x = normal(rows, n, seed=1)
    if T == "int32_t":
        x = mx.random.randint(-1000, 1000, (rows, n), key=mx.random.key(1)).astype(mx.int32)
    elif T == "complex64_t":
        x = x + 1j * normal(rows, n, seed=2)
    (y,) = run(
        REDUCE,
        f"""row_reduce_simple<{T}, {T}, {op}<{T}>>(x, y, n, rows, tid, threadgroups_per_grid, lid,
            threads_per_threadgroup, lane, simdgroups_per_threadgroup, sg);""",
        {"x": x, "n": mx.array(n, mx.uint64), "rows": mx.array(rows, mx.int64)},
        {"y": ((rows,), x.dtype)},
        threadgroups=(1, 2, 1),  # four rows a threadgroup; the last one moves back inside
        threads=(64, 1, 1),
    )
    if T == "int32_t":
        assert mx.array_equal(y, want(x, -1))
    else:
        agree(y, want(x, -1))


@pytest.mark.parametrize("inclusive", [True, False])
def test_scan(inclusive: bool) -> None:
    rows, n = 2, 300
    x = mx.random.randint(-9, 9, (rows, n), key=mx.random.key(1)).astype(mx.int32)
    (y,) = run(
        ["binary_ops.h", "scan.h"],
        f"""contiguous_scan<int, int, CumSum<int>, 4, {str(inclusive).lower()}, false>(
            x, y, n, tid, threadgroups_per_grid, lid, threads_per_threadgroup, lane, sg);""",
        {"x": x, "n": mx.array(n, mx.uint64)},
        {"y": ((rows, n), mx.int32)},
        threadgroups=(1, rows, 1),
        threads=(64, 1, 1),
    )
    assert mx.array_equal(y, mx.cumsum(x, -1, inclusive=inclusive))


@pytest.mark.parametrize(
    ("operation", "threads", "n"), [("Sum", 32, 100), ("Sum", 128, 1000), ("Prod", 32, 100)]
)
def test_scan_that_computes_with_unwritten_slots(operation: str, threads: int, n: int) -> None:
    """Lanes beyond the simdgroups there are read a slot that nobody wrote, and drop what comes of it."""
    x = mx.random.randint(-1, 2, (1, n), key=mx.random.key(2)).astype(mx.int64)
    (y,) = run(
        ["binary_ops.h", "scan.h"],
        f"""contiguous_scan<int64_t, int64_t, Cum{operation}<int64_t>, 4, true, false>(
            x, y, n, tid, threadgroups_per_grid, lid, threads_per_threadgroup, lane, sg);""",
        {"x": x, "n": mx.array(n, mx.uint64)},
        {"y": ((1, n), mx.int64)},
        threads=(threads, 1, 1),
    )
    assert mx.array_equal(y, mx.cumsum(x, -1) if operation == "Sum" else mx.cumprod(x, -1))


def test_sort() -> None:
    rows, n = 2, 200
    x = normal(rows, n, seed=1)
    (y,) = run(
        ["sort.h"],
        "block_sort<float, uint, true, 64, 4>(x, y, n, one, one, n, n, tid, lid);",
        {"x": x, "n": n, "one": 1},
        {"y": ((rows, n), mx.uint32)},
        threadgroups=(1, rows, 1),
        threads=(64, 1, 1),
    )
    assert mx.array_equal(y, mx.argsort(x, -1))


def test_gemv() -> None:
    M, K = 40, 300
    a, x = normal(M, K, seed=1, dtype=mx.float16), normal(K, seed=2, dtype=mx.float16)
    (y,) = run(
        ["gemv.h"],
        """gemv<half, 8, 1, 1, 32, 4, 4, false, false>(a, x, x, y, K, M, K, one, one, zero, nullptr,
            &none, &none, &none, zero, tid, lid, sg, lane);""",
        {
            "a": a,
            "x": x,
            "K": K,
            "M": M,
            "one": mx.array(1.0),
            "zero": 0,
            "none": mx.array(0, mx.int64),
        },
        {"y": ((M,), mx.float16)},
        threadgroups=(2, 1, 1),
        threads=(32, 1, 8),
    )
    agree(y, a.astype(mx.float32) @ x.astype(mx.float32))


def test_hadamard() -> None:
    n = 64
    x = normal(2, n, seed=1)
    (y,) = run(
        ["hadamard.h"],
        """uint3 place = thread_position_in_grid;
        hadamard_n<float, 64, 8, 2>(x, y, scale, place, threads_per_grid);""",
        {"x": x, "scale": mx.array(0.125)},
        {"y": ((2, n), mx.float32)},
        threadgroups=(1, 2, 1),
        threads=(n // 8, 1, 1),
    )
    agree(y, mx.hadamard_transform(x, scale=0.125))


def test_fft() -> None:
    n, batch = 60, 3  # 3 * 4 * 5
    x = normal(batch, n, seed=1) + 1j * normal(batch, n, seed=2)
    (y,) = run(
        ["fft.h"],
        """uint3 place = thread_position_in_grid;
        uint3 size = threads_per_grid;
        fft<128, float2, float2>((const device float2*)x, (device float2*)y, n, batch, place, size);""",
        {"x": x, "n": n, "batch": batch},
        {"y": ((batch, n), mx.complex64)},
        threadgroups=(batch, 1, 1),
        threads=(1, 1, 15),
        constants={2: 4, 9: 1, 10: 1, 11: 1},  # four elements a thread; one step each of radix 5, 4 and 3
    )
    agree(y, mx.fft.fft(x))


# ----------------------------------------------------------------------------------- elementwise and indexing


EXACT = {
    "Erf": np.vectorize(math.erf),
    "Tanh": np.tanh,
    "Expm1": np.expm1,
    "Log1p": np.log1p,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "ArcSinh": np.arcsinh,
}


@pytest.mark.parametrize(("T", "dtype"), [("float", mx.float32), ("bfloat16_t", mx.bfloat16)])
def test_unary(T: str, dtype: mx.Dtype) -> None:
    x = mx.random.uniform(0.05, 0.95, (100,), key=mx.random.key(1)).astype(dtype)
    calls = [
        f"unary_v<{T}, {T}, {name}>(x, y + {i} * 100, size, thread_position_in_grid.x);"
        for i, name in enumerate(EXACT)
    ]
    (y,) = run(
        ["unary_ops.h", "unary.h"],
        "\n".join(calls),
        {"x": x, "size": mx.array(100, mx.uint32)},
        {"y": ((len(calls), 100), dtype)},
        threadgroups=(2, 1, 1),
    )
    exact = np.array(x.astype(mx.float32)).astype(np.float64)
    for row, (name, function) in zip(y, EXACT.items(), strict=True):
        # MLX's expm1 reduces its argument by one product, which costs it an ulp or two.
        agree(row, mx.array(function(exact).astype(np.float32)), 2 if name == "Expm1" else 1)


def test_complex_unary() -> None:
    names = ["Exp", "Sqrt", "ArcTan", "Log", "Tanh", "Sin"]
    x = normal(64, seed=1) + 1j * normal(64, seed=2)
    calls = [
        f"unary_v<complex64_t, complex64_t, {name}>(x, y + {i} * 64, size, thread_position_in_grid.x);"
        for i, name in enumerate(names)
    ]
    (y,) = run(
        ["unary_ops.h", "unary.h"],
        "\n".join(calls),
        {"x": x, "size": mx.array(64, mx.uint32)},
        {"y": ((len(names), 64), mx.complex64)},
        threadgroups=(2, 1, 1),
    )
    for row, name in zip(y, names, strict=True):
        agree(row, getattr(mx, name.lower())(x), 4)


@pytest.mark.parametrize(("source", "target"), [("half", "bfloat16_t"), ("bfloat16_t", "half")])
def test_copy_between_halves(source: str, target: str) -> None:
    dtypes = {"half": mx.float16, "bfloat16_t": mx.bfloat16}
    x = normal(100, seed=1, dtype=dtypes[source])
    (y,) = run(
        ["copy.h"],
        f"copy_v<{source}, {target}>(x, y, size, thread_position_in_grid.x);",
        {"x": x, "size": mx.array(100, mx.uint32)},
        {"y": ((100,), dtypes[target])},
    )
    assert mx.array_equal(y, x.astype(dtypes[target]))


@pytest.mark.parametrize("T", ["float", "half", "int8_t"])  # native atomics, and packed ones
def test_scatter_with_atomics(T: str) -> None:
    dtype = {"float": mx.float32, "half": mx.float16, "int8_t": mx.int8}[T]
    n, size = 96, 8
    updates = mx.random.randint(-3, 4, (n,), key=mx.random.key(1)).astype(dtype)
    places = mx.random.randint(0, size, (n,), key=mx.random.key(2)).astype(mx.int32)
    (out,) = run(
        ["atomic.h", "reduction/ops.h"],
        f"""uint i = thread_position_in_grid.x;
        Sum<{T}>().atomic_update((device mlx_atomic<{T}>*)out, updates[i], places[i]);""",
        {"updates": updates, "places": places},
        {"out": ((size,), dtype)},
        threadgroups=(3, 1, 1),
        init_value=0,
    )
    assert mx.array_equal(out, mx.zeros(size, dtype).at[places].add(updates))


def test_gather_axis() -> None:
    x, places = normal(4, 6, 5, seed=1), mx.random.randint(-6, 6, (4, 3, 5), key=mx.random.key(2))
    places = places.astype(mx.int32)
    (out,) = run(
        ["indexing/gather_axis.h"],
        """uint3 place = thread_position_in_grid;
        gather_axis<float, int, int, true, true>(x, places, out, nullptr, nullptr, nullptr, ndim, axis,
            axis_size, stride, stride, place, threads_per_grid);""",
        {"x": x, "places": places, "ndim": mx.array(3, mx.uint64), "axis": 1, "axis_size": 6}
        | {"stride": mx.array(5, mx.uint64)},
        {"out": ((4, 3, 5), mx.float32)},
        threadgroups=(1, 1, 4),
        threads=(5, 3, 1),
    )
    assert mx.array_equal(out, mx.take_along_axis(x, places, 1))
