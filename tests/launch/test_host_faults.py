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
    ("array", "size"),
    [
        ("metal::array<T, 4> a", 4),
        ("struct Row { T a[4]; } row; thread auto& a = row.a", 4),
        ("vec<T, 4> a", 4),
        ("packed_vec<T, 4> a", 4),
        ("vec<T, 3> a", 3),
        ("struct Rows { int n; T a[4]; } rows; thread auto& a = rows.a", 4),
        ("matrix<float, 4, 4> m; thread auto& a = m[i % 4]", 4),
    ],
)
@pytest.mark.parametrize("store", [False, True])
def test_an_index_past_the_end_of_a_small_type(array, size, store):
    fill = f"{array};\nfor (int k = 0; k < {size}; ++k) a[k] = T(k);\n"
    good = f"{INDEX}{fill}out[i] = a[i % {size}];"
    assert launch(good, grid=N).tolist() == [i % size for i in range(N)]
    line = f"a[i % {size + 1}] = 1;\nout[i] = a[0];" if store else f"out[i] = a[i % {size + 1}];"
    error = fails(host.OutOfBounds, f"{INDEX}{fill}{line}")
    assert (error.file, error.line, error.thread) == ("planted.metal", 4, (size, 0, 0))


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
    """The compiler sees no array here, and does not know the address: red zones are watched for writes."""
    header = "template <typename P>\nvoid put(P p, int k) {\n  p[k] = 1;\n}\n"
    source = f"""
uint i = thread_position_in_grid.x;
threadgroup T first[32];
threadgroup T second[33];
first[i % 32] = second[i % 32] = x[i];
thread void* volatile hidden = (thread void*){array};
if (i == 7) put((threadgroup T*)hidden, {index});
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = first[i % 32] + second[i % 32];"""
    error = fails(host.OutOfBounds, source, header=header)
    assert f"{where} the " in str(error)
    assert f"'{array}'" in str(error)
    assert (error.thread, error.line) == ((7, 0, 0), 8)


@pytest.mark.parametrize("space", ["threadgroup", "thread"])
@pytest.mark.parametrize(("access", "line"), [("p[k] = 1;", 3), ("p[0] = p[k];", 3)])
@pytest.mark.parametrize("index", ["i == 7 ? 32 : 5", "i == 7 ? -1 : 5"])
def test_array_through_a_pointer(space, access, line, index):
    header = f"template <typename P>\nvoid use(P p, int k) {{\n  {access}\n}}\n"
    source = f"{INDEX}{space} T a[32];\nfor (int k = 0; k < 32; ++k) a[k] = x[k];\n"
    source += f"use(({space} T*)a, {index});\nout[i] = a[i % 32];"
    error = fails(host.OutOfBounds, source, header=header, threadgroup=32)
    assert (error.file, error.line, error.thread) == ("planted.h", line, (7, 0, 0))


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


@pytest.mark.parametrize("dtype", [mx.complex64, mx.uint64])
def test_half_of_an_output_element_unwritten(dtype):
    body = f"{INDEX}device uint* p = (device uint*)out;\np[2 * i] = i;\nif (i != 37) p[2 * i + 1] = i;"
    error = fails(host.UnwrittenOutput, body, dtype=dtype)
    assert (error.buffer, error.element) == ("out", 37)


def test_initial_value_counts_as_written():
    out = launch(f"{INDEX}if (i != 37) out[i] = x[i];", init_value=-1)
    assert out[37].item() == -1


@pytest.mark.parametrize("dtype", [mx.float32, mx.int32])
def test_threadgroup_memory_read_before_written(dtype):
    source = INDEX + "threadgroup T a[64];\nout[i] = a[i % 32];"
    assert fails(host.UninitializedRead, source, dtype=dtype).buffer == "out"


@pytest.mark.parametrize(
    "body",
    [
        "threadgroup float2 a;\nif (i == 0) a.x = 1;\nBARRIER\nout[i] = a.x + a.y;",
        "threadgroup T a;\nif (x[i] > 100) a = 1;\nBARRIER\nout[i] = a;",
        "threadgroup T a[64];\nout[i] = a[i];",
    ],
)
def test_threadgroup_memory_that_the_compiler_could_take_for_zeros(body):
    """No thread writes it, or part of it, or there is one write, of a constant."""
    source = INDEX + body.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);")
    assert fails(host.UninitializedRead, source, threadgroup=64).buffer == "out"


