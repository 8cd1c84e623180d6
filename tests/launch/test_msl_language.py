"""The Metal language on the CPU: types, functions, simdgroups and matrices against NumPy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.launch import host

LANES = np.arange(32)
TENSORS = "#include <metal_tensor>\n#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"


def run(
    body: str,
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
    inputs: dict[str, mx.array] | None = None,
    threads: int = 32,
    header: str = "",
    **options: Any,
) -> list[np.ndarray]:
    kernel = host.metal_kernel(
        "language",
        list(inputs or {}),
        list(outputs),
        "uint lane = thread_index_in_simdgroup;\n" + body,
        header,
    )
    arrays = kernel(
        inputs=list((inputs or {}).values()),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        **options,
    )
    return [np.array(a.astype(mx.float32) if a.dtype == mx.bfloat16 else a) for a in arrays]


def values(*expressions: str, header: str = "", dtype: mx.Dtype = mx.float32) -> np.ndarray:
    """What scalar Metal expressions are."""
    body = "".join(f"out[{i}] = {expression};\n" for i, expression in enumerate(expressions))
    (out,) = run(body, {"out": ((len(expressions),), dtype)}, threads=1, header=header)
    return out


# ---------------------------------------------------------------------------------------------- types


def test_elements_missing_in_braces_are_zero() -> None:
    """As MLX's random numbers have it: a uint4 of three keys."""
    body = "uint4 k = {lane, 2, lane ^ 7};\nfloat4 v = {float2(3, 4), 5};\n"
    body += "k_out[lane] = k.x + 10 * k.y + 100 * k.z + 1000 * k.w;\n"
    body += "v_out[lane] = v.x + v.y + v.z + 100 * v.w;"
    k, v = run(body, {"k_out": ((32,), mx.uint32), "v_out": ((32,), mx.float32)})
    assert np.array_equal(k, LANES + 20 + 100 * (LANES ^ 7))
    assert np.array_equal(v, np.full(32, 12))


def test_halves_round_after_every_operation() -> None:
    x, y, z = (np.random.default_rng(i).normal(size=64).astype(np.float32) for i in range(3))
    arrays = {n: mx.array(v) for n, v in zip("xyz", (x, y, z), strict=True)}
    h, b = run(
        """for (int i = lane; i < 64; i += 32) {
            half a = half(x[i]) * half(y[i]) + half(z[i]);
            h[i] = a;
            b[i] = bfloat(x[i]) * bfloat(y[i]) + bfloat(z[i]);
        }""",
        {"h": ((64,), mx.float16), "b": ((64,), mx.bfloat16)},
        arrays,
    )
    xh, yh, zh = (v.astype(np.float16) for v in (x, y, z))
    assert np.array_equal(h, xh * yh + zh)
    xb, yb, zb = (mx.array(v).astype(mx.bfloat16) for v in (x, y, z))
    assert np.array_equal(b, np.array((xb * yb + zb).astype(mx.float32)))


def test_conversions_and_literals() -> None:
    got = values(
        "float(bfloat(half(1.5)))",
        "float(half(bfloat(3.0f)))",
        "static_cast<float>(static_cast<half>(static_cast<bfloat>(0.25f)))",
        "1.0h / 3",
        "0.1",
        "sizeof(0.1)",
        "sizeof(1.0h)",
        "is_same_v<decltype(half(1) * 2), half> && is_same_v<decltype(half(1) * 2.0), float>",
        "as_type<float>(0x40490fdbu)",
        "as_type<ushort>(bfloat(1.0f))",
        "HALF_MAX",
        "int(INT_MAX == numeric_limits<int>::max())",
        "numeric_limits<bfloat>::max()",
    )
    third = np.float16(1) / np.float16(3)
    want = [1.5, 3, 0.25, third, np.float32(0.1), 4, 2, 1, np.float32(np.pi), 0x3F80, 65504, 1]
    assert got[:-1].tolist() == [float(x) for x in want]
    assert got[-1] == np.float32(3.3895314e38)


