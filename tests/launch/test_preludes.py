"""The three preludes define one list, and each of its primitives does what the list says."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.launch import backend, host, source
from lily_mlx.launch.kernel import Buffer, Kernel, launch

FOLDER = Path(__file__).with_name("kernels")
BACKENDS = [name for name in source.BACKENDS if backend.available(name)]
EPSILON = {mx.float32: 2**-24, mx.float16: 2**-11, mx.bfloat16: 2**-8}

PRIMITIVES = Kernel(
    stem="primitives",
    inputs=(
        Buffer("x", "N", "float32"),
        Buffer("words", "N", "uint32"),
        Buffer("pairs", "N 8", "T"),
        Buffer("halves", "N 8", "S"),
    ),
    outputs=(
        Buffer("floats", "28 N", "float32"),
        Buffer("ints", "10 N", "uint32"),
        Buffer("vectors", "N 8", "T"),
        Buffer("swapped", "N", "float32"),
        Buffer("counts", "8", "uint32"),
        Buffer("signed_counts", "8", "int32"),
    ),
    template=("T", "S", "N"),
    variants=(),
    threadgroup_bytes=lambda values: 4 * (values["N"] + 1) + values["N"] * 8 * values["T"].size,
    folder=FOLDER,
)


def _tile_bytes(T: mx.Dtype, M: int, N: int, K: int, B_IS_KN: bool, SIMDGROUPS: int) -> int:
    b_rows, b_cols = (K // 2, N) if B_IS_KN else (N, K // 2)
    return T.size * (M * K // 2 + b_rows * b_cols) + 16 * (M + b_rows)


TILE_PRODUCT = Kernel(
    stem="tile_product",
    inputs=(Buffer("a", "M K", "T"), Buffer("b", "*", "T")),
    outputs=(Buffer("c", "M N", "float32"),),
    template=("T", "M", "N", "K", "B_IS_KN", "SIMDGROUPS"),
    variants=(),
    threadgroup_bytes=lambda values: _tile_bytes(**values),
    folder=FOLDER,
)


def run_metal_prelude_on_the_host(monkeypatch) -> None:
    """Let the host launcher run the text that Apple's compiler gets, prelude/metal.h included."""
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, backend: assemble(kernel, "metal"))


def test_the_lists_are_equal():
    assert source.check_preludes() == []
    names = source.prelude_names("cuda")
    assert "T lily_simd_sum(T x)" in names
    assert "#define LILY_THREADGROUP_ARRAY(type, name, count)" in names
    assert "type lily_tile" in names
    assert "void zero()" in names
    assert len(names) > 60


@pytest.mark.parametrize(
    ("text", "changed", "problem"),
    [
        ("#define LILY_NO_UNROLL", "#define LILY_ROLLED", "lacks #define LILY_NO_UNROLL"),
        ("T lily_simd_max(T x)", "T lily_simd_maximum(T x)", "lacks T lily_simd_max(T x)"),
        ("lily_shuffle(T x, u32 lane)", "lily_shuffle(T x, int lane)", "lacks T lily_shuffle(T x, u32 lane)"),
        ("using fp16 =", "using f16 =", "lacks type fp16"),
    ],
)
def test_a_difference_is_found(tmp_path, monkeypatch, text, changed, problem):
    prelude = tmp_path / "prelude"
    prelude.mkdir()
    for path in (source.KERNELS / "prelude").glob("*.h"):
        (prelude / path.name).write_text(path.read_text())
    monkeypatch.setattr(source, "KERNELS", tmp_path)
    assert source.check_preludes() == []
    cuda = (prelude / "cuda.h").read_text()
    assert text in cuda
    (prelude / "cuda.h").write_text(cuda.replace(text, changed))
    assert f"prelude/cuda.h {problem}" in source.check_preludes()


def test_a_missing_attribute_is_found(tmp_path, monkeypatch):
    prelude = tmp_path / "prelude"
    prelude.mkdir()
    for path in (source.KERNELS / "prelude").glob("*.h"):
        (prelude / path.name).write_text(path.read_text().replace("#define threadgroups_per_grid", "// "))
    monkeypatch.setattr(source, "KERNELS", tmp_path)
    assert source.check_preludes() == ["prelude/cuda.h lacks attribute threadgroups_per_grid"]