def test_threadgroup_memory_does_not_outlive_its_threadgroup():
    source = INDEX + "threadgroup T a[32];\nif (i < 32) a[i] = x[i];\nout[i] = a[i % 32];"
    assert fails(host.UninitializedRead, source).element >= 32


@pytest.mark.parametrize("schedule", host.SCHEDULES)
def test_an_output_read_before_another_thread_wrote_it(schedule):
    """The second output was written, with what the first held before."""
    kernel = host.metal_kernel(
        "exchange", ["x"], ["out", "out2"], f"{INDEX}out[i] = x[i];\nout2[i] = out[63 - i];"
    )
    with pytest.raises(host.UninitializedRead) as caught:
        kernel(
            inputs=[mx.arange(64)],
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(64,)] * 2,
            output_dtypes=[mx.int32] * 2,
            schedule=schedule,
        )
    assert caught.value.buffer == "out2"


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


@pytest.mark.parametrize("dtype", [mx.float32, mx.int32])
@pytest.mark.parametrize(
    "body",
    [
        "int n;\nif (i > 99) n = 3;\nout[i] = T(n % 64);",
        "uint n;\nif (i > 99) n = 3;\nout[i] = x[n & 1];",
        "T m;\nm = max(m, x[i]);\nout[i] = m;",
        "T m;\nm = min(m, x[i]);\nout[i] = m;",
        "threadgroup T a[64];\nif (i != 9) a[i] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\nT m = 0;\n"
        "for (int k = 0; k < 64; ++k) m = max(m, a[k]);\nout[i] = m;",
        "vec<T, 4> v;\nv.xyz = vec<T, 3>(x[i]);\nout[i] = v.w + v.x;",
        "struct { int a; T b; } s;\ns.a = 1;\nout[i] = s.b;",
        "metal::array<T, 4> a;\na[0] = x[i];\nout[i] = a[i % 4];",
    ],
)
def test_what_nothing_wrote_cannot_hide(body, dtype):
    error = fails(host.UninitializedRead, INDEX + body, dtype=dtype, threadgroup=64)
    assert error.buffer == "out"


@pytest.mark.parametrize(
    "body",
    [
        "bool found;\nif (i > 99) found = true;\nout[i] = found ? 1 : 0;",
        "bool found[4];\nfound[0] = false;\nout[i] = found[i % 4] ? 1 : 0;",
        "struct { bool a, b; } s;\ns.a = true;\nout[i] = s.a && s.b ? 1 : 0;",
        "threadgroup bool seen[64];\nif (i != 9) seen[i] = true;\nout[i] = seen[i] ? 1 : 0;",
    ],
)
def test_uninitialised_bool(body):
    error = fails(host.UninitializedRead, INDEX + body)
    assert error.file == "planted.metal"
    assert error.line == body.count("\n") + 2


def test_a_comparison_of_what_was_never_written_with_zero():
    source = """
uint i = thread_position_in_grid.x;
threadgroup uint seen[64];
if (i == 3) seen[3] = 0;
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = seen[i] != 0 ? 1 : 2;"""
    assert fails(host.UninitializedRead, source, threadgroup=64).buffer == "out"
    assert launch(source.replace("if (i == 3) seen[3]", "seen[i]"), threadgroup=64).tolist() == [2] * N


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("threads", [64, 1024])
def test_a_product_of_what_was_never_written_and_zero(dtype, threads):
    """The tail of a tile, masked by a factor: NaN on a GPU if the memory happens to hold one."""
    source = f"""{INDEX}
threadgroup T a[{threads}];
if (i < 40) a[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
float sum = 0;
for (int k = 0; k < {threads}; ++k) sum += MASKED;
out[i] = T(sum);"""
    options = {"dtype": dtype, "grid": threads, "threadgroup": threads, "shape": (threads,)}
    fails(host.UninitializedRead, source.replace("MASKED", "(k < 40 ? 1.0f : 0.0f) * float(a[k])"), **options)
    chosen = launch(source.replace("MASKED", "k < 40 ? float(a[k]) : 0.0f"), **options)
    assert chosen.tolist() == [sum(range(40))] * threads