def test_vectors() -> None:
    header = """
    struct Pair { float xy; };  // a member named like a swizzle
    template <typename T> T twice(T x) { return x + x; }
    """
    got = values(
        "float4(1, float2(2, 3), 4).z",
        "float3(7).y",
        "float4(int4(1, -2, 3, 4)).y",
        "dot(float4(1, 2, 3, 4).wzyx, float4(1, 10, 100, 1000))",
        "({ float4 v(0); v.yx = float2(5, 6); v.x; })",
        "({ float4 v(1); v.zw += 2; v.z; })",
        "({ int3 v = {1, 2, 3}; thread int& r = v[1]; r = 9; v.y; })",
        "select(float2(1, 2), float2(3, 4), bool2(false, true)).y",
        "all(float3(1, 2, 3) < float3(2, 3, 4)) && !any(float2(1) > 2)",
        "sizeof(float3) + sizeof(packed_float3) * 100 + sizeof(bool4) * 10000",
        "twice(half3(1, 2, 3)).z",
        "max(int2(1, 5), 3).x + clamp(float2(-1, 9), 0.0f, 1.0f).y",
        "length(float2(3, 4)) + cross(float3(1, 0, 0), float3(0, 1, 0)).z",
        "(uint2(7, 9) >> 1).y % 3 + (short2(-3, 4) & short(6)).y",
        "float2x2(1, 2, 3, 4)[1].x + (float2x2(2) * float2(3, 4)).y + determinant(float3x3(2))",
        "float3(packed_float3(1, 2, 3) * 2.0f).z",
        "Pair{2.5f}.xy",
        "vec<ushort, 4>(half4(1.5h)).x",
        header=header,
    )
    want = [3, 7, -2, 1234, 6, 3, 9, 4, 1, 16 + 1200 + 40000, 6, 4, 6, 5, 3 + 8 + 8, 6, 2.5, 1]
    assert got.tolist() == want


def test_names_that_the_language_does_not_reserve() -> None:
    got = values(
        "f(2)",
        header="""
        constant constexpr float table[3] = {1.0, 2.0, 4.0};
        constant int offset = 3;
        template <typename T, int N> struct Box {
          T items[N];
          static constexpr constant int size = N;
          METAL_FUNC T first() const thread { return items[0]; }
          METAL_FUNC T first() const device { return items[0]; }
        };
        inline float f(int i) {
          Box<float, 2> box = {{0.5, 1.5}};
          return table[i] + offset + box.first() + Box<float, 2>::size;
        }
        """,
    )
    assert got[0] == 4 + 3 + 0.5 + 2


# ------------------------------------------------------------------------------------------ functions


def test_math() -> None:
    got = values(
        "rint(2.5f)",
        "round(2.5f)",
        "fract(-0.25f)",
        "sign(-3.0f) + saturate(7.0f)",
        "mix(1.0f, 3.0f, 0.25f)",
        "fma(2.0f, 3.0f, 4.0f)",
        "exp10(2.0f)",
        "sinpi(1.0f) + cospi(1.0f)",
        "precise::rsqrt(4.0f)",
        "fast::exp2(3.0f)",
        "fmin3(3.0f, 1.0f, 2.0f) + median3(3.0f, 1.0f, 2.0f) * 10",
        "max(1.0f, NAN)",
        "({ float c; float s = sincos(0.0f, c); s + c; })",
        "({ int e; float m = frexp(10.0f, e); m * 100 + e; })",
        "ldexp(1.5f, 3) + copysign(1.0f, -2.0f)",
        "float(exp(1.0h))",
        "step(1.0f, 2.0f) + smoothstep(0.0f, 1.0f, 0.5f)",
        "isnan(NAN) && isinf(INFINITY) && !isfinite(-INFINITY) && signbit(-0.0f)",
        "pow(2, 0.5f)",
        "abs(-3) + abs(-2.5f)",
        "float(nextafter(1.0h, 2.0h) - 1.0h)",
    )
    e = float(np.exp(np.float16(1)))
    want = [2, 3, 0.75, 0, 1.5, 10, 100, -1, 0.5, 8, 21, 1, 1, 66.5, 11, e, 1.5, 1, 2**0.5, 5.5, 2**-10]
    assert got == pytest.approx(np.array(want, np.float32), rel=1e-6)


