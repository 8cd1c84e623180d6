"""The host launcher's calls: MLX's keywords and their meaning, and clean kernels under every schedule."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.launch import host

INDEX = "uint i = thread_position_in_grid.x;\n"


def run(source, inputs, *, shapes, dtypes, grid, threadgroup=(32, 1, 1), header="", names=None, **options):
    """Run a body with inputs a, b, c ... and outputs out, out1 ..."""
    input_names = names or [chr(ord("a") + n) for n in range(len(inputs))]
    output_names = ["out", *(f"out{n}" for n in range(1, len(shapes)))]
    made = {k: options.pop(k) for k in ("ensure_row_contiguous", "atomic_outputs") if k in options}
    kernel = host.metal_kernel("clean", input_names, output_names, source, header, **made)
    return kernel(
        inputs=inputs,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=shapes,
        output_dtypes=dtypes,
        **options,
    )


def numbers(array):
    return np.array(array.astype(mx.float32))


# ------------------------------------------------------------------------------------ arguments


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = ["float32", "float16", "bfloat16", "complex64", "bool_", *INTEGERS]


@pytest.mark.parametrize("dtype", [getattr(mx, name) for name in DTYPES])
@pytest.mark.parametrize("shape", [(5,), (3, 7)])  # under 8 elements MLX passes `constant`
def test_every_dtype_passes_through(dtype, shape):
    a = mx.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(dtype)
    (out,) = run(f"{INDEX}out[i] = a[i];", [a], shapes=[shape], dtypes=[dtype], grid=(a.size, 1, 1))
    assert out.dtype == dtype
    assert out.shape == shape
    assert mx.array_equal(out, a)


def test_scalars_and_references():
    out, flags = run(
        "out[0] = a * b; out1[0] = c;",
        [2.5, mx.array(4.0), True],
        shapes=[(1,), (1,)],
        dtypes=[mx.float32, mx.bool_],
        grid=(1, 1, 1),
    )
    assert out.item() == 10.0
    assert flags.item() is True


def test_template_arguments():
    source = f"{INDEX}out[i] = ADD ? T(a[i]) + N : T(0);"
    for add, expected in ((True, [3, 4, 5]), (False, [0, 0, 0])):
        (out,) = run(
            source,
            [mx.arange(3)],
            shapes=[(3,)],
            dtypes=[mx.float16],
            grid=(3, 1, 1),
            template=[("T", mx.float16), ("N", 3), ("ADD", add)],
        )
        assert out.tolist() == expected


@pytest.mark.parametrize("check", [True, False])
def test_rows_are_copied_together(check):
    a = mx.arange(48).reshape(6, 8)
    (out,) = run(
        f"{INDEX}out[i] = a[i];", [a.T], shapes=[(8, 6)], dtypes=[mx.int32], grid=(48, 1, 1), check=check
    )
    assert mx.array_equal(out, a.T)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[:, 1:4],
        lambda a: a[::2, ::3],
        lambda a: mx.broadcast_to(a[2], (5, 8)),
        lambda a: a[2:3, 5],
    ],
)
@pytest.mark.parametrize("dtype", [mx.int32, mx.bfloat16])
def test_views_pass_with_their_strides(view, dtype):
    a = view(mx.arange(48).reshape(6, 8).astype(dtype))
    source = f"{INDEX}out[i] = a[elem_to_loc(i, a_shape, a_strides, a_ndim)];"
    (out,) = run(
        source, [a], shapes=[a.shape], dtypes=[dtype], grid=(a.size, 1, 1), ensure_row_contiguous=False
    )
    assert mx.array_equal(out, a)


def test_initial_value():
    for dtype in (mx.float32, mx.bfloat16, mx.int32):
        (out,) = run(
            "if (thread_position_in_grid.x == 0) out[1] = a[0];",
            [mx.array([7])],
            shapes=[(3,)],
            dtypes=[dtype],
            grid=(4, 1, 1),
            init_value=-2,
        )
        assert out.tolist() == [-2, 7, -2]


def test_atomic_outputs():
    (out,) = run(
        f"{INDEX}atomic_fetch_add_explicit(&out[a[i]], 1u, memory_order_relaxed);",
        [mx.array([0, 2, 2, 1, 2] * 20)],
        shapes=[(3,)],
        dtypes=[mx.uint32],
        grid=(100, 1, 1),
        atomic_outputs=True,
        init_value=0,
    )
    assert out.tolist() == [20, 20, 60]


def test_thread_attributes_at_the_grid_edge():
    source = """