def test_the_tail_of_a_simdgroup_matrix_that_was_never_written():
    """Rows of zeros on the left do not make up for it."""
    source = f"""{INDEX}
threadgroup float a[64], b[64];
for (uint k = i; k < 64; k += 32) {{ a[k] = k % 8 < 5 ? x[k] : 0; if (k / 8 < 5) b[k] = x[k]; OTHERWISE }}
threadgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_float8x8 left, right, product(0);
simdgroup_load(left, a, 8);
simdgroup_load(right, b, 8);
simdgroup_multiply_accumulate(product, left, right, product);
simdgroup_store(product, out, 8);"""
    fails(host.UninitializedRead, source.replace("OTHERWISE", ""), grid=32)
    launch(source.replace("OTHERWISE", "else b[k] = 0;"), grid=32)


def test_an_index_that_was_never_written():
    """It shows as an access far away, whose cause is elsewhere."""
    source = f"""{INDEX}
threadgroup uint start[1];
if (i == 63) start[0] = 0;
threadgroup_barrier(mem_flags::mem_threadgroup);
out[start[0] + i] = x[i];"""
    error = fails(host.OutOfBounds, source)
    assert error.reason.endswith(", which has 64; the index depends on memory that was never written")
    assert (error.line, error.buffer, error.thread) == (6, "out", (0, 0, 0))
    launch(source.replace("i == 63", "i % 32 == 0"))


def test_a_value_with_the_bits_of_a_poison_is_a_value():
    bits = [0xFFFFFFFF, 0xDADADADA, 0x5B5B5B5B, 0xD6D6D6D6, 0x57575757, 0xAAAAAAAA] + [7] * (N - 6)
    x = mx.array(bits, mx.uint32).view(mx.float32)
    body = f"{INDEX}threadgroup T a[64];\na[i] = x[i];\nT b = a[i];\nout[i] = b;"
    assert launch(body, x=x).view(mx.uint32).tolist() == bits
    computed = f"{INDEX}out[i] = as_type<float>(0xfffffff0u | i);"
    assert launch(computed).view(mx.uint32).tolist() == [0xFFFFFFF0 | i for i in range(N)]


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


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (WRITE_AFTER_READ.replace("BARRIER", ""), ": a race"),
        (
            f"{INDEX}threadgroup atomic_uint next[1];\n"
            "if (i == 0) atomic_store_explicit(next, 0u, memory_order_relaxed);\n"
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
            "out[atomic_fetch_add_explicit(next, 1u, memory_order_relaxed)] = x[i];",
            ": a race, or an order that its atomics leave open",
        ),
    ],
)
def test_atomics_may_be_why_schedules_differ(source, end):
    with pytest.raises(host.ScheduleDependence) as caught:
        race(source, threadgroup=128)
    assert caught.value.reason.endswith(end)


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
    "body",
    [
        "if (i % 32 < 16) simdgroup_load(m, x, 8);\nelse simdgroup_load(m, x, 8);\n"
        "simdgroup_store(m, out, 8);",
        "simdgroup_load(m, x, 8);\nif (i % 32 < 16) simdgroup_store(m, out, 8);\n"
        "else simdgroup_store(m, out, 8);",
    ],
)
def test_divergent_matrix_access(body, schedule):
    before = f"{INDEX}simdgroup_matrix<T, 8, 8> m;\n"
    error = fails(host.DivergentSimd, before + body, grid=32, schedule=schedule)
    assert error.line in (3, 4, 5)
    assert "simdgroup_load" in str(error) or "simdgroup_store" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        "a[i] = a[i + 32] = 1;\nsimdgroup_load(m, a, 8);\nsimdgroup_store(m, out, 8);",
        "simdgroup_store(m, a, 8);\nout[i] = a[63 - i];\nout[i + 32] = a[31 - i];",
    ],
)
def test_a_matrix_access_is_no_barrier(body):
    """What lanes write before a load, or read after a store, needs a barrier."""
    before = f"{INDEX}threadgroup T a[64];\nsimdgroup_matrix<T, 8, 8> m(1);\n"
    fails(host.UninitializedRead, before + body, grid=32)


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


