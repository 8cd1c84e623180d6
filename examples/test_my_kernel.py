"""How to test a Metal kernel of your own on any machine.

python -m pytest -q examples/test_my_kernel.py

The kernel normalises rows, with two reductions over a threadgroup. `host.metal_kernel` takes the place of
`mx.fast.metal_kernel`, so the program must let its tests choose: here by an argument. On a Mac the comparison
with the reference runs on the GPU too. What such tests can and cannot tell: docs/metal-without-a-mac.md.
"""

import mlx.core as mx
import pytest

from lily_mlx.launch import host, strict

# ------------------------------------------------------------------------------- the program under test

THREADS = 128  # a threadgroup, which takes one row

SOURCE = """\
constexpr uint SIMDGROUPS = THREADS / 32;
uint row = threadgroup_position_in_grid.x, first = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
uint D = x_shape[1];
auto in_row = x + size_t(row) * D;  // auto: MLX passes fewer than 8 elements in constant, not in device
device T* out_row = out + size_t(row) * D;
threadgroup float partial[SIMDGROUPS];

float sum = 0;
for (uint i = first; i < D; i += THREADS) sum += float(in_row[i]);
sum = simd_sum(sum);
if (lane == 0) partial[group] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums are written
float mean = 0;
for (uint s = 0; s < SIMDGROUPS; ++s) mean += partial[s] / D;
threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums are read

float squares = 0;
for (uint i = first; i < D; i += THREADS) squares += (float(in_row[i]) - mean) * (float(in_row[i]) - mean);
squares = simd_sum(squares);
if (lane == 0) partial[group] = squares;
threadgroup_barrier(mem_flags::mem_threadgroup);  // the squares are written
float variance = 0;
for (uint s = 0; s < SIMDGROUPS; ++s) variance += partial[s] / D;
float scale = rsqrt(variance + 1e-5f);
for (uint i = first; i < D; i += THREADS) out_row[i] = T((float(in_row[i]) - mean) * scale);
"""

NAMES = {"input_names": ["x"], "output_names": ["out"]}


def launch_arguments(x):
    """What the kernel is called with, for rows x [rows, D]."""
    return {
        "inputs": [x],
        "template": [("T", x.dtype), ("THREADS", THREADS)],
        "grid": (x.shape[0] * THREADS, 1, 1),
        "threadgroup": (THREADS, 1, 1),
        "output_shapes": [x.shape],
        "output_dtypes": [x.dtype],
    }


def layer_norm(x, metal_kernel=mx.fast.metal_kernel, source=SOURCE):
    """(x - mean) / sqrt(variance + 1e-5) for each row of x [rows, D]; float32 inside, rounded once."""
    return metal_kernel("layer_norm", **NAMES, source=source)(**launch_arguments(x))[0]


# -------------------------------------------------------------------------------------------- its tests

BACKENDS = [
    pytest.param(host.metal_kernel, id="host"),
    pytest.param(
        mx.fast.metal_kernel,
        id="metal",
        marks=pytest.mark.skipif(not mx.metal.is_available(), reason="no Metal on this machine"),
    ),
]
SIGNIFICANT_BITS = {mx.float32: 24, mx.float16: 11, mx.bfloat16: 8}


def rows(*shape, dtype=mx.float32):
    return (3 * mx.random.normal(shape, key=mx.random.key(1))).astype(dtype)


@pytest.mark.parametrize("metal_kernel", BACKENDS)
@pytest.mark.parametrize("dtype", SIGNIFICANT_BITS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 5),  # most threads without work, and an input in constant memory
        (3, 100),  # a simdgroup that is partly idle
        (2, 128),  # one element a thread
        (2, 1001),  # several, and a remainder
    ],
)
def test_against_fp32(metal_kernel, dtype, shape):
    x = rows(*shape, dtype=dtype)
    got = layer_norm(x, metal_kernel).astype(mx.float32)
    exact = x.astype(mx.float32)
    centred = exact - exact.mean(axis=-1, keepdims=True)
    want = centred * mx.rsqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)
    # One rounding to the dtype; before it two sums in float32, of up to 20 roundings each.
    rounding = 2.0 ** -SIGNIFICANT_BITS[dtype] * mx.abs(want)
    assert (mx.abs(got - want) <= rounding + 40 * 2.0**-24 * (1 + mx.abs(want))).all().item()


def test_no_race():
    """Seven orders of threads give the same bits."""
    host.check_schedules(lambda: layer_norm(rows(3, 300), host.metal_kernel))


def errors(source, x):
    return [str(d) for d in strict.check("layer_norm", source, **NAMES, **launch_arguments(x))]


@pytest.mark.parametrize("shape", [(3, 300), (1, 5)])  # an input in device memory, and in constant memory
def test_metal_would_accept_it(shape):
    assert errors(SOURCE, rows(*shape)) == []


def test_metal_would_not_accept_double():
    assert errors(SOURCE.replace("float variance", "double variance"), rows(3, 300)) == [
        "layer_norm.metal:23: double: 'double' is not supported in Metal"
    ]


def test_metal_would_not_accept_a_device_pointer_to_a_small_input():
    source = SOURCE.replace("auto in_row", "const device T* in_row")
    assert errors(source, rows(3, 300)) == []
    (error,) = errors(source, rows(1, 5))
    assert error.startswith("layer_norm.metal:5: address-space: ")


# A fault, how it gets into the source, and what reports it.
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);  // the "
PLANTED = {
    "no barrier between write and read": (
        f"{BARRIER}sums are written",
        "",
        host.UninitializedRead,
        "kernel 'layer_norm': element 0 of 'out' depends on memory that was never written, such as a local, "
        "or threadgroup memory before the barrier (900 of 900)",
    ),
    "no barrier between read and write": (
        f"{BARRIER}sums are read",
        "",
        host.ScheduleDependence,
        "kernel 'layer_norm': element 0 of 'out' differs between the schedules 'fifo' and 'lifo' "
        "(900 of 900): a race",
    ),
    "one element too far": (
        "i < D; i += THREADS) sum +=",
        "i <= D; i += THREADS) sum +=",
        host.OutOfBounds,
        "kernel 'layer_norm', layer_norm.metal:10: read of element 900 of 'x', which has 900 "
        "(thread (300, 0, 0) of the grid, threadgroup (2, 0, 0))",
    ),
    "one element forgotten": (
        "i < D; i += THREADS) out_row",
        "i < D - 1; i += THREADS) out_row",
        host.UnwrittenOutput,
        "kernel 'layer_norm': element 299 of 'out' was never written (3 of 900)",
    ),
    "a sum of half a simdgroup": (
        "sum = simd_sum(sum);",
        "if (lane < 16) sum = simd_sum(sum);",
        host.DivergentSimd,
        "kernel 'layer_norm', layer_norm.metal:13: threadgroup_barrier in divergent code: lane 0 waits at "
        "simd_sum, line 11 (thread (16, 0, 0) of the grid, threadgroup (0, 0, 0))",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault(fault):
    """Tests that cannot fail say nothing: each fault is reported, in these words."""
    good, bad, error, words = PLANTED[fault]
    assert SOURCE.count(good) == 1
    source = SOURCE.replace(good, bad)
    with pytest.raises(error) as caught:
        host.check_schedules(lambda: layer_norm(rows(3, 300), host.metal_kernel, source))
    assert str(caught.value) == words