def test_integers() -> None:
    got = values(
        "popcount(0xf0f0u)",
        "clz(ushort(1))",
        "ctz(8)",
        "clz(0)",
        "mulhi(0x80000000u, 6u)",
        "extract_bits(0xabcdu, 4, 8)",
        "extract_bits(0xf0, 4, 4)",
        "insert_bits(0u, 0xffu, 4, 8)",
        "reverse_bits(uchar(1))",
        "rotate(0x80000001u, 1u)",
        "addsat(uchar(200), uchar(100))",
        "subsat(char(-100), char(100))",
        "absdiff(-5, 7)",
        "hadd(INT_MAX, INT_MAX - 2)",
        "madsat(1000, 1000000, 2000000000)",
        dtype=mx.int64,
    )
    want = [8, 15, 3, 32, 3, 0xBC, -1, 0xFF0, 128, 3, 255, -128, 12, 2**31 - 2, 2**31 - 1]
    assert got.tolist() == want


def test_packing() -> None:
    got = values(
        "pack_float_to_unorm10a2(float4(1, 0, 0.5f, 1))",
        "pack_float_to_unorm565(float3(1, 0.5f, 0))",
        "pack_half_to_snorm2x16(half2(-0.5h, 1))",
        "pack_float_to_srgb_unorm4x8(float4(0.2158605f, 1, 0, 0.5f))",
        "int(unpack_unorm10a2_to_float(0xC0000400u).y * 1023 + unpack_unorm10a2_to_half(0xC0000000u).w)",
        "int(unpack_unorm565_to_float(0xF801).x * 10 + unpack_unorm565_to_half(0x001F).z)",
        "int(rint(unpack_unorm4x8_srgb_to_float(128u).x * 1000) + unpack_snorm4x8_to_half(0x7F00u).y)",
        dtype=mx.int64,
    )
    half = 512 << 20  # 511.5, to even
    assert got[:2].tolist() == [1023 + half + (3 << 30), (31 << 11) + (32 << 5)]
    assert got[2:].tolist() == [(32767 << 16) + (65536 - 16384), 128 + (255 << 8) + (128 << 24), 2, 11, 217]


def test_matrices_and_constants() -> None:
    got = values(
        "({ float2x2 m(1, 2, 3, 4); m *= float2x2(float2(0, 1), float2(1, 0)); m[0].y; })",
        "({ float2x2 m{{1, 2}, {3, 4}}; m *= 2; m += m; m[1].x; })",
        "({ threadgroup half3x3 t; t = half3x3(2); t *= 3; t[1][1] *= 2; t[1].y; })",
        "({ const device float* p = NULL; p == NULL; })",
        "M_PI_BF",
        "isinf(HUGE_VALBF) && float(MAXBFLOAT) > HALF_MAX",
        "numeric_limits<float>::max_exponent + numeric_limits<half>::min_exponent10 * 1000",
    )
    assert got.tolist() == [4, 12, 12, 1, 3.140625, 1, 128 - 4000]


# ------------------------------------------------------------------------------------- simdgroups, quads


def reduced(x: np.ndarray, op: np.ufunc, width: int) -> np.ndarray:
    """The ascending xor butterfly, in the type of x."""
    step = 1
    while step < width:
        x = op(x, x[LANES ^ step])
        step *= 2
    return x


@pytest.mark.parametrize(("group", "width"), [("simd", 32), ("quad", 4)])
def test_reductions(group: str, width: int) -> None:
    x = np.random.default_rng(0).normal(size=32).astype(np.float32)
    names = ["sum", "product", "min", "max", "prefix_inclusive_sum", "prefix_exclusive_sum"]
    names.append("prefix_exclusive_product")
    body = "".join(f"out[{i} * 32 + lane] = {group}_{name}(x[lane]);\n" for i, name in enumerate(names))
    (got,) = run(body, {"out": ((len(names), 32), mx.float32)}, {"x": mx.array(x)})
    blocks = x.reshape(-1, width)
    before = np.concatenate([np.zeros_like(blocks[:, :1]), blocks[:, :-1]], 1)
    factors = np.concatenate([np.ones_like(blocks[:, :1]), blocks[:, :-1]], 1)
    ufuncs = (np.add, np.multiply, np.minimum, np.maximum)
    assert np.array_equal(got[:4], [reduced(x, op, width) for op in ufuncs])
    scans = [np.cumsum(blocks, 1), np.cumsum(before, 1), np.cumprod(factors, 1)]
    assert np.array_equal(got[4:], [scan.reshape(-1) for scan in scans])