HELPER = """template <typename T>
T total(T s) {
  return simd_sum(s) + T(1);
}
template <typename T>
T deeper(T s) {
  T t = total(s * 2);
  return t + total(s);
}
struct Sum {
  int n;
  METAL_FUNC float of(float s) thread {
    threadgroup_barrier(mem_flags::mem_none);
    return s + n;
  }
};
template <typename T>
inline void meet(threadgroup T* a, T s) {
  a[0] = s;
  threadgroup_barrier(mem_flags::mem_none);
}
"""


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
@pytest.mark.parametrize("helper", ["total", "deeper"])
@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("T s = x[i];\nif (i % 2) s = {0}(s);\nelse s = {0}(s + 1);\nout[i] = s;", (3, 4)),
        ("T s = x[i];\nif (i % 32 < 3) s = {0}(s);\nelse {{\n  s = {0}(s);\n}}\nout[i] = s;", (3, 5)),
        ("T s = x[i];\ns = i % 2 ? {0}(s) : {0}(-s);\nout[i] = s;", (3,)),
        (
            "T s = x[i];\nswitch (i % 2) {{\n  case 0: s = {0}(s); break;\n"
            "  default: s = {0}(s);\n}}\nout[i] = s;",
            (4, 5),
        ),
    ],
)
def test_divergent_operation_of_a_helper(body, lines, helper, schedule):
    error = fails(host.DivergentSimd, INDEX + body.format(helper), header=HELPER, schedule=schedule)
    assert error.line in lines
    assert error.file == "planted.metal"
    assert "simd_sum" in str(error)


OPERATORS = """struct Sum {
  float v;
  float operator()(float w) const { return metal::simd_sum(w); }
  float operator[](int k) const { return metal::simd_max(v + k); }
  operator float() const { return metal::simd_min(v); }
};
template <typename T>
struct Pair {
  T a, b;
};
template <typename T>
T operator+(Pair<T> p, Pair<T> q) {
  return metal::simd_sum(p.a * q.a + p.b * q.b);
}
inline float through(float w) {
  return Sum()(w) + 1;
}
"""


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
@pytest.mark.parametrize(
    "call",
    [
        "Sum()({0})",
        "Sum{{{0}}}[1]",
        "float(Sum{{{0}}})",
        "Pair<T>{{{0}, 1}} + Pair<T>{{1, 2}}",
        "through({0})",
    ],
)
def test_divergent_operator(call, schedule):
    body = (
        f"T s;\nif (i % 32 < 16) s = {call.format('x[i]')};\nelse s = {call.format('2 * x[i]')};\nout[i] = s;"
    )
    error = fails(host.DivergentSimd, INDEX + body, header=OPERATORS, schedule=schedule)
    assert (error.file, error.line) in (("planted.metal", 3), ("planted.metal", 4))
    meeting = f"T s = {call.format('x[i]')};\nif (i < 32) s += {call.format('s')};\nout[i] = s;"
    launch(INDEX + meeting, header=OPERATORS, schedule=schedule)


