"""Planted faults: each sanitizer of the host back-end reports its own, by line, thread and buffer."""

from __future__ import annotations

import platform

import mlx.core as mx
import pytest

from lily_mlx.launch import host

N = 64


def launch(source, *, x=None, dtype=mx.float32, grid=N, threadgroup=32, shape=None, header="", **options):
    """Run a body with input `x` (N elements) and output `out` (N elements)."""
    x = mx.arange(N).astype(dtype) if x is None else x
    kernel = host.metal_kernel("planted", ["x"], ["out"], source, header)
    return kernel(
        inputs=[x],
        template=[("T", x.dtype)],
        grid=(grid, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[shape or (N,)],
        output_dtypes=[dtype],
        **options,
    )[0]


def fails(error, source, **options):
    with pytest.raises(error) as caught:
        launch(source, **options)
    assert caught.value.kernel == "planted"
    return caught.value


# ------------------------------------------------------------------------------------- out of bounds

INDEX = "uint i = thread_position_in_grid.x;\n"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.int64])
@pytest.mark.parametrize("n", [64, 61])  # 61: the buffer's end is no multiple of 16 bytes
@pytest.mark.parametrize(
    ("body", "buffer", "element", "thread"),
    [
        ("out[i] = x[i + 1];", "x", "n", "n-1"),
        ("out[i] = x[int(i) - 1];", "x", -1, 0),
        ("out[i + 1] = x[i];", "out", "n", "n-1"),
        ("out[int(i) - 1] = x[i];", "out", -1, 0),
    ],
)
def test_one_element_too_far(dtype, n, body, buffer, element, thread):
    x = mx.arange(n).astype(dtype)
    error = fails(host.OutOfBounds, INDEX + body, x=x, dtype=dtype, grid=n, shape=(n,))
    position = n - 1 if thread == "n-1" else thread
    assert (error.buffer, error.element) == (buffer, n if element == "n" else element)
    assert (error.file, error.line) == ("planted.metal", 2)
    assert error.thread == (position, 0, 0)
    assert error.threadgroup == (position // 32, 0, 0)


@pytest.mark.parametrize("offset", ["100000000", "1u * 0xf0000000u", "-5000"])
def test_far_out_of_bounds_names_the_buffer(offset):
    error = fails(host.OutOfBounds, f"{INDEX}out[i] = x[i + {offset}];")
    assert error.buffer == "x"


def test_wrapped_unsigned_index():
    error = fails(host.OutOfBounds, f"{INDEX}out[i] = x[i - 1u];")
    assert (error.buffer, error.element) == ("x", 2**32 - 1)


def test_one_element_too_far_beside_vector_loads():
    """21 floats cannot lie at a multiple of 16 bytes and end at a page: the rest of the page is watched."""
    vectors = "((device float4*)out)[i] = ((const device float4*)x)[i];\nif (i == 0) out[20] = x[20];\n"
    x = mx.arange(21).astype(mx.float32)
    assert launch(INDEX + vectors, x=x, grid=5, shape=(21,)).tolist() == list(range(21))
    error = fails(host.OutOfBounds, f"{INDEX}{vectors}if (i == 4) out[21] = 0;", x=x, grid=5, shape=(21,))
    assert (error.buffer, error.element) == ("out", 21)
    error = fails(
        host.UninitializedRead, f"{INDEX}{vectors}if (i == 4) out[19] = x[21];", x=x, grid=5, shape=(21,)
    )
    assert (error.buffer, error.element) == ("out", 19)


def test_misaligned_vector_access():
    """The GPU would read from another address: no placement of the buffers makes it right."""
    body = "((device float4*)(out + 1))[0] = ((const device float4*)x)[i % 4];"
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("only x86 notices")
    error = fails(host.KernelCrash, f"{INDEX}{body}", check=False)
    assert error.line == 2
    assert "multiple" in str(error)


def test_write_to_an_input():
    error = fails(host.OutOfBounds, f"{INDEX}((device T*)(x))[i] = 0;\nout[i] = x[i];")
    assert (error.buffer, error.element, error.line) == ("x", 0, 2)
    assert "an input" in str(error)


def test_shape_has_bounds_too():
    error = fails(host.OutOfBounds, f"{INDEX}out[i] = x_shape[1];")
    assert (error.buffer, error.element) == ("x_shape", 1)


def test_out_of_bounds_is_caught_without_check():
    assert fails(host.OutOfBounds, f"{INDEX}out[i] = x[i + 1];", check=False).element == N


def test_bad_index_of_a_local_array():
    error = fails(host.OutOfBounds, f"{INDEX}T a[4] = {{0, 1, 2, 3}};\nout[i] = a[i % 8];")
    assert error.line == 3
    assert error.thread == (4, 0, 0)


@pytest.mark.parametrize(
    ("index", "array", "where"),
    [
        ("32", "first", "behind"),
        ("-1", "first", "before"),
        ("40", "second", "behind"),
        ("33", "second", "behind"),
    ],
)
def test_threadgroup_array_through_a_pointer(index, array, where):
    """The compiler sees no array here: red zones do."""
    header = "template <typename P>\nvoid put(P p, int k) {\n  p[k] = 1;\n}\n"
    source = f"""
uint i = thread_position_in_grid.x;
threadgroup T first[32];
threadgroup T second[33];
first[i % 32] = second[i % 32] = x[i];
if (i == 7) put((threadgroup T*){array}, {index});
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = first[i % 32] + second[i % 32];"""
    error = fails(host.OutOfBounds, source, header=header)
    assert f"{where} the " in str(error)
    assert f"'{array}'" in str(error)
    assert (error.thread, error.line) == ((7, 0, 0), 7)


def test_header_lines_have_their_own_file():
    header = "template <typename T>\nT load(const device T* p, uint i) {\n  return p[i + 1];\n}\n"
    error = fails(host.OutOfBounds, f"{INDEX}out[i] = load(x, i);", header=header)
    assert (error.file, error.line) == ("planted.h", 3)


def test_line_directives_are_respected():
    error = fails(host.OutOfBounds, f'{INDEX}#line 70 "scan.metal"\nout[i] = x[i + 1];')
    assert (error.file, error.line) == ("scan.metal", 70)


# ------------------------------------------------------------------------------ memory nobody wrote


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32, mx.uint8, mx.bool_])
def test_one_output_element_unwritten(dtype):
    error = fails(host.UnwrittenOutput, f"{INDEX}if (i != 37) out[i] = x[i];", dtype=dtype)
    assert (error.buffer, error.element) == ("out", 37)