@pytest.mark.parametrize("backend", [*BACKENDS, "host running prelude/metal.h"])
@pytest.mark.parametrize(
    ("dtype", "half"),
    [(mx.float32, mx.float16), (mx.float16, mx.bfloat16), (mx.bfloat16, mx.float16)],
)
def test_primitives(backend, dtype, half, monkeypatch):
    if backend not in BACKENDS:
        run_metal_prelude_on_the_host(monkeypatch)
        backend = "host"
    N = 96
    rng = np.random.default_rng(3)
    x = rng.uniform(-1.9, 1.9, N).astype(np.float32)
    x[32:64] = np.abs(x[32:64])  # a simdgroup in which a vote is unanimous
    words = rng.integers(0, 2**32, N, dtype=np.uint32)
    pairs = mx.array(rng.normal(size=(N, 8)).astype(np.float32)).astype(dtype)
    halves = mx.array(rng.normal(size=(N, 8)).astype(np.float32)).astype(half)
    floats, ints, vectors, swapped, counts, signed_counts = launch(
        PRIMITIVES,
        [mx.array(x), mx.array(words), pairs, halves],
        template={"T": dtype, "S": half, "N": N},
        grid=(N, 1, 1),
        threadgroup=(N, 1, 1),
        output_shapes=[(28, N), (10, N), (N, 8), (N,), (8,), (8,)],
        output_dtypes=[mx.float32, mx.uint32, dtype, mx.float32, mx.uint32, mx.int32],
        backend=backend,
        init_value=0,
    )

    groups = x.reshape(-1, 32)
    lane = np.arange(32)

    def each(per_group: np.ndarray) -> np.ndarray:
        return np.repeat(per_group, 32)

    def rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
        return np.array(mx.array(values).astype(dtype).astype(mx.float32))

    prefix = np.cumsum(groups.astype(np.float64), axis=1) - groups
    down = np.where(lane < 29, groups[:, np.minimum(lane + 3, 31)], groups)
    magnitude = np.abs(x)
    angles = (np.float32(1000) * x).astype(np.float64)  # of many turns, as of a late token
    exact = {
        1: each(groups.max(1)),
        2: each(groups.min(1)),
        4: groups[:, lane * 7 % 32].ravel(),
        5: groups[:, lane ^ 5].ravel(),
        6: down.ravel(),
        7: each(groups[:, 0]),
        16: np.minimum(x, np.float32(0.5)),
        17: rounded(x, dtype),
        18: -x,
        19: words >> 20 & 15,
        20: (words & 15) + 16 * (words >> 28),
        21: words & 0xFFFF,
        22: words >> 16,
        23: np.where(x < 0, -np.inf, np.inf),
        24: rounded(x, mx.bfloat16),
        25: rounded(x, mx.float16),
    }
    close = {  # value and relative tolerance: 2^-22 for correctly rounded or precise functions, 1e-5 for fast
        0: (each(groups.astype(np.float64).sum(1)), 1e-6),
        3: (prefix.ravel(), 1e-6),
        8: (np.exp(x), 2**-22),
        9: (np.log(magnitude), 2**-22),
        10: (1 / np.sqrt(magnitude), 2**-22),
        11: (np.exp(x), 1e-5),
        12: (np.exp2(x), 1e-5),
        13: (np.log(magnitude), 1e-5),
        14: (1 / np.sqrt(magnitude), 1e-5),
        15: (x.astype(np.float64) ** 2 + 1, 2**-23),
        26: (np.cos(angles), 1e-6),
        27: (np.sin(angles), 1e-6),
    }
    assert exact.keys() | close.keys() == set(range(28))
    got = np.array(floats)
    for row, want in exact.items():
        np.testing.assert_array_equal(got[row], want.astype(np.float32), err_msg=f"floats[{row}]")
    for row, (want, tolerance) in close.items():
        np.testing.assert_allclose(got[row], want, rtol=tolerance, atol=2e-6, err_msg=f"floats[{row}]")

    small = (words % 1000).reshape(-1, 32).astype(np.int64)
    want_ints = [
        each(((groups > 0) * (1 << lane.astype(np.uint64))).sum(1)),
        each((groups > 2.0).any(1)),
        each((groups > -2.0).all(1)),
        np.array([int(word).bit_count() for word in words]),
        each(small.sum(1)),
        (np.cumsum(small, axis=1) - small).ravel(),
        each((small - 500).max(1) >= 0),
        np.array([2, 3, 5, 7])[np.arange(N) % 4],
        np.roll(words, -1),
        np.full(N, (words % 2).sum()),
    ]
    for row, want in enumerate(want_ints):
        np.testing.assert_array_equal(np.array(ints)[row], want, err_msg=f"ints[{row}]")

    assert mx.array_equal(vectors[:, :7], 2 * pairs[:, :7])
    assert mx.array_equal(vectors[:, 7], 2 * pairs[:, 7])
    weights = np.array([1, -1, 2, -2, 3, -3, 4, -4])
    np.testing.assert_allclose(
        np.array(swapped), -(np.array(halves.astype(mx.float32)) * weights).sum(1), rtol=1e-5, atol=1e-5
    )
    want_counts = np.bincount(words % 8, minlength=8)
    np.testing.assert_array_equal(np.array(counts), want_counts)
    np.testing.assert_array_equal(np.array(signed_counts), -want_counts)