# The first lane or thread of two does what the others do a turn later.
TURNS = [
    "for (uint k = 0; k < 2; ++k)\n  if (k == i % 2) { MEET }",
    "uint k = 0;\nwhile (k < 2)\n  if (k++ == i % 2) { MEET }",
    "uint k = 0;\ndo {\n  if (k == i % 2) { MEET }\n} while (++k < 2);",
    "#pragma unroll\nfor (uint k = 0; k < 3; ++k) {\n  if (k == 2 * (i % 2)) continue;\n  MEET\n}",
    "for (uint k = 0; k < 2; ++k) {\n  for (uint j = 0; j < 2; ++j) if (k == i % 2 && j == 1) { MEET }\n}",
]


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
@pytest.mark.parametrize("loop", TURNS)
@pytest.mark.parametrize(
    ("meet", "error"),
    [
        ("s += simd_sum(x[i]);", host.DivergentSimd),
        ("s += total(x[i]);", host.DivergentSimd),
        ("threadgroup_barrier(mem_flags::mem_none);", host.BarrierMismatch),
    ],
)
def test_lanes_in_different_turns_of_a_loop(meet, error, loop, schedule):
    body = f"{INDEX}T s = 0;\n{loop.replace('MEET', meet)}\nout[i] = s;"
    if error is host.BarrierMismatch:  # whole simdgroups, so that lanes are not divergent
        body = body.replace("i % 2", "(i / 32 % 2)")
    caught = fails(error, body, header=HELPER, threadgroup=64, schedule=schedule)
    assert "another turn" in str(caught)
    assert caught.file == ("planted.h" if "total" in meet else "planted.metal")


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
@pytest.mark.parametrize("call", ["sum.of(x[i])", "meet(a, x[i])"])
def test_divergent_barrier_of_a_helper(call, schedule):
    before = f"{INDEX}threadgroup T a[1];\nSum sum{{1}};\n"
    for condition in ("i % 2", "i % 64 < 32"):
        body = f"{before}if ({condition}) {call};\nelse {call};\nout[i] = x[i];"
        error = fails(host.BarrierMismatch, body, header=HELPER, threadgroup=64, schedule=schedule)
        assert error.line in (4, 5)
        assert error.file == "planted.metal"


@pytest.mark.parametrize("schedule", host.SCHEDULES)
def test_helpers_that_meet_are_clean(schedule):
    """Calls in uniform branches, loops that the compiler may copy, and lanes that left by a return."""
    body = """
uint lane = thread_index_in_simdgroup;
T s = x[i];
threadgroup T a[64];
if (i < 32) s = total(s);
else s = deeper(s);
for (uint k = 0; k < 5; ++k) {
  s = total(s) / 64;
  if (lane == 0) a[k] = s;
  meet(a + 8, s);
}
for (uint k = 0; k < i / 32 + 2; ++k) s = deeper(s) / 128;
for (uint k = i / 32; k < 4; k += 2) {
  for (uint j = i; j < 64; j += 7) s += 1;
  if (i < 32) for (uint j = 0; j < 2; ++j) s = total(s) / 64;
  else do s = total(s) / 64; while (simd_max(s) > 2);
  if (simd_any(s > 1e9f)) break;
}
if (lane > 20) { out[i] = 1; return; }
out[i] = total(s) + a[3] * 0;"""
    launch(INDEX + body, header=HELPER, threadgroup=64, schedule=schedule)


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
def test_barrier_that_some_lanes_skip(schedule):
    """MLX's gemv has one. Metal forbids it, Apple's GPUs allow it: so it runs when asked not to check."""
    body = "if (i % 4 == 0) threadgroup_barrier(mem_flags::mem_none);\nout[i] = x[i];"
    assert fails(host.BarrierMismatch, INDEX + body, threadgroup=64, schedule=schedule).line == 2
    out = launch(INDEX + body, threadgroup=64, schedule=schedule, check=False)
    assert out.tolist() == list(range(N))


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random:3"])
@pytest.mark.parametrize("after", ["", "threadgroup_barrier(mem_flags::mem_none);\n"])
def test_simd_operation_that_some_lanes_skip(after, schedule):
    """MLX's dot_product has one: a sum over the active lanes, which runs when asked not to check."""
    body = f"{INDEX}T s = x[i];\nif (i % 64 < 3) {{\n  s = simd_sum(s);\n}}\n{after}out[i] = s;"
    assert fails(host.DivergentSimd, body, threadgroup=64, schedule=schedule).line in (4, 6)
    out = launch(body, threadgroup=64, schedule=schedule, check=False)
    assert out.tolist() == [3, 3, 3, *range(3, N)]


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


def test_an_overflow_beside_one_of_what_was_never_written():
    """The first line overflows with some values of the local, the second with all."""
    error = fails(
        host.IndexOverflow, f"{INDEX}int t; t *= 3;\nint k = 2147483600 + int(i); out[i] = k ? 0 : t;"
    )
    assert error.line == 3


def test_an_overflow_that_ends_in_an_output_is_an_uninitialised_read():
    assert fails(host.UninitializedRead, f"{INDEX}int t; out[i] = t * 3;", dtype=mx.int32).element == 0


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


