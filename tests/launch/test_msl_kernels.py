"""More of MLX's kernels, from every family of headers; test_msl_mlx.py says how they are called."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.launch.test_msl_mlx import (
    QUANTISED,
    REDUCE,
    agree,
    attention_inputs,
    attention_parameters,
    gather_inputs,
    normal,
    run,
    weights,
)

GEMM = ["steel/utils.h", "steel/gemm/gemm.h"]


def longs(*values: int) -> mx.array:
    return mx.array(values, mx.int64)


def size(n: int) -> mx.array:
    return mx.array(n, mx.uint64)


def long(n: int) -> mx.array:
    return mx.array(n, mx.int64)


def randint(low: int, high: int, shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.randint(low, high, shape, key=mx.random.key(seed)).astype(mx.int32)


# ---------------------------------------------------------------------------------------- elementwise

BINARY = {
    "Add": np.add,
    "Divide": np.divide,
    "Remainder": np.mod,
    "Maximum": np.maximum,
    "LogAddExp": np.logaddexp,
    "ArcTan2": np.arctan2,
    "Power": np.power,
}


@pytest.mark.parametrize(("T", "dtype"), [("float", mx.float32), ("half", mx.float16)])
def test_binary(T: str, dtype: mx.Dtype) -> None:
    """Vectors with vectors, with scalars, and with operands that have strides."""
    a, b = mx.abs(normal(6, 10, seed=1, dtype=dtype)) + 0.25, normal(10, 6, seed=2, dtype=dtype)
    calls = []
    for i, op in enumerate(BINARY):
        out = f"out + {i} * 180"
        calls += [
            f"binary_vv<{T}, {T}, {op}, 1>(a, b, {out}, n, i);",
            f"binary_vs<{T}, {T}, {op}, 1>(a, b, {out} + 60, n, i);",
            f"binary_g_nd2<{T}, {T}, {op}>(a, b, {out} + 120, rows, columns, at, uint2(10, 6));",
        ]
    (out,) = run(
        ["binary_ops.h", "binary.h"],
        "uint i = thread_position_in_grid.x;\nuint2 at = uint2(i % 10, i / 10);\n" + "\n".join(calls),
        {"a": a, "b": b, "n": mx.array(60, mx.uint32), "rows": longs(10, 1), "columns": longs(1, 6)},
        {"out": ((len(BINARY), 180), dtype)},
        threads=(60, 1, 1),
    )
    x, y = (np.array(v.astype(mx.float32)).astype(np.float64) for v in (a, b))
    for got, function in zip(out, BINARY.values(), strict=True):
        operands = (y.ravel(), np.float64(y[0, 0]), y.T.ravel())
        want = np.concatenate([function(x.ravel(), other) for other in operands])
        agree(got, mx.array(want.astype(np.float32)), 2)


def test_select_copy_arange_and_searchsorted() -> None:
    a, b, c = normal(4, 6, seed=1), normal(4, 6, seed=2), normal(6, 4, seed=3)
    values = mx.sort(normal(37, seed=4))
    wanted = mx.concatenate([normal(20, seed=5), values[5:9]])
    select, scalar, transposed, numbers, left, right = run(
        ["ternary_ops.h", "ternary.h", "copy.h", "arange.h", "sort.h", "searchsorted.h"],
        """uint i = thread_position_in_grid.x;
        uint3 at = thread_position_in_grid;
        ternary_g_nd1<float, Select>(pick, a, b, select, one, one, one, i);
        ternary_v<float, Select, false, true, 1>(pick, a, b, scalar, n, i);
        copy_g_nd2<float, half>(c, transposed, flipped, uint2(i % 6, i / 6), uint2(6, 4));
        arange<int>(start, step, numbers, i);
        searchsorted<float, false>(values, wanted, left, count, one, at, threads_per_grid);
        searchsorted<float, true>(values, wanted, right, count, one, at, threads_per_grid);""",
        {"pick": a > 0, "a": a, "b": b, "c": c, "n": mx.array(24, mx.uint32), "one": long(1)}
        | {"start": 5, "step": -3, "values": values, "wanted": wanted, "count": mx.array(37, mx.uint32)}
        | {"flipped": longs(1, 4)},
        {"select": ((4, 6), mx.float32), "scalar": ((4, 6), mx.float32)}
        | {"transposed": ((4, 6), mx.float16), "numbers": ((24,), mx.int32)}
        | {"left": ((24,), mx.uint32), "right": ((24,), mx.uint32)},
        threads=(24, 1, 1),
    )
    assert mx.array_equal(select, mx.where(a > 0, a, b))
    assert mx.array_equal(scalar, mx.where(a > 0, a, b[0, 0]))
    assert mx.array_equal(transposed, c.T.astype(mx.float16))
    assert numbers.tolist() == [5 - 3 * i for i in range(24)]
    for got, side in ((left, "left"), (right, "right")):
        assert got.tolist() == np.searchsorted(np.array(values), np.array(wanted), side).tolist()


# ------------------------------------------------------------------------------------------- indexing


def test_gather_and_scatter() -> None:
    """Rows taken and added by index, one per thread; negative indices count from the end."""
    source, updates = normal(7, 6, seed=1), normal(5, 6, seed=2)
    places = mx.array([3, -1, 0, 3, 5], mx.int32)
    columns = randint(-4, 4, (5, 6), seed=3)
    mask = normal(5, 6, seed=4) > 0
    ranks = (mx.cumsum(mask.flatten().astype(mx.int32)) - 1).astype(mx.uint32)
    taken, front, added, along, masked = run(
        [*REDUCE[:2], "indexing/indexing.h"]
        + [
            f"indexing/{name}.h"
            for name in ("gather", "gather_front", "scatter", "scatter_axis", "masked_scatter")
        ],
        """uint3 at = thread_position_in_grid;
        bool contiguous[] = {true};
        metal::array<const device int*, 1> buffers = {{places}};
        Indices<int, 1> rows = {buffers, row_extent, row_step, contiguous, 1};
        gather_impl<float, int, 1, 1, int>(source, taken, shape, strides, two, slice, zero, rows,
            uint3(at.y, 0, at.x), uint3(5, 1, 6));
        gather_front<float, int, int, 2>(source, places, front, stride, seven,
            uint2(at.x, at.y), uint2(3, 5));
        scatter_impl<float, int, Sum<float>, 1, true, 1, int>(updates, (device mlx_atomic<float>*)added,
            upd_shape, upd_strides, two, six, shape, strides, two, zero, five, rows, uint2(at.x, at.y));
        scatter_axis<float, int, int, Sum<float>, true, true>(updates, columns,
            (device mlx_atomic<float>*)along, nullptr, nullptr, nullptr, one, zero[0], four, one, one,
            uint3(0, at.x, at.y), uint3(1, 6, 5));
        masked_assign_impl<float, true>(mask, ranks, source, masked, nullptr, nullptr, zero[0], all, all,
            at.y * 6 + at.x);""",
        {"source": source, "updates": updates, "places": places, "columns": columns, "mask": mask}
        | {"ranks": ranks, "shape": mx.array([7, 6]), "strides": longs(6, 1), "slice": mx.array([1, 6])}
        | {"row_extent": mx.array([5]), "row_step": longs(1), "upd_shape": mx.array([5, 1, 6])}
        | {"upd_strides": longs(6, 6, 1), "zero": mx.array([0]), "stride": long(6), "all": long(30)}
        | {"seven": 7, "four": 4, "one": size(1), "two": size(2), "five": size(5), "six": size(6)},
        {"taken": ((5, 6), mx.float32), "front": ((5, 6), mx.float32), "added": ((7, 6), mx.float32)}
        | {"along": ((5, 4), mx.float32), "masked": ((5, 6), mx.float32)},
        threads=(6, 5, 1),
        init_value=0,
    )
    assert mx.array_equal(taken, source[places])
    assert mx.array_equal(front, source[places])
    agree(added, mx.zeros((7, 6)).at[places % 7].add(updates))
    rows = mx.broadcast_to(mx.arange(5)[:, None], (5, 6))
    agree(along, mx.zeros((5, 4)).at[rows, columns % 4].add(updates))
    flat = source.flatten()[ranks.astype(mx.int32) % 42].reshape(5, 6)
    assert mx.array_equal(masked, mx.where(mask, flat, 0))


# ------------------------------------------------------------------------------- reductions, scans, sorts


def test_reductions_of_all_and_of_rows() -> None:
    """x [3, 5, 70]: over everything, and over the first and last axis."""
    x = normal(3, 5, 70, seed=1)
    whole, largest, total = run(
        [*REDUCE, "reduction/reduce_all.h"],
        """uint n = simdgroups_per_threadgroup;
        uint3 groups = threadgroups_per_grid, extent = threads_per_threadgroup;
        all_reduce<float, float, Sum<float>>(x, whole, all, rows, tid, lid, extent, n, lane, sg);
        row_reduce_looped<float, float, Max<float>, int, 1>(x, largest, seventy, three, row_extent, row_step,
            one, reduce_shape, reduce_strides, one, tid, groups, lid, extent, lane, n, sg);
        row_reduce_small<float, float, Sum<float>, int, 1>(x, total, seventy, three, row_extent, row_step,
            one, reduce_shape, reduce_strides, one, lane, tid, groups,
            uint3(0, tid.y, 0), uint3(1, 5, 1));""",
        {"x": x, "all": size(1050), "rows": size(210), "seventy": long(70), "three": long(3), "one": 1}
        | {"row_extent": mx.array([5]), "row_step": longs(70)}
        | {"reduce_shape": mx.array([3]), "reduce_strides": longs(350)},
        dict.fromkeys(("whole", "largest", "total"), ((5,), mx.float32)),
        threadgroups=(1, 5, 1),
        threads=(64, 1, 1),
    )
    agree(whole, x.reshape(5, 210).sum(axis=1), 4)
    assert mx.array_equal(largest, x.max(axis=(0, 2)))
    agree(total, x.sum(axis=(0, 2)), 4)


def test_reductions_of_columns() -> None:
    """x [90, 37] over its rows: one thread a column, one threadgroup a column, tiles of the matrix."""
    x = normal(90, 37, seed=1)
    shared = """uint3 groups = threadgroups_per_grid, extent = threads_per_threadgroup;
        """
    inputs = {"x": x, "rows": size(90), "width": long(37), "wide": size(37), "one": 1, "once": size(1)}
    inputs |= {
        "shape": mx.array([1]),
        "strides": longs(0),
        "row_shape": mx.array([90]),
        "row_strides": longs(37),
    }
    inputs["start"] = long(0)
    (small,) = run(
        [*REDUCE, "reduction/reduce_col.h"],
        shared
        + """col_reduce_small<float, float, Sum<float>, int, 1>(x, small, rows, width, shape, strides, one,
            row_shape, row_strides, one, once, tid, groups, lid, extent);""",
        inputs,
        {"small": ((37,), mx.float32)},
        threads=(10, 8, 1),
    )
    (looped,) = run(
        [*REDUCE, "reduction/reduce_col.h"],
        shared
        + """col_reduce_looped<float, float, Sum<float>, int, 1, 8, 128>(x, looped, rows, width, shape,
            strides, one, row_shape, row_strides, one, once, start, tid, groups, lane, sg);""",
        inputs,
        {"looped": ((37,), mx.float32)},
        threads=(256, 1, 1),
    )
    agree(small, x.sum(axis=0), 4)
    agree(looped, x.sum(axis=0), 4)


def test_strided_scan() -> None:
    x = randint(-9, 9, (2, 70, 40), seed=1)
    (y,) = run(
        ["binary_ops.h", "scan.h"],
        """uint3 groups = threadgroups_per_grid;
        strided_scan<int, int, CumSum<int>, 4, true, true>(x, y, n, stride, blocks, tid, groups, lid,
            lane, sg);""",
        {"x": x, "n": size(70), "stride": size(40), "blocks": size(2)},
        {"y": (x.shape, mx.int32)},
        threadgroups=(1, 4, 1),
        threads=(256, 1, 1),
    )
    assert mx.array_equal(y, mx.cumsum(x, 1, reverse=True))


def test_sort_in_several_blocks() -> None:
    """300 elements: blocks of 128 are sorted, then merged two by two."""
    n, blocks = 300, 3
    x = normal(n, seed=1)
    kernel = "<float, uint, true, 32, 4>"
    values, indices = run(
        ["sort.h"],
        f"mb_block_sort{kernel}(x, values, indices, n, one, zero, nullptr, nullptr, tid, lid);",
        {"x": x, "n": n, "one": 1, "zero": 0},
        {"values": ((n,), mx.float32), "indices": ((n,), mx.uint32)},
        threadgroups=(blocks, 1, 1),
    )
    for tiles in (2, 4):
        (parts,) = run(
            ["sort.h"],
            f"""uint3 extent = threads_per_threadgroup;
            mb_block_partition{kernel}(parts, values, indices, n, tiles, blocks, tid, lid, extent);""",
            {"values": values, "indices": indices, "n": n, "tiles": tiles, "blocks": blocks},
            {"parts": ((blocks + 1,), mx.uint32)},
        )
        values, indices = run(
            ["sort.h"],
            f"mb_block_merge{kernel}(parts, values, indices, sorted, order, n, tiles, blocks, tid, lid);",
            {"parts": parts, "values": values, "indices": indices, "n": n, "tiles": tiles, "blocks": blocks},
            {"sorted": ((n,), mx.float32), "order": ((n,), mx.uint32)},
            threadgroups=(blocks, 1, 1),
        )
    assert mx.array_equal(indices, mx.argsort(x))
    assert mx.array_equal(values, mx.sort(x))


def test_cross_entropy_and_its_derivative() -> None:
    rows, n = 3, 1000
    x, targets, cotangent = normal(rows, n, seed=1, scale=3), mx.array([4, -1, 999]), normal(rows, seed=2)
    inputs = {"x": x, "targets": targets, "n": n}
    (loss,) = run(
        ["cross_entropy.h"],
        """cross_entropy<float, float>(x, targets, loss, n, tid.x, lid.x, threads_per_threadgroup.x, lane,
            sg);""",
        inputs,
        {"loss": ((rows,), mx.float32)},
        threadgroups=(rows, 1, 1),
        threads=(256, 1, 1),
    )
    (gradient,) = run(
        ["cross_entropy.h"],
        """cross_entropy_vjp<float, float>(x, targets, loss, cotangent, gradient, n, tid.x, lid.x,
            threads_per_threadgroup.x);""",
        {**inputs, "loss": loss, "cotangent": cotangent},
        {"gradient": ((rows, n), mx.float32)},
        threadgroups=(rows, 1, 1),
        threads=(256, 1, 1),
    )

    def reference(x: mx.array) -> mx.array:
        return mx.logsumexp(x, -1) - mx.take_along_axis(x, (targets % n)[:, None], 1)[:, 0]

    agree(loss, reference(x))
    agree(gradient, mx.vjp(reference, [x], [cotangent])[1][0], 3)


# ------------------------------------------------------------------------------------------- products


def test_transposed_gemv() -> None:
    K, N = 300, 64
    a, x = normal(K, N, seed=1, dtype=mx.float16), normal(K, seed=2, dtype=mx.float16)
    (y,) = run(
        ["gemv.h"],
        """gemv_t<half, 1, 2, 8, 4, 4, 4, false, false>(a, x, x, y, K, N, N, one, one, zero, nullptr,
            &none, &none, &none, zero, tid, lid, sg, lane);""",
        {"a": a, "x": x, "K": K, "N": N, "one": mx.array(1.0), "zero": 0, "none": long(0)},
        {"y": ((N,), mx.float16)},
        threadgroups=(-(-N // 32), 1, 1),
        threads=(32, 2, 1),
    )
    agree(y, x.astype(mx.float32) @ a.astype(mx.float32))


def test_masked_gemv() -> None:
    """Blocks of 64 x 64 of the matrix, of the vector and of the result are left out."""
    M, K = 128, 192
    a, x = normal(M, K, seed=1), normal(K, seed=2)
    out_mask, a_mask, x_mask = (
        mx.array([True, True]),
        mx.array([[1, 0, 1], [0, 1, 1]]) > 0,
        mx.array([1, 1, 0]) > 0,
    )
    (y,) = run(
        ["gemv_masked.h"],
        """gemv_masked<float, bool, bool, 1, 1, 1, 32, 1, 2, false>(a, x, y, K, M, K, one, &one, &none,
            &none, out_mask, a_mask, x_mask, strides, batches, tid, lid, sg, lane);""",
        {"a": a, "x": x, "K": K, "M": M, "one": 1, "none": long(0), "out_mask": out_mask, "a_mask": a_mask}
        | {"x_mask": x_mask, "strides": mx.array([1, 1, 1, 3, 1, 1]), "batches": longs(0, 0, 0)},
        {"y": ((M,), mx.float32)},
        threadgroups=(M, 1, 1),
    )
    full = mx.repeat(mx.repeat(a_mask, 64, 0), 64, 1)
    agree(y, mx.where(full, a, 0) @ mx.where(mx.repeat(x_mask, 64), x, 0), 4)


def test_qmv_by_quads() -> None:
    N, K = 64, 128
    w, scales, biases, values = weights(N, K, bits=4, dtype=mx.float16)
    x = normal(2, K, seed=2, dtype=mx.float16)
    (y,) = run(
        QUANTISED,
        """qmv_quad_impl<half, 64, 4, 128>(w, scales, biases, x, y, K, N, tid, quadgroup_index_in_threadgroup,
            thread_index_in_quadgroup);""",
        {"w": w, "scales": scales, "biases": biases, "x": x, "K": K, "N": N},
        {"y": ((2, N), mx.float16)},
        threadgroups=(2, 1, 1),
    )
    agree(y, x.astype(mx.float32) @ values.T)


def test_qvm_over_parts_of_the_sum() -> None:
    N, K, parts = 64, 256, 4
    w, scales, biases, values = weights(K, N, bits=4, dtype=mx.float16)
    x = normal(1, K, seed=2, dtype=mx.float16)
    part = K // parts
    (y,) = run(
        QUANTISED,
        """affine_qvm_split_k<half, 64, 4, 4>(w, scales, biases, x, y, part, N, one, x_extent, x_step,
            one, w_extent, w_step, s_step, s_step, part, tid, sg, lane);""",
        {"w": w, "scales": scales, "biases": biases, "x": x, "part": part, "N": N, "one": 1}
        | {"x_extent": mx.array([parts, 1, part]), "x_step": longs(part, K, 1)}
        | {"w_extent": mx.array([parts, part, N]), "w_step": longs(part * N // 8, N // 8, 1)}
        | {"s_step": longs(part * N // 64, N // 64, 1)},
        {"y": ((parts, N), mx.float16)},
        threadgroups=(1, 1, parts),
        threads=(32, 2, 1),
    )
    rows = x.astype(mx.float32).reshape(parts, 1, part) @ values.reshape(parts, part, N)
    agree(y, rows[:, 0])


@pytest.mark.parametrize("bits", [4, 6])
def test_quantise_and_back(bits: int) -> None:
    x = normal(4, 128, seed=1)
    w, scales, biases = mx.quantize(x, group_size=64, bits=bits)
    packed, new_scales, new_biases = run(
        QUANTISED,
        f"""uint2 at = uint2(thread_position_in_grid.x, 0);
        affine_quantize<float, 64, {bits}>(x, packed, scales, biases, at, uint2(256, 1));""",
        {"x": x},
        {"packed": ((4 * 16 * bits,), mx.uint8), "scales": (scales.shape, mx.float32)}
        | {"biases": (biases.shape, mx.float32)},
        threads=(256, 1, 1),
    )
    agree(new_scales, scales)
    agree(new_biases, biases)
    count = 512 * bits // 8 // (3 if bits == 6 else 1)  # packs: bytes, or three of them
    (back,) = run(
        QUANTISED,
        f"""uint2 at = uint2(thread_position_in_grid.x, 0);
        affine_dequantize<float, 64, {bits}>(w, scales, biases, back, at, uint2({count}, 1));""",
        {"w": packed, "scales": new_scales, "biases": new_biases},
        {"back": ((4, 128), mx.float32)},
        threads=(count, 1, 1),
    )
    agree(back, mx.dequantize(w, scales, biases, group_size=64, bits=bits))


def test_gather_qmm() -> None:
    E, N, K, M = 3, 32, 64, 5
    w, scales, biases, values = weights(E, N, K, bits=4, dtype=mx.bfloat16)
    x = normal(2, M, K, seed=2, dtype=mx.bfloat16)
    left, right = mx.array([1, 0], mx.uint32), mx.array([2, 0], mx.uint32)
    (y,) = run(
        QUANTISED,
        """affine_gather_qmm_t<bfloat16_t, 64, 4, true>(w, scales, biases, x, left, right, y, K, N, M,
            one, x_extent, x_step, one, w_extent, w_step, s_step, s_step, one, two, ones, ones, tid,
            thread_id, sg, lane);""",
        {
            "w": w,
            "scales": scales,
            "biases": biases,
            "x": x,
            "left": left,
            "right": right,
            "K": K,
            "N": N,
            "M": M,
        }
        | {"one": 1, "two": mx.array([2]), "ones": longs(1), "x_extent": mx.array([2, M, K])}
        | {"x_step": longs(M * K, K, 1), "w_extent": mx.array([E, N, K // 8])}
        | {"w_step": longs(N * K // 8, K // 8, 1), "s_step": longs(N, 1, 1)},
        {"y": ((2, M, N), mx.bfloat16)},
        threadgroups=(1, 1, 2),
        threads=(32, 2, 2),
    )
    agree(y, x.astype(mx.float32)[left.astype(mx.int32)] @ values[right.astype(mx.int32)].swapaxes(-1, -2))


def test_gather_mm() -> None:
    """Rows sorted by expert, unquantised."""
    inputs, _ = gather_inputs(4, 64, 128)
    x, experts = inputs["x"], normal(4, 64, 128, seed=3, dtype=mx.bfloat16)
    counts = [5, 0, 20, 8]
    M, N, K = 33, 64, 128
    (y,) = run(
        [*GEMM, "steel/gemm/kernels/steel_gemm_gather.h"],
        f"GEMMParams params = {{{M}, {N}, {K}, {K}, {K}, {N}, 1, 3, 0, {N * K}, 0, 0, {K // 16}, 1}};\n"
        "gather_mm_rhs<bfloat16_t, 16, 64, 16, 1, 2, false, true>(x, w, offsets, y, &params, groups, "
        "lane, sg, tid);",
        {"x": x, "w": experts, "offsets": inputs["offsets"], "groups": 4},
        {"y": ((M, N), mx.bfloat16)},
        threadgroups=(1, M // 16 + 4, 1),
        threads=(32, 2, 1),
        constants={200: False, 201: True, 202: True},
    )
    of_row = mx.array([e for e, count in enumerate(counts) for _ in range(count)])
    agree(y, (x.astype(mx.float32)[:, None] @ experts.astype(mx.float32)[of_row].swapaxes(-1, -2))[:, 0])


def test_split_gemm() -> None:
    M, N, K, parts = 40, 33, 128, 2
    a, b = normal(M, K, seed=1, dtype=mx.float16), normal(N, K, seed=2, dtype=mx.float16)
    (c,) = run(
        [*GEMM, "steel/gemm/kernels/steel_gemm_splitk.h"],
        f"""GEMMSpiltKParams params = {{{M}, {N}, {K}, {K}, {K}, {N}, 2, 2, {parts}, {M * N}, {K // parts}, 0,
            {K // parts // 16}}};
        gemm_splitk<half, float, 32, 32, 16, 2, 2, false, true, false, true>(a, b, c, &params,
            lane, sg, tid, lid);""",
        {"a": a, "b": b},
        {"c": ((parts, M, N), mx.float32)},
        threadgroups=(2, 2, parts),
        threads=(32, 2, 2),
    )
    a, b = (x.astype(mx.float32).reshape(-1, parts, K // parts).swapaxes(0, 1) for x in (a, b))
    agree(c, a @ b.swapaxes(-1, -2), 4)


def test_convolution() -> None:
    """x [1, 9, 8, 32] with 32 filters of 3 x 3, as one matrix product."""
    H, W, C, O = 9, 8, 32, 32
    x, w = normal(1, H, W, C, seed=1), normal(O, 3, 3, C, seed=2)
    (y,) = run(
        [*GEMM, "steel/conv/conv.h", "steel/conv/params.h", "steel/conv/kernels/steel_conv.h"],
        f"""MLXConvParams<2> conv = {{1, {C}, {O}, {{{H}, {W}}}, {{3, 3}}, {{{H}, {W}}}, {{1, 1}}, {{1, 1}},
            {{1, 1}}, {{1, 1}}, {{{H * W * C}, {W * C}, {C}, 1}}, {{{9 * C}, {3 * C}, {C}, 1}},
            {{{H * W * O}, {W * O}, {O}, 1}}, 1, false}};
        ImplicitGemmConv2DParams gemm = {{{H * W}, {O}, {9 * C}, {9 * C // 16}, {C}, {W * C - 2 * C},
            {16 - 2 * W * C - 2 * C}, 1, {-(-H * W // 32)}, 0}};
        implicit_gemm_conv_2d<float, 32, 32, 16, 2, 2, 0, true>(x, w, y, &conv, &gemm, tid, lid, sg,
            lane);""",
        {"x": x, "w": w},
        {"y": ((1, H, W, O), mx.float32)},
        threadgroups=(1, -(-H * W // 32), 1),
        threads=(32, 2, 2),
    )
    agree(y, mx.conv2d(x, w, padding=1), 4)


# ------------------------------------------------------------------------------------------ attention


def masked_reference(q: mx.array, k: mx.array, v: mx.array, mask: mx.array, sinks: Any = None) -> mx.array:
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    k, v = (mx.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.shape[-1] ** -0.5 * q @ k.swapaxes(-1, -2)
    bias = mx.where(mask, 0, -mx.inf) if mask.dtype == mx.bool_ else mask.astype(mx.float32)
    scores = scores + bias
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[None, :, None, None], (*scores.shape[:3], 1))
        return mx.softmax(mx.concatenate([scores, column], -1), -1)[..., :-1] @ v
    return mx.softmax(scores, -1) @ v


@pytest.mark.parametrize(
    ("D", "kind", "sinks"),
    [(96, "bool", False), (128, "float", True), (256, "bool", True)],
)
def test_sdpa_vector_with_masks_and_sinks(D: int, kind: str, sinks: bool) -> None:
    Hq, Hk, L, N = 4, 2, 2, 45
    q, k, v = attention_inputs(Hq, Hk, L, N, D)
    mask = normal(Hq, L, N, seed=4, dtype=mx.bfloat16)
    mask = mask > -0.5 if kind == "bool" else mask
    bool_mask, float_mask = ("mask", "nullptr") if kind == "bool" else ("nullptr", "mask")
    sink = normal(Hq, seed=5, dtype=mx.bfloat16)
    (out,) = run(
        ["sdpa_vector.h"],
        f"""sdpa_vector<bfloat16_t, {D}>(q, k, v, out, gqa, N, heads, row, heads, row, scale, {bool_mask},
            {float_mask}, one, N, mask_head, sinks, query_heads, tid, threadgroups_per_grid, sg, lane);""",
        {"q": q, "k": k, "v": v, "gqa": Hq // Hk, "N": N, "heads": size(N * D), "row": size(D)}
        | {"scale": mx.array(D**-0.5), "mask": mask, "one": 1, "mask_head": L * N, "sinks": sink}
        | {"query_heads": Hq},
        {"out": (q.shape, mx.bfloat16)},
        threadgroups=(Hq, L, 1),
        threads=(1024, 1, 1),
        constants={20: True, 23: kind == "bool", 24: kind == "float", 25: sinks},
    )
    agree(out, masked_reference(q, k, v, mask[None], sink if sinks else None), 1.5)


@pytest.mark.parametrize(("D", "kind"), [(128, "bool"), (80, "float")])
def test_steel_attention_with_masks(D: int, kind: str) -> None:
    Hq, Hk, L, N = 2, 1, 40, 53
    q, k, v = attention_inputs(Hq, Hk, L, N, D)
    BQ, BK = 32, 16
    mask = normal(Hq, L, N, seed=4, dtype=mx.bfloat16)
    mask = mask > -0.5 if kind == "bool" else mask
    (out,) = run(
        ["steel/attn/kernels/steel_attention.h"],
        attention_parameters(Hq, Hk, L, N, D, BQ, BK)
        + f"""AttnMaskParams places = {{{{0, {L * N}, {N}}}}};
        attention<bfloat16_t, {BQ}, {BK}, {D}, {D}, 4, 1, {"bool" if kind == "bool" else "bfloat16_t"}>(
            q, k, v, out, &params, &places, mask, nullptr, nullptr, lane, sg, tid, lid);""",
        {"q": q, "k": k, "v": v, "mask": mask},
        {"out": (q.shape, mx.bfloat16)},
        threadgroups=(-(-L // BQ), Hq, 1),
        threads=(32, 4, 1),
        constants={300: True},
    )
    agree(out, masked_reference(q, k, v, mask[None]), 1.5)
