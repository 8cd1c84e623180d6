"""The example for authors of other kernels runs, and docs/metal-without-a-mac.md says what is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from lily_mlx.launch import host

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "metal-without-a-mac.md").read_text()
# A Python listing and, in the block after it, what it prints.
LISTINGS = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", DOCUMENT, re.DOTALL)


def run(*words, stdin=None):
    """Run a Python process in the checkout as a reader would, outside of this pytest."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, input=stdin, capture_output=True, text=True
    )


def test_the_example_passes():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/test_my_kernel.py")
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 22


def test_there_are_listings():
    assert len(LISTINGS) == DOCUMENT.count("```python") > 0


@pytest.mark.parametrize(("code", "printed"), LISTINGS)
def test_a_listing_prints_what_the_document_says(code, printed):
    done = run("-", stdin=code)
    assert done.stdout == printed, done.stderr


# ------------------------------------------------------------ what the document says about limits

INDEX = "uint i = thread_position_in_grid.x;\n"


def launch(body, **options):
    """Run a body of 64 threads in one threadgroup, under every schedule."""
    kernel = host.metal_kernel("limits", ["x"], ["out"], INDEX + body, atomic_outputs="(&out" in body)
    return host.check_schedules(
        lambda: kernel(
            inputs=[mx.arange(64).astype(mx.float32)],
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
            **options,
        )[0]
    )


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
NOT_REPORTED = {
    "a sum without an atomic": "out[0] += 1;",
    "a barrier with the wrong flags": (
        "threadgroup float a[64];\na[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_none);\n"
        "out[i] = a[63 - i];"
    ),
    "return before a barrier": f"if (i > 40) {{ out[i] = 0; return; }}\n{BARRIER}out[i] = x[i];",
    "a shuffle whose lanes differ in distance": "out[i] = simd_shuffle_down(x[i], ushort(i % 3));",
    "a shift that loses bits": "int k = (int(i) + 1) << 27;\nout[i] = x[k >> 27 & 31];",
    "a sum of unsigned that wraps": "uint k = 4294967290u + i;\nout[i] = x[k % 64];",
    "a large stride that wraps": "uint stride = 1u << 25, k = i * stride * 4;\nout[i] = x[k % 64];",
    "a stride like a random generator's": "uint n = 151669, k = i * 65000 * n;\nout[i] = x[k % 64];",
    "what was never written, compared with one number": "threadgroup int t[64];\nout[i] = t[i] == 3 ? 1 : 0;",
    "an overflow in 8 or 16 bits": (
        "short a = short(x[i]) + 30000, b = a * 3;\nchar c = int(x[i]) * 100;\nout[i] = b + c;"
    ),
    "a wrong index inside a buffer": "out[i] = x[i == 7 ? 8 : i];",
}


@pytest.mark.parametrize("fault", NOT_REPORTED)
def test_what_is_not_reported(fault):
    """When one of these is reported at last, the document has to change."""
    launch(NOT_REPORTED[fault], init_value=0)


REPORTED_THOUGH_ALLOWED = {
    "a float sum with atomics": (
        "atomic_fetch_add_explicit(&out[0], x[i] * 0.1f, memory_order_relaxed);",
        host.ScheduleDependence,
    ),
    "a list in an order that atomics choose": (
        "threadgroup atomic_uint length[1];\n"
        f"if (i == 0) atomic_store_explicit(length, 0u, memory_order_relaxed);\n{BARRIER}"
        "out[atomic_fetch_add_explicit(length, 1u, memory_order_relaxed)] = x[i];",
        host.ScheduleDependence,
    ),
    "a hash with a small multiplier": (
        "uint h = i + 1;\nfor (int k = 0; k < 4; ++k) h = uint(k) + h * 65599u;\nout[i] = h % 1000;",
        host.IndexOverflow,
    ),
    "a simd operation of some lanes": (
        "float s = x[i];\nif (i % 32 < 16) s = simd_sum(s);\nout[i] = s;",
        host.DivergentSimd,
    ),
    "a barrier that some lanes skip": (f"if (i % 4 == 0) {BARRIER}out[i] = x[i];", host.BarrierMismatch),
    "waiting for another simdgroup": (
        "threadgroup atomic_uint ready[1];\n"
        f"if (i == 0) atomic_store_explicit(ready, 0u, memory_order_relaxed);\n{BARRIER}"
        "if (i == 0) atomic_store_explicit(ready, 1u, memory_order_relaxed);\n"
        "if (i == 63) while (atomic_load_explicit(ready, memory_order_relaxed) == 0u) { }\nout[i] = x[i];",
        host.Timeout,
    ),
}


@pytest.mark.parametrize("case", REPORTED_THOUGH_ALLOWED)
def test_what_is_reported_though_a_gpu_runs_it(case):
    body, error = REPORTED_THOUGH_ALLOWED[case]
    with pytest.raises(error):
        launch(body, init_value=0, time_limit=0.5)


@pytest.mark.parametrize("table", [NOT_REPORTED, REPORTED_THOUGH_ALLOWED])
def test_the_document_names_these_limits(table):
    assert [name for name in table if f"| {name} |" not in DOCUMENT] == []