@pytest.mark.parametrize("factor", [1664525, 214013, 69069])
def test_a_random_generator_is_no_overflow(factor):
    """Linear congruential ones, with the multipliers of Numerical Recipes, Microsoft's C and the VAX."""
    body = f"{INDEX}uint s = i * 1013u;\ns = s * {factor}u + 12345u;\nout[i] = s;"
    out = launch(body, dtype=mx.uint32)
    assert out.tolist() == [(i * 1013 * factor + 12345) % 2**32 for i in range(N)]


def test_a_shift_takes_its_amount_modulo_the_width():
    """As in OpenCL C, only the lowest bits of an amount count."""
    body = """
uint n = i + uint(x[0]) * 0;
uint a = 0x80000001u;
ulong b = 0x8000000000000001ul;
uint4 v = uint4(a, 1, 2, 3) << n;
out[i] = (a >> n) ^ (uint(int(a) >> n) * 3) ^ ((a << n) * 5) ^ (uint(b >> n) * 7) ^ (v.y * 11)
    ^ uint(b << (n + 64));"""
    got = launch(INDEX + body, dtype=mx.uint32)
    want = []
    for i in range(N):
        a, b, s = 0x80000001, 0x8000000000000001, i % 32
        arithmetic = (a - 2**32) >> s
        terms = [a >> s, arithmetic * 3, (a << s) % 2**32 * 5, (b >> i) % 2**32 * 7, (1 << s) * 11, b << i]
        value = 0
        for term in terms:
            value ^= term % 2**32
        want.append(value)
    assert got.tolist() == want
    assert launch(f"{INDEX}out[i] = (1 << int(i)) < 0 ? 1 : 0;").tolist() == [
        float(i % 32 == 31) for i in range(N)
    ]


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


SPINS = {
    "simd operation": ("T s = x[i];\n", "while (simd_sum(s) >= 0) {\n  s += 0;\n}\n", (3, 4)),
    "barrier": ("", "for (;;) {\n  threadgroup_barrier(mem_flags::mem_none);\n}\n", (2, 3)),
    "function of the C library": ("T s = x[i];\n", "while (s < 100) {\n  s = sin(s + 1);\n}\n", (3, 4)),
    "helper": ("T s = x[i];\n", "s = spin(s);\n", (3,)),
    "helper that waits": ("T s = x[i];\n", "while (true) {\n  s = total(s) * 0;\n}\n", (3, 4)),
    "atomic": (
        "threadgroup atomic_uint ready[1];\natomic_store_explicit(ready, 0u, memory_order_relaxed);\n",
        "while (atomic_load_explicit(ready, memory_order_relaxed) == 0u) {\n}\n",
        (4, 5),
    ),
    "long loop": (
        "T s = x[i];\n",
        "for (uint k = 0; k < 4000000000u; ++k)\n  s = s * T(1.5) + x[k % 64];\nout[i] = s;\n",
        (3, 4),
    ),
    "step by a simd operation": (
        "T s = x[i];\n",
        "for (uint k = 0; k < 4000000000u; k += simd_max(1))\n  s += x[k % 64];\n",
        (3, 4),
    ),
}


SPIN = """#line 1 "spin.h"
float spin(float s) {
  float t = s;
  while (t >= 0) t = cos(t) + 2;
  return t;
}
"""


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("case", SPINS)
def test_a_timeout_names_the_line_of_the_loop(case, check):
    before, loop, lines = SPINS[case]
    header = HELPER + SPIN
    files = {"helper": {("spin.h", 3)}, "helper that waits": {("planted.h", 2), ("planted.h", 3)}}
    allowed = {("planted.metal", line) for line in lines} | files.get(case, set())
    body = f"{INDEX}{before}{loop}out[i] = T(i) + x[0];"
    error = fails(host.Timeout, body, header=header, check=check, time_limit=0.11, threadgroup=64)
    assert (error.file, error.line) in allowed
    assert error.thread is not None


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


@pytest.mark.parametrize("header", ["math.h", "vector", "metal_scan"])
def test_headers_that_metal_does_not_have(header):
    error = fails(host.CompileError, f"{INDEX}out[i] = x[i];", header=f"// One.\n#include <{header}>\n")
    assert (error.file, error.line) == ("planted.h", 2)
    assert f"'{header}' file not found" in str(error)


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