def test_initial_value_counts_as_written():
    out = launch(f"{INDEX}if (i != 37) out[i] = x[i];", init_value=-1)
    assert out[37].item() == -1


@pytest.mark.parametrize("dtype", [mx.float32, mx.int32])
def test_threadgroup_memory_read_before_written(dtype):
    source = INDEX + "threadgroup T a[64];\nout[i] = a[i % 32];"
    assert fails(host.UninitializedRead, source, dtype=dtype).buffer == "out"


def test_threadgroup_memory_does_not_outlive_its_threadgroup():
    source = INDEX + "threadgroup T a[32];\nif (i < 32) a[i] = x[i];\nout[i] = a[i % 32];"
    assert fails(host.UninitializedRead, source).element >= 32


@pytest.mark.parametrize("schedule", ["fifo", "lifo", *(f"random:{seed}" for seed in range(5))])
def test_missing_barrier(schedule):
    source = """
uint i = thread_position_in_grid.x;
threadgroup T a[64];
a[i] = x[i];
out[i] = a[63 - i];"""
    assert fails(host.UninitializedRead, source, threadgroup=64, schedule=schedule).buffer == "out"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32, mx.uint8])
def test_uninitialised_local(dtype):
    source = INDEX + "T total;\nfor (uint k = 0; k < i; ++k) total = max(total, x[k]);\nout[i] = total;"
    assert fails(host.UninitializedRead, source, dtype=dtype).buffer == "out"


# --------------------------------------------------------------------------------------------- races

WRITE_AFTER_READ = """
uint i = thread_position_in_grid.x;
threadgroup T a[128];
a[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
T other = a[(i + 32) % 128];
BARRIER
a[i] = other + 1;
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = a[i];"""


def race(source, **options):
    x = mx.arange(128).astype(mx.float32)
    return host.check_schedules(
        lambda schedule: launch(source, x=x, grid=128, shape=(128,), schedule=schedule, **options)
    )


def test_write_after_read_race():
    with pytest.raises(host.ScheduleDependence) as caught:
        race(WRITE_AFTER_READ.replace("BARRIER", ""), threadgroup=128)
    assert (caught.value.kernel, caught.value.buffer) == ("planted", "out")
    assert 0 <= caught.value.element < 128