@pytest.mark.parametrize(("group", "width"), [("simd", 32), ("quad", 4)])
def test_shuffles(group: str, width: int) -> None:
    calls = [
        "shuffle(lane, ushort((lane * 3 + 1) % {w}))",
        "shuffle_xor(lane, 3)",
        "shuffle_up(lane, 1)",
        "shuffle_down(lane, 3)",
        "shuffle_rotate_up(lane, 3)",
        "shuffle_rotate_down(lane, 3)",
        "shuffle_and_fill_up(lane, lane + 100, 3)",
        "shuffle_and_fill_down(lane, lane + 100, 3)",
        "shuffle_and_fill_up(lane, lane + 100, 1, 2)",
        "broadcast(lane, 2)",
        "broadcast_first(lane)",
    ]
    body = "".join(
        f"out[{i} * 32 + lane] = {group}_{call.format(w=width)};\n" for i, call in enumerate(calls)
    )
    (got,) = run(body, {"out": ((len(calls), 32), mx.uint32)})
    base, at = LANES // width * width, LANES % width
    want = [
        base + (LANES * 3 + 1) % width,
        base + (at ^ 3),
        np.where(at >= 1, LANES - 1, LANES),
        np.where(at + 3 < width, LANES + 3, LANES),
        base + (at - 3) % width,
        base + (at + 3) % width,
        np.where(at >= 3, LANES - 3, LANES - 3 + width + 100),
        np.where(at + 3 < width, LANES + 3, LANES + 3 - width + 100),
        np.where(LANES % 2 >= 1, LANES - 1, LANES + 1 + 100),
        base + 2,
        base,
    ]
    assert np.array_equal(got, want)