uint at = thread_position_in_grid.x + threads_per_grid.x * thread_position_in_grid.y;
out[at * 8 + 0] = thread_position_in_threadgroup.x * 100 + thread_position_in_threadgroup.y;
out[at * 8 + 1] = threadgroup_position_in_grid.x * 100 + threadgroup_position_in_grid.y;
out[at * 8 + 2] = threads_per_threadgroup.x * 100 + threads_per_threadgroup.y;
out[at * 8 + 3] = threadgroups_per_grid.x * 100 + threadgroups_per_grid.y;
out[at * 8 + 4] = thread_index_in_threadgroup;
out[at * 8 + 5] = thread_index_in_simdgroup * 100 + simdgroup_index_in_threadgroup;
out[at * 8 + 6] = dispatch_threads_per_threadgroup.x * 100 + simdgroups_per_threadgroup;
out[at * 8 + 7] = a[0] + threads_per_simdgroup;"""
    X, Y, TX, TY = 21, 5, 16, 4
    (out,) = run(
        source,
        [mx.array([0])],
        shapes=[(Y, X, 8)],
        dtypes=[mx.int32],
        grid=(X, Y, 1),
        threadgroup=(TX, TY, 1),
    )
    for y in range(Y):
        for x in range(X):
            w, h = min(TX, X - x // TX * TX), min(TY, Y - y // TY * TY)
            index = y % TY * w + x % TX
            assert out[y, x].tolist() == [
                x % TX * 100 + y % TY,
                x // TX * 100 + y // TY,
                w * 100 + h,
                202,
                index,
                index % 32 * 100 + index // 32,
                TX * 100 + (w * h + 31) // 32,
                32,
            ]


def test_threadgroup_is_no_larger_than_the_grid():
    (out,) = run(
        f"{INDEX}out[i] = a[0] + threads_per_threadgroup.x;",
        [mx.array([0])],
        shapes=[(5,)],
        dtypes=[mx.int32],
        grid=(5, 1, 1),
        threadgroup=(256, 1, 1),
    )
    assert out.tolist() == [5] * 5


def test_no_threads_and_no_elements():
    (out,) = run("out[0] = a[0];", [mx.zeros((4,))], shapes=[(0, 3)], dtypes=[mx.float32], grid=(0, 1, 1))
    assert out.shape == (0, 3)


def test_verbose_prints_the_source(capsys):
    run("out[0] = a;", [1.0], shapes=[(1,)], dtypes=[mx.float32], grid=(1, 1, 1), verbose=True)
    assert "[[kernel]] void custom_kernel_clean" in capsys.readouterr().out


def test_mlx_header_is_there():
    (out,) = run(
        f"{INDEX}out[i] = bfloat16_t(Limits<int>::max > 0 ? a[i] : 0) + ceildiv(9, 4);",
        [mx.arange(4)],
        shapes=[(4,)],
        dtypes=[mx.float32],
        grid=(4, 1, 1),
    )
    assert out.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grid": (4, 1)}, "grid"),
        ({"threadgroup": (0, 1, 1)}, "threadgroup"),
        ({"grid": (2048, 1, 1), "threadgroup": (1025, 1, 1)}, "1024"),
        ({"schedule": "random"}, "schedule"),
        ({"schedule": "sorted"}, "schedule"),
        ({"dtypes": [mx.float32, mx.float32]}, "outputs"),
        ({"inputs": [1.0, 2.0]}, "inputs"),
    ],
)
def test_calls_that_cannot_be_launched(change, words):
    options = {"inputs": [1.0], "shapes": [(1,)], "dtypes": [mx.float32], "grid": (1, 1, 1), **change}
    with pytest.raises(ValueError, match=words):
        run("out[0] = a;", options.pop("inputs"), names=["a"], **options)


def test_a_name_that_no_function_can_have():
    with pytest.raises(ValueError, match="function's; letters"):
        host.metal_kernel("my kernel", ["x"], ["out"], "out[0] = x[0];")


def half_of(a):
    return run(f"{INDEX}out[i] = a[i] / 2;", [a], shapes=[a.shape], dtypes=[a.dtype], grid=(a.size, 1, 1))[0]


@pytest.mark.parametrize(
    "transform",
    [
        lambda a: mx.grad(lambda a: half_of(a).sum())(a),
        lambda a: mx.value_and_grad(lambda a: half_of(a * a).sum())(a),
        lambda a: mx.vjp(lambda a: half_of(a), [a], [a]),
        lambda a: mx.jvp(lambda a: half_of(a), [a], [a]),
        lambda a: mx.vmap(half_of)(a[None]),
        lambda a: mx.compile(half_of)(a),
    ],
)
def test_a_transformation_that_it_cannot_follow_is_refused(transform):
    with pytest.raises(host.HostKernelError, match=r"derivative|mx\.compile"):
        transform(mx.ones((8,)))


def test_derivatives_that_do_not_need_the_kernels():
    a = mx.arange(8, dtype=mx.float32)
    assert mx.grad(lambda w: (w * half_of(a)).sum())(mx.ones((8,))).tolist() == (a / 2).tolist()

    @mx.custom_function
    def halved(a):
        return half_of(a)

    halved.vjp(lambda primal, cotangent, output: cotangent / 2)
    assert mx.grad(lambda a: halved(a).sum())(a).tolist() == [0.5] * 8


def test_metal_has_31_buffers():
    def total(n):
        names = [f"in{k}" for k in range(n)]
        body = f"{INDEX}out[i] = {' + '.join(f'{name}[i]' for name in names)};"
        inputs = [mx.full((8,), k, mx.int32) for k in range(n)]
        return run(body, inputs, names=names, shapes=[(8,)], dtypes=[mx.int32], grid=(8, 1, 1))[0]

    assert total(30).tolist() == [sum(range(30))] * 8
    with pytest.raises(host.CompileError, match="32 buffers"):
        total(31)


def test_inside_compile_it_says_why():
    def double(a):
        return run(f"{INDEX}out[i] = 2 * a[i];", [a], shapes=[(3,)], dtypes=[mx.float32], grid=(3, 1, 1))[0]

    a = mx.array([1.0, 2.0, 3.0])
    with pytest.raises(host.HostKernelError, match=r"mx\.compile"):
        mx.compile(double)(a)
    with pytest.raises(host.HostKernelError, match=r"trace"):
        mx.export_function(lambda entry: None, double, a)
    assert double(a).tolist() == [2.0, 4.0, 6.0]


# ---------------------------------------------------------------------------- clean kernels


def softmax(schedule):
    """Rows of 96 over simdgroups: simd reductions, threadgroup exchange, barriers."""
    source = """