@pytest.mark.parametrize("backend", [*BACKENDS, "host running prelude/metal.h"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("b_is_kn", [False, True], ids=["B[N,K]", "B[K,N]"])
@pytest.mark.parametrize(
    ("M", "N", "K", "simdgroups"),
    [
        (16, 16, 32, 1),  # the smallest tile
        (48, 64, 96, 2),  # unequal sides, several fragments each way, two simdgroups
    ],
)
def test_tile_product(backend, dtype, b_is_kn, M, N, K, simdgroups, monkeypatch):
    if backend not in BACKENDS:
        run_metal_prelude_on_the_host(monkeypatch)
        backend = "host"
    rng = np.random.default_rng(M + K)
    a = mx.array(rng.normal(size=(M, K)).astype(np.float32)).astype(dtype)
    b = mx.array(rng.normal(size=(K, N) if b_is_kn else (N, K)).astype(np.float32)).astype(dtype)
    (c,) = launch(
        TILE_PRODUCT,
        [a, b],
        template={"T": dtype, "M": M, "N": N, "K": K, "B_IS_KN": b_is_kn, "SIMDGROUPS": simdgroups},
        grid=(32 * simdgroups, 1, 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[(M, N)],
        output_dtypes=[mx.float32],
        backend=backend,
    )
    a64, b64 = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (a, b))
    want = a64 @ (b64 if b_is_kn else b64.T)
    # Products are exact or nearly so in fp32: what is left is K additions in fp32.
    bound = K * 2**-24 * (np.abs(a64) @ np.abs(b64 if b_is_kn else b64.T))
    error = np.abs(np.array(c) - want)
    assert (error <= bound).all(), (
        f"worst {np.max(error / bound):.2f} of the bound at {np.argmax(error / bound)}"
    )


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=str)
def test_each_element_of_a_tile_is_owned_once(dtype):
    """Ones times ones: an element that no lane or two lanes own would not be K."""
    (c,) = launch(
        TILE_PRODUCT,
        [mx.ones((32, 64), dtype), mx.ones((48, 64), dtype)],
        template={"T": dtype, "M": 32, "N": 48, "K": 64, "B_IS_KN": False, "SIMDGROUPS": 1},
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32, 48)],
        output_dtypes=[mx.float32],
        backend="host",
        init_value=-1,
    )
    assert mx.array_equal(c, mx.full((32, 48), 64.0))


def test_a_missing_barrier_would_be_seen(tmp_path):
    """The host tests above have teeth: without its barriers the tile product is caught."""
    text = (FOLDER / "tile_product.metal").read_text().replace("lily_threadgroup_barrier();", "")
    (tmp_path / "tile_product.metal").write_text(text)
    kernel = Kernel(
        TILE_PRODUCT.stem,
        TILE_PRODUCT.inputs,
        TILE_PRODUCT.outputs,
        TILE_PRODUCT.template,
        (),
        folder=tmp_path,
    )
    a, b = mx.random.normal((16, 32)), mx.random.normal((32, 32))

    def call() -> list[mx.array]:
        return launch(
            kernel,
            [a, b],
            template={"T": mx.float32, "M": 16, "N": 32, "K": 32, "B_IS_KN": False, "SIMDGROUPS": 2},
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(16, 32)],
            output_dtypes=[mx.float32],
            backend="host",
        )

    with pytest.raises((host.ScheduleDependence, host.UninitializedRead)):
        host.check_schedules(call)