def test_the_same_with_its_barrier_is_clean():
    source = WRITE_AFTER_READ.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);")
    out = race(source, threadgroup=128)
    assert out.tolist() == [(i + 32) % 128 + 1 for i in range(128)]


LOCKSTEP = """
uint i = thread_position_in_grid.x;
threadgroup T a[128];
a[i] = x[i];
BARRIER
T other = a[i ^ 1];
BARRIER
a[i] = other;
BARRIER
out[i] = a[i ^ 1];"""


def test_lockstep_is_not_assumed():
    with pytest.raises((host.ScheduleDependence, host.UninitializedRead)):
        race(LOCKSTEP.replace("BARRIER", ""), threadgroup=128)
    out = race(LOCKSTEP.replace("BARRIER", "simdgroup_barrier(mem_flags::mem_threadgroup);"), threadgroup=128)
    assert out.tolist() == list(range(128))


def test_race_between_threadgroups():
    with pytest.raises(host.ScheduleDependence):
        race(f"{INDEX}out[i] = 0;\nout[0] = T(i);", threadgroup=32)


RACE = f"{INDEX}out[i] = 0;\nout[0] = T(i);"


@pytest.mark.parametrize(
    "call",
    [
        lambda: launch(RACE),
        lambda s: launch(RACE, schedule=s),
        lambda schedule: launch(RACE, schedule=schedule),
        lambda **options: launch(RACE, **options),
        lambda source=RACE: launch(source),
    ],
)
def test_check_schedules_takes_any_call(call):
    with pytest.raises(host.ScheduleDependence):
        host.check_schedules(call)


# ------------------------------------------------------------------------------ divergent operations


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("T s = x[i];\nif (i % 32 < 16) s = simd_sum(s);\nout[i] = s;", (3,)),
        ("T s = x[i];\nif (i % 2) s = simd_sum(s);\nelse s = simd_max(s);\nout[i] = s;", (3, 4)),
        ("T s = x[i];\nif (i % 2) s = simd_sum(s);\nelse s = simd_sum(s);\nout[i] = s;", (3, 4)),
        (
            "T s = x[i];\nif (i % 2) s = simd_sum(s);\n"
            "else threadgroup_barrier(mem_flags::mem_none);\nout[i] = s;",
            (3, 4),
        ),
    ],
)
def test_divergent_simd_operation(body, lines, schedule):
    error = fails(host.DivergentSimd, INDEX + body, schedule=schedule)
    assert error.line in lines
    assert error.file == "planted.metal"
    assert error.thread is not None


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("if (i % 64 < 32) threadgroup_barrier(mem_flags::mem_none);\nout[i] = x[i];", (2,)),
        (
            "if (i % 64 < 32) threadgroup_barrier(mem_flags::mem_none);\n"
            "else threadgroup_barrier(mem_flags::mem_none);\nout[i] = x[i];",
            (2, 3),
        ),
    ],
)
def test_barrier_mismatch(body, lines, schedule):
    error = fails(host.BarrierMismatch, INDEX + body, threadgroup=64, schedule=schedule)
    assert error.line in lines
    assert error.file == "planted.metal"


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
def test_barrier_that_some_lanes_skip(schedule):
    """MLX's gemv has one. Metal forbids it, Apple's GPUs allow it: so it runs when asked not to check."""
    body = "if (i % 4 == 0) threadgroup_barrier(mem_flags::mem_none);\nout[i] = x[i];"
    assert fails(host.BarrierMismatch, INDEX + body, threadgroup=64, schedule=schedule).line == 2
    out = launch(INDEX + body, threadgroup=64, schedule=schedule, check=False)
    assert out.tolist() == list(range(N))


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
def test_inactive_lane_read(schedule):
    body = "if (i % 32 >= 16) { out[i] = 0; return; }\nout[i] = simd_shuffle(x[i], 20);"
    error = fails(host.InactiveLaneRead, INDEX + body, schedule=schedule)
    assert (error.file, error.line) == ("planted.metal", 3)


# ------------------------------------------------------------------------------------------ overflow


@pytest.mark.parametrize(
    "index",
    [
        "int k = int(i) * 70000 * 70000;\n",
        "int k = 2147483600 + int(i);\n",
        "uint stride = 100000; uint k = (i + 1) * stride * stride;\n",
    ],
)
def test_index_overflow(index):
    error = fails(host.IndexOverflow, f"{INDEX}{index}out[i] = x[k % 64];")
    assert error.line == 2