uint i = thread_position_in_threadgroup.x, row = threadgroup_position_in_grid.x;
threadgroup float part[3];
float v = a[row * 96 + i];
float m = simd_max(v);
if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = m;
threadgroup_barrier(mem_flags::mem_threadgroup);
m = max(part[0], max(part[1], part[2]));
threadgroup_barrier(mem_flags::mem_threadgroup);
float e = exp(v - m);
float s = simd_sum(e);
if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = s;
threadgroup_barrier(mem_flags::mem_threadgroup);
out[row * 96 + i] = e / (part[0] + part[1] + part[2]);"""
    a = mx.random.normal((5, 96), key=mx.random.key(1))
    (out,) = run(
        source,
        [a],
        shapes=[(5, 96)],
        dtypes=[mx.float32],
        grid=(480, 1, 1),
        threadgroup=(96, 1, 1),
        schedule=schedule,
    )
    assert np.abs(numbers(out) - numbers(mx.softmax(a, axis=-1))).max() < 1e-6


def early_return(schedule):
    """Lanes that return are inactive in the sums and barriers of the others."""
    source = """
uint i = thread_position_in_grid.x;
if (i >= 75) { out[i] = -1; return; }
float s = simd_sum(float(a[i]));
threadgroup_barrier(mem_flags::mem_none);
out[i] = s;"""
    (out,) = run(
        source,
        [mx.arange(128)],
        shapes=[(128,)],
        dtypes=[mx.float32],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        schedule=schedule,
    )
    sums = [sum(range(32)), sum(range(32, 64)), sum(range(64, 75))]
    assert out.tolist() == [sums[i // 32] if i < 75 else -1 for i in range(128)]


def partial_simdgroup(schedule):
    """A threadgroup of 50 threads: its second simdgroup has 18 lanes."""
    source = f"{INDEX}out[i] = simd_sum(a[i]) + simd_broadcast(a[i], 3);"
    (out,) = run(
        source,
        [mx.arange(50)],
        shapes=[(50,)],
        dtypes=[mx.int32],
        grid=(50, 1, 1),
        threadgroup=(50, 1, 1),
        schedule=schedule,
    )
    assert out.tolist() == [sum(range(32)) + 3] * 32 + [sum(range(32, 50)) + 35] * 18


def transpose(schedule):
    """Tiles through threadgroup memory, with an edge."""
    source = """