def test_votes_and_types() -> None:
    votes, floats, vectors = run(
        """votes[lane] = uint(simd_vote::vote_t(simd_ballot(lane % 3 == 0)));
        votes[32 + lane] = simd_all(lane < 32) + 2 * simd_any(lane == 40) + 4 * simd_is_first();
        votes[64 + lane] = uint(quad_vote::vote_t(quad_ballot(lane % 3 == 0))) + 16 * quad_is_first();
        uint odd_one = simd_xor(lane == 5 ? 9u : 0u);
        votes[96 + lane] = simd_sum(lane > 3) + simd_or(lane) + simd_and(lane | 64) + odd_one;
        floats[lane] = simd_sum(half(lane) * half(0.25)) + simd_max(bfloat(lane));
        vectors[lane] = simd_shuffle_xor(float2(lane, lane + 100), 1).y + simd_sum(int3(1, 2, 3)).z;""",
        {
            "votes": ((128,), mx.uint32),
            "floats": ((32,), mx.float32),
            "vectors": ((32,), mx.float32),
        },
    )
    ballot = sum(1 << i for i in range(0, 32, 3))
    assert (votes[:32] == ballot).all()
    assert votes[32:64].tolist() == [5, *[1] * 31]
    assert votes[64:96].tolist() == [((ballot >> i // 4 * 4) & 15) + 16 * (i % 4 == 0) for i in range(32)]
    assert (votes[96:] == 28 + 31 + 64 + 9).all()
    assert (floats == 124 + 31).all()
    assert np.array_equal(vectors, (LANES ^ 1) + 100 + 96)


@pytest.mark.parametrize(
    "call", ["simd_shuffle(lane, 20)", "simd_shuffle_down(lane, 16)", "simd_broadcast(lane, 31)"]
)
def test_a_read_from_an_inactive_lane_is_reported(call: str) -> None:
    with pytest.raises(
        host.InactiveLaneRead, match=r"lane \d+ reads lane \d+, which is not active"
    ) as raised:
        run(f"if (lane >= 16) {{ return; }}\nout[lane] = {call};", {"out": ((16,), mx.uint32)})
    assert raised.value.line == 3


def test_inactive_lanes_are_left_out_of_reductions() -> None:
    (out,) = run(
        """if (lane % 4 == 3) { out[lane] = 0; return; }
        out[lane] = simd_sum(int(lane)) + simd_min(lane + 7);""",
        {"out": ((32,), mx.int32)},
    )
    active = LANES[LANES % 4 != 3]
    assert (out[active] == active.sum() + 7).all()


# ------------------------------------------------------------------------------------------- matrices


def test_simdgroup_matrices() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-4, 5, (8, 8)).astype(np.float32) for _ in range(3))
    got, layout, transposed, half_product = run(
        """simdgroup_float8x8 ma, mb, mc, md, mt;
        simdgroup_load(ma, a);
        simdgroup_load(mb, b, 8);
        simdgroup_load(mc, c, 8, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(md, ma, mb, mc);
        simdgroup_store(md, got);
        layout[lane * 2] = ma.thread_elements()[0];
        layout[lane * 2 + 1] = ma.thread_elements()[1];
        simdgroup_multiply(mt, ma, simdgroup_float8x8(2));
        simdgroup_store(mt, transposed, 8, ulong2(0, 0), true);
        simdgroup_half8x8 mh = make_filled_simdgroup_matrix<half, 8, 8>(1.5h);
        simdgroup_multiply(mh, mh, mh);
        simdgroup_store(mh, half_product, 8);""",
        {
            "got": ((8, 8), mx.float32),
            "layout": ((32, 2), mx.float32),
            "transposed": ((8, 8), mx.float32),
            "half_product": ((8, 8), mx.float16),
        },
        {"a": mx.array(a), "b": mx.array(b), "c": mx.array(c)},
    )
    assert np.array_equal(got, a @ b + c.T)
    row = (LANES // 4 & 4) + (LANES // 2) % 4
    column = (LANES // 4 & 2) * 2 + LANES % 2 * 2
    assert np.array_equal(layout, np.stack([a[row, column], a[row, column + 1]], 1))
    assert np.array_equal(transposed, 2 * a.T)
    assert (half_product == 18).all()


@pytest.mark.parametrize("simdgroups", [1, 2])
def test_matmul2d_on_tensors(simdgroups: int) -> None:
    M, N, K = 40, 50, 70  # a remainder of every tile
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((M, K), (K, N)))
    (got,) = run(
        """using namespace mpp::tensor_ops;
        using matrix_t = tensor<device float, dextents<int, 2>, tensor_inline>;
        matrix_t ta((device float*)a, dextents<int, 2>(70, 40));
        matrix_t tb((device float*)b, dextents<int, 2>(50, 70));
        matrix_t tc(got, dextents<int, 2>(50, 40));
        constexpr auto shape = matmul2d_descriptor(32, 32, dynamic_length_v<int>);
        matmul2d<shape, execution_simdgroups<SIMDGROUPS>> product;
        for (int row = 0; row < 40; row += 32) {
          for (int column = 0; column < 50; column += 32) {
            auto pa = ta.slice(0, row);
            auto pb = tb.slice(column, 0);
            auto pc = tc.slice(column, row);
            product.run(pa, pb, pc);
          }
        }""",
        {"got": ((M, N), mx.float32)},
        {"a": mx.array(a), "b": mx.array(b)},
        threads=32 * simdgroups,
        header=TENSORS,
        template=[("SIMDGROUPS", simdgroups)],
    )
    assert np.array_equal(got, a @ b)


# ------------------------------------------------------------------------------- memory of the threadgroup


def test_atomics_and_threadgroup_memory() -> None:
    counts, extremes, swapped = run(
        """threadgroup atomic_uint bins[4];
        SHARED float rows[2][32];
        uint i = thread_position_in_grid.x;
        if (i < 4) { atomic_store_explicit(&bins[i], 0u, memory_order_relaxed); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&bins[i % 4], i, memory_order_relaxed);
        rows[i / 32][lane] = i;
        device atomic_int* e = (device atomic_int*)extremes;
        atomic_fetch_max_explicit(e, int(i), memory_order_relaxed);
        atomic_fetch_min_explicit(e + 1, -int(i), memory_order_relaxed);
        device atomic<float>* f = (device atomic<float>*)swapped;
        float old = atomic_load_explicit(f, memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(f, &old, old + 0.5f, memory_order_relaxed,
                                                      memory_order_relaxed)) {}
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i < 4) { counts[i] = atomic_load_explicit(&bins[i], memory_order_relaxed) + rows[1][i]; }""",
        {"counts": ((4,), mx.uint32), "extremes": ((2,), mx.int32), "swapped": ((1,), mx.float32)},
        threads=64,
        header="#define SHARED threadgroup\n",
        init_value=0,
    )
    assert counts.tolist() == [sum(range(r, 64, 4)) + 32 + r for r in range(4)]
    assert extremes.tolist() == [63, -63]
    assert swapped[0] == 32