def test_hashing_is_no_overflow():
    source = (
        INDEX + "uint h = i * 747796405u + 2891336453u;\nh ^= h >> 16;\nh *= 0x85ebca6bu;\nout[i] = h % 97;"
    )
    out = launch(source, dtype=mx.uint32)
    expected = []
    for i in range(N):
        h = (i * 747796405 + 2891336453) % 2**32
        h ^= h >> 16
        expected.append(h * 0x85EBCA6B % 2**32 % 97)
    assert out.tolist() == expected


# ------------------------------------------------------------------------------- crashes and their end


@pytest.mark.parametrize(
    ("body", "error", "line"),
    [
        ("out[i] = *(const device T*)(0);", host.KernelCrash, 2),
        ("int d = int(x[i]) - 5;\nout[i] = 100 / d;", host.KernelCrash, 3),
        ("while (true) { }\nout[i] = 0;", host.Timeout, 2),
        ("while (out[i] != T(0.5)) { out[i] = x[i]; }", host.Timeout, 2),
    ],
)
def test_a_crash_spares_the_interpreter(body, error, line):
    caught = fails(error, INDEX + body, time_limit=0.3)
    assert (caught.file, caught.line) == ("planted.metal", line)
    assert caught.thread is not None
    assert launch(f"{INDEX}out[i] = x[i];").tolist() == list(range(N))


def test_endless_recursion():
    header = """inline int deep(int n) {
  volatile int a[64];
  a[n % 64] = n;
  return n < 0 ? 0 : deep(n + 1) + a[n % 64];
}
"""
    error = fails(host.KernelCrash, f"{INDEX}out[i] = deep(int(i));", header=header)
    assert error.file == "planted.h"


def test_a_frame_larger_than_the_stack():
    header = """inline int wide(int n) {
  volatile int a[100000];
  a[n % 100000] = n;
  return a[(n * 7) % 100000];
}
"""
    error = fails(host.KernelCrash, f"{INDEX}out[i] = wide(int(i));", header=header)
    assert "stack" in str(error)


def test_wild_writes_do_not_reach_the_interpreter():
    source = (
        INDEX
        + "device int* p = (device int*)(size_t(0x400000));\nfor (int k = 0; ; ++k) p[k] = k;\nout[i] = 0;"
    )
    error = fails(host.HostKernelError, source)
    assert isinstance(error, host.KernelCrash | host.OutOfBounds)


@pytest.mark.parametrize(
    ("source", "header", "file", "line"),
    [
        (f"{INDEX}out[i] = y[i];", "", "planted.metal", 2),
        (f"{INDEX}out[i] = x[i];", "\nint f() { return undefined_name; }\n", "planted.h", 2),
    ],
)
def test_compile_error_names_the_line(source, header, file, line):
    error = fails(host.CompileError, source, header=header)
    assert (error.file, error.line) == (file, line)
    assert "undeclared" in str(error)
    assert "error:" in error.log


def test_too_much_threadgroup_memory():
    source = INDEX + "threadgroup float a[8193];\na[i] = x[i];\nout[i] = a[i];"
    assert "32768" in str(fails(host.CompileError, source, threadgroup=64))
    launch(source.replace("8193", "8192"), threadgroup=64)


def test_a_reused_slot_is_a_race_whatever_the_values():
    """Sums by simdgroup go through two slots without a second barrier: whoever runs ahead overwrites them.

    The last simdgroup to reach a barrier must not always be the first to leave it.
    """
    source = """
      uint i = thread_position_in_grid.x;
      threadgroup float slots[2];
      float total = 0;
      for (int k = 0; k < 3; ++k) {
        float sum = simd_sum(x[(i + k) % 64]);
        if (thread_index_in_simdgroup == 0) slots[simdgroup_index_in_threadgroup] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        total += slots[0] + slots[1];
      }
      y[i] = total;
    """
    kernel = host.metal_kernel(name="slots", input_names=["x"], output_names=["y"], source=source)

    def call(schedule):
        return kernel(
            inputs=[mx.arange(1, 65, dtype=mx.float32)],
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
            schedule=schedule,
        )

    with pytest.raises(host.ScheduleDependence):
        host.check_schedules(call)