uint x = thread_position_in_grid.x, y = thread_position_in_grid.y;
threadgroup T tile[8][9];
tile[thread_position_in_threadgroup.y][thread_position_in_threadgroup.x] = a[y * 21 + x];
threadgroup_barrier(mem_flags::mem_threadgroup);
out[x * 13 + y] = tile[thread_position_in_threadgroup.y][thread_position_in_threadgroup.x];"""
    a = mx.arange(13 * 21).reshape(13, 21).astype(mx.bfloat16)
    (out,) = run(
        source,
        [a],
        shapes=[(21, 13)],
        dtypes=[mx.bfloat16],
        grid=(21, 13, 1),
        threadgroup=(8, 8, 1),
        template=[("T", mx.bfloat16)],
        schedule=schedule,
    )
    assert mx.array_equal(out, a.T)


def vector_loads(schedule):
    """float4 accesses into buffers whose size is no multiple of 16 bytes."""
    source = """
uint i = thread_position_in_grid.x;
float4 v = ((const device float4*)a)[i];
((device float4*)out)[i] = v * 2;
if (i == 0) out[20] = a[20];"""
    (out,) = run(
        source,
        [mx.arange(21).astype(mx.float32)],
        shapes=[(21,)],
        dtypes=[mx.float32],
        grid=(5, 1, 1),
        schedule=schedule,
    )
    assert out.tolist() == [2.0 * i for i in range(20)] + [20.0]


def histogram(schedule):
    """Integer atomics of all threadgroups in one buffer: any order, one result."""
    (out,) = run(
        f"{INDEX}atomic_fetch_add_explicit(&out[a[i] % 7], uint(a[i]), memory_order_relaxed);",
        [mx.arange(300)],
        shapes=[(7,)],
        dtypes=[mx.uint32],
        grid=(300, 1, 1),
        threadgroup=(64, 1, 1),
        atomic_outputs=True,
        init_value=0,
        schedule=schedule,
    )
    assert out.tolist() == [sum(range(r, 300, 7)) for r in range(7)]


def loop_of_collectives(schedule):
    """Lanes leave a loop together after many shuffles; scratch is reused with simdgroup barriers."""
    source = """
uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;
threadgroup int scratch[64];
threadgroup int* mine = scratch + 32 * simdgroup_index_in_threadgroup;
int v = a[i];
for (int step = 0; step < 5; ++step) {
  mine[lane] = v;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  int other = mine[(lane + 1) % 32];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  v = other + simd_shuffle_xor(v, 1) - v;
}
out[i] = v;"""
    start = np.arange(128, dtype=np.int64) * 7 % 31
    (out,) = run(
        source,
        [mx.array(start.astype(np.int32))],
        shapes=[(128,)],
        dtypes=[mx.int32],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        schedule=schedule,
    )
    v = start.reshape(-1, 32)
    for _ in range(5):
        v = np.roll(v, -1, axis=1) + v[:, np.arange(32) ^ 1] - v
    assert out.tolist() == v.ravel().tolist()


CLEAN = [softmax, early_return, partial_simdgroup, transpose, vector_loads, histogram, loop_of_collectives]


@pytest.mark.parametrize("schedule", host.SCHEDULES)
@pytest.mark.parametrize("kernel", CLEAN)
def test_clean_kernels_are_not_accused(kernel, schedule):
    kernel(schedule)


@pytest.mark.parametrize("kernel", CLEAN)
def test_clean_kernels_do_not_depend_on_the_schedule(kernel):
    host.check_schedules(kernel)


def test_uniform_branches_are_not_divergent():
    """Whole simdgroups may take different branches, and whole threadgroups different barriers."""
    source = """
uint i = thread_position_in_grid.x;
int s = a[i];
if (simdgroup_index_in_threadgroup == 0) s = simd_sum(s); else s = simd_max(s);
if (threadgroup_position_in_grid.x == 0) threadgroup_barrier(mem_flags::mem_none);
out[i] = s;"""
    (out,) = run(
        source, [mx.arange(128)], shapes=[(128,)], dtypes=[mx.int32], grid=(128, 1, 1), threadgroup=(64, 1, 1)
    )
    assert out.tolist() == [sum(range(32))] * 32 + [63] * 32 + [sum(range(64, 96))] * 32 + [127] * 32


@pytest.mark.parametrize("schedule", host.SCHEDULES)
@pytest.mark.parametrize(
    "body",
    [
        "threadgroup int t[64];\nif (i < 2) t[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "int v = t[i] * 3;\nout[i] = i < 2 ? v : 0;",
        "int t[4];\nfor (int k = 0; k < 2; ++k) t[k] = a[i];\nfor (int k = 0; k < 4; ++k) t[k] *= 3;\n"
        "out[i] = i < 2 ? t[i] : 0;",
        "threadgroup int t[64];\nif (i < 2) t[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "int v = 75 / t[i];\nout[i] = i < 2 ? v / (i ? 2 : 1) + i * 12 : 0;",
        "int4 v;\nv.x = a[i];\nv = v * 5 - 3;\nout[i] = i < 2 ? (v.x + 3) / 5 * 3 : 0;",
    ],
)
def test_arithmetic_on_what_was_never_written_may_be_dropped(body, schedule):
    """Only the poison overflows in these, or the zero that is one divides, and no output depends on it."""
    (out,) = run(
        INDEX + body,
        [mx.arange(5, 69)],
        shapes=[(64,)],
        dtypes=[mx.int32],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        schedule=schedule,
    )
    assert out.tolist() == [15, 18] + [0] * 62


def test_the_macros_of_metal_are_there():
    body = "#if defined(__HAVE_BFLOAT__) && __METAL_VERSION__ >= 310\nout[0] = bfloat(1.5f);\n#endif"
    (out,) = run(body, [], shapes=[(1,)], dtypes=[mx.float32], grid=(1, 1, 1))
    assert out.item() == 1.5


def test_stands_in_for_mlx_directly(monkeypatch):
    """The pattern a kernel author would try first: the replacement must not find itself."""
    monkeypatch.setattr(mx.fast, "metal_kernel", host.metal_kernel)
    kernel = mx.fast.metal_kernel(
        name="twice",
        input_names=["x"],
        output_names=["y"],
        source="y[thread_position_in_grid.x] = 2 * x[thread_position_in_grid.x];",
    )
    (y,) = kernel(
        inputs=[mx.arange(32, dtype=mx.float32)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
    )
    assert mx.array_equal(y, 2 * mx.arange(32)).item()
