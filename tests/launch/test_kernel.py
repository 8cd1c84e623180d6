"""What every launch checks, and that no two variants share compiled code."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.counters import counts
from lily_mlx.errors import BackendUnavailableError
from lily_mlx.launch import backend, source
from lily_mlx.launch.kernel import (
    Buffer,
    Kernel,
    Variant,
    all_kernels,
    declare,
    host_options,
    launch,
)

BACKENDS = [name for name in source.BACKENDS if backend.available(name)]

SCALE = f"""
template <typename T>
LILY_INLINE void scale(LILY_DEVICE const T* x, LILY_DEVICE const T* by, LILY_DEVICE T* y, uint i) {{
  y[i] = lily_from_f32<T>(lily_to_f32(x[i]) * FACTOR * lily_to_f32(by[0]));
}}
{source.BODY_MARK}
scale<T>(x, by, y, thread_position_in_grid.x);
"""


def scale_kernel(folder, factor: str = "2.0f", **changes) -> Kernel:
    folder.mkdir(exist_ok=True)
    (folder / "scale.metal").write_text(SCALE.replace("FACTOR", factor))
    fields = {
        "stem": "scale",
        "inputs": (Buffer("x", "N", "T"), Buffer("by", "1", "T", optional=True)),
        "outputs": (Buffer("y", "N", "T"),),
        "template": ("T",),
        "variants": (Variant({"T": mx.float32}, {"N": 32}, (32, 1, 1), (32, 1, 1)),),
        "folder": folder,
    }
    return Kernel(**{**fields, **changes})


def scale(kernel: Kernel, x: mx.array, backend: str = "metal", **changes) -> mx.array:
    arguments = {
        "template": {"T": x.dtype},
        "grid": (x.size, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [x.shape],
        "output_dtypes": [x.dtype],
        "backend": backend,
    }
    (y,) = launch(kernel, [x, mx.ones((1,), x.dtype)], **{**arguments, **changes})
    return y


@pytest.mark.parametrize("backend", BACKENDS)
def test_variants_never_share_compiled_code(tmp_path, backend):
    """One kernel with two dtypes in turn, and two kernels of one name with different bodies."""
    twice, thrice = scale_kernel(tmp_path / "a"), scale_kernel(tmp_path / "b", "3.0f")
    numbers = np.arange(64, dtype=np.float32)
    for dtype in (mx.float32, mx.float16, mx.float32, mx.bfloat16, mx.float16):
        x = mx.array(numbers).astype(dtype)
        for kernel, factor in ((twice, 2), (thrice, 3)):
            y = scale(kernel, x, backend)
            assert y.dtype == dtype
            np.testing.assert_array_equal(np.array(y.astype(mx.float32)), numbers * factor)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_input_is_an_ordinary_buffer(tmp_path, backend):
    """MLX passes inputs of fewer than 8 elements as `constant`, which `scale` would not compile with."""
    y = scale(scale_kernel(tmp_path), mx.arange(32, dtype=mx.float32), backend)
    np.testing.assert_array_equal(np.array(y), 2 * np.arange(32, dtype=np.float32))


def test_a_row_of_a_transposed_array_is_read_in_its_order(tmp_path):
    x = mx.arange(64, dtype=mx.float32).reshape(2, 32).T.reshape(-1)
    y = scale(scale_kernel(tmp_path), x, "host")
    np.testing.assert_array_equal(np.array(y), 2 * np.array(x))


def test_launches_are_counted(tmp_path):
    before = counts["op.scale"]
    scale(scale_kernel(tmp_path), mx.ones((32,)), "host")
    assert counts["op.scale"] == before + 1


def test_an_output_starts_with_the_init_value(tmp_path):
    kernel = scale_kernel(tmp_path, outputs=(Buffer("y", "M", "T"),))
    y = scale(kernel, mx.ones((32,)), "host", output_shapes=[(40,)], init_value=7.0)
    assert y.tolist() == [2.0] * 32 + [7.0] * 8


def test_host_options_reach_the_launcher(tmp_path):
    kernel = scale_kernel(tmp_path)
    with host_options(schedule="no such schedule"), pytest.raises(ValueError, match="no such schedule"):
        scale(kernel, mx.ones((32,)), "host")
    assert scale(kernel, mx.ones((32,)), "host").tolist() == [2.0] * 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": {}}, "template has"),
        ({"template": {"T": mx.float32, "N": 3}}, "template has"),
        ({"template": {"T": mx.float16}}, "x is mlx.core.float32, declared mlx.core.float16"),
        ({"output_dtypes": [mx.float16]}, "y is mlx.core.float16"),
        ({"output_shapes": [(65,)]}, r"y is \(65,\), declared \[N\] {'N': 64}"),
        ({"output_shapes": [(8, 8)]}, r"y is \(8, 8\)"),
        ({"output_shapes": []}, "0 outputs"),
        ({"grid": (48, 1, 1)}, "whole threadgroups"),
        ({"grid": (0, 1, 1)}, "whole threadgroups"),
        ({"threadgroup": (16, 1, 1)}, "has 16 threads"),
        ({"threadgroup": (2048, 1, 1), "grid": (2048, 1, 1)}, "has 2048 threads"),
        ({"grid": (32, 65536, 1)}, "65535"),
    ],
)
def test_calls_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        scale(scale_kernel(tmp_path), mx.ones((64,)), **changes)


def test_metal_launches_no_more_threads_than_every_apple_gpu_has_registers_for(tmp_path):
    """Known without a GPU, in a trace too: on an M1 or M2 MLX would find out in the middle of a prompt."""
    kernel = scale_kernel(tmp_path)

    def traced(threads: int) -> None:
        size = {"grid": (threads, 1, 1), "threadgroup": (threads, 1, 1)}
        mx.export_function(lambda node: None, lambda x: scale(kernel, x, "metal", **size), mx.ones((1024,)))

    traced(384)
    with pytest.raises(ValueError, match="has 416 threads; must be a multiple of 32 up to 384 on metal"):
        traced(416)
    size = {"grid": (1024, 1, 1), "threadgroup": (1024, 1, 1)}
    assert scale(kernel, mx.ones((1024,)), "host", **size).shape == (1024,)


def test_inputs_that_do_not_fit_are_refused(tmp_path):
    kernel = scale_kernel(tmp_path)
    rest = {
        "template": {"T": mx.float32},
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(32,)],
        "output_dtypes": [mx.float32],
        "backend": "host",
    }
    with pytest.raises(ValueError, match="1 inputs, declared 2"):
        launch(kernel, [mx.ones((32,))], **rest)
    with pytest.raises(ValueError, match="input 'x' is missing"):
        launch(kernel, [None, mx.ones((1,))], **rest)
    with pytest.raises(ValueError, match=r"by is \(2,\), declared \[1\]"):
        launch(kernel, [mx.ones((32,)), mx.ones((2,))], **rest)


@pytest.mark.parametrize("used", [32 * 1024, 32 * 1024 + 1])
def test_threadgroup_memory_is_limited_on_every_backend(tmp_path, used):
    kernel = scale_kernel(tmp_path, threadgroup_bytes=lambda _: used)
    if used <= 32 * 1024:
        assert scale(kernel, mx.ones((32,)), "host").tolist() == [2.0] * 32
        return
    for name in source.BACKENDS:
        with pytest.raises(ValueError, match="32769 bytes"):
            scale(kernel, mx.ones((32,)), name)


def test_a_stem_is_declared_once(tmp_path):
    kernel = all_kernels()[0]
    assert declare(kernel) is kernel
    with pytest.raises(ValueError, match="declared twice"):
        declare(scale_kernel(tmp_path, stem=kernel.stem))


def test_every_kernel_has_examples_that_launch():
    for kernel in all_kernels():
        assert kernel.variants
        for variant in kernel.variants:
            example = kernel.example(variant)
            assert variant.template.keys() == set(kernel.template)
            assert len(example["inputs"]) == len(kernel.inputs)


class TestBackend:
    def test_auto_on_the_cpu_is_ops(self, monkeypatch):
        monkeypatch.setenv("LILY_BACKEND", "auto")
        with mx.stream(mx.cpu):
            device = mx.default_device()
            mx.set_default_device(mx.cpu)
            try:
                assert backend.resolve() == "ops"
            finally:
                mx.set_default_device(device)

    @pytest.mark.parametrize("name", ["host", "ops"])
    def test_what_is_asked_for(self, monkeypatch, name):
        monkeypatch.setenv("LILY_BACKEND", name)
        assert backend.resolve() == name

    @pytest.mark.parametrize("name", ["metal", "cuda"])
    def test_a_missing_backend_is_one_clear_line(self, monkeypatch, name):
        monkeypatch.setenv("LILY_BACKEND", name)
        monkeypatch.setattr(backend, "available", lambda _: False)
        with pytest.raises(BackendUnavailableError, match=f"LILY_BACKEND is '{name}'") as caught:
            backend.resolve()
        assert "\n" not in str(caught.value)

    def test_override_is_for_the_block(self, monkeypatch):
        monkeypatch.setenv("LILY_BACKEND", "ops")
        with backend.override("metal"):
            assert backend.resolve() == "metal"
        assert backend.resolve() == "ops"
        with pytest.raises(BackendUnavailableError), backend.override("auto"):
            pass
